"""Messages in protobuf's wire format, as far as containerd's interface needs it: numbers, texts, and messages in them.

A message is made of its fields' numbers, as containerd's ``.proto`` files have them, and read to a dict of them. What
is read is bounded by whoever has received it, and typed by whoever takes a field out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Value = int | str | bytes
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_BITS = 64


class Malformed(ValueError):
    """It is no such message."""


class Message:
    """A message that was received: its fields by number."""

    def __init__(self, data: bytes):
        """Raises Malformed."""
        self._fields: dict[int, list[int | bytes]] = {}
        at = 0
        while at < len(data):
            key, at = _number(data, at)
            value: int | bytes
            if key & 7 == _VARINT:
                value, at = _number(data, at)
            else:
                size = {_FIXED64: 8, _FIXED32: 4}.get(key & 7, -1)
                if key & 7 == _BYTES:
                    size, at = _number(data, at)
                if size < 0 or at + size > len(data):
                    raise Malformed("a field ends nowhere")
                value, at = data[at : at + size], at + size
            self._fields.setdefault(key >> 3, []).append(value)

    def number(self, field: int) -> int:
        """Return a number, 0 where it is not there."""
        found = self.last(field, 0)
        if not isinstance(found, int):
            raise Malformed(f"field {field} is no number")
        return found

    def data(self, field: int) -> bytes:
        """Return bytes, b"" where they are not there."""
        found = self.last(field, b"")
        if not isinstance(found, bytes):
            raise Malformed(f"field {field} is a number")
        return found

    def text(self, field: int) -> str:
        """Return a text, "" where it is not there."""
        try:
            return self.data(field).decode()
        except UnicodeDecodeError as error:
            raise Malformed(f"field {field} is no text") from error

    def message(self, field: int) -> Message:
        """Return a message, an empty one where it is not there."""
        return Message(self.data(field))

    def all(self, field: int) -> list[bytes]:
        """Return what is there more than once: texts, or messages."""
        return [one for one in self._fields.get(field, []) if isinstance(one, bytes)]

    def texts(self, field: int) -> dict[str, str]:
        """Return a map of texts to texts."""
        pairs = [Message(one) for one in self.all(field)]
        return {pair.text(1): pair.text(2) for pair in pairs}

    def last(self, field: int, otherwise: int | bytes = 0) -> int | bytes:
        """Return what is there, of whatever kind."""
        found = self._fields.get(field)
        return found[-1] if found else otherwise


def message(*fields: tuple[int, Value | Iterable[bytes] | Mapping[str, str]]) -> bytes:
    """Return a message.

    Args:
        fields: number and value of each: a number, a text, bytes (a message is bytes), several messages, or a map of
            texts. What is 0 or empty is left out, as protobuf 3 does.
    """
    made = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            if value:
                made += _varint(number << 3 | _VARINT) + _varint(value)
            continue
        parts: Iterable[bytes]
        if isinstance(value, Mapping):
            parts = [message((1, key), (2, text)) for key, text in value.items()]
        elif isinstance(value, str | bytes):
            parts = [value.encode() if isinstance(value, str) else value] if value else []
        else:
            parts = value
        for part in parts:
            made += _varint(number << 3 | _BYTES) + _varint(len(part)) + part
    return bytes(made)


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A number at a place, and the place behind it."""
    found = shift = 0
    while True:
        if at >= len(data) or shift >= _MOST_BITS + 6:
            raise Malformed("a number ends nowhere")
        byte = data[at]
        found |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return found, at


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)
