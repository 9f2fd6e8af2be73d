"""For each line of standard input, an operation in a child process that is disturbed at a named point.

In: lines of JSON {"verb", "args", "options", …}; out: a line of JSON with what came of it (see ``main``). A program of
its own because it forks: it is warm, has one thread, and its children cost no start of Python.

*Points* are the moments before and after everything that changes what is on disk or who runs: each record of the
journal, the claim, each of the image's steps, each question of CRIU's script and its answer, each record about the job.
An undisturbed run lists them with who lives at each, so that a new step is disturbed without a change here.
What an order may say:

    kill: {"who": ["criu" | "script" | "worker" | "limosa", …], "point": n}    SIGKILL at the n-th point, in this order;
                                             [name, k] is the k-th point of that name (how many there are in all varies)
    cancel: n                                the caller's ``cancel`` is set at the n-th point
    hold: {"point": name, "until": path}     nothing goes on at the first point of that name until there is that file;
                                             "late": s in place of it: as if so many seconds had passed there
    fail: {"call": name, "n": n}             the n-th change of that kind to a disk fails with EIO (or ``errno``);
                                             with ``forever`` all after it too
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from limosa import operation
from limosa.errors import LimosaError
from limosa.image import Draft
from limosa.image.files import Files
from limosa.operation import claims, journal, rewind, work
from limosa.process import records, runtime
from limosa.process.criu import run as criu_run
from limosa.process.identity import read_stat

restore_module = importlib.import_module("limosa.operation.steps.returning")


class Disturber:
    """Notes points as they are passed, and disturbs at the one it was told."""

    def __init__(self, order: dict[str, Any], pipe: int):
        self.kill = order.get("kill")
        self.fail = order.get("fail")
        self.hold = order.get("hold")
        self.cancel_at = order.get("cancel")
        self.cancel = threading.Event()
        self.quiet = any(self.__dict__[name] is not None for name in ("kill", "fail", "hold", "cancel_at"))
        self.pipe = pipe
        self.count = 0
        self.names: Counter[str] = Counter()
        self.calls: dict[str, int] = {}
        self.run_ids: set[str] = set()
        self.work: Any = None
        self.criu: Any = None
        self.work_fd = -1

    def say(self, **what: Any) -> None:
        os.write(self.pipe, json.dumps(what).encode() + b"\n")

    # who lives ------------------------------------------------------------------------------------------------

    def worker(self) -> int | None:
        driver = self.work._driver if self.work is not None else None
        return driver.pid if driver is not None else None

    def criu_pid(self) -> int | None:
        child = self.criu._child if self.criu is not None else None
        if child is None or child.poll() is not None:
            return None
        return int(child.pid)

    def script(self) -> int | None:
        """The action script is CRIU's child that runs our shell script."""
        parent = self.criu_pid()
        if parent is None:
            return None
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                fields = Path(f"/proc/{int(name)}/stat").read_bytes().rpartition(b")")[2].split()
                ours = int(fields[1]) == parent and fields[0] != b"Z"
                if ours and b"action.sh" in Path(f"/proc/{name}/cmdline").read_bytes():
                    return int(name)
        return None

    def living(self) -> dict[str, int]:
        found = {"limosa": os.getpid(), "worker": self.worker(), "criu": self.criu_pid(), "script": self.script()}
        return {who: pid for who, pid in found.items() if pid}

    # points ---------------------------------------------------------------------------------------------------

    def at(self, name: str) -> None:
        number, self.count = self.count, self.count + 1
        self.names[name] += 1
        self._run_id()
        if self.hold is not None and self.hold["point"] == name:
            hold, self.hold = self.hold, None
            self.say(at=name)
            self.work.started -= hold.get("late", 0.0)
            while "until" in hold and not os.path.exists(hold["until"]):
                time.sleep(0.01)
        if number == self.cancel_at:
            self.say(at=name)
            self.cancel.set()
        if not self.quiet:
            self.say(point=name, living=sorted(self.living()))
        if self.kill is None or self.kill["point"] not in (number, [name, self.names[name]]):
            return
        living = self.living()
        who = [one for one in self.kill["who"] if one in living]
        self.say(killed=who, at=name)
        for one in who:
            os.kill(living[one], signal.SIGKILL)
            # Not for a worker: limosa would give its will to another before it is killed itself.
            if one not in ("worker", who[-1]):
                _wait_gone(living[one])

    def _run_id(self) -> None:
        if self.work_fd >= 0:
            with contextlib.suppress(OSError):
                fd = os.open("dump.log", os.O_RDONLY, dir_fd=self.work_fd)
                with open(fd, "rb") as file:
                    first = file.readline()
                if b"run id = " in first:
                    run_id = first.rpartition(b"= ")[2].strip().decode()
                    if run_id not in self.run_ids:
                        self.run_ids.add(run_id)
                        self.say(run_id=run_id)

    def around(self, owner: Any, name: str, label: Callable[..., str]) -> None:
        """Makes the moments before and after each call of a method points; one that is called "" is none."""
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            text = label(*args, **kwargs)
            if not text:
                return original(*args, **kwargs)
            self.at(f"before {text}")
            result = original(*args, **kwargs)
            self.at(f"after {text}")
            return result

        setattr(owner, name, wrapper)

    def install(self) -> None:
        originals = work.Work.begin, criu_run._Run.start, journal.Journal.create, Draft.create

        def begin(this: Any, *args: Any, **kwargs: Any) -> Any:
            self.work = this
            return originals[0](this, *args, **kwargs)

        def start(this: Any, on_start: Any, **kwargs: Any) -> None:
            self.criu, self.work_fd = this, this.work_fd

            def started(who: Any) -> None:
                self.at("before start of criu")
                on_start(who)
                self.at("after start of criu")

            originals[1](this, started, **kwargs)

        work.Work.begin = begin  # type: ignore[method-assign]
        criu_run._Run.start = start  # type: ignore[method-assign]
        self.around(work, "make", lambda *_, **__: "claim")
        self.around(claims.Claim, "save", lambda *_: "save of the claim")
        self.around(claims.Claim, "release", lambda *_: "release of the claim")
        journal.Journal.create = staticmethod(originals[2])  # type: ignore[assignment,method-assign]
        self.around(journal.Journal, "create", lambda *_: "journal")
        journal.Journal.create = staticmethod(journal.Journal.create)  # type: ignore[assignment,method-assign]
        self.around(journal.Journal, "note", lambda _, step, phase, *a, **k: f"note {step} {phase}")
        self.around(journal.Journal, "rewrite_header", lambda *_: "header")
        self.around(journal.Journal, "finish", lambda *_: "end of the journal")
        Draft.create = staticmethod(originals[3])  # type: ignore[assignment,method-assign]
        self.around(Draft, "create", lambda *_, **__: "draft")
        Draft.create = staticmethod(Draft.create)  # type: ignore[assignment,method-assign]
        for name in ("prepare", "publish", "discard", "secure_log"):
            self.around(Draft, name, lambda *_, _name=name, **__: f"{_name} of the draft")
        for kind in (records.EndedRecord, records.RunRecord, records.SuspendRecord):
            for name in ("save", "forget"):
                self.around(kind, name, lambda *_, _text=f"{name} of {kind.__name__}", **__: _text)
        self.around(criu_run._Run, "_act", lambda _, action, *a, **k: f"action {action}")
        self.around(criu_run._Run, "_reply", lambda _, verdict: f"answer {verdict}")
        self.around(rewind.Rewind, "do", lambda *_: "rewind")
        # Pages are compared beside CRIU: where among the other points that is differs from run to run.
        self.around(restore_module, "verify_image", lambda *_, part, **__: "" if part == "pages" else "verify")
        if self.fail is not None or not self.quiet:
            self._faults()

    # faults ---------------------------------------------------------------------------------------------------

    def _faults(self) -> None:
        """Counts every change to a disk that the host side makes; makes the chosen one fail."""
        for name in ("mkdir", "write", "fsync", "chmod", "rename", "unlink", "rmdir"):
            self._faulty(Files, name, f"image {name}")
        self._faulty(journal.Journal, "_write", "journal write")
        self._faulty(records, "write_atomic", "record write")
        self._faulty(runtime, "write_atomic", "record write")  # claims

    def _faulty(self, owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            number = self.calls[label] = self.calls.get(label, -1) + 1
            if self.fail is None:
                self.say(call=label)
            elif self.fail["call"] == label and (
                number == self.fail["n"] or (number > self.fail["n"] and self.fail.get("forever"))
            ):
                self.say(failed=label)
                code = self.fail.get("errno", errno.EIO)
                raise OSError(code, os.strerror(code))
            return original(*args, **kwargs)

        setattr(owner, name, wrapper)


def _wait_gone(pid: int) -> None:
    """Waits until a process has ended, with all its threads: until then it holds what it has open."""
    with contextlib.suppress(LimosaError):
        while not read_stat(pid).ended:
            pass


VERBS: dict[str, Callable[..., Any]] = {
    "checkpoint": lambda pid, output, **options: operation.checkpoint(int(pid), output, **options),
    "restore": operation.restore,
    "recover": operation.recover,
}


def child(order: dict[str, Any], pipe: int) -> None:
    disturber = Disturber(order, pipe)
    if order.get("points", True) and order["verb"] != "recover":
        disturber.install()
    answer: dict[str, Any] = {"rc": 0}
    try:
        options = order.get("options", {})
        if order.get("cancel") is not None:
            options["cancel"] = disturber.cancel
        result = VERBS[order["verb"]](*order["args"], **options)
        answer["result"] = operation_result(result)
    except LimosaError as error:
        answer = {"rc": error.exit_code, "id": error.id, "message": error.message, "image": error.fields.get("image")}
        answer |= {"hint": error.hint, "job_state": error.job_state}
        if error.exit_code in (1, 40):
            answer["trace"] = traceback.format_exc()
    except BaseException as error:
        answer = {"rc": 1, "id": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
    disturber.say(answer=answer)


def operation_result(result: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(result, enc_hook=str, str_keys=True)


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            try:
                child(order, theirs)
            finally:
                os._exit(0)
        os.close(theirs)
        told = b""
        while chunk := os.read(ours, 1 << 16):
            told += chunk
        os.close(ours)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = [json.loads(one) for one in told.splitlines()]
        found: dict[str, Any] = {
            "died": status == -signal.SIGKILL,
            "points": [[s["point"], s["living"]] for s in said if "point" in s],
            "calls": [s["call"] for s in said if "call" in s],
            "run_ids": [s["run_id"] for s in said if "run_id" in s],
            "killed": [one for s in said for one in s.get("killed", [])],
            "at": "".join(s["at"] for s in said if "at" in s),
            "failed": [s["failed"] for s in said if "failed" in s],
        }
        for s in said:
            found |= s.get("answer", {})
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
