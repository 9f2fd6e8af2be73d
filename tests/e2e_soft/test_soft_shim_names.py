"""The socket of a process under the shim across checkpoint and restore: its name is nobody's to take."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from soft_command import child_of, start

from limosa.parking.names import names_of
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

pytestmark = pytest.mark.criu
SMALL = ["--chunk", "4MiB"]
HAS = """
import os, socket, sys, time
os.setuid(65534)
names = []
for word in sys.argv[1:]:
    names.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    names[-1].bind("\\0" + word)
    names[-1].listen(8)
print("has them", flush=True)
time.sleep(300)
"""


def names(pid: int) -> set[str]:
    return {name.address for name in names_of(pid)}


def sockets(pid: int) -> int:
    """How many sockets a process has that are no connection."""
    found = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        found += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
    return found


def test_names_that_were_taken_meanwhile_keep_no_job_from_coming_back(parked: Any, tmp_path: Path) -> None:
    """They are in the image, and were to be read by everybody as long as the job ran. Twice over."""
    job = start(parked, "--mib", 16, "--partner")
    family, image = [job.pid, child_of(job)], tmp_path / "image"
    before, open_before = [names(pid) for pid in family], [sockets(pid) for pid in family]
    for _ in range(2):
        taken = [name.removeprefix("\0") for pid in family for name in names(pid)]
        parked.limosa("checkpoint", job.pid, "--output", image, *SMALL)
        job.until_gone()
        with subprocess.Popen([sys.executable, "-c", HAS, *taken], stdout=-1, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "has them\n"
            parked.says(0, "", "restore", image)
            for pid, had in zip(family, before, strict=True):
                with Shim(Identity.of(pid)) as shim:
                    assert shim.memories()
                assert names(pid).isdisjoint(had)
            other.kill()
        before = [names(pid) for pid in family]
        parked.limosa("rm", image)
    now = [sockets(pid) for pid in family]  # one was asking the other when they were counted first, perhaps
    assert all(a <= b for a, b in zip(now, open_before, strict=True)), f"what stood in for it is open: {now}"
    job.goes_on(2)
    assert parked.says(0, "", "move", job.pid, "--to", 1)["way"] == "parked"
    job.goes_on(2)
    job.finish()


def test_names_of_pids_that_somebody_has_keep_no_job_from_being_moved(parked: Any) -> None:
    """Two processes that had bound them all kept every new job of other users where it was."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squats:
        job = start(parked, "--mib", 16)
        squats.bind(f"\0limosa/shim/{job.pid}")
        assert parked.says(0, "", "move", job.pid, "--to", 1)["way"] == "parked"
        job.goes_on(2)
        job.finish()
