"""What the shim costs a job of several ranks that nobody moves: with it and without, in turns, in one run.

    python bench/nccl_cost.py [--quads 9] [--only collective,ddp,fsdp] [--json FILE] [--backend gloo]

collective: nanoseconds that the shim adds to ncclAllReduce. ddp, fsdp: a step of GPT training (12 layers of 768, for
fsdp of 2048; bf16, AdamW, 16 × 1024 tokens a rank) on two ranks under ``limosa run`` and ``limosa run --no-shim``. How
they are compared is ``cost.py``'s. Exit code 0 where all is within the limits, 1 where not, 3 where something could
not be measured.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "src")]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "src"), *filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
)

from cost import Side, compare, told, unmeasured  # noqa: E402
from jobs import end_helpers  # noqa: E402
from nccl_jobs import Asked  # noqa: E402

from limosa.native.build import build_shim, compilers  # noqa: E402

ALL = "collective,ddp,fsdp"


def library() -> Path:
    """libnccl as PyTorch has it."""
    for folder in map(Path, sys.path):
        for found in sorted(folder.glob("nvidia/nccl/lib/libnccl.so.2")):
            return found
    raise OSError("there is no libnccl.so.2 in nvidia/nccl/lib")


def collective(folder: str, quads: int) -> dict[str, Any]:
    """A call of ncclAllReduce."""
    program, source, nccl = f"{folder}/cost_nccl", Path(__file__).with_name("cost_nccl.c"), library()
    argv = [*compilers()[0], "-O2", "-o", program, str(source), str(nccl), f"-Wl,-rpath,{nccl.parent}", "-ldl"]
    subprocess.run(argv, check=True, timeout=60)
    sides = [Side([program], shim, pin=True) for shim in (True, False)]
    try:
        return compare("collective", sides, "200000", 3 * quads)
    finally:
        for side in sides:
            side.end()


def training(kind: str, folder: str, quads: int, more: Sequence[str]) -> dict[str, Any]:
    """A step; both jobs live side by side, and only one of them computes."""
    sides: list[Asked] = []
    try:
        for name, run in (("with", ()), ("without", ("--no-shim",))):
            sides.append(Asked(f"{kind}-{name}", Path(folder), kind, run, more))
        # Of three steps each, one side differed from itself by 10 % (two H200, 2026-11-27).
        steps = "3" if "gloo" in more else {"ddp": "20", "fsdp": "10"}[kind]
        return compare(kind, sides, steps, 2 * quads)
    finally:
        for side in sides:
            side.end()


def cost(quads: int, only: str, more: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows as :func:`cost.compare` makes them."""
    rows: list[dict[str, Any]] = []
    problem = build_shim()
    with tempfile.TemporaryDirectory(prefix="limosa-cost-") as folder:
        for what in only.split(","):
            try:
                if problem is not None:
                    raise OSError(problem)
                rows.append(collective(folder, quads) if what == "collective" else training(what, folder, quads, more))
            except (OSError, ValueError, RuntimeError, subprocess.SubprocessError, IndexError) as error:
                rows.append(unmeasured(what, error))
    return rows


def main() -> int:
    """Measure, say it, write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quads", type=int, default=9)
    parser.add_argument("--only", default=ALL)
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--json")
    options = parser.parse_args()
    own = "LIMOSA_RUNTIME_DIR" not in os.environ
    if own:
        os.environ["LIMOSA_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="limosa-run-")
    try:
        rows = cost(options.quads, options.only, ["--backend", options.backend])
    finally:
        if own:
            end_helpers(os.environ["LIMOSA_RUNTIME_DIR"])
    return told(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
