"""The worker: calls in parallel, given up on, taken over; the will; a controller or worker that is killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import quickest

from limosa import start
from limosa.errors import (
    DriverHung,
    DriverTooOld,
    GpuUnavailable,
    IllegalState,
    InvalidArgument,
    InvalidMap,
    LimosaError,
)
from limosa.gpu import Driver, LockResult, State
from limosa.gpu.binding import libcuda_found
from limosa.gpu.meanings import driver_error
from limosa.gpu.worker_loop import serve
from limosa.gpu.worker_process import Launched
from limosa.ipc.frames import Frames, Reply, Request, frame, pack_error, unpack_error

ME = os.getpid()


def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.005)
    return value


def ended(pid: int) -> bool:
    """Whether a process has ended (a zombie that its init has not reaped yet included)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


# --- the protocol, in one process: a thread runs the worker's loop with calls of the test's own -----------------------


class Threads:
    """Starts "workers" that are threads, and remembers what became of them."""

    def __init__(self, table: dict[str, Callable[..., Any]]):
        self.table = {"available": lambda: None, **table}
        self.wills: dict[int, list[list[str]]] = {}
        self.started = 0

    def __call__(self) -> Launched:
        ours, theirs = socket.socketpair()
        self.started += 1
        worker = _Thread(self, theirs, self.started)
        worker.start()
        return Launched(ours, worker, -1)


class _Thread(threading.Thread):
    def __init__(self, owner: Threads, connection: socket.socket, pid: int):
        super().__init__(daemon=True)
        self.owner, self.connection, self.pid = owner, connection, pid

    def run(self) -> None:
        with self.connection:
            self.owner.wills[self.pid] = serve(self.connection, self.owner.table).wills

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return 0


def test_values_and_typed_errors_come_back_as_they_were():
    def lock(pid: int, timeout_ms: int) -> LockResult:
        return LockResult.TIMED_OUT if timeout_ms else LockResult.LOCKED

    def checkpoint(pid: int) -> None:
        raise driver_error("cuCheckpointProcessCheckpoint", pid, 401, hint="lock it first")

    def unlock(pid: int) -> None:
        raise ZeroDivisionError("oops")

    table = {"state": lambda pid: State.from_code(7), "lock": lock, "checkpoint": checkpoint, "unlock": unlock}
    with Driver(start=Threads(table)) as driver:
        assert driver.state(ME) == State("7")
        assert driver.lock(ME, 0) is LockResult.LOCKED
        assert driver.lock(ME, 5) is LockResult.TIMED_OUT
        with pytest.raises(IllegalState) as caught:
            driver.checkpoint(ME)
        assert (caught.value.fields["pid"], caught.value.fields["code"], caught.value.hint) == (
            ME,
            401,
            "lock it first",
        )
        assert caught.value.result == "CUDA_ERROR_ILLEGAL_STATE"
        with pytest.raises(LimosaError, match="ZeroDivisionError: oops") as internal:
            driver.unlock(ME)
        assert internal.value.exit_code == 1
        with pytest.raises(LimosaError, match="no call 'restore'"):
            driver.restore(ME)


def test_a_bad_map_is_refused_before_the_worker_is_asked():
    start = Threads({})
    with Driver(start=start) as driver, pytest.raises(InvalidMap):
        driver.restore(ME, {"0": "1"})
    assert start.started == 0


def test_calls_on_different_processes_go_in_parallel():
    both = threading.Barrier(2, timeout=60)
    with Driver(start=Threads({"checkpoint": lambda pid: both.wait() and None})) as driver:
        threads = [threading.Thread(target=driver.checkpoint, args=(pid, 60.0)) for pid in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not both.broken
        assert not any(thread.is_alive() for thread in threads)


def test_states_of_several_processes_are_asked_at_once():
    three = threading.Barrier(3, timeout=60)

    def state(pid: int) -> State:
        three.wait()
        if pid == 2:
            raise driver_error("cuCheckpointProcessGetState", pid, 3)
        return State.RUNNING

    with Driver(start=Threads({"state": state})) as driver:
        found = driver.states([1, 2, 3])
    assert (found[1], found[3]) == (State.RUNNING, State.RUNNING)
    assert isinstance(found[2], LimosaError)
    assert found[2].id == "no-cuda-state"


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    """A call waits for this; set at the end so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()


def test_a_hung_call_is_given_up_on_and_others_go_to_another_worker(hung: threading.Event):
    start = Threads({"checkpoint": lambda pid: hung.wait(90) and None, "unlock": lambda pid: None})
    with Driver(start=start) as driver:
        with pytest.raises(DriverHung, match=r"checkpoint on process 7 has not returned after 0\.05 s") as caught:
            driver.checkpoint(7, limit=0.05)
        assert caught.value.job_state == "unknown"
        assert driver.under_way(7) == "checkpoint"
        assert driver.under_way(8) is None
        driver.unlock(8)
        assert start.started == 2
        assert not driver.wait_under_way(7, timeout=0.05)
        assert start.wills == {}, "the first worker ended in the middle of its call"
        hung.set()
        assert driver.wait_under_way(7, timeout=60)
        eventually(lambda: 1 in start.wills)


def test_a_call_beside_a_hung_one_still_gets_its_answer_from_the_old_worker(hung: threading.Event):
    slow_answered = threading.Event()

    def restore(pid: int, mapping: Any) -> None:
        if pid == 1:
            hung.wait(90)
        else:
            slow_answered.wait(90)

    with Driver(start=Threads({"restore": restore})) as driver:
        slow = threading.Thread(target=driver.restore, args=(2, None, 60.0))
        slow.start()
        eventually(lambda: driver.under_way(2))
        with pytest.raises(DriverHung):
            driver.restore(1, None, limit=0.05)
        slow_answered.set()
        slow.join(60)
        assert not slow.is_alive()
        assert driver.under_way(2) is None


def test_a_state_that_waits_behind_a_restore_costs_no_worker(hung: threading.Event):
    table = {"restore": lambda pid, m: hung.wait(90) and None, "state": lambda pid: hung.wait(90) and "locked"}
    start = Threads(table)
    with Driver(start=start) as driver:
        restore = threading.Thread(target=driver.restore, args=(5, None, 60.0))
        restore.start()
        eventually(lambda: driver.under_way(5))
        for _ in range(3):
            with pytest.raises(DriverHung):
                driver.state(5, timeout=0.02)
        assert start.started == 1
        hung.set()
        restore.join(60)
        assert driver.state(5) == State.LOCKED


def test_a_missing_driver_is_found_once_and_kept():
    asked = itertools.count()

    def available() -> None:
        next(asked)
        raise DriverTooOld(detail="none here", hint="install one")

    with Driver(start=Threads({"available": available})) as driver:
        for call in (driver.available, lambda: driver.state(ME), lambda: driver.checkpoint(ME)):
            with pytest.raises(DriverTooOld, match="none here") as caught:
                call()
            assert caught.value.hint == "install one"
    assert next(asked) == 1


def test_the_will_of_a_given_up_worker_goes_to_the_next(hung: threading.Event):
    start = Threads({"checkpoint": lambda pid: hung.wait(90) and None})
    driver = Driver(start=start)
    driver.set_will(["/bin/true", "x"])
    with pytest.raises(DriverHung):
        driver.checkpoint(7, limit=0.05)
    assert start.started == 2
    hung.set()
    assert eventually(lambda: 1 in start.wills) is True
    assert start.wills[1] == []
    assert driver._worker is not None
    driver._worker.hang_up()  # as if this process had ended
    eventually(lambda: 2 in start.wills)
    assert start.wills[2] == [["/bin/true", "x"]]
    driver.close()


def test_a_will_that_was_cleared_or_a_client_that_was_closed_leaves_none():
    for clear in (lambda driver: driver.set_will(None), lambda driver: None):
        start = Threads({})
        driver = Driver(start=start)
        driver.set_will(["/bin/false"])
        clear(driver)
        driver.close()
        eventually(lambda s=start: 1 in s.wills)
        assert start.wills == {1: []}


def test_a_client_that_was_closed_starts_no_worker_again():
    start = Threads({"state": lambda pid: "running"})
    driver = Driver(start=start)
    assert driver.state(7) == "running"
    driver.close()
    for call in (
        lambda: driver.state(7), lambda: driver.states([7]), driver.available, driver.start, driver.warm,
        driver.inventory, driver.facts, lambda: driver.set_will(["/bin/true"]),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="has been closed: make another one"):
            call()
    driver.set_will(None)  # what a closing operation says last
    driver.close()
    assert start.started == 1
    assert driver.pid is None


def test_calls_under_way_finish_before_the_loop_ends():
    ours, theirs = socket.socketpair()
    go, log = threading.Event(), []

    def restore(pid: int) -> None:
        go.wait(60)
        log.append("restored")

    loop = threading.Thread(target=lambda: log.append(serve(theirs, {"restore": restore}).wills))
    loop.start()
    with ours, theirs:
        ours.sendall(frame(Request(1, "set_will", [["/bin/true"]])) + frame(Request(2, "restore", [7])))
        ours.shutdown(socket.SHUT_WR)
        loop.join(0.1)
        assert loop.is_alive()
        go.set()
        loop.join(60)
    assert log == ["restored", [["/bin/true"]]]


def test_the_last_word_of_a_controller_that_is_gone_already_counts():
    """What it had sent, and that it has ended, are seen at once."""
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    controller = os.pidfd_open(gone)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        select.select([controller], [], [], 10)
        ours.sendall(frame(Request(1, "set_will", [["/bin/false"]])) + frame(Request(2, "set_will", [["/bin/true"]])))
        assert serve(theirs, {}, controller).wills == [["/bin/true"]]
        ours.sendall(frame(Request(1, "set_will", [["/bin/false"]])) + frame(Request(2, "set_will", [None])))
        assert serve(theirs, {}, controller).wills == []
    os.close(controller)
    os.waitpid(gone, 0)


def test_frames_are_put_together_from_single_bytes():
    messages = [Reply(1, {"a": [1, 2]}), Reply(2, None, pack_error(GpuUnavailable(detail="x"))), Reply(3, "z" * 5000)]
    data = b"".join(frame(message) for message in messages)
    frames = Frames(replies=True)
    assert [m for i in range(len(data)) for m in frames.feed(data[i : i + 1])] == messages
    assert Frames(replies=True).feed(data) == messages
    with pytest.raises(ValueError, match="frame of"):
        Frames(replies=True).feed(b"\xff\xff\xff\xff")


def test_an_error_of_an_unknown_kind_is_an_internal_error():
    record = pack_error(KeyError("x"))
    record.kind = "os"
    assert type(unpack_error(record)) is LimosaError


# --- real worker processes -------------------------------------------------------------------------------------------


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.close()


def test_the_worker_is_detached_and_sees_every_gpu(driver: Driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    driver.set_will(["/bin/true"])
    pid = driver.pid
    assert pid
    assert os.getsid(pid) == pid
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1)} == {"/dev/null"}
    assert b"CUDA_" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert Path(f"/proc/{pid}/comm").read_text() == "limosa-worker\n"
    inherited = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if int(fd) > 2}
    assert all(target.startswith(("socket:", "anon_inode:")) for target in inherited), inherited


def test_the_worker_is_up_within_half_a_second():
    """Of a processor's time, however many others want it; nor does it sleep meanwhile."""
    drivers = [Driver() for _ in range(5)]
    left = iter(drivers)
    try:
        assert quickest(lambda: next(left).set_will(["/bin/true"]), 3, len(drivers)) < 3
        fields = Path(f"/proc/{drivers[0].pid}/stat").read_text().rpartition(")")[2].split()
        assert sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") < 0.5
    finally:
        for driver in drivers:
            driver.close()


def test_signals_of_a_terminal_do_not_end_the_worker(driver: Driver):
    driver.set_will(["/bin/true"])
    pid = driver.pid
    assert pid
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGTSTP):
        os.kill(pid, number)
    driver.set_will(None, limit=60)
    assert driver.pid == pid


def test_a_killed_worker_fails_the_call_under_way_and_the_next_call_has_another(driver: Driver):
    driver.set_will(["/bin/true"])
    pid = driver.pid
    assert pid
    os.kill(pid, signal.SIGSTOP)
    worker = driver._worker
    assert worker is not None
    slot = worker.submit("ping", 0, [])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DriverHung, match=f"worker process {pid} ended during ping"):
        driver._value(worker, slot, 60.0, 60.0)
    driver.set_will(["/bin/true"])
    assert driver.pid not in (None, pid)
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_a_worker_that_cannot_start_says_why(driver: Driver, monkeypatch):
    monkeypatch.setattr(start, "python", lambda *_: [sys.executable, "-I", "-c", "import not_there"])
    with pytest.raises(DriverHung, match="No module named"):
        driver.set_will(["/bin/true"], limit=60)


def test_close_ends_the_worker(driver: Driver):
    driver.set_will(["/bin/true"])
    pid = driver.pid
    assert pid
    driver.close(wait=60)
    assert not Path(f"/proc/{pid}").exists()
    assert driver.pid is None


def test_a_fork_has_a_worker_of_its_own(driver: Driver):
    driver.set_will(["/bin/true"])
    pid = driver.pid
    child = os.fork()
    if child == 0:
        code = 1
        try:
            driver.set_will(["/bin/true"])
            code = 0 if driver.pid not in (None, pid) else 2
            driver.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert driver.pid == pid
    driver.set_will(None, limit=60)


@pytest.mark.skipif(libcuda_found(), reason="there is a driver here: tests/gpu asks it")
def test_without_a_driver_calls_are_typed_and_the_worker_stays(driver: Driver):
    with pytest.raises(DriverTooOld, match="no NVIDIA driver"):
        driver.state(ME)
    with pytest.raises(DriverTooOld, match="libnvidia-ml"):
        driver.inventory()
    assert not driver.facts().available
    pid = driver.pid
    driver.set_will(["/bin/true"])
    assert driver.pid == pid


CONTROLLER = """
import os, sys, time
from limosa.gpu import Driver
driver = Driver()
driver.set_will([sys.executable, "-c", sys.argv[1], sys.argv[2]])
if "clear" in sys.argv:
    driver.set_will(None)
if "fork" in sys.argv and os.fork() == 0:
    os.write(1, f"child {os.getpid()}\\n".encode())
    time.sleep(30)
    os._exit(0)
os.write(1, f"worker {driver.pid}\\n".encode())
if "stay" in sys.argv:
    time.sleep(30)
"""
WILL = """
import os, signal, sys, time
fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
ignored = int([l for l in open("/proc/self/status") if l.startswith("SigIgn")][0].split()[1], 16)
facts = [os.getpid(), os.getsid(0), os.getcwd(), fds[:3], len(fds), bool(ignored >> (signal.SIGTERM - 1) & 1)]
open(sys.argv[1] + ".part", "w").write(repr(facts))
os.rename(sys.argv[1] + ".part", sys.argv[1])
"""


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", CONTROLLER, WILL, str(tmp_path / "done"), *words]
        made.append(subprocess.Popen(argv, stdout=subprocess.PIPE, bufsize=0))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()
        assert process.stdout
        process.stdout.close()


def said(process: subprocess.Popen[bytes], *words: str) -> list[int]:
    """The numbers that a controller and its child say after these words, in whatever order."""
    assert process.stdout
    heard: dict[str, int] = {}
    while not set(words) <= set(heard):
        ready, _, _ = select.select([process.stdout], [], [], 20)
        assert ready, f"the controller says no more than {heard}"
        word, number = process.stdout.readline().decode().split()
        heard[word] = int(number)
    return [heard[word] for word in words]


@pytest.mark.parametrize("way", ["killed", "ended"])
def test_the_will_runs_when_the_controller_is_gone(controller, tmp_path: Path, way: str):
    process = controller("stay") if way == "killed" else controller()
    (worker,) = said(process, "worker")
    if way == "killed":
        process.kill()
    process.wait(60)
    eventually((tmp_path / "done").exists)
    pid, sid, cwd, first, count, ignored = eval((tmp_path / "done").read_text())
    assert (pid, sid, cwd) == (worker, worker, "/")
    assert first == [0, 1, 2]
    assert count == 4  # and the one that lists them
    assert not ignored
    eventually(lambda: ended(worker))


def test_the_will_runs_also_where_a_child_of_the_controller_lives_on(controller, tmp_path: Path):
    process = controller("stay", "fork")
    child, worker = said(process, "child", "worker")
    try:
        process.kill()
        process.wait(60)
        eventually((tmp_path / "done").exists)
    finally:
        os.kill(child, signal.SIGKILL)
    assert eval((tmp_path / "done").read_text())[0] == worker


def test_a_cleared_will_does_not_run(controller, tmp_path: Path):
    process = controller("clear")
    (worker,) = said(process, "worker")
    process.wait(60)
    eventually(lambda: ended(worker))
    assert not (tmp_path / "done").exists()


def test_a_killed_worker_is_replaced_at_once_where_a_will_depends_on_it(controller, tmp_path: Path):
    process = controller("stay")
    (worker,) = said(process, "worker")
    os.kill(worker, signal.SIGKILL)
    heir = eventually(lambda: [pid for pid in children(process.pid) if pid != worker and not ended(pid)])[0]
    eventually(lambda: Path(f"/proc/{heir}/comm").read_text() == "limosa-worker\n")
    process.kill()
    process.wait(60)
    eventually((tmp_path / "done").exists)
    assert eval((tmp_path / "done").read_text())[0] == heir


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            found += [int(child) for child in (task / "children").read_text().split()]
    return found
