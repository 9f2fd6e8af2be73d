"""The near end of server.py: a process that makes driver calls, asked from the tests.

A call ends in one of four ways, all of them answers: a result ("SUCCESS", "INVALID_VALUE", …), "BLOCKED" (it has not
come back within its limit; it may do so later), "DIED -11" (the process ended instead), "ERROR …" (the bindings
raised).
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = Path(__file__).parent / "server.py"
LIMIT = 60.0  # seconds that a call may take where no blocking is expected; eight at a time make a real driver slow
Record = Callable[[dict[str, Any]], None]


def result_name(code: int) -> str:
    """ "INVALID_VALUE" of 1: the CUresult's name without what all of them begin with."""
    from cuda.bindings.driver import CUresult

    try:
        return CUresult(code).name.removeprefix("CUDA_").removeprefix("ERROR_")
    except ValueError:
        return f"CUresult {code}"


@dataclass
class Answer:
    """How a call ended.

    Attributes:
        result: see the module.
        value: what it returned beside its result.
        seconds: how long it took, as its process measured it; the limit where it is blocked.
    """

    result: str
    value: Any = None
    seconds: float = 0.0


class Pending:
    """A call that was sent and may not have come back."""

    def __init__(self, remote: Remote, future: Future[dict[str, Any]], described: dict[str, Any]):
        self.remote, self.future, self.described = remote, future, described
        self.sent = time.monotonic()

    def answer(self, limit: float = LIMIT) -> Answer:
        """How it ended, or "BLOCKED" where it has not after so many seconds."""
        try:
            raw = self.future.result(limit)
        except TooLate:
            answer = Answer("BLOCKED", None, time.monotonic() - self.sent)
        else:
            if "died" in raw:
                answer = Answer(f"DIED {raw['died']}")
            elif "error" in raw:
                answer = Answer(f"ERROR {raw['error']}", None, raw["seconds"])
            elif isinstance(raw["result"], dict):
                answer = Answer(f"NVML {raw['result']['nvml']}", None, raw["seconds"])
            else:
                answer = Answer(result_name(raw["result"]), raw["value"], raw["seconds"])
        self.remote.record({**self.described, "result": answer.result, "value": answer.value, "s": answer.seconds})
        return answer

    def result(self, limit: float = LIMIT) -> str:
        return self.answer(limit).result

    def done(self) -> bool:
        return self.future.done()


class Remote:
    """A process that runs server.py.

    Args:
        prefix: what to put before the program, to have it run on the node.
        env: variables to set (None: to unset).
        name: what it is called in the recording.
        record: where each answer is written.
    """

    def __init__(self, prefix: Sequence[str], env: dict[str, str | None], name: str, record: Record):
        self.name, self.record = name, record
        shim = {"LD_PRELOAD": os.environ["LIMOSA_CONFORMANCE_SHIM"]} if "LIMOSA_CONFORMANCE_SHIM" in os.environ else {}
        full = {k: v for k, v in {**os.environ, **shim, **env}.items() if v is not None}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=full,
            start_new_session=True,
        )
        self._waiting: dict[int, Future[dict[str, Any]]] = {0: Future()}
        self._threads: dict[str, list[Future[dict[str, Any]]]] = {}
        self._guard = threading.Lock()
        self._count = 0
        hello = self._waiting[0]
        threading.Thread(target=self._read, daemon=True).start()
        told = hello.result(LIMIT)
        if "died" in told:
            raise RuntimeError(f"a server ended at once: {told}")
        self.pid: int = told["value"]["pid"]
        self.scratch: int = told["value"]["scratch"]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            raw = json.loads(line)
            with self._guard:
                future = self._waiting.pop(raw["id"])
            future.set_result(raw)
        code = self._ended(0)
        with self._guard:
            left, self._waiting = list(self._waiting.values()), {}
        for future in left:
            future.set_result({"died": code})

    def _ended(self, flags: int) -> int | None:
        """Its exit code (negative: a signal), None while it lives. It is not reaped: a zombie is a state, too."""
        try:
            info = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | flags)
        except ChildProcessError:
            return self._process.returncode or 0
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    # --- asking ---

    def send(self, op: str, args: Sequence[Any], thread: str = "main") -> Pending:
        """Send a request and return at once."""
        future: Future[dict[str, Any]] = Future()
        with self._guard:
            self._count += 1
            number = self._count
            self._waiting[number] = future
            self._threads.setdefault(thread, []).append(future)
        request = {"id": number, "thread": thread, "op": op, "args": list(args)}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            if not future.done():
                with self._guard:
                    self._waiting.pop(number, None)
                future.set_result({"died": self._ended(0)})
        return Pending(self, future, {"who": self.name, "pid": self.pid, "op": op, "args": list(args)})

    def start(self, name: str, *args: Any, thread: str = "main") -> Pending:
        """Start a driver call."""
        return self.send("call", [name, args], thread)

    def ask(self, name: str, *args: Any, thread: str = "main", limit: float = LIMIT) -> Answer:
        """Make a driver call and wait for its end."""
        return self.start(name, *args, thread=thread).answer(limit)

    def says(self, name: str, *args: Any, thread: str = "main", limit: float = LIMIT) -> str:
        """The result of a driver call."""
        return self.ask(name, *args, thread=thread, limit=limit).result

    def do(self, name: str, *args: Any, thread: str = "main", limit: float = LIMIT) -> Any:
        """The value of a driver call that must succeed."""
        answer = self.ask(name, *args, thread=thread, limit=limit)
        assert answer.result == "SUCCESS", f"{name}{args} of {self.name}: {answer}"
        return answer.value

    def raw(self, name: str, *args: int | None, limit: float = LIMIT) -> str:
        """The result of a driver call past the bindings, with numbers and null pointers as they are."""
        return self.send("raw", [name, args]).result(limit)

    def run(self, op: str, *args: Any, thread: str = "main", limit: float = LIMIT) -> Any:
        """The value of an operation of the server's own."""
        answer = self.send(op, args, thread).answer(limit)
        assert answer.result == "SUCCESS", f"{op}{args} of {self.name}: {answer}"
        return answer.value

    def nvml(self, name: str, *args: Any) -> Answer:
        """A call of NVML; ``{"gpu": 0}`` is a handle."""
        return self.send("nvml", [name, args], "nvml").answer()

    # --- memory ---

    def peek(self, address: int, size: int) -> bytes:
        """Host memory of the process."""
        return bytes.fromhex(self.run("peek", address, size, thread="memory"))

    def poke(self, address: int, data: bytes) -> None:
        self.run("poke", address, data.hex(), thread="memory")

    def read(self, device: int, size: int) -> bytes:
        """Device memory, by a synchronous copy to the scratch memory."""
        self.do("cuMemcpyDtoH", self.scratch, device, size)
        return self.peek(self.scratch, size)

    def write(self, device: int, data: bytes) -> None:
        self.poke(self.scratch, data)
        self.do("cuMemcpyHtoD", device, self.scratch, len(data))

    def words(self, device: int, count: int = 1) -> tuple[int, ...]:
        """64-bit words of device memory."""
        return struct.unpack(f"<{count}Q", self.read(device, 8 * count))

    # --- the process ---

    def alive(self) -> bool:
        return self._ended(os.WNOHANG) is None

    def idle(self) -> bool:
        """Whether nothing that it was asked is still under way."""
        with self._guard:
            return not self._waiting

    def threads(self) -> set[int]:
        return {int(name) for name in os.listdir(f"/proc/{self.pid}/task")}

    def stopped(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def stop(self) -> None:
        """SIGSTOP, seen to have arrived."""
        os.kill(self.pid, signal.SIGSTOP)
        end = time.monotonic() + 60
        while not self.stopped() and time.monotonic() < end:
            time.sleep(0.005)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self, limit: float = 5) -> None:
        """End it for sure; one that the kernel does not let go is left behind."""
        try:
            self._process.kill()
            self._process.wait(limit)
        except (OSError, subprocess.TimeoutExpired):
            pass
