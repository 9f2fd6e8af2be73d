"""Device memory over all processes of a node, whoever is killed and whenever: nothing leaks or is given twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

MIB = 1 << 20
IDLE = 4

# Takes and gives back device memory as fast as it can; every page holds its pid, so that memory given twice shows.
CHURN = """
import ctypes, os, random, sys
cuda = ctypes.CDLL("libcuda.so.1")
def ok(result): assert result == 0, result
gpu = int(sys.argv[1])
device, context = ctypes.c_int(), ctypes.c_void_p()
ok(cuda.cuInit(0)); ok(cuda.cuDeviceGet(ctypes.byref(device), gpu))
FULL = 2
while True:
    result = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    if result != FULL: break
ok(result)
ok(cuda.cuCtxSetCurrent(context))
kept, random_ = [], random.Random(os.getpid())
mark = os.getpid() << 32 | 0x5EED
print("up", flush=True)
while True:
    if len(kept) < 4 and random_.random() < 0.6:
        memory, size = ctypes.c_uint64(), random_.choice((1, 2 << 20, 5 << 20))
        result = cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size))
        if result == FULL: continue
        ok(result)
        if size > 4096: ok(cuda.cuMemcpyHtoD_v2(memory, ctypes.byref(ctypes.c_uint64(mark)), ctypes.c_size_t(8)))
        kept.append((memory, size))
    elif kept:
        memory, size = kept.pop(random_.randrange(len(kept)))
        back = ctypes.c_uint64()
        if size > 4096:
            ok(cuda.cuMemcpyDtoH_v2(ctypes.byref(back), memory, ctypes.c_size_t(8)))
            assert back.value == mark, (hex(back.value), hex(mark))
        ok(cuda.cuMemFree_v2(memory))
"""


def used(node):
    return [gpu["memory_used"] for gpu in node.limosa("gpus", "-o", "json").json["gpus"]]


def start(node, gpu, log):
    job = node.popen([sys.executable, "-c", CHURN, gpu], stdout=subprocess.PIPE, stderr=log)
    assert job.stdout.readline() == b"up\n"
    return job


def test_killed_at_any_time_nothing_is_lost(new_node, tmp_path):
    node = new_node(gpus=2, memory="48MiB")
    chance = random.Random(4)
    words = tmp_path / "words"
    with open(words, "wb") as log:
        jobs = [start(node, i % 2, log) for i in range(4)]
        for _ in range(25):
            time.sleep(chance.random() * 0.03)
            victim = jobs.pop(chance.randrange(len(jobs)))
            assert victim.poll() is None, words.read_text()
            victim.kill()
            assert victim.wait(60) == -signal.SIGKILL
            jobs.append(start(node, chance.randrange(2), log))
        for gpu in node.limosa("gpus", "-o", "json").json["gpus"]:
            assert gpu["memory_used"] <= gpu["memory_total"]
            assert {p["pid"] for p in gpu["processes"]} <= {job.pid for job in jobs}
        for job in jobs:
            assert job.poll() is None, words.read_text()
            job.kill()
            job.wait(60)
    assert used(node) == [IDLE * MIB] * 2
    assert node.blocks() == []


def test_a_forked_child_neither_has_nor_holds_device_memory(node, tmp_path):
    code = (
        "import os, sys, time\n" + CHURN.split("kept, random_", maxsplit=1)[0] + "memory = ctypes.c_uint64()\n"
        "ok(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(8 << 20)))\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    free, all_ = ctypes.c_size_t(), ctypes.c_size_t()\n"
        "    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(all_)) == 3\n"
        "    time.sleep(60)\n"
        "print(child, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    job = node.popen([sys.executable, "-c", code, "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = int(job.stdout.readline())
    assert used(node)[0] > (8 + IDLE) * MIB
    job.stdin.close()
    assert job.wait(60) == 0
    assert os.path.exists(f"/proc/{child}")
    maps = Path(f"/proc/{child}/maps").read_text()
    assert "nvidia-soft" not in maps, maps
    assert used(node) == [IDLE * MIB] * 2


def test_a_fork_under_the_nodes_lock(node):
    """A child that is forked while another thread holds the lock must not hold it, nor keep a name of the node open."""
    code = (
        CHURN.split("kept, random_", maxsplit=1)[0] + "import threading, time\n"
        "stop = False\n"
        "def churn():\n"
        "    ok(cuda.cuCtxSetCurrent(context))\n"
        "    memory = ctypes.c_uint64()\n"
        "    while not stop:\n"
        "        ok(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(2 << 20)))\n"
        "        ok(cuda.cuMemFree_v2(memory))\n"
        "threads = [threading.Thread(target=churn) for _ in range(2)]\n"
        "for t in threads: t.start()\n"
        "children = []\n"
        "for _ in range(60):\n"
        "    child = os.fork()\n"
        "    if not child: time.sleep(60); os._exit(0)\n"
        "    children.append(child)\n"
        "stop = True\n"
        "for t in threads: t.join()\n"
        "left = [os.readlink(f'/proc/{c}/fd/{f}') for c in children for f in os.listdir(f'/proc/{c}/fd')]\n"
        "print([name for name in left if 'nvidia-soft' in name])\n"
        "for c in children: os.kill(c, 9)\n"
    )
    ran = node.run([sys.executable, "-c", code, "0"], limit=120)
    assert ran.stdout == "[]\n"
    assert used(node) == [IDLE * MIB] * 2
