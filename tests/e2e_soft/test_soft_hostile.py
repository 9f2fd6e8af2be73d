"""Processes that say to whoever asks their shim what no shim says: what that costs is theirs alone."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from soft_command import start

from limosa.parking import LIBRARY

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

# A process with a context, in which the library is mapped and a thread is called like the shim's.
HOSTILE = """
import array, ctypes, mmap, os, random, socket, struct, sys, threading, time
from cuda.bindings import driver as cu

way, library = sys.argv[1:]
cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
assert not int(cu.cuMemAlloc(4 << 20)[0])
file = open(library, "rb")
mapped = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
number = os.urandom(4).hex()
listening.bind("\\0limosa/shim/" + number)
listening.listen(64)
message = struct.Struct("=IHHIi4Q")
record = struct.Struct("=QQQQIIiI")

def answer(client):
    asked = client.recv(1 << 16)
    if not asked:
        return False
    magic, version, verb, n, *_ = message.unpack_from(asked)
    said = lambda total, here: message.pack(magic, version, verb, n, 0, total, here, 0, 0)
    i = 0
    while way != "noise":
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))] if way == "flood" else []
        client.sendmsg([said(1 << 17, 1) + record.pack(i + 1, 2 << 20, 0, 0, 0, 0, 0, 0)], rights)
        i += 1
        time.sleep(0.1 if way == "drip" else 0)
    client.send(said(*random.choices([0, 1, 2, 1 << 40], k=2)) + os.urandom(random.choice([0, 16, 56, 4000])))
    return True

def serve():
    open(f"/proc/self/task/{threading.get_native_id()}/comm", "w").write("limosa-" + number)
    print("READY", flush=True)
    while True:
        client, _ = listening.accept()
        try:
            while answer(client):
                pass
        except OSError:
            pass
        client.close()

serve()
"""
WAYS = ["drip", "flood", "noise"]


@pytest.fixture
def hostile(parked: Any, tmp_path: Path) -> list[int]:
    library = tmp_path / LIBRARY.name
    shutil.copy(LIBRARY, library)
    found: list[int] = []
    for way in WAYS:
        argv = [sys.executable, "-c", HOSTILE, way, str(library)]
        process = parked.popen(argv, stdin=subprocess.DEVNULL, stdout=-1, text=True)
        parked.reaper.watch(process.pid)
        assert process.stdout.readline() == "READY\n"
        found.append(process.pid)
    return found


def test_others_are_shown_planned_and_moved(parked: Any, hostile: list[int]) -> None:
    """A drip held ``ps`` for more than 25 seconds, a flood had it take 2.7 GB, and noise ended it."""
    job, begun = start(parked, "--mib", 16), time.monotonic()
    jobs = {found["pid"]: found for found in parked.says(0, "", "ps")["jobs"]}
    assert time.monotonic() - begun < 25, "a second or two for each that is hostile"
    assert {job.pid, *hostile} <= set(jobs)
    assert jobs[job.pid]["way"] == "parked"
    assert len(parked.says(0, "", "gpus")["gpus"]) == 2
    parked.says(0, "", "plan", "move", job.pid, "--to", 1)
    said = parked.limosa("move", "-o", "json", "--all", "--to", 1, rc=None)
    assert parked.where(job) == [1], said
    assert 10 < said.rc < 40, said
    for pid in hostile:
        assert Path(f"/proc/{pid}").exists()
    job.goes_on(2)
    job.finish()
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 1 << 20, "a GiB"
