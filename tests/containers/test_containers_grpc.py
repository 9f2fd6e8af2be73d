"""What containerd is asked and says: its messages are read as what they are, or not at all, however they were made."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from hypothesis import given
from hypothesis import strategies as st

from limosa.containers import grpc
from limosa.containers.protobuf import Malformed, Message, message
from limosa.errors import CannotBeMoved

pytestmark = pytest.mark.root


@given(st.integers(0, 2**64 - 1), st.text(), st.binary(), st.dictionaries(st.text(), st.text()), st.lists(st.binary()))
def test_what_is_written_is_read(
    number: int, text: str, data: bytes, pairs: dict[str, str], parts: list[bytes]
) -> None:
    read = Message(message((1, number), (2, text), (30, data), (4, pairs), (5, parts), (6, message((1, number)))))
    assert (read.number(1), read.text(2), read.data(30), read.texts(4)) == (number, text, data, pairs)
    assert (read.all(5), read.message(6).number(1)) == (parts, number)


@given(st.binary(max_size=64))
def test_anything_is_a_message_or_none(data: bytes) -> None:
    try:
        read = Message(data)
        for field in range(1, 16):
            read.all(field)
            read.text(field)
    except Malformed:
        pass


def test_fields_of_another_kind_are_refused() -> None:
    read = Message(message((1, 5), (2, b"\xff")))
    for take in (lambda: read.text(1), lambda: read.number(2), lambda: read.text(2), lambda: read.message(2)):
        with pytest.raises(Malformed):
            take()


def served(place: Path, answer: Callable[[socket.socket], None]) -> str:
    """Somebody of root's who listens and answers one call so."""
    path, ready = str(place / "socket"), threading.Event()

    def serve() -> None:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            ready.set()
            connection, _ = listening.accept()
            with connection, contextlib.suppress(BrokenPipeError):
                answer(connection)

    threading.Thread(target=serve, daemon=True).start()
    assert ready.wait(10)
    return path


def with_messages(*bodies: bytes, status: str = "0", text: str = "") -> Callable[[socket.socket], None]:
    """An answer in HTTP/2: these bytes, and this end."""

    def answer(connection: socket.socket) -> None:
        h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        h2.initiate_connection()
        connection.sendall(h2.data_to_send())
        while not h2.open_inbound_streams:
            h2.receive_data(connection.recv(1 << 16))
        h2.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
        for body in bodies:
            h2.send_data(1, body)
        h2.send_headers(1, [("grpc-status", status), ("grpc-message", text)], end_stream=True)
        connection.sendall(h2.data_to_send())
        while connection.recv(1 << 16):
            pass

    return answer


def asked(path: str, **options: object) -> list[bytes]:
    return list(grpc.call(path, "some.Service/Method", b"", {}, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: None,
        lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" * 100),
        lambda connection: connection.sendall(b"\0" * (1 << 20)),
        lambda connection: connection.sendall(struct.pack(">I", 0xFFFFFF) + b"\xff" * 5),
    ],
)
def test_what_is_no_answer_is_an_error(tmp_path: Path, answer: Callable[[socket.socket], None]) -> None:
    with pytest.raises(grpc.Broken):
        asked(served(tmp_path, answer), seconds=5)


def test_messages_are_heard_as_they_were_cut(tmp_path: Path) -> None:
    one, two = (struct.pack(">?I", False, n) + b"x" * n for n in (5, 0))
    assert asked(served(tmp_path, with_messages(one[:3], one[3:] + two))) == [b"xxxxx", b""]


@pytest.mark.parametrize("body", [struct.pack(">?I", False, (16 << 20) + 1), struct.pack(">?I", True, 4) + b"zzzz"])
def test_too_much_and_what_was_not_asked_for_is_not_taken(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(grpc.Broken, match="not asked for"):
        asked(served(tmp_path, with_messages(body)))


@pytest.mark.parametrize(("status", "number"), [("5", grpc.NOT_FOUND), ("x" * 100, 2), ("", 2)])
def test_what_it_refuses_is_said(tmp_path: Path, status: str, number: int) -> None:
    with pytest.raises(grpc.Refused, match="no such thing") as caught:
        asked(served(tmp_path, with_messages(status=status, text="no%20such thing")))
    assert caught.value.status == number


def test_whoever_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(grpc.Broken, match="no answer"):
        asked(served(tmp_path, lambda connection: time.sleep(2)), seconds=0.3)


def test_what_a_caller_raises_ends_a_call(tmp_path: Path) -> None:
    def tick() -> None:
        raise OSError("enough")

    with pytest.raises(OSError, match="enough"):
        asked(served(tmp_path, lambda connection: time.sleep(2)), tick=tick)


def test_a_place_that_others_can_change_is_refused(tmp_path: Path) -> None:
    (place := tmp_path / "open").mkdir()
    place.chmod(0o777)
    with pytest.raises(CannotBeMoved, match="others than root"):
        asked(served(place, lambda connection: None))
