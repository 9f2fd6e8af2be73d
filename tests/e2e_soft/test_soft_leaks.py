"""One job moved by the parked way again and again: nothing is left behind, in whatever process."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from leaks import grown, seen, too_much
from soft_command import start

TURNS = 50
MIB = 1 << 20
# Python takes memory by arenas of 1 MiB: one may fall into these turns (over 200 moves it is 1 MiB as well), and beside
# it the C library's heap grows by pages. A leak of 50 KiB a turn is over it, and so is a mapping every tenth turn.
JOB = {"gpu": 0, "RssAnon": 2 * MIB, "VmSize": 2 * MIB, "fds": 0, "maps": 4, "threads": 0}
# The others have threads, for a client each or to ask several at once. The C library keeps a thread's stack (8 MiB, two
# mappings) and its heap (64 MiB of addresses) for the next one, as many as ever were there at once.
THREADED = JOB | {"VmSize": 128 * MIB, "maps": 8}
MOVES = """
import json, os, sys
sys.path.insert(0, sys.argv[3])
from leaks import seen
from limosa import operation
from limosa.gpu import inventory
job = int(sys.argv[1])
for turn in range(int(sys.argv[2])):
    (outcome,) = operation.move(job, to=str(1 - turn % 2), timeout=120)
    assert outcome.result is not None and outcome.result.way == "parked", outcome
    if turn % 2:
        found = {"job": seen(job), "limosa": seen(os.getpid())}
        found["gpus"] = {f"gpu {gpu.index}": gpu.memory_used for gpu in inventory().gpus}
        for name in os.listdir("/proc"):
            try:
                if not name.isdigit() or os.readlink(f"/proc/{name}/ns/mnt") != os.readlink("/proc/self/ns/mnt"):
                    continue
                comm = open(f"/proc/{name}/comm").read().strip()
                if comm in ("limosa-vault", "limosa-mover"):
                    found[comm] = seen(int(name))
            except OSError:
                pass
        print(json.dumps(found), flush=True)
"""


def test_fifty_moves_leave_nothing(soft: Any) -> None:
    node = soft(gpus=2, memory="256MiB")
    job = start(node, "--mib", 8)
    said = node.python(MOVES, job.pid, TURNS, str(Path(__file__).parents[1]), limit=280)
    samples = [json.loads(line) for line in said.stdout.splitlines()]
    assert len(samples) == TURNS // 2
    found = grown(samples)
    assert {"limosa-vault: fds", "limosa-mover: fds", "job: maps", "gpus: gpu 0"} <= set(found), found
    of_job = {name: more for name, more in found.items() if name.startswith(("job: ", "gpus: "))}
    assert not too_much(of_job, JOB), found
    assert not too_much({name: found[name] for name in found.keys() - of_job.keys()}, THREADED), found
    job.goes_on(2)
    job.finish()


def test_a_leak_would_be_seen() -> None:
    held: list[int] = []
    samples = []
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            held.append(os.open("/dev/null", os.O_RDONLY))
            stack.callback(os.close, held[-1])
            samples.append({"us": seen(os.getpid())})
    assert too_much(grown(samples)) == {"us: fds": grown(samples)["us: fds"]}
