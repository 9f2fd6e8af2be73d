"""Each log is what a CRIU really wrote when it was brought to fail so (shortened around its errors)."""

from __future__ import annotations

from pathlib import Path

import pytest

from limosa.process.criu.log import TAKEN, cause

LOGS = Path(__file__).with_name("logs")
EXPECTED = {
    "cwd-missing": ("file-missing", "/home/job/cwd, which the job had open, is not there any more"),
    "device": ("device", "descriptor 3, chr 10:237"),
    "external-unix": ("external-unix", "unix socket to a process outside of the job"),
    "file-lock": ("file-lock", "--file-locks"),
    "file-missing": ("file-missing", "/home/job/log"),
    "ghost-limit": ("ghost-limit", "3145728 bytes"),
    "image-cut": ("image-damaged", "cut off"),
    "inventory-missing": ("image-damaged", "missing or damaged"),
    "io-uring": ("io-uring", "io_uring"),
    "kernel-sockopt-4.1.1": ("kernel-sockopt", "too old for this kernel (socket option 1:16)"),
    "kernel-vdso-3.17": ("kernel-vdso", "too old for this kernel"),
    "kvm": ("device", "descriptor 3, chr 10:232"),
    "link-remap": ("link-remap", "--link-remap"),
    "pid-taken": ("pid-taken", TAKEN),
    "port-taken": ("port-taken", "a port that the job listened on"),
    "shell-job": ("shell-job", "--shell-job"),
    "size-changed": ("size-changed", "/home/job/log has 7 bytes, it had 3"),
    "sysv-shm": ("sysv-ipc", "System V shared memory"),
    "tcp-established": ("tcp-established", "--tcp-established keeps it"),
    "thread-taken": ("pid-taken", TAKEN),
    "terminal": ("terminal", "a terminal open whose other side is outside"),
    "traced": ("traced", "a debugger holds it"),
}


def test_every_log_is_in_the_table_of_this_test():
    assert {path.stem for path in LOGS.glob("*.log")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_cause_of_a_real_log(name):
    kind, part = EXPECTED[name]
    found = cause((LOGS / f"{name}.log").read_text(), 1)
    assert found.kind == kind
    assert part in found.text
    assert "Error (" not in found.text


def test_harmless_lines_alone_are_no_cause():
    noise = "(00.03) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"
    assert cause(noise, 1).text == "it ended with status 1, and its log names no error"
    assert cause(noise, -9).kind == "killed"


def test_an_unknown_error_is_told_in_criu_s_words():
    log = "(00.030000)     42: Error (criu/odd.c:7): odd: the {moon} is too low\n"
    assert cause(log, 1).text == cause(log, 1).raw == "odd: the {moon} is too low"


def test_what_it_says_before_it_has_a_log_is_the_cause():
    assert cause("unrecognized option: --odd\n", 1).text == "it ended with status 1: unrecognized option: --odd"
