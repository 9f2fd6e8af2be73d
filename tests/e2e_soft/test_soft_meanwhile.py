"""What a job does between the look at it and its pause; who dies between the first gate that opens and the last."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from soft_command import UNDER, Held, child_of, importer_of, pieces, start, used, waits_for

from limosa.parking.protocol import Stand
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

MIB = 1 << 20
SMALL = ["--chunk", "4MiB"]

_MEANWHILE = """
import importlib, json, pathlib, sys, time
from limosa import operation
from limosa.errors import LimosaError
from limosa.parking import mover

where, cls, folder, ask, told, verb, pid = sys.argv[1:8]
options = json.loads(sys.argv[8])
kind = getattr(importlib.import_module(f"limosa.operation.parked.{where}"), cls)
prepare, hold = kind.prepare, mover.Mover.hold

def prepared(*arguments):
    prepare(*arguments)
    mover.Mover.hold = held
    for part in arguments[0]._parts if ask == "share" else ():
        part.shim._lost = True  # as when an answer was late: it is connected to anew, and others are served before
        part.shim._socket.close()
    pathlib.Path(folder, ask).touch()
    end = time.monotonic() + 60
    while not pathlib.Path(folder, told).exists():
        assert time.monotonic() < end, "the job does not answer"
        time.sleep(0.01)
    kind.prepare = prepare

def held(*arguments, pin, **rest):
    print("pin", pin)
    return hold(*arguments, pin=pin, **rest)

kind.prepare = prepared
try:
    getattr(operation, verb)(int(pid), **options)
    print("done")
except LimosaError as error:
    print("code", error.exit_code, error)
"""


def meanwhile(node: Any, where: str, job: Any, ask: str, told: str, verb: str, options: str) -> str:
    """Has a job do something when all is prepared and before its gate is closed; what was said."""
    words = [*where.split("."), job.folder, ask, told, verb, job.pid, options]
    return str(node.python(_MEANWHILE, *words).stdout)


@pytest.mark.parametrize("verb", ["move", "suspend"])
def test_memory_that_is_shared_once_all_is_prepared_is_one_afterwards(parked: Any, verb: str) -> None:
    job = start(parked, "--mib", 64, "--partner")
    where, options = ("moving.Moving", '{"to": "1"}') if verb == "move" else ("suspending.Suspending", "{}")
    assert "done" in meanwhile(parked, where, job, "share", "shared", verb, options)
    if verb == "suspend":
        parked.limosa("resume", job.pid, "--to", 1)
    job.goes_on(3)
    assert 128 * MIB < used(parked)[1] < 176 * MIB, "what is shared is there once"
    (ours,) = [m for m in pieces(job) if m.share]
    assert ours.imported
    parked.says(0, "", "move", job.pid, "--to", 0)
    job.goes_on(3)
    job.finish()


@pytest.mark.criu
def test_memory_that_is_shared_once_all_is_prepared_is_one_in_the_image(parked: Any, tmp_path: Path) -> None:
    """It was copied as one process's alone, and two have it when the job is held still."""
    job = start(parked, "--mib", 16, "--partner")
    child = child_of(job)
    options = f'{{"output": "{tmp_path / "image"}"}}'
    said = meanwhile(parked, "saving.Saving", job, "share", "shared", "checkpoint", options)
    assert "done" in said, said
    job.until_gone()
    parked.says(0, "", "restore", tmp_path / "image", "--to", 1)
    job.goes_on(3)
    with Shim(Identity.of(child)) as shim:
        (theirs,) = [m.share for m in shim.memories() if m.share]
    assert [m.share for m in pieces(job) if m.share] == [theirs]
    assert max(used(parked)) < 80 * MIB, "what is shared is there once"
    time.sleep(0.3)
    job.finish()


def test_nothing_is_pinned_while_the_job_stands_still(parked: Any) -> None:
    job = start(parked, "--mib", 48)
    said = meanwhile(parked, "suspending.Suspending", job, "grow", "grown", "suspend", "{}")
    assert "done" in said
    assert "pin False" in said
    assert "pin True" not in said
    parked.limosa("resume", job.pid, "--to", 1)
    job.goes_on(2)
    job.finish()


_KILLED = """
import os, signal, sys
from limosa import operation
from limosa.parking import shim

open_gate = shim.Shim.open_gate

def opened(one):
    open_gate(one)
    os.kill(os.getpid(), signal.SIGKILL)

shim.Shim.open_gate = opened
verb, what, to = sys.argv[1:]
if verb == "move":
    operation.move(int(what), to=to)
elif verb == "restore":
    operation.restore(what)
else:
    operation.recover()
"""


def test_an_undo_that_was_killed_between_two_gates_is_gone_on_with(parked: Any) -> None:
    """Neither process saw the GPU that it was to go to; one cannot make its memory there, one has come home."""
    job = parked.job("--mib", 48, "--child", env=UNDER | {"CUDA_VISIBLE_DEVICES": "0"})
    rule = parked.switches.add("function=cuMemCreate caller=job.py every=1 result=OUT_OF_MEMORY")
    died = parked.run([sys.executable, "-c", _KILLED, "move", job.pid, 1], rc=None)
    assert died.rc == -signal.SIGKILL, died
    parked.switches.remove(rule)
    parked.run([sys.executable, "-c", _KILLED, "recover", "", ""], rc=None)
    parked.limosa("recover")
    job.goes_on(3)
    assert used(parked)[1] < 48 * MIB
    parked.says(0, "", "move", job.pid, "--to", 1)
    job.goes_on(3)
    job.finish()


@pytest.mark.criu
def test_a_checkpoint_whose_job_cannot_go_home_leaves_it_suspended(parked: Any, tmp_path: Path) -> None:
    """It was to run on, and its GPU is full: what was taken away goes into an arena."""
    job = start(parked, "--mib", 48)
    command = ["checkpoint", job.pid, "--output", tmp_path / "image", "-R", "--rounds", 0, *SMALL]
    held = Held(parked, "cuMemcpyDtoHAsync", *command)
    waits_for(parked, lambda: parked.state(job) == "checkpointed")
    with parked.switches.fill(0, leave=4 * MIB):
        held.let_go()
        parked.judge(parked.ends(held.process), 41, "")
        with Shim(Identity.of(job.pid)) as shim:
            assert shim.hello().stand is Stand.AWAY
        assert parked.state(job) == "checkpointed"
        parked.limosa("resume", job.pid, "--to", 1)
    job.goes_on(2)
    parked.limosa("move", job.pid, "--to", 0)
    job.goes_on(2)
    job.finish()


_CANCELLED = """
import sys, threading
from limosa import operation
from limosa.operation.parked import loading

cancel, open_gates = threading.Event(), loading.Loading.open

def opened(one):
    open_gates(one)
    cancel.set()

loading.Loading.open = opened
print(operation.restore(sys.argv[1], cancel=cancel).pid)
"""


@pytest.mark.criu
def test_a_restored_job_that_runs_is_not_ended_by_who_cancels_then(parked: Any, tmp_path: Path) -> None:
    job = start(parked, "--mib", 16)
    parked.limosa("checkpoint", job.pid, "--output", tmp_path / "image", *SMALL)
    job.until_gone()
    assert parked.python(_CANCELLED, tmp_path / "image").stdout.strip() == str(job.pid)
    job.goes_on(3)
    job.finish()


@pytest.mark.criu
def test_a_restore_that_was_killed_between_two_gates_is_finished_and_not_ended(parked: Any, tmp_path: Path) -> None:
    job = start(parked, "--mib", 16, "--child")
    parked.limosa("checkpoint", job.pid, "--output", tmp_path / "image", *SMALL)
    job.until_gone()
    died = parked.run([sys.executable, "-c", _KILLED, "restore", tmp_path / "image", ""], rc=None)
    assert died.rc == -signal.SIGKILL, died
    parked.limosa("recover", rc=None)
    job.goes_on(3)
    job.finish()


def test_a_move_is_refused_where_a_shim_does_not_answer(parked: Any) -> None:
    """The driver alone would lose what was imported."""
    job = start(parked, "--mib", 16)
    parked.limosa("move", job.pid, "--to", 1)
    with Shim(Identity.of(job.pid)):
        answer = parked.limosa("move", job.pid, "--to", 0, "-o", "json", rc=None)
    assert answer.rc == 13, answer
    job.goes_on(2)
    job.finish()


def test_the_memory_alone_is_not_taken_of_a_part_of_a_job(parked: Any) -> None:
    """The child has none that could be given back, and would run on."""
    job = start(parked, "--mib", 16, "--child", "--child-without", "LD_PRELOAD")
    job.until(lambda: len(parked.limosa("gpus", "-o", "json").json["gpus"][0]["processes"]) > 1, what="a child")
    parked.says(13, "runs-on", "suspend", job.pid, "--release=memory-only")
    job.goes_on(2)
    parked.says(0, "", "suspend", job.pid)
    parked.says(0, "", "resume", job.pid)
    job.goes_on(2)
    job.finish()


def test_who_only_looks_does_not_wait_for_who_works(parked: Any) -> None:
    """The shims listen to the operation that is under way: nobody else asks them and waits for an answer."""
    job = start(parked, "--mib", 16, "--export")
    importer_of(job)
    held = Held(parked, "cuMemcpyDtoDAsync", "move", "--to", 1, job.pid)
    waits_for(parked, lambda: parked.state(job) == "checkpointed")
    for code, words in ((0, "ps"), (0, "gpus"), (19, f"plan move {job.pid} --to 1"), (19, f"move {job.pid} --to 1")):
        answers = (parked.limosa(*words.split(), rc=code) for _ in range(4))  # who is held up only takes longer
        assert any(answer.seconds < 8 for answer in answers), words
    (shown,) = parked.limosa("ps", "-o", "json").json["jobs"]
    assert [reason["id"] for reason in shown["reasons"]] == ["busy"]
    assert shown["under_way"] == {"operation": "move", "alive": True}
    assert "move under way" in parked.limosa("ps").stdout
    assert all("while a move is under way" in process["why"] for process in shown["processes"])
    parked.switches.remove(held.rule)
    assert parked.ends(held.process).rc == 0
    job.goes_on(3)
    time.sleep(0.5)
    job.finish()
