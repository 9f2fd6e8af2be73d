"""Processes that say to whoever asks their shim what no shim says: what that costs is theirs alone."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from soft_command import start as start_job

from limosa.operation.claims import Claim
from limosa.operation.journal import Header, Journal
from limosa.parking import LIBRARY
from limosa.process.identity import Identity
from limosa.process.places import own_folder

pytestmark = [pytest.mark.root, pytest.mark.timeout(600)]

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
    job, begun = start_job(parked, "--mib", 16), time.monotonic()
    jobs = {found["pid"]: found for found in parked.says(0, "", "ps")["jobs"]}
    quickest = time.monotonic() - begun
    for _ in range(4):  # who is held up only takes longer
        if quickest < 25:
            break
        begun = time.monotonic()
        parked.says(0, "", "ps")
        quickest = min(quickest, time.monotonic() - begun)
    assert quickest < 25, "a second or two for each that is hostile"
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


# A process with a context whose name, threads' names and arguments are no text, and whose /proc/PID/stat is odd.
NAMELESS = r"""
import ctypes, threading, time
from cuda.bindings import driver as cu

libc = ctypes.CDLL(None)
libc.prctl(15, b"\xff\xfe) R 1 \n\x1b[")
cu.cuInit(0)
cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
assert not int(cu.cuMemAlloc(4 << 20)[0])

def other():
    libc.prctl(15, b"\xff" * 15)
    print("READY", flush=True)
    time.sleep(600)

threading.Thread(target=other).start()
time.sleep(600)
"""


def test_a_process_whose_name_is_no_text_is_shown_and_moved_like_others(parked: Any) -> None:
    argv = [sys.executable, "-c", NAMELESS, b"\xff\xfe\n\x1b["]
    process = parked.popen(argv, stdin=subprocess.DEVNULL, stdout=-1)
    parked.reaper.watch(process.pid)
    assert process.stdout.readline() == b"READY\n"
    pid = process.pid
    assert Path(f"/proc/{pid}/comm").read_bytes().startswith(b"\xff\xfe) R 1")
    assert pid in {found["pid"] for found in parked.says(0, "", "ps")["jobs"]}
    for verb in (["ps"], ["ps", "-v"], ["gpus"], ["gpus", "-v"], ["plan", "move", pid, "--to", "1"]):
        shown = parked.limosa(*verb)
        assert "\x1b[" not in shown.stdout
        assert verb[0] == "gpus" or str(pid) in shown.stdout
    assert pid in {p["pid"] for gpu in parked.says(0, "", "gpus")["gpus"] for p in gpu["processes"]}
    parked.says(0, "", "move", pid, "--to", 1)
    assert parked.where(process) == [1]
    moving = parked.later("suspend", pid, halts="lock done")
    parked.reaches(moving, "lock done")
    parked.kill("limosa", moving)
    parked.limosa("recover")
    assert parked.where(process) == [1]
    assert Path(f"/proc/{pid}").exists()


NOBODY = 65534
GONE = Identity(1, 999)  # never alive: process 1 has another start time
HUGE = 10**15


def claim_of_nobody(runtime: Path, claim: Claim, *, journal: bool = False) -> None:
    """A claim as that user could have written it; with a journal, as if its holder had died at work."""
    folder = runtime / "users" / f"limosa-{NOBODY}"
    files = {"claims": (f"{claim.id}.json", msgspec.json.encode(claim))}
    if journal:
        files["journals"] = (f"{claim.id}.jsonl", b"x")
    for kind, (name, data) in files.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        (folder / kind / name).write_bytes(data)
        for path in (folder, folder / kind, folder / kind / name):
            os.chown(path, NOBODY, NOBODY)
            path.chmod(0o755)


def test_claims_on_gpus_that_are_not_here_and_on_more_than_there_is(
    parked: Any, runtime: Path, start: Callable[..., Any]
) -> None:
    """A user's and root's own, of holders that live and that have died; only what a living one could use counts."""
    job = start_job(parked, "--mib", 16)
    own_folder("claims")
    there = [gpu["uuid"] for gpu in parked.says(0, "", "gpus")["gpus"]]
    his = start(["setpriv", f"--reuid={NOBODY}", "--clear-groups", "sleep", "100"], ready=None)
    his.until(lambda: os.stat(f"/proc/{his.pid}").st_uid == NOBODY)
    nowhere = {"GPU-nowhere": HUGE, "": 1, "\0": 1, **{f"GPU-{n}": HUGE for n in range(1000)}}
    claim_of_nobody(runtime, Claim(id="living", operation="move", holder=Identity.of(his.pid), gpus=nowhere))
    everything = nowhere | dict.fromkeys(there, HUGE)
    claim_of_nobody(runtime, Claim(id="dead", operation="move", holder=GONE, gpus=everything), journal=True)
    Claim(id="roots", operation="move", holder=GONE, gpus=nowhere).save()
    Journal.create(Header(id="roots", operation="move", controller=GONE, roots=[])).close()
    assert parked.says(0, "", "ps")["jobs"][0]["way"] == "parked"
    for verb in (["move", job.pid, "--to", 1], ["suspend", job.pid], ["resume", job.pid], ["ps"], ["gpus"]):
        parked.says(0, "", *verb)
    assert parked.where(job) == [1]
    greedy = Claim(id="greedy", operation="move", holder=Identity.of(his.pid), gpus=dict.fromkeys(there, HUGE))
    claim_of_nobody(runtime, greedy)
    error = parked.says(14, "", "move", job.pid, "--to", 0)["error"]
    assert "-" not in error["message"].replace("--", ""), "less than nothing is free"
    his.kill()
    parked.says(0, "", "move", job.pid, "--to", 0)
    assert parked.where(job) == [0]
    job.goes_on(2)
    job.finish()
