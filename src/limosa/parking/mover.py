"""The mover from Limosa's side: started for an operation, told what to make, map and copy."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from limosa.errors import FailedUndone, NoRoomOnGpu
from limosa.parking.mover_main import SEARCH_PATH
from limosa.parking.packets import MOST, receive, send
from limosa.parking.vault import spawn

CALL_SECONDS = 60.0
SLOWEST_PIN = 0.5e9
"""Bytes a second; 2.2 to 2.6e9 were measured."""


class Mover:
    """A mover of our own, which ends when we do.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process: subprocess.Popen[bytes] = spawn(
                "mover_main.py", SEARCH_PATH, [str(theirs.fileno())], fd=theirs.fileno()
            )

    def prepare(self, gpus: Sequence[str]) -> None:
        """Have contexts on these GPUs (UUIDs) ready."""
        self._ask({"verb": "prepare", "gpus": list(gpus)})

    def take(self, key: str, fds: Sequence[int], sizes: Sequence[int], gpu: str) -> None:
        """Have it map memory, to be used from a GPU; the descriptors stay ours."""
        for start in range(0, max(1, len(fds)), MOST):
            message = {"verb": "take", "key": key, "sizes": list(sizes), "gpu": gpu, "more": start + MOST < len(fds)}
            self._send(message, fds[start : start + MOST])
        self._receive(CALL_SECONDS)

    def make(self, key: str, sizes: Sequence[int], gpu: str) -> list[int]:
        """Have it make memory on a GPU; returns descriptors, which are ours to close.

        Raises:
            NoRoomOnGpu: there is none.
        """
        self._send({"verb": "make", "key": key, "sizes": list(sizes), "gpu": gpu})
        found: list[int] = []
        while True:
            message, fds = self._receive(CALL_SECONDS)
            found += fds
            if not message["more"]:
                return found

    def copy(self, source: str, target: str, gpu: str, limit: float) -> float:
        """Have it copy all that one key holds to what another holds; returns seconds."""
        return float(self._ask({"verb": "copy", "source": source, "target": target, "gpu": gpu}, limit)["seconds"])

    def arena(self, key: str, fd: int, bytes_: int, gpu: str) -> None:
        """Have it map, and pin, host memory; the descriptor stays ours."""
        self._send({"verb": "arena", "key": key, "bytes": bytes_, "gpu": gpu}, [fd])
        self._receive(CALL_SECONDS + bytes_ / SLOWEST_PIN)

    def host(self, way: str, key: str, arena: str, offset: int, *, gpu: str, limit: float) -> float:
        """Have it copy all of a key to the arena ("out") or back ("in"); returns seconds."""
        message = {"verb": "host", "way": way, "key": key, "arena": arena, "offset": offset, "gpu": gpu}
        return float(self._ask(message, limit)["seconds"])

    def drop(self, key: str) -> None:
        """Have it let go of a key."""
        self._ask({"verb": "drop", "key": key})

    def close(self) -> None:
        """Let it end; what it held and nobody else holds is gone."""
        self._connection.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Mover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, message: dict[str, Any], limit: float = CALL_SECONDS) -> dict[str, Any]:
        self._send(message)
        return self._receive(limit)[0]

    def _send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        self._connection.settimeout(CALL_SECONDS)
        try:
            send(self._connection, message, fds)
        except OSError as error:
            raise FailedUndone(f"the mover, which copies device memory, has gone ({error})") from error

    def _receive(self, limit: float) -> tuple[dict[str, Any], list[int]]:
        self._connection.settimeout(limit)
        try:
            message, fds = receive(self._connection)
        except (EOFError, OSError) as error:
            text = str(error) or "it was killed"
            raise FailedUndone(f"the mover, which copies device memory, does not answer ({text})") from error
        if "error" in message:
            for fd in fds:
                os.close(fd)
            if message.get("result") == "CUDA_ERROR_OUT_OF_MEMORY":
                raise NoRoomOnGpu(detail="the destination filled up while memory was made there")
            raise FailedUndone(f"the mover: {message['error']}")
        return message, fds
