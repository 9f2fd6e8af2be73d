"""A warm process that forks others: victims, or controllers that run ``limosa``. Costs no start of Python each time.

Lines of JSON on standard input are orders; lines on standard output tell. A victim is forked twice, so that whoever
adopts orphans becomes its parent, as with a job started detached. A controller stays our child and its end is told.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from typing import Any

STDOUT = 1


def say(**what: Any) -> None:
    """One line to the room; short enough to be written in one piece."""
    os.write(STDOUT, json.dumps(what).encode() + b"\n")


def victim(order: dict[str, Any]) -> None:
    """Starts a victim and tells its pid."""
    read, write = os.pipe()
    if os.fork() == 0:
        pid = os.fork()
        if pid:
            os.write(write, b"%d" % pid)
            os._exit(0)
        os.setsid()
        log = os.open(f"{order['folder']}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open("/dev/null", os.O_RDONLY)
        for fd, copy in ((null, 0), (log, 1), (log, 2)):
            os.dup2(fd, copy)
        os.closerange(3, 1024)
        os.chdir(order["folder"])
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from campaign.victim import main as run

        try:
            run(order["shape"], order["folder"], order["ptx"], order["first"])
        finally:
            os._exit(4)
    os.close(write)
    told = b""
    while chunk := os.read(read, 64):
        told += chunk
        if told:
            break
    os.close(read)
    os.wait()
    say(victim=int(told))


def controller(order: dict[str, Any], own: int) -> None:
    """Runs a command line of ``limosa`` in a child and tells how it ended."""
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        from campaign.controller import run as command

        os.close(0)
        os.open("/dev/null", os.O_RDONLY)
        out = os.open(f"{order['folder']}/stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        err = os.open(f"{order['folder']}/stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            command(order, own)
        finally:
            os._exit(99)
    say(controller=pid)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    say(ended=status, seconds=time.monotonic() - begun)


def main(kind: str) -> None:
    """Serves orders until standard input ends."""
    if kind == "victims":
        from cuda.bindings import driver

        import campaign.victim

        assert driver
    else:
        import campaign.controller

        campaign.controller.load()
    gc.collect()
    gc.freeze()
    own = os.dup(STDOUT)
    os.set_inheritable(own, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    buffer = b""
    say(ready=os.getpid())
    while chunk := os.read(0, 1 << 16):
        buffer += chunk
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            order = json.loads(line)
            if kind == "victims":
                victim(order)
            else:
                controller(order, own)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1])
