"""Does the shim know every function that has to do with memory and that a program called, or asked for?

python tests/shim/known.py PID…      # of processes that run under it: exit code 1 where one is not known
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from limosa.parking.answers import Called
from limosa.parking.protocol import Role
from limosa.parking.shim import Shim
from limosa.process.identity import Identity

# How names of functions that make, give away or find memory are built; those of drivers to come, too.
MEMORY = re.compile(r"Mem|Alloc|Array|Pool|Multicast|Ipc|Import|Export|Pointer|Buffer|Graphics")


def not_known(called: Iterable[Called]) -> list[str]:
    """Functions of memory that were called and are not in the list, or that it has for nothing to do with memory.

    What was only asked for does not count: the runtime asks for all that it could use.
    """
    odd = (Role.UNKNOWN, Role.PASS)
    return [one.name for one in called if one.called and one.role in odd and MEMORY.search(one.name)]


def of(pid: int) -> list[Called]:
    """All that a process called or asked for."""
    with Shim(Identity.of(pid)) as shim:
        return shim.called()


if __name__ == "__main__":
    found = {pid: not_known(of(int(pid))) for pid in sys.argv[1:]}
    for pid, names in found.items():
        print(pid, *names)
    raise SystemExit(any(found.values()))
