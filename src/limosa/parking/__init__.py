"""The parked way: a preloaded library manages a job's device memory, to hold it aside and move it.

``preload`` starts a job with it; ``protocol.py`` has the messages between the library and Limosa, ``shim.py`` one
process's end of them. ``vault.py`` holds descriptors, ``mover.py`` copies; both are processes of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from limosa import start

WITHOUT = "LIMOSA_SHIM_WITHOUT"
_RAS = "NCCL_RAS_ENABLE"
"""NCCL listens on ports for it until the process ends: an image would need them, and the address, to be free."""

LIBRARY = Path(__file__).resolve().parents[1] / "native" / "shim" / "liblimosa_shim.so"


def preload(env: Mapping[str, str] | None = None, *, without: Sequence[str] = ()) -> dict[str, str]:
    """Return an environment (``env``, or the caller's) in which programs run under the shim, where it has been built.

    ``without`` is what the shim leaves alone: "bulk", "stack" (``operation/parked/bulk.py``), "ranks"
    (``operation/communicators/``). NCCL's RAS service is off where nobody has said otherwise.
    """
    found = dict(os.environ if env is None else env)
    if without:
        found[WITHOUT] = ",".join(without)
    if start.loadable(LIBRARY):
        others = [part for part in found.get("LD_PRELOAD", "").replace(":", " ").split() if part != str(LIBRARY)]
        found["LD_PRELOAD"] = ":".join([str(LIBRARY), *others])
        if "ranks" not in without:
            found.setdefault(_RAS, "0")
    return found
