"""The mover: the process that makes, maps and copies device memory for an operation on parked jobs.

Started by :mod:`limosa.parking.mover` (``python -I mover_main.py FD``); ends with its controller. What it holds, the
vault holds too: it may be killed at any moment.

What it is asked (``packets.py``): ``prepare`` gpus; ``take`` key, sizes, gpu (descriptors come with it, in parts);
``make`` key, sizes, gpu (answered with descriptors, in parts); ``copy`` source, target, gpu; ``drop`` key.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

SEARCH_PATH = "LIMOSA_MOVER_SYS_PATH"
STREAMS = 4
CHUNK = 64 << 20
_SHIELDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)


class Mover:
    """What it holds, by key, and what it does."""

    def __init__(self) -> None:
        from limosa.gpu.vmm import Contexts

        self.contexts = Contexts()
        self.pieces: dict[str, list[Any]] = {}
        self.coming: dict[str, list[int]] = {}

    def prepare(self, gpus: Sequence[str]) -> None:
        """Have contexts ready."""
        for uuid in gpus:
            self.contexts.use(uuid)

    def take(self, key: str, sizes: Sequence[int], gpu: str, fds: list[int]) -> None:
        """Map memory for which descriptors have come, to be used from a GPU."""
        from limosa.gpu.vmm import Piece

        self.contexts.use(gpu)
        user = [self.contexts.ordinal(gpu)]
        held = self.pieces.setdefault(key, [])
        for fd, size in zip(fds, sizes, strict=True):
            held.append(Piece.take(fd, size, user))

    def make(self, key: str, sizes: Sequence[int], gpu: str) -> list[int]:
        """Make memory on a GPU; returns descriptors."""
        from limosa.gpu.vmm import Piece

        self.contexts.use(gpu)
        ordinal = self.contexts.ordinal(gpu)
        held = self.pieces.setdefault(key, [])
        begin = len(held)
        try:
            held.extend(Piece.make(size, ordinal, [ordinal]) for size in sizes)
            return [piece.export() for piece in held[begin:]]
        except BaseException:
            while len(held) > begin:
                held.pop().close()
            raise

    def copy(self, source: str, target: str, gpu: str) -> float:
        """Copy each piece of one key to that of another, in their order; returns seconds."""
        from limosa.gpu.vmm import call

        self.contexts.use(gpu)
        begun = time.monotonic()
        streams = [call("cuStreamCreate", 1) for _ in range(STREAMS)]
        turn = 0
        for from_, to in zip(self.pieces.get(source, []), self.pieces.get(target, []), strict=True):
            for start in range(0, from_.bytes, CHUNK):
                size = min(CHUNK, from_.bytes - start)
                call("cuMemcpyDtoDAsync", to.at + start, from_.at + start, size, streams[turn % STREAMS])
                turn += 1
        for stream in streams:
            call("cuStreamSynchronize", stream)
            call("cuStreamDestroy", stream)
        return time.monotonic() - begun

    def arena(self, key: str, fd: int, bytes_: int, gpu: str) -> None:
        """Map host memory that a descriptor leads to, pinned, as one piece."""
        from limosa.gpu.vmm import HostPiece

        self.contexts.use(gpu)
        self.pieces[key] = [HostPiece(fd, bytes_)]

    def host(self, way: str, key: str, arena: str, offset: int, gpu: str) -> float:
        """Copy all of a key to the arena from an offset on ("out"), or back ("in"); returns seconds."""
        from limosa.gpu.vmm import call

        self.contexts.use(gpu)
        begun = time.monotonic()
        base, turn = self.pieces[arena][0].at + offset, 0
        streams = [call("cuStreamCreate", 1) for _ in range(STREAMS)]
        for piece in self.pieces.get(key, []):
            for start in range(0, piece.bytes, CHUNK):
                size, stream = min(CHUNK, piece.bytes - start), streams[turn % STREAMS]
                if way == "out":
                    call("cuMemcpyDtoHAsync", base + start, piece.at + start, size, stream)
                else:
                    call("cuMemcpyHtoDAsync", piece.at + start, base + start, size, stream)
                turn += 1
            base += piece.bytes
        for stream in streams:
            call("cuStreamSynchronize", stream)
            call("cuStreamDestroy", stream)
        return time.monotonic() - begun

    def drop(self, key: str) -> None:
        """Let go of a key."""
        for piece in self.pieces.pop(key, []):
            piece.close()


def serve(connection: socket.socket) -> None:
    """Answer until the controller is gone."""
    from limosa.errors import LimosaError
    from limosa.parking.packets import MOST, receive, send

    mover = Mover()
    while True:
        try:
            asked, fds = receive(connection)
        except (EOFError, OSError, ValueError):
            return
        verb, key = asked.get("verb"), asked.get("key", "")
        try:
            if verb == "take":
                coming = mover.coming.setdefault(key, [])
                coming += fds
                fds = []
                if asked.get("more"):
                    continue
                try:
                    mover.take(key, asked["sizes"], asked["gpu"], coming)
                finally:
                    for fd in mover.coming.pop(key):
                        os.close(fd)
                send(connection, {})
            elif verb == "make":
                made = mover.make(key, asked["sizes"], asked["gpu"])
                try:
                    for start in range(0, max(1, len(made)), MOST):
                        send(connection, {"more": start + MOST < len(made)}, made[start : start + MOST])
                finally:
                    for fd in made:
                        os.close(fd)
            elif verb == "copy":
                send(connection, {"seconds": mover.copy(asked["source"], asked["target"], asked["gpu"])})
            elif verb == "arena":
                mover.arena(key, fds[0], asked["bytes"], asked["gpu"])
                send(connection, {})
            elif verb == "host":
                seconds = mover.host(asked["way"], key, asked["arena"], asked["offset"], asked["gpu"])
                send(connection, {"seconds": seconds})
            elif verb == "drop":
                mover.drop(key)
                send(connection, {})
            elif verb == "prepare":
                mover.prepare(asked["gpus"])
                send(connection, {})
            else:
                send(connection, {"error": f"the mover knows no {verb}"})
        except LimosaError as error:
            send(connection, {"error": error.message, "result": error.fields.get("result", "")})
        except Exception as error:
            send(connection, {"error": f"{type(error).__name__}: {error}"})
        finally:
            for fd in fds:
                os.close(fd)


def main(argv: list[str]) -> int:
    """Run the mover.

    Args:
        argv: the descriptor of the socketpair's end.

    Returns:
        The exit code.
    """
    for number in _SHIELDED:
        signal.signal(number, signal.SIG_IGN)
    for variable in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_PRELOAD"):
        os.environ.pop(variable, None)
    with open("/proc/self/comm", "w", encoding="ascii") as file:
        file.write("limosa-mover")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    connection = socket.socket(fileno=int(argv[0]))
    connection.set_inheritable(False)
    serve(connection)
    return 0


if __name__ == "__main__":
    sys.path[:] = json.loads(os.environ.pop(SEARCH_PATH, "[]")) or sys.path
    os._exit(main(sys.argv[1:]))
