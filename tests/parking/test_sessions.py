"""The server loop of vault and mover where something fails: threads, descriptors, clients that do not read."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from limosa.ipc import messages, packet, sessions
from limosa.ipc.messages import Message, receive_all, send
from limosa.ipc.packet import Given
from limosa.ipc.sessions import Answer, Sessions, listen, serve
from limosa.parking import vault_main
from limosa.parking.vault_protocol import Get, Ping, Put

KEY = "aside/test"


class Echo:
    """A session that says how many descriptors came, and how many clients there are."""

    gone_called = False

    def answer(self, message: Message, came: Given) -> Answer:
        return Answer({"n": len(came)})

    def gone(self) -> None:
        self.gone_called = True


def client(path: Path, limit: float = 60) -> socket.socket:
    end = time.monotonic() + limit
    while True:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found.settimeout(limit)
        try:
            found.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):  # it does not listen yet
            found.close()
            assert time.monotonic() < end
            time.sleep(0.01)
        else:
            return found


@contextlib.contextmanager
def accepting(clients: Sessions[Echo], path: Path) -> Iterator[None]:
    """Takes clients in, in a thread of its own, until the end of the block."""
    listening, over = listen(str(path)), threading.Event()

    def loop() -> None:
        while not over.wait(0.01):
            clients.accept(listening)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)
        listening.close()
        assert not thread.is_alive()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_where_no_thread_can_be_started_clients_are_served_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The server ended with it, and with the vault the last copy of what it held (RLIMIT_NPROC, pids.max)."""
    clients, started = Sessions(Echo), []

    class Limited(threading.Thread):
        def start(self) -> None:
            if started:
                raise error
            started.append(self)
            super().start()

    with accepting(clients, tmp_path / "socket"):
        monkeypatch.setattr(sessions.threading, "Thread", Limited)
        with client(tmp_path / "socket") as first, client(tmp_path / "socket") as second:
            send(first, {})
            assert receive_all(first, 60, fds=0).read_as(dict) == {"n": 0}
            send(second, {})
            second.settimeout(0.3)
            with pytest.raises(TimeoutError):  # it waits for its turn
                second.recv(100)
            first.close()
            assert receive_all(second, 60, fds=0).read_as(dict) == {"n": 0}
        monkeypatch.undo()
    assert len(started) == 1


def test_a_thread_serves_the_next_client_and_no_more_than_one_waits(tmp_path: Path) -> None:
    before, clients = threading.active_count(), Sessions(Echo)
    with accepting(clients, tmp_path / "socket"):
        for _ in range(3):
            with contextlib.ExitStack() as stack:
                some = [stack.enter_context(client(tmp_path / "socket")) for _ in range(8)]
                for one in some:
                    send(one, {})
                assert [receive_all(one, 60, fds=0).read_as(dict) for one in some] == [{"n": 0}] * 8
                assert len(clients) >= 8
        end = time.monotonic() + 60
        while len(clients) or threading.active_count() > before + 2:  # who accepts, and one that waits
            assert time.monotonic() < end, threading.enumerate()
            time.sleep(0.01)


def test_no_more_clients_than_may_be_are_taken_in_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_CLIENTS", 2)
    clients = Sessions(Echo)
    with accepting(clients, tmp_path / "socket"), contextlib.ExitStack() as stack:
        one, two, three = (stack.enter_context(client(tmp_path / "socket")) for _ in range(3))
        for each in (one, two, three):
            send(each, {})
        receive_all(one, 60, fds=0)
        receive_all(two, 60, fds=0)
        three.settimeout(0.3)
        with pytest.raises(TimeoutError):
            three.recv(100)
        one.close()
        assert receive_all(three, 60, fds=0).read_as(dict) == {"n": 0}


def test_a_session_is_told_that_its_client_has_gone_also_where_a_descriptor_cannot_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    send(ours, {"more": True}, [0, 0])
    ours.close()
    before, real = len(os.listdir("/proc/self/fd")), os.close

    def close(fd: int) -> None:
        real(fd)
        raise OSError(errno.EIO, "what was written is not on disk")

    session = Echo()
    monkeypatch.setattr(packet.os, "close", close)
    serve(theirs, session)
    monkeypatch.undo()
    assert session.gone_called
    assert len(os.listdir("/proc/self/fd")) == before - 1  # theirs


def test_a_client_that_never_reads_is_given_up_and_what_was_lent_to_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "SEND_SECONDS", 0.3)
    before, vault = len(os.listdir("/proc/self/fd")), vault_main.VaultServer()
    vault.put(KEY, b"n" * 30_000, [os.memfd_create("x") for _ in range(50)])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=serve, args=(theirs, vault_main.VaultSession(vault)))
    thread.start()
    ours.settimeout(0.2)
    with contextlib.suppress(OSError):
        for _ in range(1000):
            send(ours, Get(key=KEY))
    with vault.lock:
        assert vault.let_go(KEY) == 50
    thread.join(60)
    assert not thread.is_alive()
    ours.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_many_descriptors_under_way_are_told_as_such_and_not_as_a_server_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mover that hangs is ended, with all that others have it do."""

    def full(*_: object) -> None:
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))

    monkeypatch.setattr(messages.packet, "send", full)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(0.05)
        with pytest.raises(OSError, match="Too many references") as raised:
            send(ours, {}, [0])
    assert not isinstance(raised.value, TimeoutError)


def test_a_vault_that_is_told_to_end_keeps_what_a_client_puts_before_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held was looked at first, then who is there: a put between the two ended with the vault."""
    monkeypatch.setattr(vault_main, "LISTEN_SECONDS", 0.05)
    path, told, ended = tmp_path / "vault", threading.Event(), threading.Event()
    servers: list[vault_main.VaultServer] = []
    late: list[socket.socket] = []

    class Held(dict[str, vault_main.Entry]):
        def __bool__(self) -> bool:
            there = len(self) > 0
            if told.is_set() and late:  # the last look at what is held has begun
                with late.pop() as last:
                    send(last, Put(key=KEY, n=1), [0])
                    receive_all(last, 60, fds=0)
                time.sleep(0.2)  # until its session has ended
            return there

    class Watched(vault_main.VaultServer):
        def __init__(self) -> None:
            super().__init__()
            self.held = Held()
            servers.append(self)

    def run() -> None:
        vault_main.run(str(path), told)
        ended.set()

    monkeypatch.setattr(vault_main, "VaultServer", Watched)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with client(path) as one:
        send(one, Ping())
        receive_all(one, 60, fds=0)
        late.append(one.dup())
        late[0].settimeout(60)
    told.set()
    assert not ended.wait(1.0), f"it has ended, and with it {dict(servers[0].held)}"
    while late:  # it was not asked what it holds, as long as a client was there
        late.pop().close()
    with servers[0].lock:
        servers[0].let_go(KEY)
    assert ended.wait(60)


def test_a_vault_that_is_only_looked_at_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault_main, "LISTEN_SECONDS", 0.05)
    monkeypatch.setattr(vault_main, "IDLE_SECONDS", 0.5)
    path = tmp_path / "vault"
    thread = threading.Thread(target=vault_main.run, args=(str(path), threading.Event()), daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while thread.is_alive() and time.monotonic() < end:
        with contextlib.suppress(OSError, EOFError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
            one.settimeout(60)
            one.connect(str(path))
            send(one, Ping())
            receive_all(one, 60, fds=0)
            time.sleep(0.2)  # it sees that somebody is there, and then that nobody is
        time.sleep(0.15)
    assert not thread.is_alive()
