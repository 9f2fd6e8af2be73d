"""Mutations of bytes, JSON-like objects and command lines, each from a source of randomness that is given."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

NUMBERS = [
    *(0, 1, -1, 2, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32),
    *(2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 10**15, 10**30, 10**400, 0.5, -0.0, 1e300, 5e-324),
]
NOT_NUMBERS = [float("nan"), float("inf"), float("-inf")]
TEXTS = [
    *(
        "",
        " ",
        "\0",
        "a\0b",
        "\n",
        "\x1b[2J",
        "\ud800",
        "\u202e",
        "²",
        "١",
        "0x10",
        "-1",
        "+1",
        "1e9",
        "01001",
        "nan",
        "null",
    ),
    *(
        ".",
        "..",
        "/",
        "//",
        "../../etc/shadow",
        "/proc/self/root",
        "/proc/1/root/etc",
        "a/" * 5000,
        "x" * 5000,
        "é" * 300,
    ),
    *("%s%n", "$(id)", "`id`", "--help", "-o", "*", "~root", "inet filter", "GPU-" + "0" * 36),
]
_KEYS = ["", "\0", "__class__", "id", "pid", "x" * 300, "type", "schema", "version"]
_DEEP = 200


def mutated(source: random.Random, samples: Sequence[bytes], most: int = 1 << 20) -> bytes:
    """A sample with one to eight things wrong with it; now and then nothing but noise."""
    if source.random() < 0.03:
        return source.randbytes(source.choice([0, 1, 2, 3, 4, 7, 8, 16, 255, 4096]))
    data = bytearray(source.choice(samples))
    for _ in range(source.choice([1, 1, 1, 2, 3, 8])):
        _one(source, data, samples)
        del data[most:]
    return bytes(data)


def _one(source: random.Random, data: bytearray, samples: Sequence[bytes]) -> None:
    at = source.randrange(len(data) + 1)
    end = min(len(data), at + source.choice([1, 1, 2, 4, 8, 64, 1024]))
    kind = source.randrange(10)
    if kind == 0:
        del data[at:]
    elif kind == 1:
        del data[at:end]
    elif kind == 2 and data:
        data[min(at, len(data) - 1)] ^= 1 << source.randrange(8)
    elif kind == 3:
        data[at:end] = source.randbytes(end - at)
    elif kind == 4:
        data[at:at] = data[at:end] * source.choice([1, 2, 16, 256])
    elif kind == 5:
        other = source.choice(samples)
        cut = source.randrange(len(other) + 1)
        data[at:] = other[cut:]
    elif kind == 6:
        size = source.choice([1, 2, 4, 8])
        number = int(source.choice(NUMBERS[:25])) % (1 << 8 * size)
        data[at : at + size] = number.to_bytes(size, source.choice(["little", "big"]))
    elif kind == 7:
        data[at:at] = source.choice(
            [b"\0", b"\n", b"\xff", b"\xff\xfe", b"{", b"[" * 2000, b'"', b"\\u0000", b"1e999", b"}"]
        )
    elif kind == 8:
        text = str(source.choice(NUMBERS + NOT_NUMBERS)) if source.random() < 0.5 else source.choice(TEXTS)
        data[at:end] = text.encode(errors="surrogatepass")
    else:
        data += source.randbytes(source.choice([1, 8, 4096]))


def any_value(source: random.Random, depth: int = 0) -> Any:
    """Something that a decoder may meet where it expects something else."""
    kind = source.randrange(10 if depth < 3 else 7)
    if kind < 3:
        return source.choice(NUMBERS)
    if kind < 5:
        return source.choice(TEXTS)
    if kind == 5:
        return source.choice([None, True, False, [], {}, "", 0])
    if kind == 6:
        return source.choice(NOT_NUMBERS)
    if kind == 7:
        many = 300 if depth == 2 and source.random() < 0.2 else 1
        return [any_value(source, depth + 1) for _ in range(source.choice([1, 2, 5]))] * many
    if kind == 8:
        return {source.choice(_KEYS + TEXTS): any_value(source, depth + 1) for _ in range(source.choice([1, 2, 5]))}
    deep: Any = source.choice(NUMBERS)
    for _ in range(_DEEP):
        deep = [deep] if source.random() < 0.5 else {"a": deep}
    return deep


def mutated_object(source: random.Random, sample: Any) -> Any:
    """A copy of lists, dictionaries and scalars with one to three of its parts changed, missing, double or foreign."""
    made = copy.deepcopy(sample)
    for _ in range(source.choice([1, 1, 1, 2, 3])):
        holder = {"": made}
        places = list(_places(holder))
        parent, key = source.choice(places)
        kind = source.randrange(6)
        if kind < 3:
            parent[key] = any_value(source)
        elif kind == 3 and parent is not holder:
            del parent[key]
        elif kind == 4 and isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
            parent[key] = parent[key] * source.choice([-1, 2, 10**9]) + source.choice([-1, 0, 1])
        elif isinstance(parent[key], dict):
            parent[key][source.choice(_KEYS)] = any_value(source)
        elif isinstance(parent[key], list):
            parent[key].extend(copy.deepcopy(parent[key]) * source.choice([1, 2, 50]) or [any_value(source)])
        elif isinstance(parent[key], str):
            parent[key] += source.choice(TEXTS)
        else:
            parent[key] = any_value(source)
        made = holder[""]
    return made


def _places(value: Any) -> Any:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)


def mutated_words(source: random.Random, sample: Sequence[str], words: Sequence[str] = ()) -> list[str]:
    """A command line with words missing, double, exchanged, or replaced by hostile ones (no NUL: nobody can give one).

    Args:
        source: of randomness.
        sample: a good command line.
        words: others that fit somewhere: options, verbs.
    """
    made = list(sample)
    for _ in range(source.choice([1, 1, 2, 3])):
        at = source.randrange(len(made) + 1)
        kind = source.randrange(5)
        foreign = source.choice([*TEXTS, *words, str(source.choice(NUMBERS)), *words])
        if kind == 0:
            made[at:at] = [foreign]
        elif kind == 1:
            made[at : at + 1] = [foreign]
        elif kind == 2:
            del made[at : at + 1]
        elif kind == 3 and made:
            made.append(source.choice(made))
        elif made:
            at = min(at, len(made) - 1)
            made[at] = mutated(source, [made[at].encode(errors="surrogatepass")], most=4096).decode(
                errors="surrogateescape"
            )
    return [word.replace("\0", "") for word in made]
