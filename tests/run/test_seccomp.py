"""io_uring is answered as by a kernel without it; everything else, and other ABIs, pass."""

from __future__ import annotations

import errno
import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support import VICTIMS

from limosa.process import seccomp
from limosa.process.launch import launch


def evaluate(program, nr, arch):
    """Runs a filter on one call the way the kernel does, as far as ours goes (linux/filter.h)."""
    data = struct.pack("=iIQ6Q", nr, arch, 0, *[0] * 6)
    accumulator, at = 0, 0
    while True:
        code, true, false, operand = program[at]
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, operand)[0]
        elif code == 0x15:
            at += true if accumulator == operand else false
        else:
            assert code == 0x06
            return operand


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_only_io_uring_setup_of_the_native_abi_is_denied(machine):
    program, arch = seccomp.program(machine), seccomp.AUDIT_ARCH[machine]
    denied = 0x00050000 | errno.ENOSYS
    assert evaluate(program, 425, arch) == denied
    for nr in (*range(425), *range(426, 500), 425 | 0x40000000):
        assert evaluate(program, nr, arch) == 0x7FFF0000
    for other in (0x40000003, 0x40000028, 0xC00000F3):  # i386, arm, riscv64
        assert evaluate(program, 425, other) == 0x7FFF0000


def test_an_unknown_architecture_is_said():
    with pytest.raises(NotImplementedError, match="vax"):
        seccomp.program("vax")
    assert platform.machine() in seccomp.AUDIT_ARCH


def run_victim(tmp_path: Path, **options: bool) -> str:
    (tmp_path / "stop").touch()
    launched = launch([sys.executable, str(VICTIMS / "io_uring.py"), str(tmp_path)], tmp_path / "log", **options)
    assert os.waitpid(launched.identity.pid, 0)[1] == 0
    return (tmp_path / "log").read_text().splitlines()[0]


def test_the_job_does_not_get_an_io_uring(tmp_path):
    assert run_victim(tmp_path) == "io_uring -1 ENOSYS"


def test_no_seccomp_leaves_it_to_the_kernel(tmp_path):
    kernel = Path("/proc/sys/kernel/io_uring_disabled")
    disabled = kernel.exists() and kernel.read_text().strip() != "0"
    assert run_victim(tmp_path, seccomp=False) == ("io_uring -1 EPERM" if disabled else "io_uring open ok")


LAUNCH = """
import os, sys
from limosa.process.launch import launch
launched = launch(["grep", "NoNewPrivs", "/proc/self/status"], sys.argv[1])
os.waitpid(launched.identity.pid, 0)
print(*[r.id for r in launched.warnings])
"""


@pytest.mark.parametrize("privileged", [True, False])
def test_no_new_privs_is_set_and_said_only_where_the_kernel_wants_it(tmp_path, privileged):
    if privileged and os.geteuid() != 0:
        pytest.skip("needs CAP_SYS_ADMIN")
    drop = [] if privileged or os.geteuid() != 0 else ["setpriv", "--bounding-set=-sys_admin"]
    command = [*drop, sys.executable, "-c", LAUNCH, str(tmp_path / "log")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert said == ([] if privileged else ["no-new-privs"])
    assert (tmp_path / "log").read_text().split() == ["NoNewPrivs:", "0" if privileged else "1"]
