"""nft in a network whose tables are somebody else's to make."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from limosa.process.criu import network
from limosa.process.criu.find import find

pytestmark = [pytest.mark.root, pytest.mark.criu, pytest.mark.timeout(300)]
TABLES, AT_ONCE = 2500, 500
GIB = 1 << 20  # in KiB


@pytest.mark.parametrize(
    "call", [network.open_again, lambda criu, pid: network.shut(criu, pid, "limosa-x-1")], ids=["open", "shut"]
)
def test_what_nft_takes_does_not_grow_with_a_containers_tables(call: Callable[..., None]) -> None:
    """It took half a MiB for each, out of the container's memory limit: 5 GiB were seen."""
    criu = find()
    assert criu.nft is not None
    holder = subprocess.Popen(["unshare", "--net", "sleep", "100"])
    try:
        own = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == own:
            time.sleep(0.01)
        for first in range(0, TABLES, AT_ONCE):
            made = "".join(f"add table inet t{first + i}\n" for i in range(AT_ONCE))
            enter = ["nsenter", f"--net=/proc/{holder.pid}/ns/net", *criu.nft, "-f", "-"]
            subprocess.run(enter, input=made, text=True, check=True)
        child = os.fork()
        if not child:
            refused = False
            try:
                call(criu, holder.pid)
            except network.NetworkError:
                refused = True
            os._exit(not refused or resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > GIB)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        holder.kill()
        holder.wait()
