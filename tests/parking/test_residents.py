"""What vault and mover hold is found again however much it is, and whatever one of them says."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import open_the_way_to

from limosa.errors import FailedUndone, LimosaError
from limosa.ipc import messages as packets
from limosa.ipc import packet
from limosa.ipc.packet import Given, close_all
from limosa.ipc.sessions import serve
from limosa.operation import idle
from limosa.operation.journal import Member
from limosa.operation.parked import holders
from limosa.parking import mover_main, mover_memory, resident, vault_main
from limosa.parking.mover import Mover
from limosa.parking.mover_protocol import Copy
from limosa.parking.mover_session import Session, Shared
from limosa.parking.residents import Residents
from limosa.parking.segments import Pool, make
from limosa.parking.vault import Vault
from limosa.parking.vault_protocol import Asked, Get, Put
from limosa.process import openat
from limosa.process.identity import Handle, Identity
from limosa.process.limits import many_descriptors
from limosa.process.openat import open_in
from limosa.process.places import own_place

ME = Identity.of(os.getpid())
KEY = f"move-1-a/source/{ME.to_str()}"


@pytest.fixture
def place(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder; the vault that was started in it is ended."""
    monkeypatch.setattr(resident, "ANSWER_SECONDS", 60.0)  # a busy machine is no fault of the vault
    yield runtime
    for found in vaults():
        with Handle(found) as handle:
            handle.signal(9)
            handle.wait(60)


def vaults() -> list[Identity]:
    found = None
    with contextlib.suppress(LimosaError):
        found = resident.look_for("vault", os.geteuid())
    if found is None or found.identity == ME:
        return []
    found.connection.close()
    return [found.identity]


@pytest.fixture
def many() -> Iterator[list[int]]:
    """Ten thousand descriptors, as of 200 GB in pieces of 20 MiB."""
    with many_descriptors():
        found = [make(0) for _ in range(10_000)]
        yield found
        for fd in found:
            os.close(fd)


def note(n: int) -> bytes:
    return msgspec.json.encode(
        [holders.Held(i, 20 << 20, "GPU-00000000-0000-0000-0000-000000000000") for i in range(n)]
    )


def open_here() -> int:
    return len(os.listdir("/proc/self/fd"))


def closed(answer: object) -> None:
    """Closes the descriptors that came with an answer, where some did."""
    found = answer[0] if isinstance(answer, tuple) else answer
    close_all(found if isinstance(found, list) else [])


def assert_closed(before: int) -> None:
    """Descriptors that came are closed, once whoever sent them has seen that nobody is there."""
    end = time.monotonic() + 60
    while open_here() > before:
        assert time.monotonic() < end, f"{open_here() - before} more than before"
        time.sleep(0.01)


def inodes(fds: list[int]) -> list[int]:
    return [os.fstat(fd).st_ino for fd in fds]


def test_ten_thousand_pieces_are_held_in_order(place: Path, many: list[int]) -> None:
    """A note of so many went whole into every packet, and no packet is so large."""
    residents, wanted, open_before = Residents(), inodes(many), open_here()
    residents.vault(os.geteuid())
    begun = time.monotonic()
    residents.put(os.geteuid(), KEY, many, note(len(many)), mover=False)
    held = time.monotonic()
    close_all(many)  # as many again may not be open everywhere
    many.clear()
    closed_at = time.monotonic()
    found, said = residents.get(os.geteuid(), KEY)
    seconds = time.monotonic() - closed_at + held - begun
    try:
        assert inodes(found) == wanted
        assert said == note(len(wanted))
        assert seconds < 30, "some hundredths of a second, where nobody else has the machine"
    finally:
        close_all(found)
    residents.close()
    assert open_here() == open_before - len(wanted)


def test_too_few_descriptors_are_no_lost_memory(place: Path, many: list[int]) -> None:
    """``recover`` said of a healthy job that nothing can bring it back: as many as may be open are not enough."""
    residents, uid = Residents(), os.geteuid()
    residents.put(uid, KEY, many[:2000], note(2000), mover=False)
    residents.close()
    limit, before = resource.getrlimit(resource.RLIMIT_NOFILE), open_here()
    member = Member(identity=ME)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 1000, limit[1]))
    try:
        with pytest.raises(FailedUndone) as error:
            holders.get(member, uid, KEY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert "Too many open files" in str(error.value)
    assert open_here() == before
    fds, pieces = holders.get(member, uid, KEY)
    close_all(fds)
    assert len(pieces) == 2000


def test_memory_that_both_say_they_have_not_is_lost(place: Path) -> None:
    with pytest.raises(holders.LostMemory):
        holders.get(Member(identity=ME), os.geteuid(), KEY)


def test_the_limit_is_the_callers_again() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        with many_descriptors():
            with many_descriptors():
                pass
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# -- what may be said ------------------------------------------------------------------------------------------------


class Says:
    """Somebody at a resident's name who says what he likes, to each verb."""

    def __init__(self, kind: str, said: Callable[[dict[str, Any]], object], fds: int = 0):
        path = resident.socket_path(kind, os.geteuid())
        self.asked: list[Any] = []
        self._said, self._fds = said, fds
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(str(path))
        self._listening.listen(8)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        given = [os.open("/dev/null", os.O_RDONLY) for _ in range(self._fds)]
        with contextlib.suppress(OSError, EOFError, ValueError), connection:
            while True:
                message = packets.receive(connection)
                message.given.close()
                if message.more:
                    continue
                asked = msgspec.msgpack.decode(message.data)
                self.asked.append(asked["verb"])
                answer = {"version": packets.VERSION} if asked["verb"] == "ping" else self._said(asked)
                if isinstance(answer, bytes):
                    connection.send(answer)
                else:
                    packets.send(connection, answer, given)  # type: ignore[arg-type]
        close_all(given)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


ODD: list[Any] = [
    {},
    {"keys": 7, "n": "x", "note": 5, "there": "no", "bytes": -1, "seconds": float("nan"), "inodes": {}, "by": []},
    {"keys": {1: 2}, "n": None, "there": None},
    {"keys": {"a": -1}, "used": "x"},
    {"error": 7, "used": "much"},
    {"error": ["x"]},
    b"\xc1",
    b"\x91" * 100_000,
    b"\x93\x01\x02\x03",
    msgspec.msgpack.encode({"a part of a message": b"\xc1"}),
    msgspec.msgpack.encode("text"),
]


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_whatever_a_vault_says_is_an_error_in_words(place: Path, odd: Any) -> None:
    one = Says("vault", lambda asked: odd, fds=3)
    asked: list[Callable[[Vault], object]] = [
        lambda vault: vault.put(KEY, [0]),
        lambda vault: vault.get(KEY),
        lambda vault: vault.drop(KEY),
        lambda vault: vault.segments(KEY, 1, 1 << 30),
        lambda vault: vault.reserve(0, 1.0, 1 << 30),
        lambda vault: vault.arena(),
        lambda vault: vault.held(),
    ]
    before = open_here()
    try:
        for ask in asked:
            with contextlib.suppress(LimosaError, KeyError), Vault(limit=0.5) as vault:
                closed(ask(vault))
        holders.forget("move-1-a")
        with contextlib.suppress(LimosaError):
            holders.forget_arenas([Member(identity=ME)])
    finally:
        one.close()
    assert_closed(before)


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_whatever_a_mover_says_is_an_error_in_words(place: Path, odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("limosa.parking.mover.CALL_SECONDS", 0.5)
    one = Says("mover", lambda asked: odd, fds=3)
    asked: list[Callable[[Mover], object]] = [
        lambda mover: mover.put(KEY, [0]),
        lambda mover: mover.get(KEY),
        lambda mover: mover.unput(KEY),
        lambda mover: mover.held(),
        lambda mover: mover.pinned(),
        lambda mover: mover.make(KEY, [1], "GPU-1"),
        lambda mover: mover.hold(KEY, [0], 0, "GPU-1", pin=False),
    ]
    before = open_here()
    try:
        for ask in asked:
            with contextlib.suppress(LimosaError, KeyError), Mover() as mover:
                closed(ask(mover))
        idle.end_idle(["GPU-1"])
        holders.forget("move-1-a")
    finally:
        one.close()
    assert_closed(before)


def test_what_was_not_copied_is_missed(place: Path) -> None:
    """A key that the mover does not know was copied in no time."""
    answers = {"copy": {"bytes": 0, "seconds": 0.0}, "host": {"bytes": 5, "seconds": 0.0}}
    one = Says("mover", lambda asked: answers.get(asked["verb"], {}))
    try:
        with Mover() as mover:
            mover.take("a", [0], [7], "GPU-1")
            with pytest.raises(FailedUndone, match="0 of 7 bytes"):
                mover.copy([("a", "b", "GPU-1")], 5)
            with pytest.raises(FailedUndone, match="5 of 7 bytes"):
                mover.host("out", [("a", "b", 0, "GPU-1")], 5)
    finally:
        one.close()


def test_an_unknown_key_is_not_copied() -> None:
    session = Session(Shared(), mover_main.all_verbs())
    with pytest.raises(FailedUndone, match="nothing was made or taken as a"):
        mover_memory.copy(session, Copy(copies=[("a", "b", "GPU-1")]), [])


def test_the_vault_goes_on_after_what_it_cannot_do(place: Path) -> None:
    """One message that nobody expected ended it, with all that it held."""
    with Vault() as vault, Vault() as other:
        pid = vault.identity
        vault.put(KEY, [0], b"note")
        for message in (
            {"verb": "segments", "key": "aside/1@1", "sizes": [1, "x"], "cap": 1 << 40},
            {"verb": "reserve", "bytes": None, "seconds": "x", "cap": 0},
            {"verb": "put", "key": "other", "note": "x"},
            {"verb": 7},
            {"verb": ["x"], "key": {}},
            {"key": 7},
        ):
            connection = other._connection
            packets.send(connection, message)
            answer = packets.receive_all(connection, 60, fds=0)
            assert "error" in answer.read_as(dict), message
        assert vault.held() == {KEY: 1}
        arena = vault.arena()
        assert (arena.used, arena.free, arena.inodes) == (0, 0, [])
    assert vaults() == [pid]


def test_segments_that_are_not_all_there_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, left = Pool(), [2]

    def fails(size: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("no more")
        return make(0)

    monkeypatch.setattr("limosa.parking.segments.make", fails)
    before = open_here()
    with pytest.raises(OSError, match="no more"):
        pool.take([32 << 20] * 3, 0, 1 << 40)
    assert open_here() - before == len(pool.free) == 2
    close_all(fd for fd, _, _ in pool.free)


# -- who it is -------------------------------------------------------------------------------------------------------


def test_one_of_another_version_makes_way_if_it_holds_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "VERSION", packets.VERSION)
    with Vault() as vault:
        old = vault.identity
        vault.put(KEY, [0])
    monkeypatch.setattr(resident, "VERSION", packets.VERSION + 1)
    with pytest.raises(FailedUndone, match="another version"):
        Vault()
    assert old.alive()
    with Vault(found=resident.look_for("vault", os.geteuid())) as vault:
        vault.drop(KEY)
    monkeypatch.setattr(resident, "START_SECONDS", 3.0)
    with pytest.raises(FailedUndone):
        Vault()  # the next one is no newer here
    end = time.monotonic() + 60
    while old.alive():
        assert time.monotonic() < end, "it does not make way"
        time.sleep(0.01)


def test_nobody_else_is_ended_in_a_movers_place(place: Path) -> None:
    """Whose pid a socket has need not be who listens: who has called listen() may have left, and pids come again."""
    with subprocess.Popen(["sleep", "60"]) as bystander:
        resident.replace("mover", os.geteuid(), Identity.of(bystander.pid))
        assert bystander.poll() is None
        bystander.kill()


def test_a_name_in_a_folder_that_leads_elsewhere_is_not_removed(place: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = resident.socket_path("mover", os.geteuid())
    for inside in (elsewhere / path.name, path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
            one.bind(str(inside))
    resident.replace("mover", os.geteuid(), None)
    assert not path.exists()
    shutil.rmtree(path.parent)
    path.parent.symlink_to(elsewhere)
    path = path.parent / path.name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident, "socket_path", lambda kind, uid: path)
        resident.replace("mover", os.geteuid(), None)
    assert (elsewhere / path.name).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace is made by root")
def test_who_sees_other_processes_has_another_vault(place: Path) -> None:
    """It would let go of what is held for processes that it does not see."""
    text = "import os\nfrom limosa.parking.resident import socket_path\nprint(socket_path('vault', os.geteuid()).name)"
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    names = [
        subprocess.run([*before, sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=120)
        for before in ([], apart)
    ]
    assert len({one.stdout for one in names}) == 2


def test_letting_go_never_fails(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", fails)
    residents = Residents()
    residents.drop(os.geteuid(), KEY)
    with pytest.raises(FailedUndone, match="no more processes"):
        residents.put(os.geteuid(), KEY, [])
    residents.close()


# -- the end ---------------------------------------------------------------------------------------------------------


def test_a_mover_that_is_to_end_keeps_what_it_holds(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody was connected, so "all of them hang" was true, and what it held was gone."""
    monkeypatch.setattr(mover_main, "LOOK_SECONDS", 0.05)
    path = resident.socket_path("mover", os.geteuid())
    one = mover_main.MoverServer(str(path), mover_main.all_verbs())
    thread = threading.Thread(target=one.serve, daemon=True)
    thread.start()
    with Mover() as mover:
        mover.put(KEY, [0], note(1))
        mover.end()
    end = time.monotonic() + 60
    while path.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(0.3)
    assert thread.is_alive()
    fds, pieces = holders.get(Member(identity=ME), os.geteuid(), KEY)
    close_all(fds)
    assert len(pieces) == 1
    holders.forget("move-1-a")
    thread.join(60)
    assert not thread.is_alive()
    assert [p.name for p in path.parent.iterdir() if p.is_socket()] == []


@pytest.mark.parametrize("fds", [[], [0]], ids=["nothing", "descriptors"])
def test_what_has_no_end_is_not_waited_for(place: Path, fds: list[int]) -> None:
    ends, before = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), open_here()

    def talk() -> None:
        with contextlib.suppress(OSError):
            while True:
                packets.send(ends[1], {"more": True}, fds)
                time.sleep(0.01)

    threading.Thread(target=talk, daemon=True).start()
    begun = time.monotonic()
    with pytest.raises(TimeoutError if fds else ValueError):
        packets.receive_all(ends[0], 0.3)
    assert time.monotonic() - begun < 60
    for end in ends:
        end.close()
    assert_closed(before - 2)


PART = "a part of a message"


def test_a_message_that_does_not_fit_into_a_packet_goes_in_several() -> None:
    ends, fds = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), [make(10) for _ in range(3)]
    big = {"text": "x" * (1 << 20)}
    thread = threading.Thread(target=packets.send, args=(ends[1], big, fds))
    thread.start()
    said = packets.receive_all(ends[0], 60)
    thread.join(60)
    assert said.read_as(dict) == big
    assert inodes(list(said.given.fds)) == inodes(fds)
    said.given.close()
    close_all([*fds, *(end.detach() for end in ends)])


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([{"more": True, PART: b"x"}, {}], "the last part of a message is missing"),
        ([{"more": True, PART: b"x" * 60}, {"more": True, PART: b"x" * 60}], "too large"),
        ([{"more": True, PART: b""}], "brings nothing"),
        ([{"more": True, PART: b"\x81"}, {PART: b"\xa1n"}], "no message"),
    ],
)
def test_parts_that_are_no_message(parts: list[dict[str, Any]], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packets, "_MOST_BYTES", 100)
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for part in parts:
        ends[1].send(msgspec.msgpack.encode(part))
    with pytest.raises(ValueError, match=why):
        packets.receive_all(ends[0], 2).read_as(dict)
    close_all(end.detach() for end in ends)


def test_a_descriptor_that_nobody_wants_is_never_open_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever closes one of a user's own file system may wait for ever, root with SIGKILL or not."""
    monkeypatch.setattr(packet.os, "close", lambda fd: pytest.fail("one was closed"))
    for said in ({"n": 1}, {PART: msgspec.msgpack.encode({"n": 1})}, {"its message is beside it": True}):
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = open_here()
        socket.send_fds(ends[1], [msgspec.msgpack.encode(said)], [0])
        with pytest.raises(ValueError, match="that nobody asked for"):
            packets.receive_all(ends[0], 2, fds=0, memory=True)
        assert open_here() == before
        for end in ends:
            end.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="root breaks off a user's file system")
@pytest.mark.parametrize("whose", [4242, 0])
def test_a_users_file_system_is_broken_off_before_what_he_gave_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: int
) -> None:
    """Only his own: somebody else's, or the machine's, he could not break off himself."""
    monkeypatch.setattr(packet, "FUSE", str(tmp_path))
    fd = os.memfd_create("stands for a file there")
    place = tmp_path / str(os.minor(os.fstat(fd).st_dev))
    place.mkdir()
    (place / "abort").write_text("")
    os.chown(place, whose, whose)
    packet.let_go(fd, 4242)
    assert (place / "abort").read_text() == ("1" if whose else "")
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/self/fd/{fd}"):
        assert time.monotonic() < end


def test_a_packet_of_empty_maps_takes_no_memory() -> None:
    """16 MiB of them became 1.2 GB."""
    n = 16 << 20
    data = b"\x83\xa4keys\xdf" + (n // 2).to_bytes(4, "big") + b"\xa0\x80" * (n // 2)
    data += b"\xa4gpus\xdd" + n.to_bytes(4, "big") + b"\x80" * n + b"\xa1n\x01"
    for type_ in (resident.Holding, resident.Greeting, Asked):
        tracemalloc.start()
        with contextlib.suppress(ValueError):
            packets.Message(data, Given()).read_as(type_)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20, type_


def test_what_was_not_finished_is_forgotten() -> None:
    """A put that breaks off in the middle leaves neither key nor descriptors."""
    before, vault = open_here(), vault_main.VaultServer()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    packets.send(ours, {"more": True}, [0, 0])
    ours.close()
    serve(theirs, vault_main.VaultSession(vault))
    assert (vault.held, open_here()) == ({}, before)


def test_a_client_that_does_not_read_holds_up_nobody(place: Path, many: list[int]) -> None:
    """The vault waited ten seconds for it, and whoever asked meanwhile gave up after five."""
    with Vault() as vault, Vault() as slow:
        vault.put(KEY, many[:2000], b"note")
        slow._connection.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            while True:  # until the vault reads no more of what it asks
                packets.send(slow._connection, {"verb": "get", "key": KEY})
        begun = time.monotonic()
        assert vault.held() == {KEY: 2000}
        assert vault.drop(KEY) == 2000
        assert time.monotonic() - begun < 30, "half of what the vault waits for one that does not read"
    end = time.monotonic() + 60
    while True:  # what was being sent is closed when it has gone
        there = os.listdir(f"/proc/{vault.identity.pid}/fd")
        if len(there) < 100:
            return
        assert time.monotonic() < end, f"{len(there)} descriptors are still open in the vault"
        time.sleep(0.05)


def test_what_is_being_sent_is_closed_afterwards_and_not_before() -> None:
    """A number that is closed is the next one's: a client would get another's memory."""
    lending, (fd, other) = vault_main.Lending(), (os.dup(0), os.dup(0))
    lending.lend([fd, other])
    lending.lend([fd])
    lending.close(fd)
    os.fstat(fd)
    lending.back([fd, other])
    os.fstat(fd)
    lending.back([fd])
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    lending.close(other)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(other)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is made by root")
def test_a_vault_answers_its_user_and_root_and_nobody_else(place: Path) -> None:
    """Also where the socket itself would let him in: he has it from its owner, or the folder is open."""
    with contextlib.closing(Vault(os.geteuid())) as vault:
        vault.put(KEY, [0], b"")
        path = resident.socket_path("vault", os.geteuid())
        os.chmod(path, 0o666)
        open_the_way_to(path)
        asks = (
            "import msgspec, socket, sys\n"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(60); s.connect(sys.argv[1])\n"
            "try:\n    s.send(msgspec.msgpack.encode({'verb': 'keys'})); print(s.recv(1000))\n"
            "except (BrokenPipeError, ConnectionResetError):\n    print(b'')"
        )
        said = {}
        for uid in (0, 65534):
            words = ["setpriv", f"--reuid={uid}", "--clear-groups", sys.executable, "-c", asks, str(path)]
            said[uid] = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        assert KEY in said[0]
        assert said[65534] == "b''\n"
        vault.drop(KEY)


def test_cleaners_of_tmp_leave_the_folder_of_a_user_with_a_vault_alone(place: Path) -> None:
    """systemd-tmpfiles passes over a folder that it cannot lock, and over all that is in it."""
    fd = os.open(own_place(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
        with Vault() as vault:
            vault.held()
            with pytest.raises(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def test_a_set_that_is_not_all_there_does_not_take_the_place_of_the_whole_one() -> None:
    """Who sends it had no descriptor left for the rest, say; what is held so far may be the last copy."""
    vault, before = vault_main.VaultServer(), open_here()
    assert vault.answer(Put(key=KEY, n=2), Given([os.dup(0), os.dup(0)])) == ({"n": 2}, [])
    with Given([os.dup(0)]) as fewer:
        said, _ = vault.answer(Put(key=KEY, n=3), fewer)
    assert said == {"error": "1 descriptors came of 3"}
    assert vault.answer(Get(key=KEY), Given())[0]["n"] == 2
    vault.let_go(KEY)
    assert open_here() == before


@pytest.mark.parametrize("kind", ["vault", "mover"])
def test_nobody_is_waited_for_in_a_folder_that_cannot_be_opened(
    place: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One that is there, and cannot be seen, was started again and waited for, 15 seconds at each step of an undo."""
    folder = own_place() / kind
    real, said = os.open, OSError(errno.EMFILE, "Too many open files")

    def refused(path: Any, *more: Any, **options: Any) -> int:
        if str(path) in (str(folder), kind):
            raise said
        return real(path, *more, **options)

    def refused_in(at: int, name: str, *more: Any) -> int:
        if name == kind:
            raise said
        return open_in(at, name, *more)

    monkeypatch.setattr(openat, "open_in", refused_in)
    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr(resident, "start", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(resident, "START_SECONDS", 120.0)
    begun = time.monotonic()
    with pytest.raises(FailedUndone, match="Too many open files"):
        resident.connect(kind, os.geteuid())
    assert time.monotonic() - begun < 60
