"""GPUs that CUDA_VISIBLE_DEVICES leaves out: the driver sees them, and a program finds nothing of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from soft_node import Node
from softgpu.far import Far

from limosa.parking.shim import Shim
from limosa.process.identity import Identity

pytestmark = pytest.mark.root
# What a program is answered, of three GPUs, about each device and bus id that there may be.
ASKS = """
import ctypes, os
raw, libc = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
raw.cuMemAdvise_v2.argtypes = raw.cuMemPrefetchAsync_v2.argtypes = None
buffer, number = ctypes.create_string_buffer(4096), ctypes.c_int(-7)
def answers():
    found = {}
    by = ctypes.byref
    for d in (-1, 0, 1, 2, 3, 4, 2**31 - 1):
        context = ctypes.c_void_p()
        found[d] = [
            raw.cuDeviceGet(by(number), d), raw.cuDeviceGet(None, d), raw.cuDeviceGetName(buffer, 64, d),
            raw.cuDeviceTotalMem_v2(buffer, d), raw.cuDeviceGetAttribute(by(number), 16, d),
            raw.cuDeviceGetUuid(buffer, d), raw.cuDeviceGetUuid_v2(buffer, d), raw.cuDeviceGetPCIBusId(buffer, 32, d),
            raw.cuDeviceCanAccessPeer(by(number), 0, d), raw.cuDeviceCanAccessPeer(by(number), d, 0),
            raw.cuDeviceGetP2PAttribute(by(number), 3, 0, d), raw.cuDevicePrimaryCtxGetState(d, buffer, buffer),
            raw.cuDeviceGetDefaultMemPool(buffer, d), raw.cuDeviceGetMemPool(buffer, d),
            raw.cuCtxCreate_v2(by(context), 0, d), raw.cuDevicePrimaryCtxRetain(by(context), d),
            raw.cuDevicePrimaryCtxRelease_v2(d), raw.cuDevicePrimaryCtxReset_v2(d),
        ]
    raw.cuDeviceGetCount(by(number))
    return number.value, found
def bus(id_):
    number.value = -7
    return raw.cuDeviceGetByPCIBusId(ctypes.byref(number), id_), number.value
"""


def far(node: Node, library: Path, *, shim: bool = True, **env: str) -> Far:
    found = Far(node, env={**env, **({"LD_PRELOAD": str(library)} if shim else {})})
    found(ASKS)
    return found


def saw(job: Far) -> list[str]:
    with Shim(Identity.of(job.pid)) as shim:
        return shim.saw()


@pytest.mark.parametrize(
    "visible", ["0", "1", "1,0", "2,0", "0, 2", "0,1,2", "0,0", "0,7", "-1", "", "7", "MIG-0", "x"]
)
def test_a_program_sees_what_it_would_have_seen(new_node: Callable[..., Node], library: Path, visible: str) -> None:
    node = new_node(gpus=3, memory="64MiB")
    whole = far(node, library, shim=False)
    whole("raw.cuInit(0)")
    ids = [whole(f"(raw.cuDeviceGetPCIBusId(buffer, 32, {n}), buffer.value)[1]") for n in range(3)]
    told = []
    for options in ({"shim": False}, {"LIMOSA_SHIM_WITHOUT": "unseen"}, {}):
        job = far(node, library, CUDA_VISIBLE_DEVICES=visible, **options)  # type: ignore[arg-type]
        begun = job("[raw.cuInit(0), raw.cuInit(0), raw.cuInit(1)]")
        told.append((begun, job("answers()"), [job(f"bus({one})") for one in [*ids, "b'0000:77:00.0'", "b'where'"]]))
        assert job("libc.getenv(b'CUDA_VISIBLE_DEVICES').decode()") == visible
    assert told[0] == told[1] == told[2]
    if visible in ("0", "1", "1,0", "2,0", "0, 2"):
        assert len(saw(job)) == 3, "and the driver sees all"


def test_by_uuid_where_the_kernel_tells_them(new_node: Callable[..., Node], library: Path) -> None:
    node = new_node(gpus=3, memory="64MiB")
    plain = Far(node, env={"LD_PRELOAD": str(library)})
    plain("ok(cu.cuInit(0))")
    ids = saw(plain)
    for number in range(3):
        folder = f"/proc/driver/nvidia/gpus/0000:0{number}:00.0"
        text = f"Model: soft\\nGPU UUID: \\t {ids[number]}\\nDevice Minor: \\t {number}\\n"
        mount = "mount -t tmpfs none /proc/driver && " if not number else ""
        node.run(["sh", "-c", f"{mount}mkdir -p {folder} && printf '{text}' > {folder}/information"])
    for visible, seen in ((ids[2], [ids[2]]), (f"{ids[1][:16]},{ids[0]}", [ids[1], ids[0]])):
        job = far(node, library, CUDA_VISIBLE_DEVICES=visible)
        assert job("raw.cuInit(0)") == 0
        assert saw(job)[: len(seen)] == seen
        assert sorted(saw(job)) == sorted(ids)
        assert job("answers()")[0] == visible.count(",") + 1


def test_with_more_than_three_others_nothing_is_done(new_node: Callable[..., Node], library: Path) -> None:
    node = new_node(gpus=5, memory="64MiB")
    for visible, n in (("0", 1), ("0,1", 5)):
        job = far(node, library, CUDA_VISIBLE_DEVICES=visible)
        job("raw.cuInit(0)")
        assert len(saw(job)) == n


def test_nobody_else_ever_reads_another_list(new_node: Callable[..., Node], library: Path) -> None:
    """Threads that ask all the time, children that are forked and started meanwhile."""
    node = new_node(gpus=2, memory="64MiB", costs=["init=0.2"])
    job = far(node, library, CUDA_VISIBLE_DEVICES="1")
    job(
        "import subprocess, sys, threading\n"
        "heard, stop = set(), threading.Event()\n"
        "def ask():\n"
        "    while not stop.is_set():\n"
        "        heard.add(libc.getenv(b'CUDA_VISIBLE_DEVICES'))\n"
        "def fork():\n"
        "    while not stop.is_set():\n"
        "        heard.add(subprocess.check_output(['printenv', 'CUDA_VISIBLE_DEVICES']).strip())\n"
        "threads = [threading.Thread(target=one) for one in (ask, ask, fork)]\n"
        "[one.start() for one in threads]\n"
        "begun = raw.cuInit(0)\n"
        "stop.set()\n"
        "[one.join() for one in threads]\n"
    )
    assert job("begun") == 0
    assert job("[one.decode() for one in heard]") == ["1"]
    assert len(saw(job)) == 2
