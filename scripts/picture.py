"""Records a session in a terminal, really run, and draws it: docs/picture.svg.

python scripts/picture.py docs/picture.svg              as root: on two software GPUs, which the picture says
python scripts/picture.py --real docs/picture.svg       on two GPUs of this machine

The job is the demo's program on device memory; COMMAND... after -- is another one.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS = 88
SESSION = ("limosa ps", "limosa move train --to 1", "limosa suspend train", "limosa ps", "limosa resume train --to 0")
_FACES = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def limosa(*arguments: str) -> list[str]:
    """The command line of this Python's Limosa."""
    return [sys.executable, "-m", "limosa", *arguments]


def seen(argv: list[str]) -> str:
    """What a program writes on a terminal, colours and all, without the display that it takes away again."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=env)
    os.close(theirs)
    text = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:
            break
        if not data:
            break
        text += data
    os.close(ours)
    if process.wait() != 0:
        raise SystemExit(f"{shlex.join(argv)} exited {process.returncode}: {text.decode()}")
    return text.decode().replace("\r\n", "\n")


def draw(out: Path, job: list[str], title: str) -> None:
    """Run the session beside a job, and write what was seen."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="256")
        os.chdir(folder)
        started = subprocess.run([*limosa("run", "-q", "-d", "--name", "train", "--"), *job], check=False)
        if started.returncode:
            raise SystemExit(started.returncode)
        try:
            time.sleep(4)
            for line in SESSION:
                console.print(Text.assemble(("$ ", "bold green"), (line, "bold")))
                console.print(Text.from_ansi(seen(limosa(*shlex.split(line)[1:]))), end="\n")
                time.sleep(0.5)
        finally:
            subprocess.run(limosa("stop", "train", "--kill", "-q"), check=False, stdout=subprocess.DEVNULL)
    svg = console.export_svg(title=title, theme=MONOKAI)
    out.write_text(_FACES.sub("", svg))  # no font from elsewhere: the reader's own will do


def main() -> None:
    """Draw on real GPUs, or in a node of software ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("job", nargs="*", default=["python3", "-m", "limosa.demo.compute", ".", "--steps", "100000"])
    chosen = parser.parse_args()
    out = chosen.out.absolute()
    if not chosen.real and not chosen.inside:
        again = [sys.executable, os.path.abspath(__file__), "--inside", str(out), "--", *chosen.job]
        os.chdir("/")  # -m takes code from where it is
        os.execv(  # noqa: S606 - the same Python
            sys.executable, limosa("softgpu", "--gpus", "2", "--memory", "4GiB", "--", *again)
        )
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    draw(out, chosen.job, "limosa" if chosen.real else "limosa, on two software GPUs (no GPU in this machine)")


if __name__ == "__main__":
    main()
