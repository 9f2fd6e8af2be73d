"""Which devices a program sees, what they say of themselves, and which device nodes that opens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from softgpu.far import Far

from limosa_softgpu.node import environment
from limosa_softgpu.state import NODE_FOLDER

SEEN = "[bytes(ok(cu.cuDeviceGetUuid(i)).bytes).hex() for i in range(ok(cu.cuDeviceGetCount()))]"


def uuids(node: Any) -> list[str]:
    job = Far(node)
    job("ok(cu.cuInit(0))")
    return list(job(SEEN))


def dashed(uuid: str) -> str:
    return "GPU-" + "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0", [0]),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("1gpu,2x", [1, 2]),
        ("0,7,1", [0]),
        ("0,-1,1", [0]),
        ("0,two,1", [0]),
        ("7", []),
        ("", []),
        ("-1", []),
        ("0,0", []),
        ("MIG-0", []),
        ("{0}", [0]),
        ("{2},{1}", [2, 1]),
        ("{1:.12}", [1]),
        ("{1},1", [1]),
        ("{1},GPU-ffffffff,{0}", [1]),
        ("GPU-", []),
        ("1,{0}", [1]),
    ],
)
def test_visible_devices(new_node: Any, visible: str, expected: list[int]) -> None:
    """Indices or beginnings of uuids; the list ends at the first word that names none."""
    node = new_node(gpus=3)
    all_of_them = uuids(node)
    job = Far(node, env={"CUDA_VISIBLE_DEVICES": visible.format(*map(dashed, all_of_them))})
    answer = job("word(cu.cuInit(0)[0])")
    assert answer == ("SUCCESS" if expected else "NO_DEVICE")
    if expected:
        assert job(SEEN) == [all_of_them[i] for i in expected]
    else:
        assert job("word(cu.cuDeviceGetCount()[0])") == "NOT_INITIALIZED"
        assert NODE_FOLDER not in Path(f"/proc/{job.pid}/maps").read_text()  # or it could not be dumped


def test_init_again_after_it_has_failed(node: Any) -> None:
    job = Far(node, env={"CUDA_VISIBLE_DEVICES": ""})
    assert job("[word(cu.cuInit(0)[0]) for _ in range(2)]") == ["NO_DEVICE"] * 2
    job("import ctypes; ctypes.CDLL(None).setenv(b'CUDA_VISIBLE_DEVICES', b'1', 1)")
    assert job("word(cu.cuInit(0)[0])") == "SUCCESS"
    job("context(0); plain(1, 1)")
    assert job("intact()")


def test_beginning_of_two_uuids_names_none(new_node: Any) -> None:
    """A digit with which two uuids begin names neither of them; a longer beginning tells them apart."""
    node = new_node(gpus=16, memory="16MiB")
    found = uuids(node)
    by_digit = {digit: [u for u in found if u.startswith(digit)] for digit in "0123456789abcdef"}
    several = next(digit for digit, those in by_digit.items() if len(those) > 1)
    job = Far(node, env={"CUDA_VISIBLE_DEVICES": f"GPU-{several}"})
    assert job("word(cu.cuInit(0)[0])") == "NO_DEVICE"
    job = Far(node, env={"CUDA_VISIBLE_DEVICES": dashed(by_digit[several][1])[:30]})
    job("ok(cu.cuInit(0))")
    assert job(SEEN) == [by_digit[several][1]]


def test_init_twice_with_flags_and_before(node: Any) -> None:
    job = Far(node)
    assert job("word(cu.cuDeviceGetCount()[0])") == "NOT_INITIALIZED"
    assert job("word(cu.cuMemAlloc(16)[0])") == "NOT_INITIALIZED"
    assert job("word(cu.cuInit(1)[0])") == "INVALID_VALUE"
    assert job("[word(cu.cuInit(0)[0]) for _ in range(2)]") == ["SUCCESS", "SUCCESS"]


def test_no_node_no_device(libraries: None) -> None:
    """Outside of a node the library finds nothing and says so."""
    assert not os.path.exists(NODE_FOLDER)
    code = "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0))"
    found = subprocess.run([sys.executable, "-c", code], env=environment(dict(os.environ)), timeout=60, check=False)
    assert found.returncode == 100


def test_what_a_device_says(new_node: Any) -> None:
    node = new_node(gpus=2, memory="64MiB")
    job = Far(node)
    job("ok(cu.cuInit(0))")
    assert job("ok(cu.cuDeviceGetName(64, 0)).split(b'\\0')[0].decode()") == "Soft GPU H200"
    assert job("ok(cu.cuDeviceGetName(5, 0)).decode()") == "Soft\0"
    assert job("ok(cu.cuDeviceTotalMem(1))") == 64 << 20
    attribute = "cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_"
    for name, value in {
        "COMPUTE_CAPABILITY_MAJOR": 9,
        "COMPUTE_CAPABILITY_MINOR": 0,
        "MULTIPROCESSOR_COUNT": 132,
        "WARP_SIZE": 32,
        "MAX_THREADS_PER_BLOCK": 1024,
        "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
        "MULTICAST_SUPPORTED": 0,
    }.items():
        assert job(f"ok(cu.cuDeviceGetAttribute({attribute}{name}, 0))") == value
    bus_id = job("ok(cu.cuDeviceGetPCIBusId(32, 1)).split(b'\\0')[0].decode()")
    assert job(f"int(ok(cu.cuDeviceGetByPCIBusId({bus_id.encode()!r})))") == 1
    assert job(f"int(ok(cu.cuDeviceGetByPCIBusId({bus_id[5:].encode()!r})))") == 1
    assert job("word(cu.cuDeviceGetByPCIBusId(b'0000:77:00.0')[0])") == "INVALID_DEVICE"
    assert job("word(cu.cuDeviceGetByPCIBusId(b'somewhere')[0])") == "INVALID_VALUE"


def test_devices_that_are_not_there(node: Any) -> None:
    job = Far(node)
    job("ok(cu.cuInit(0))")
    for call in (
        "cuDeviceGet(2)",
        "cuDeviceGet(-1)",
        "cuDeviceGetName(64, 2)",
        "cuDeviceTotalMem(-1)",
        "cuDeviceGetUuid(9)",
        "cuDevicePrimaryCtxRetain(2)",
        "cuDeviceCanAccessPeer(0, 2)",
        "cuDeviceGetPCIBusId(32, 2)",
    ):
        assert job(f"word(cu.{call}[0])") == "INVALID_DEVICE", call


def test_every_attribute_that_cuda_h_knows_is_answered(node: Any) -> None:
    """And no number beyond."""
    job = Far(node)
    job("ok(cu.cuInit(0))")
    refused = job(
        "[a.name for a in cu.CUdevice_attribute if a.name != 'CU_DEVICE_ATTRIBUTE_MAX' and a.value < 148"
        " and int(cu.cuDeviceGetAttribute(a, 0)[0])]"
    )
    assert refused == []
    job("import ctypes; raw = ctypes.CDLL('libcuda.so.1'); number = ctypes.c_int()")
    assert job("[raw.cuDeviceGetAttribute(ctypes.byref(number), a, 0) for a in (0, -1, 148, 100000)]") == [1] * 4


def test_peers(node: Any) -> None:
    job = Far(node)
    job("ok(cu.cuInit(0))")
    assert job("[ok(cu.cuDeviceCanAccessPeer(a, b)) for a in (0, 1) for b in (0, 1)]") == [0, 1, 1, 0]
    access = "cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED"
    assert job(f"ok(cu.cuDeviceGetP2PAttribute({access}, 0, 1))") == 1
    assert job(f"word(cu.cuDeviceGetP2PAttribute({access}, 1, 1)[0])") == "INVALID_DEVICE"


def maps_and_descriptors(pid: int) -> tuple[list[str], list[str]]:
    with open(f"/proc/{pid}/maps") as file:
        maps = [line.split()[-1] for line in file if "/dev/nvidia" in line and NODE_FOLDER not in line]
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        link = os.readlink(f"/proc/{pid}/fd/{fd}")
        if link.startswith("/dev/nvidia"):
            links.append(link)
    return maps, links


def test_what_is_seen_from_outside(node: Any) -> None:
    """Descriptors of every GPU, mappings of nvidiactl, one of nvidia-uvm for each GPU with a context."""
    job = Far(node, env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert maps_and_descriptors(job.pid) == ([], [])
    job("ok(cu.cuInit(0))")
    maps, links = maps_and_descriptors(job.pid)
    assert {"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"} == set(links)
    assert set(maps) == {"/dev/nvidiactl"}
    assert len(maps) > 1
    for n, device in enumerate((0, 1, 0), 1):
        job(f"context({device})")
        maps, _ = maps_and_descriptors(job.pid)
        assert maps.count("/dev/nvidia-uvm") == min(n, 2)
    job("ok(cu.cuDevicePrimaryCtxReset(1))")
    maps, _ = maps_and_descriptors(job.pid)
    assert maps.count("/dev/nvidia-uvm") == 1


def test_a_forked_child_has_no_driver(node: Any) -> None:
    """Every call answers NOT_INITIALIZED; no block stays alive through it, its descriptors of /dev/nvidia* do."""
    job = Far(node)
    job("start()")
    job("address = plain(4, 1)")
    job(
        "import subprocess, signal\n"
        "r, w = os.pipe()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    said = [word(cu.cuInit(0)[0]), word(cu.cuDeviceGetCount()[0]), word(cu.cuMemAlloc(16)[0])]\n"
        "    os.write(w, ' '.join(said).encode())\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
    )
    assert job("os.read(r, 1000).decode()").split() == ["NOT_INITIALIZED"] * 3
    child = job("child")
    maps, links = maps_and_descriptors(child)
    assert "/dev/nvidia-uvm" in maps
    assert "/dev/nvidia0" in links
    assert NODE_FOLDER not in Path(f"/proc/{child}/maps").read_text()
    assert not [link for link in links if link.startswith(NODE_FOLDER)]
    assert job("intact()")
    job("os.kill(child, signal.SIGKILL); os.waitpid(child, 0)")


def test_a_lost_gpu(node: Any) -> None:
    """It has fallen off the bus: contexts on it fail for good, a new process does not see it."""
    job = Far(node)
    job("start(1)")
    job("plain(1, 1)")
    node.switches.lose(1)
    assert job("word(cu.cuCtxSynchronize()[0])") == "UNKNOWN"
    assert job("word(cu.cuMemAlloc(16)[0])") == "UNKNOWN"
    other = Far(node)
    other("ok(cu.cuInit(0))")
    assert other("ok(cu.cuDeviceGetCount())") == 1
