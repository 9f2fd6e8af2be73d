"""What each class of victim is made of; read by the victim itself and by the twin that it is compared with.

A victim is one or more processes with slots 0, 1, … on a control page. Each process has parts (a context on a GPU),
each part has blocks of device memory (sizes in words of 8 bytes) that are stamped anew in every epoch, and a small
float array that every epoch adds to, so that its bits depend on every epoch since the start.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

FLOATS = 512
"""Length of the float array of each part."""

MiB = (1 << 20) // 8


class Part(NamedTuple):
    """A context and what lies in it: ``device`` counts from the victim's first GPU."""

    device: int
    plain: tuple[int, ...] = ()
    vmm: tuple[int, ...] = ()
    pooled: tuple[int, ...] = ()
    threads: int = 0
    own: tuple[int, ...] = ()  # of cuMemCreate, shown to nobody
    churn: int = 0  # words of what a thread allocates, writes, reads and frees, all the time
    idle: int = 0  # bytes that are allocated and left alone
    peer: bool = False  # the victim's parts have access to each other's memory

    @property
    def blocks(self) -> tuple[int, ...]:
        """All blocks in the order in which they are hashed."""
        return self.plain + self.vmm + self.own + self.pooled

    @property
    def pieces(self) -> int:
        """How many pieces of its memory the shim looks after, at most."""
        return sum(words >= 2 * MiB for words in self.plain) + len(self.own + self.vmm) + bool(self.churn)


class Ranks(NamedTuple):
    """What the ranks of a victim do with one another, in each epoch (``rank.py``).

    Attributes:
        numbers: how many each has, of 4 bytes, in each of four buffers.
        p2p: they also send to the next one and receive from the one before.
        groups: what belongs together is called in groups.
        nonblocking: communicators are made with blocking=0.
        late: milliseconds by which each is late, at most.
        meets: after so many epochs they wait for each other on the host, at the agent's store.
    """

    numbers: int = 700
    p2p: bool = False
    groups: bool = False
    nonblocking: bool = False
    late: float = 0
    meets: int = 0


class Shape(NamedTuple):
    """A class of victims.

    Attributes:
        processes: parts of each process with CUDA state; slot by slot.
        idle: processes of the tree without CUDA state.
        behaviour: what it does when it is told to: "exit", "fork", "stop", "busy", or "".
        shim: whether it runs under the shim, as ``limosa run`` starts it; a container has it by ``limosa cdi``.
        blind: whether it sees no GPU but its first (CUDA_VISIBLE_DEVICES).
        hidden: whether the other GPUs are hidden from it, as by ``limosa run --gpus``.
        box: the runtime whose container it is; its job is that of ``tests/containers``.
        ranks: what its processes but the first compute together over NCCL; the first starts them, waits for them, and
            ends them when one of them ends, as torchrun does.
    """

    processes: tuple[tuple[Part, ...], ...]
    idle: int = 0
    behaviour: str = ""
    shim: bool = False
    blind: bool = False
    hidden: bool = False
    ranks: Ranks | None = None
    box: str = ""

    @property
    def pieces(self) -> int:
        """How many pieces of its memory can be parked; each rank has four buffers."""
        found = sum(part.pieces for parts in self.processes for part in parts)
        if self.ranks is not None and 4 * self.ranks.numbers >= 2 * MiB:
            found += 4 * (len(self.processes) - 1)
        return found

    @property
    def gpus(self) -> int:
        """On how many GPUs it is."""
        return 1 + max((part.device for parts in self.processes for part in parts), default=-1)


_ONE = (Part(0, plain=(MiB // 4, 700)),)


def _ranks(n: int, ranks: Ranks) -> Shape:
    return Shape(((), *((Part(device),) for device in range(n))), shim=True, ranks=ranks)


SHAPES: dict[str, Shape] = {
    "one": Shape((_ONE,)),
    "tree": Shape((_ONE, (Part(0, plain=(3000,)),), (Part(0, plain=(5000, 64)),)), idle=1),
    "threads": Shape(((Part(0, plain=(20000, 20000, 999), threads=3),),)),
    "allocations": Shape(((Part(0, plain=(4 * MiB, *(512 + 3 * i for i in range(24))), pooled=(4096, 100)),),)),
    "vmm": Shape(((Part(0, plain=(1000,), vmm=(MiB // 4, MiB // 4)),),)),
    "two-gpus": Shape(((Part(0, plain=(30000,)), Part(1, plain=(20000, 77))),)),
    # What the driver was seen to lose; more than it has when it is one of several GPUs is refused (docs/caveats.md).
    "peers": Shape(((Part(0, plain=(30000,), idle=512 << 20, peer=True), Part(1, plain=(20000, 77), peer=True)),)),
    "exits": Shape((_ONE,), behaviour="exit"),
    "forks": Shape((_ONE,), behaviour="fork"),
    "stopped": Shape((_ONE,), behaviour="stop"),
    "host": Shape(((),)),  # no CUDA state: what CRIU alone moves
    # Under the shim: what is 2 MiB or larger can be parked, what is smaller is left to the driver.
    "parked": Shape(((Part(0, plain=(2 * MiB + 77, 700)),),), behaviour="busy", shim=True),
    "parked-pair": Shape(
        ((Part(0, plain=(2 * MiB, 64)),), (Part(1, plain=(2 * MiB + 3000,)),)), behaviour="busy", shim=True
    ),
    "parked-vmm": Shape(
        ((Part(0, plain=(2 * MiB, 1000), vmm=(MiB // 4,), own=(MiB // 2, MiB)),),), behaviour="busy", shim=True
    ),
    "parked-churn": Shape(((Part(0, plain=(2 * MiB, 100), churn=2 * MiB + 9),),), behaviour="busy", shim=True),
    "parked-blind": Shape(((Part(0, plain=(2 * MiB + 5, 300), own=(MiB,)),),), behaviour="busy", shim=True, blind=True),
    "parked-hidden": Shape(
        ((Part(0, plain=(2 * MiB + 9, 200), own=(MiB,)),),), behaviour="busy", shim=True, hidden=True
    ),
    # Held still, and nothing of it is parked; one process of two alone has something.
    "parked-small": Shape((_ONE,), behaviour="busy", shim=True),
    "parked-mixed": Shape(((Part(0, plain=(2 * MiB, 64)),), (Part(0, plain=(3000,)),)), behaviour="busy", shim=True),
    # Containers (boxes.py).
    "runc": Shape((_ONE,), box="runc"),
    "podman": Shape((_ONE,), box="podman"),
    "containerd": Shape((_ONE,), box="containerd"),
    "runc-shim": Shape(((Part(0, plain=(2 * MiB,)),),), box="runc", shim=True),
    "podman-shim": Shape(((Part(0, plain=(2 * MiB,)),),), box="podman", shim=True),
    "containerd-shim": Shape(((Part(0, plain=(2 * MiB,)),),), box="containerd", shim=True),
    # Ranks that talk over NCCL; large buffers can be parked.
    "ranks": _ranks(2, Ranks(groups=True)),
    "ranks-ring": _ranks(2, Ranks(p2p=True, meets=7)),
    "ranks-late": _ranks(2, Ranks(p2p=True, groups=True, nonblocking=True, late=12)),
    "ranks-parked": _ranks(2, Ranks(numbers=1 << 19, p2p=True)),
    "ranks-four": _ranks(4, Ranks(p2p=True, groups=True)),
    "parked-two": Shape(((Part(0, plain=(2 * MiB,)), Part(1, plain=(3 * MiB, 77))),), behaviour="busy", shim=True),
}


def page_of(slot: int, part: int, block: int) -> int:
    """The page number that a block is stamped with."""
    return 100_000 * slot + 10_000 * part + 7 * block + 1


def factor(epoch: int) -> float:
    """What an epoch multiplies with before it adds."""
    return 1.0 / (1 + epoch % 97)


class Slot:
    """Words of the control page that belong to one process, by number."""

    EPOCH, REQUEST, ANSWER, ANSWER_EPOCH, HASH, BYTES, FLOATS, COMMAND, DONE, PID, ERROR = range(11)
    WORDS = 64


COMMANDS = {"exit": 1, "fork": 2, "join": 3, "spin": 4, "callback": 5, "lose-store": 6}


def sees(folder: Path) -> Path:
    """The file that says which GPUs a victim in that folder sees, as ``limosa run --gpus`` makes one."""
    return Path(os.environ["LIMOSA_RUNTIME_DIR"]) / "0" / "sees" / folder.name
