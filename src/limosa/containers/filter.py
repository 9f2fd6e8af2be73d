"""The device filter of a version 2 cgroup: a program in the kernel that says which devices may be opened.

Nobody can ask such a program what it allows, but it can be read, and loaded again with something before it. So a GPU
is allowed, or forbidden, by a few instructions in front of the very program that the runtime has made. They are known
again by their beginning: whatever has been changed since, the runtime's program behind them is the same.

The new program takes the old one's place in one call of the kernel (``BPF_F_REPLACE``), so that at no moment there is
none.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

import msgspec

from limosa.process.openat import closing, last_error

_SYS_BPF = {"x86_64": 321, "ppc64le": 361}.get(os.uname().machine, 280)  # of the newer machines, arm64 among them
_LOAD, _ATTACH, _FD_BY_ID, _INFO, _QUERY = 5, 8, 13, 15, 16
_CGROUP_DEVICE_PROGRAM, _CGROUP_DEVICE = 15, 6
_MULTI, _REPLACE = 2, 4
_MOST_PROGRAMS, _MOST_INSTRUCTIONS, _ATTRIBUTE = 64, 1 << 16, 128
_CHARACTER = 2  # BPF_DEVCG_DEV_CHAR
_MARK = 0x4C494D4F
_INSTRUCTION = struct.Struct("<BBhi")
_SIZE = _INSTRUCTION.size
_MOVE, _LOAD_WORD, _AND, _JUMP_IF_NOT, _EXIT = 0xB7, 0x61, 0x57, 0x55, 0x95
_libc = ctypes.CDLL(None, use_errno=True)


class Changes(msgspec.Struct, frozen=True):
    """What was put before a runtime's program: devices (``st_rdev``)."""

    allowed: frozenset[int] = frozenset()
    forbidden: frozenset[int] = frozenset()

    def with_more(self, devices: Iterable[int]) -> Changes:
        """Return them so that these may be opened, too."""
        more = frozenset(devices)
        return Changes(self.allowed | more, self.forbidden - more)

    def without(self, devices: Iterable[int]) -> Changes:
        """Return them so that these may not be opened."""
        less = frozenset(devices)
        return Changes(self.allowed - less, self.forbidden | less)


def has_filter(cgroup: str) -> bool:
    """Return whether a version 2 cgroup has a program of its own.

    Args:
        cgroup: its folder.

    Raises:
        OSError: it cannot be asked.
    """
    with closing(os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        return bool(_programs(fd)[1])


def change(cgroup: str, *, more: Iterable[int] = (), less: Iterable[int] = ()) -> None:
    """Let a cgroup's processes open some devices, and others not, besides what its programs say.

    Args:
        cgroup: its folder.
        more: devices (``st_rdev``) that may be opened.
        less: devices that may not.

    Raises:
        OSError: the kernel refuses. What has been changed by then stays.
    """
    with closing(os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        flags, programs = _programs(fd)
        for number in programs:  # each of them has to allow it
            with closing(_by_number(number)) as old:
                before, own = _split(_instructions(old))
                wanted = before.with_more(more).without(less)
                if wanted == before:
                    continue
                with closing(_load(_prefix(wanted) + own)) as new:
                    replace = struct.pack("<IIIII", fd, new, _CGROUP_DEVICE, flags, 0)
                    if flags & _MULTI:
                        replace = struct.pack("<IIIII", fd, new, _CGROUP_DEVICE, flags | _REPLACE, old)
                    _bpf(_ATTACH, replace)


def _bpf(command: int, attribute: bytes) -> tuple[int, bytes]:
    buffer = ctypes.create_string_buffer(attribute.ljust(_ATTRIBUTE, b"\0"), _ATTRIBUTE)
    found = int(_libc.syscall(ctypes.c_long(_SYS_BPF), ctypes.c_int(command), buffer, ctypes.c_uint(_ATTRIBUTE)))
    if found < 0:
        raise last_error()
    return found, buffer.raw


def _programs(cgroup: int) -> tuple[int, list[int]]:
    """The flags by which programs were attached to a cgroup itself, and their numbers in order."""
    numbers = (ctypes.c_uint32 * _MOST_PROGRAMS)()
    asked = struct.pack("<IIIIQI", cgroup, _CGROUP_DEVICE, 0, 0, ctypes.addressof(numbers), _MOST_PROGRAMS)
    _, said = _bpf(_QUERY, asked)
    _, _, _, flags, _, n = struct.unpack_from("<IIIIQI", said)
    return flags, list(numbers[: min(n, _MOST_PROGRAMS)])


def _by_number(number: int) -> int:
    return _bpf(_FD_BY_ID, struct.pack("<I", number))[0]


def _instructions(program: int) -> bytes:
    """A loaded program's instructions. OSError: the kernel does not tell them."""
    code = ctypes.create_string_buffer(_MOST_INSTRUCTIONS * _SIZE)
    # struct bpf_prog_info: type, id, tag, jited_prog_len, xlated_prog_len, jited_prog_insns, xlated_prog_insns
    info = ctypes.create_string_buffer(
        struct.pack("<II8sIIQQ", 0, 0, b"", 0, len(code), 0, ctypes.addressof(code)), 256
    )
    _bpf(_INFO, struct.pack("<IIQ", program, 40, ctypes.addressof(info)))
    length, at = struct.unpack_from("<I", info.raw, 20)[0], struct.unpack_from("<Q", info.raw, 32)[0]
    if not at or not 0 < length <= len(code):
        raise PermissionError("the device filter of the container cannot be read")
    return code.raw[:length]


def _load(code: bytes) -> int:
    instructions = ctypes.create_string_buffer(code, len(code))
    license_ = ctypes.create_string_buffer(b"Apache-2.0")
    where = (ctypes.addressof(instructions), ctypes.addressof(license_))
    counts = (_CGROUP_DEVICE_PROGRAM, len(code) // _SIZE)
    return _bpf(_LOAD, struct.pack("<IIQQIIQII16s", *counts, *where, 0, 0, 0, 0, 0, b"limosa"))[0]


def _prefix(changes: Changes) -> bytes:
    """The instructions for some changes; nothing for none."""
    devices = [(device, 1) for device in sorted(changes.allowed)]
    devices += [(device, 0) for device in sorted(changes.forbidden)]
    if not devices:
        return b""
    made = [
        (_LOAD_WORD, 0x12, 0, 0),  # r2: kind and access; r1, where the question is, stays for the program behind
        (_AND, 0x02, 0, 0xFFFF),
        (_LOAD_WORD, 0x13, 4, 0),  # r3: major
        (_LOAD_WORD, 0x14, 8, 0),  # r4: minor
        (_JUMP_IF_NOT, 0x02, 4 * len(devices), _CHARACTER),
    ]
    for device, answer in devices:
        made += [
            (_JUMP_IF_NOT, 0x03, 3, os.major(device)),
            (_JUMP_IF_NOT, 0x04, 2, os.minor(device)),
            (_MOVE, 0x00, 0, answer),
            (_EXIT, 0x00, 0, 0),
        ]
    made = [(_MOVE, 0x00, 0, _MARK), (_MOVE, 0x00, 0, len(made) + 2), *made]
    return b"".join(_INSTRUCTION.pack(*one) for one in made)


def _split(code: bytes) -> tuple[Changes, bytes]:
    """What was put before a program, and the program."""
    made = [_INSTRUCTION.unpack_from(code, at) for at in range(0, len(code), _SIZE)]
    if len(made) < 2 or made[0] != (_MOVE, 0, 0, _MARK) or not 2 <= made[1][3] < len(made):
        return Changes(), code
    own = made[: made[1][3]]
    answers: dict[int, int] = {}
    for major, minor, answer in zip(own[7::4], own[8::4], own[9::4], strict=False):
        if min(major[3], minor[3]) >= 0:
            answers[os.makedev(major[3], minor[3])] = answer[3]
    changes = Changes(
        frozenset(device for device, answer in answers.items() if answer),
        frozenset(device for device, answer in answers.items() if not answer),
    )
    at = len(own) * _SIZE
    # Somebody else's program may begin like that: it is ours if it is what we would write.
    return (changes, code[at:]) if _prefix(changes) == code[:at] else (Changes(), code)
