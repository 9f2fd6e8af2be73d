"""libuv gets no io_uring where UV_USE_IO_URING=0 says so: newer ones look at that for some of their rings alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ELSE = "mmap abcdefgh\npid right\nwrite 8\nread 8 abcdefgh\nbad -1 EBADF\nchild 7\nframes enough\n"
"""What a program hears of other calls."""
STORE = """
import os, torch.distributed
store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, use_libuv=True)
store.set("a", "b")
files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
kinds = [os.readlink(file) for file in files if os.path.lexists(file)]
print(store.get("a").decode(), "anon_inode:[io_uring]" in kinds)
"""


def says(argv: list[str | Path], **env: str) -> str:
    env = {**{name: value for name, value in os.environ.items() if name != "UV_USE_IO_URING"}, **env}
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


@pytest.fixture
def program(compiled: Callable[..., Path]) -> Path:
    return compiled("rings.c", "-D_GNU_SOURCE")


def test_no_ring_is_set_up_where_libuvs_switch_is_off(program: Path, library: Path) -> None:
    assert says([program], LD_PRELOAD=str(library), UV_USE_IO_URING="0") == f"ring refused ENOSYS\n{ELSE}"


def test_the_kernel_answers_in_any_other_case(program: Path, library: Path) -> None:
    kernels = says([program])
    assert kernels.endswith(ELSE)
    assert says([program], LD_PRELOAD=str(library)) == kernels
    assert says([program], LD_PRELOAD=str(library), UV_USE_IO_URING="1") == kernels
    assert says([program], UV_USE_IO_URING="0") == kernels  # it is libuv's, not the kernel's


def test_the_store_of_pytorch_does_without(program: Path, library: Path) -> None:
    """It opens one where it can, whatever the switch says: that is why the shim stands between."""
    store = [sys.executable, "-c", STORE]
    assert says(store, UV_USE_IO_URING="0") == f"b {says([program]).startswith('ring open')}\n"
    assert says(store, UV_USE_IO_URING="0", LD_PRELOAD=str(library)) == "b False\n"
