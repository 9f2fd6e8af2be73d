"""A worker that waits for the next controller: who may have it, who not, when it ends."""

from __future__ import annotations

import contextlib
import os
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

from limosa.errors import DriverError, NoCudaState
from limosa.gpu import Driver, worker_idle
from limosa.gpu.worker_idle import end_all, next_controller, start_in
from limosa.gpu.worker_loop import serve
from limosa.gpu.worker_process import Apart, Launched
from limosa.ipc.frames import Frames, Reply, Request, Sender, frame


def eventually(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)
    return found


WORKER = """
import os, sys
from limosa.gpu import worker_idle, worker_main
worker_idle.ANSWER_SECONDS = 60.0
def state(pid):
    if pid == 13:
        raise MemoryError("this driver is not well")
    return "running"
calls = {"available": lambda: None, "state": state, "inventory": lambda: os.environ.get("TZ", "")}
worker_main.table = lambda: calls
worker_main.main(sys.argv[1:])
"""
"""A real worker with a driver of three calls."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A folder in which workers wait; those that do are ended afterwards."""

    def launch(waits_at: str = "") -> Launched:
        ours, theirs = socket.socketpair()
        me = os.pidfd_open(os.getpid())
        argv = [sys.executable, "-c", WORKER, str(theirs.fileno()), str(me), waits_at]
        process = subprocess.Popen(argv, pass_fds=(theirs.fileno(), me), start_new_session=True)
        theirs.close()
        os.close(me)
        if waits_at:
            threading.Thread(target=process.wait, daemon=True).start()
            return Launched(ours, Apart(), -1)
        return Launched(ours, process, -1)

    monkeypatch.setattr("limosa.gpu.worker_process.launch", launch)
    monkeypatch.setattr(worker_idle, "ANSWER_SECONDS", 60.0)  # a busy machine is no fault of the worker
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    yield tmp_path
    end_all(tmp_path)


def client(place: Path | None) -> Driver:
    return Driver(start=start_in(lambda: place))


def used(place: Path, ask: int = 7) -> int:
    """One command: returns the pid of the worker that it had."""
    with client(place) as driver:
        with contextlib.suppress(Exception):
            driver.state(ask)
        pid = driver.pid
    assert pid
    return pid


def test_the_next_command_has_the_worker_of_the_one_before(place: Path):
    first = used(place)

    def takes_over() -> None:
        assert used(place) == first

    assert quickest(takes_over, 0.1) < 0.1
    assert os.getsid(first) == first
    assert Path(f"/proc/{first}/stat").read_text().rsplit(")", 1)[1].split()[1] != str(os.getpid()), "nobody's child"


def test_two_at_once_have_two_and_one_waits_afterwards(place: Path):
    first = used(place)
    with client(place) as one, client(place) as two:
        assert (one.state(7), two.state(7)) == ("running", "running")
        assert one.pid == first != two.pid
        second = two.pid
    eventually(lambda: [Path(f"/proc/{pid}").exists() for pid in (first, second)].count(True) == 1)
    assert used(place) in (first, second)


def test_it_waits_no_longer_than_it_is_told(place: Path, monkeypatch):
    monkeypatch.setenv("LIMOSA_DRIVER_IDLE", "0.2")
    pid = used(place)
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert list(place.iterdir()) == []


def test_one_that_waits_ends_when_it_is_told_to(place: Path):
    for number in (signal.SIGTERM, signal.SIGHUP):
        pid = used(place)
        os.kill(pid, number)
        eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists())
        assert list(place.iterdir()) == []
    with client(place) as driver:  # not one that works
        assert driver.state(7) == "running"
        assert driver.pid
        os.kill(driver.pid, signal.SIGTERM)
        assert driver.state(7) == "running"


def test_a_controller_that_asks_nothing_of_the_driver_leaves_it_as_it_was(place: Path):
    first = used(place)
    with client(place) as driver:
        driver.set_will(["/bin/true"])
    assert used(place) == first


def test_another_umask_or_limit_wants_another_worker(place: Path):
    first = used(place)
    program = """
import os, resource, sys
from pathlib import Path
from limosa.gpu import Driver
from limosa.gpu.worker_idle import name
known = name()
os.umask(0o077)
other = name()
os.umask(0o022)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
print(len({known, other, name()}))
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=True, umask=0o022)
    assert said.stdout == b"3\n"
    assert used(place) == first


def test_one_that_waits_with_other_rights_is_ended_by_a_signal(place: Path, monkeypatch):
    pid = used(place)
    real = worker_idle.standing
    monkeypatch.setattr(worker_idle, "standing", lambda who="self": real(who) + str(who))
    assert end_all(place) == [pid]
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert list(place.iterdir()) == []


def test_what_one_that_was_killed_has_left_is_tidied(place: Path):
    os.kill(first := used(place), signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{first}").exists())
    assert len(list(place.iterdir())) == 2
    for name in ("a.lock", "a~"):  # of one that was killed before it had its name
        Path(place, name).touch()
    assert end_all(place) == []
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("said", "seconds"), [("", 120), ("off", 120), ("-1", 120), ("nan", 120), ("7", 7), ("inf", 1e6)]
)
def test_what_is_no_time_is_the_usual_one(said: str, seconds: float, monkeypatch):
    monkeypatch.setenv("LIMOSA_DRIVER_IDLE", said)
    assert worker_idle._idle_seconds() == seconds


def test_one_is_ended_by_name(place: Path):
    pid = used(place)
    assert end_all(place) == [pid]
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert list(place.iterdir()) == []


def test_one_that_was_killed_is_passed_over(place: Path):
    first = used(place)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{first}").exists())
    second = used(place)
    assert second != first
    assert used(place) == second


def test_one_whose_driver_has_failed_does_not_wait(place: Path):
    pid = used(place, ask=13)
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_one_that_was_never_asked_has_nothing_to_wait_with(place: Path):
    with client(place) as driver:
        driver.set_will(["/bin/true"])
        pid = driver.pid
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_where_there_is_no_place_it_ends(place: Path):
    with client(None) as driver:
        assert driver.state(7) == "running"
        pid = driver.pid
    assert not Path(f"/proc/{pid}").exists()


def test_it_takes_the_environment_of_each_controller(place: Path, monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    first = used(place)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    with client(place) as driver:
        worker = driver._current()
        assert worker.pid == first
        assert driver._value(worker, worker.submit("inventory", 0, []), 5, 5) == "Asia/Tokyo"


def test_another_library_path_wants_another_worker(place: Path, monkeypatch):
    first = used(place)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/lib")
    assert used(place) != first


def test_the_will_of_the_second_controller_runs(place: Path, tmp_path: Path):
    first = used(place)
    done = tmp_path / "done"
    program = f"""
import os, sys
from pathlib import Path
from limosa.gpu import Driver
from limosa.gpu.worker_idle import start_in
driver = Driver(start=start_in(lambda: Path({str(place)!r})))
driver.state(7)
for name in ("a", "b"):
    driver.set_will(["/bin/sh", "-c", "echo $$ > {done}-" + name], name=name)
print(driver.pid, flush=True)
os._exit(0)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=True)
    assert int(said.stdout) == first
    for name in ("a", "b"):
        eventually(Path(f"{done}-{name}").exists)
    eventually(lambda: Path(f"{done}-b").read_text().strip() == str(first))


def test_a_will_is_cleared_by_its_name():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for number, args in enumerate([[["/a"], "a"], [["/b"], "b"], [["/c"]], [None, "a"], [None]]):
            ours.sendall(frame(Request(number + 1, "set_will", args)))
        ours.shutdown(socket.SHUT_WR)
        assert serve(theirs, {}).wills == [["/b"]]


def no_cuda(pid: int) -> str:
    raise NoCudaState(call="x", pid=pid, result="X", code=3, meaning="none")


def broken(pid: int) -> str:
    raise DriverError(call="x", pid=pid, result="X", code=999, meaning="unknown")


@pytest.mark.parametrize(
    ("calls", "fit"),
    [
        (["available"], True),
        (["available", "no_cuda"], True),
        (["available", "broken"], False),
        (["available", "leave"], False),
        (["no_cuda"], False),
        ([], False),
    ],
)
def test_who_is_fit_to_wait(calls: list[str], fit: bool):
    table = {"available": lambda: None, "no_cuda": lambda: no_cuda(7), "broken": lambda: broken(7)}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for number, call in enumerate(calls):
            ours.sendall(frame(Request(number + 1, call, [])))
        ours.shutdown(socket.SHUT_WR)
        left = serve(theirs, table)
    assert (left.wills, left.initialised and not left.spoilt) == ([], fit)


# --- strangers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch) -> Iterator[tuple[str, list[Any]]]:
    """A worker's wait, in a thread of this process: where, and what came of it."""
    monkeypatch.setattr(worker_idle, "IDLE_SECONDS", 60.0)
    monkeypatch.setattr(worker_idle, "_dress", lambda _: None)
    monkeypatch.setattr(worker_idle, "ANSWER_SECONDS", 60.0)
    path = str(tmp_path / "x")
    last, other = socket.socketpair()
    came: list[Any] = []
    thread = threading.Thread(target=lambda: came.append(next_controller(path, last)), daemon=True)
    thread.start()
    eventually(lambda: Path(path).exists())
    yield path, came
    if (asked := worker_idle._asked(path, "end", [])[0]) is not None:
        asked.close()
    thread.join(60)
    other.close()
    for found in came:
        if found is not None:
            found[0].close()
            os.close(found[1])


def says(path: str, data: bytes, fds: list[int]) -> list[Any]:
    """What a stranger hears who says that."""
    with socket.socket(socket.AF_UNIX) as mine:
        mine.connect(path)
        with contextlib.suppress(OSError):
            socket.send_fds(mine, [data], fds)
            mine.settimeout(60)
            heard = b"".join(iter(lambda: mine.recv(100), b""))
            return Frames(replies=True).feed(heard)[1:]  # behind the number with which each is greeted
    return []


def test_who_says_nothing_or_nonsense_is_sent_away_and_the_next_is_served(waiting, monkeypatch):
    path, came = waiting
    monkeypatch.setattr(worker_idle, "ANSWER_SECONDS", 0.3)
    null = os.open("/dev/null", os.O_RDONLY)
    child = subprocess.Popen(["/bin/sleep", "30"])
    other = os.pidfd_open(child.pid)
    take = frame(Request(0, "take", [{}]))
    try:
        for data, fds in (
            (b"\xff" * 100, []),
            (take, []),
            (take, [null]),
            (take, [other]),  # another process than the one that speaks
            (take, [null, other]),
            (take[:5], [null]),
        ):
            assert says(path, data, fds) == []
        assert not came
        monkeypatch.setattr(worker_idle, "ANSWER_SECONDS", 60.0)
        connection, pid = worker_idle._asked(path, "end", [])
        assert connection is not None
        connection.close()
        assert pid == os.getpid()
        eventually(lambda: came)
        assert came == [None]
    finally:
        child.kill()
        child.wait()
        os.close(null)
        os.close(other)


def test_who_stands_elsewhere_does_not_get_it(waiting, monkeypatch):
    """Fewer rights, another cgroup, other namespaces: what it says of itself in /proc counts."""
    path, came = waiting
    real = worker_idle.standing
    monkeypatch.setattr(worker_idle, "standing", lambda pid="self": real() + ("less" if pid != "self" else ""))
    assert worker_idle._asked(path, "take", [{}])[0] is None
    assert not came
    monkeypatch.setattr(worker_idle, "standing", real)


def test_who_may_not_trace_the_worker_does_not_get_it(waiting, monkeypatch):
    """As one that is locked in by Landlock, of which /proc says nothing: the kernel does not let it read the word."""
    path, came = waiting
    real = worker_idle._word_at
    monkeypatch.setattr(worker_idle, "_word_at", lambda pid, fd: "a guess")
    assert worker_idle._asked(path, "take", [{}])[0] is None
    assert not came
    monkeypatch.setattr(worker_idle, "_word_at", real)


def test_a_worker_that_only_owes_a_state_ends_with_its_controller():
    """A stopped process answers when it goes on: until then each look at it would leave a worker."""
    never = threading.Event()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(Request(1, "available", [])) + frame(Request(2, "state", [])))
        ours.shutdown(socket.SHUT_WR)
        begun = time.monotonic()
        left = serve(theirs, {"available": lambda: None, "state": lambda: never.wait(30) and ""})
    never.set()
    assert left.spoilt
    assert time.monotonic() - begun < 3


def test_one_that_takes_it_is_alone_with_it(waiting):
    path, came = waiting
    answers = threading.Thread(
        target=lambda: (eventually(lambda: came), Sender(came[0][0]).send(Reply(0, os.getpid())))
    )
    answers.start()
    connection, _ = worker_idle._asked(path, "take", [{}])
    answers.join(60)
    assert connection is not None
    connection.close()
    assert not Path(path).exists()
    assert worker_idle._asked(path, "take", [{}])[0] is None


def test_what_is_no_socket_is_passed_over(place: Path):
    Path(place, worker_idle.name()).write_text("a file")
    first = used(place)
    eventually(lambda: Path(place, worker_idle.name()).is_socket())
    assert used(place) == first
