"""What a node is to be like: its GPUs, its driver's version, how long things take."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from limosa.errors import UsageError
from limosa_softgpu.state import GRANULARITY, MAGIC, MAX_GPUS, NodeState

MIB = 1 << 20
DRIVER_VERSION = "580.159.04"
CUDA_VERSION = 13000
_SPEED = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kKMGT])?(?P<binary>i)?B?(/s)?")
_SECONDS = re.compile(r"\d+(\.\d+)?")


class Chip(NamedTuple):
    """What programs can ask about a chip."""

    cc_major: int
    cc_minor: int
    multiprocessors: int


CHIPS = {
    "V100": Chip(7, 0, 80),
    "T4": Chip(7, 5, 40),
    "A100": Chip(8, 0, 108),
    "L4": Chip(8, 9, 58),
    "L40S": Chip(8, 9, 142),
    "H100": Chip(9, 0, 132),
    "H200": Chip(9, 0, 132),
    "B200": Chip(10, 0, 148),
}


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a second (0: as fast as the machine is), seconds, and bytes, as ``struct node_rates`` has them."""

    checkpoint: float = 0
    restore: float = 0
    checkpoint_fixed: float = 0
    restore_fixed: float = 0
    lock_fixed: float = 0
    unlock_fixed: float = 0
    host_to_device: float = 0
    device_to_host: float = 0
    device_to_device: float = 0
    peer: float = 0
    copy_fixed: float = 0
    pinned: float = 0
    init_fixed: float = 0
    context_fixed: float = 0
    context_bytes: int = 8 * MIB
    checkpoint_bytes: int = 8 * MIB


AS_THE_MACHINE = Rates()
# Measured on H200 with driver 580.159.04 (docs/softgpu.md, "As slow as a real one", has what was measured).
H200_RATES = Rates(
    checkpoint=2.7e9,  # 32 GB in 12.1-12.5 s, host memory touched beforehand, less the fixed cost
    restore=7.5e9,  # 32 GB in 4.3-4.5 s
    checkpoint_fixed=0.29,  # nothing on the device
    restore_fixed=0.18,
    lock_fixed=0.001,
    unlock_fixed=0.002,
    host_to_device=55.2e9,  # pinned
    device_to_host=55.2e9,
    device_to_device=2119e9,  # 4,238 GB/s of reading and writing
    peer=394e9,  # NVLink
    copy_fixed=0,  # not measured
    pinned=2.4e9,
    init_fixed=0.34,  # reported: 2.7 s on a machine with eight H100
    context_fixed=0.15,  # not measured: the order of it
    context_bytes=518 * MIB,
    checkpoint_bytes=527_000_000,  # what the driver maps for a bare context
)
LIKE = {"h200": H200_RATES}
COPIES = ("host_to_device", "device_to_host", "device_to_device", "peer")
RATES: dict[str, tuple[str, ...]] = {
    "checkpoint": ("checkpoint",),
    "restore": ("restore",),
    "copy": COPIES,
    **{name.replace("_", "-"): (name,) for name in COPIES},
    "pinned": ("pinned",),
}
"""What ``--rate`` can name, and the fields of :class:`Rates` that are meant."""
COSTS = ("checkpoint", "restore", "lock", "unlock", "copy", "init", "context")
"""What ``--cost`` can name."""


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU: its chip (a name of ``CHIPS``) and the bytes of its memory."""

    chip: str = "H200"
    memory: int = 2048 * MIB


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A node.

    Attributes:
        gpus: in the order of their indices.
        driver_version: what the driver calls itself.
        cuda_version: 1000 × major + 10 × minor.
        rates: how long things take.
        idle_bytes: what an idle GPU shows as used.
        faults: rules that hold from the start (``limosa_softgpu.faults``).
        log: a file that its log is appended to; "" for one that is gone with the node.
    """

    gpus: list[GpuSpec]
    driver_version: str = DRIVER_VERSION
    cuda_version: int = CUDA_VERSION
    rates: Rates = AS_THE_MACHINE
    idle_bytes: int = 4 * MIB
    faults: list[str] = []
    log: str = ""

    def fill(self, state: NodeState) -> None:
        """Write a new node's state; every GPU gets a UUID that no other node has."""
        state.size = _size()
        state.n_gpus = len(self.gpus)
        state.cuda_version = self.cuda_version
        state.driver_version = self.driver_version.encode()
        for field in Rates.__struct_fields__:
            setattr(state.rates, field, getattr(self.rates, field))
        for index, wanted in enumerate(self.gpus):
            gpu, chip = state.gpus[index], CHIPS[wanted.chip]
            uuid = bytearray(secrets.token_bytes(16))
            uuid[6], uuid[8] = uuid[6] & 0x0F | 0x40, uuid[8] & 0x3F | 0x80  # version 4, as real ones look
            gpu.uuid[:] = uuid
            gpu.name = f"Soft GPU {wanted.chip}".encode()
            gpu.pci = f"00000000:{index + 1:02X}:00.0".encode()
            gpu.minor = index
            gpu.cc_major, gpu.cc_minor, gpu.multiprocessors = chip
            gpu.memory = wanted.memory
            gpu.reserved = self.idle_bytes
            gpu.persistence = 1
        state.magic = MAGIC  # last: whoever maps it before sees no node


def _size() -> int:
    import ctypes

    return ctypes.sizeof(NodeState)


def paced(rates: Rates, speeds: Sequence[str] = (), costs: Sequence[str] = ()) -> Rates:
    """Return rates with some of them changed.

    Args:
        rates: those to begin with.
        speeds: "checkpoint=2.5GiB/s", "copy=0" (as fast as the machine); names of ``RATES``.
        costs: "checkpoint=0.4" (seconds); names of ``COSTS``.

    Raises:
        UsageError: one of them is none.
    """
    changes: dict[str, float] = {}
    for word in speeds:
        what, _, speed = word.partition("=")
        found = _SPEED.fullmatch(speed)
        if what not in RATES or not found:
            raise UsageError(detail=f"--rate {word}: it is WHAT=SPEED, like checkpoint=2.5GiB/s; {', '.join(RATES)}")
        base = 1024 if found["binary"] else 1000
        bytes_ = float(found["number"]) * base ** " kmgt".index((found["unit"] or " ").lower())
        changes |= dict.fromkeys(RATES[what], bytes_)
    for word in costs:
        what, _, seconds = word.partition("=")
        if what not in COSTS or not _SECONDS.fullmatch(seconds):
            raise UsageError(detail=f"--cost {word}: it is WHAT=SECONDS, like checkpoint=0.4; {', '.join(COSTS)}")
        changes[f"{what}_fixed"] = float(seconds)
    return msgspec.structs.replace(rates, **changes)


def make_spec(  # noqa: PLR0913 - options are keywords
    gpus: int,
    memory: Sequence[int],
    chips: Sequence[str],
    *,
    like: str | None = None,
    speeds: Sequence[str] = (),
    costs: Sequence[str] = (),
    driver_version: str = DRIVER_VERSION,
    faults: Sequence[str] = (),
    log: str = "",
) -> NodeSpec:
    """Check what somebody asked for and make a node's description of it.

    Args:
        gpus: how many.
        memory: bytes, one figure for all or one for each GPU.
        chips: likewise, names of ``CHIPS``.
        like: whose speed: a name of ``LIKE``; None for that of this machine.
        speeds: what is otherwise, as for :func:`paced`.
        costs: likewise.
        driver_version: "580.159.04".
        faults: rules, checked by ``limosa_softgpu.faults``.
        log: a file that the node's log is appended to.

    Raises:
        UsageError: there is no such node.
    """
    from limosa_softgpu.faults import check_rule

    if not 1 <= gpus <= MAX_GPUS:
        raise UsageError(detail=f"--gpus {gpus}: a node has 1 to {MAX_GPUS} GPUs")
    for option, given in (("--memory", memory), ("--chip", chips)):
        if len(given) not in (1, gpus):
            raise UsageError(detail=f"{option}: one for all GPUs or one for each of the {gpus}, not {len(given)}")
    for chip in chips:
        if chip not in CHIPS:
            raise UsageError(detail=f"--chip {chip}: the chips are {', '.join(CHIPS)}")
    for bytes_ in memory:
        if not 16 * MIB <= bytes_ <= 1 << 44:
            raise UsageError(detail=f"--memory {bytes_}: a GPU has from 16 MiB to 16 TiB")
    if like is not None and like not in LIKE:
        raise UsageError(detail=f"--like {like}: the speeds known are {', '.join(LIKE)}")
    version = re.fullmatch(r"(\d{3})(\.\d{1,4}){1,2}", driver_version)
    if not version:
        raise UsageError(detail=f"--driver {driver_version}: a version is like {DRIVER_VERSION}")
    for rule in faults:
        check_rule(rule)
    many = [(memory[i % len(memory)], chips[i % len(chips)]) for i in range(gpus)]
    return NodeSpec(
        gpus=[GpuSpec(chip=chip, memory=-(-bytes_ // GRANULARITY) * GRANULARITY) for bytes_, chip in many],
        driver_version=driver_version,
        cuda_version=_cuda_of(int(version[1])),
        rates=paced(LIKE[like] if like else AS_THE_MACHINE, speeds, costs),
        faults=list(faults),
        log=log,
    )


def _cuda_of(major: int) -> int:
    """The newest CUDA that a driver of a branch knows."""
    newer = (615, 13040), (610, 13030), (595, 13020), (590, 13010)
    for branch, cuda in (*newer, (580, 13000), (570, 12080), (560, 12060), (550, 12040), (535, 12020)):
        if major >= branch:
            return cuda
    return 12000
