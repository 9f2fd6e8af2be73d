"""A handle of a communicator is never given to another one, wherever libnccl and the shim's records come to lie."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from limosa.native.build import SHIM


def test_no_handle_is_given_out_twice(compiled: Callable[..., Path]) -> None:
    program = compiled("handles.c", f"-I{SHIM}", "-D_GNU_SOURCE", "-lpthread")
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stdout + done.stderr
