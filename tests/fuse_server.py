"""A file system of a user's (FUSE) with one file, whose closing it never answers: ``fuse_server.py FOLDER UID …``.

More words: "all" (``allow_other``), "roots" (it says that all is root's), "name=NAME" (of the mount's source),
"gone" (it says of everything that it is not there).
Mounted by root as ``fusermount`` does it for that user. READY is printed when it is there. Whoever waits for it goes
on when this process is killed.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys

INIT, LOOKUP, GETATTR, OPEN, FLUSH, FORGET, RELEASE, INTERRUPT, BATCH_FORGET = 26, 1, 3, 14, 25, 2, 18, 36, 42
SILENT = (FLUSH, FORGET, RELEASE, INTERRUPT, BATCH_FORGET)
ROOT = 1
ENOENT, ENOSYS = 2, 38


def attributes(node: int, uid: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o600
    return struct.pack("=6Q10I", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, uid, uid, 0, 4096, 0)


def answer(opcode: int, node: int, uid: int) -> bytes | None:
    if opcode == INIT:
        return struct.pack("=4I2H2I2H8I", 7, 31, 0, 0, 0, 0, 1 << 16, 1, 0, 0, *[0] * 8)
    if opcode == LOOKUP:
        return struct.pack("=4Q2I", 2, 1, 0, 0, 0, 0) + attributes(2, uid)
    if opcode == GETATTR:
        return struct.pack("=Q2I", 0, 0, 0) + attributes(node, uid)
    if opcode == OPEN:
        return struct.pack("=Q2I", 1, 0, 0)
    return None


def main(folder: str, uid: int, words: list[str]) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={uid},group_id={uid}{',allow_other' if 'all' in words else ''}"
    libc = ctypes.CDLL(None, use_errno=True)
    name = next((word[5:] for word in words if word.startswith("name=")), "limosa-test")
    if libc.mount(name.encode(), folder.encode(), b"fuse", 6, options.encode()):  # nosuid, nodev
        raise OSError(ctypes.get_errno(), "mount")
    print("READY", flush=True)
    while True:
        request = os.read(device, 1 << 18)
        _, opcode, unique, node = struct.unpack_from("=2I2Q", request)
        if opcode in SILENT:
            continue
        said = answer(opcode, node, 0 if "roots" in words else uid)
        if opcode == GETATTR and "gone" in words:
            os.write(device, struct.pack("=IiQ", 16, -ENOENT, unique))
            continue
        error, body = (-ENOSYS, b"") if said is None else (0, said)
        os.write(device, struct.pack("=IiQ", 16 + len(body), error, unique) + body)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
