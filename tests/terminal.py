"""A terminal of a given size, and a program on it: what people see, wrapped where they see it wrapped."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][AB0]|\x1b\][^\x07]*\x07")


class Terminal:
    """A program on a pseudo-terminal, which is its controlling one.

    Attributes:
        seen: all that it has written there.
        process: the program.
    """

    def __init__(self, argv: Sequence[str], *, columns: int = 80, env: Mapping[str, str], cwd: str | None = None):
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        kept = {k: v for k, v in env.items() if k not in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR")}
        self.process = subprocess.Popen(
            argv,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**kept, "TERM": "xterm-256color"},
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - one system call, no lock
        )
        os.close(theirs)
        self.seen = ""

    def read(self, seconds: float, until: Callable[[str], bool] = lambda _: False) -> str:
        """Reads for so long, or until the text satisfies ``until`` or the program has closed the terminal."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not until(self.seen):
            if not select.select([self._fd], [], [], left)[0]:
                break
            try:
                data = os.read(self._fd, 65536)
            except OSError:  # EIO: nobody has the other side open
                break
            if not data:
                break
            self.seen += data.decode(errors="replace")
        return self.seen

    def end(self, seconds: float = 120) -> int:
        """Reads to the end of the program; its exit code."""
        self.read(seconds)
        return self.process.wait(timeout=60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lines(seen: str) -> list[str]:
    """What was written, without colours and movements, as lines."""
    return _CODES.sub("", seen).replace("\r\n", "\n").replace("\r", "\n").split("\n")
