"""Forty of CRIU's own tests through Limosa; all of them beside bare CRIU: ``make test-zdtm``.

Each of these passes with bare CRIU (``docs/results``), so whatever fails is Limosa's. They are skipped where the source
cannot be fetched, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, wait

import pytest

from zdtm import source, suite
from zdtm.__main__ import prepare, workroom
from zdtm.play import play

pytestmark = [pytest.mark.criu, pytest.mark.network]

SAMPLE = [
    "chroot", "symlink", "console", "cow01", "cwd01", "deleted_unix_sock", "rmdir_open", "epoll", "eventfs00", "pty04",
    "fdt_shared", "fifo", "file_append", "file_locks01", "inotify00", "link10", "maps00", "maps04", "maps05",
    "memfd00", "opath_file", "pidfd_child", "pipe01", "posix_timers", "proc-self", "pstree", "pthread00", "pty00",
    "sigpending", "sk-unix-rel", "socket-ext", "socket-tcp-listen", "socket-tcp-skip-in-flight", "socket_icmp",
    "socket_queues", "stopped", "tty02", "unbound_sock", "unlink_mmap00", "zombie01",
]  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, object]]:
    try:
        zdtm = source.suite()
    except source.NoSource as error:
        pytest.skip(str(error))
    tests = [test for test in suite.read(zdtm, "static") if test.name in SAMPLE]
    assert source.build(zdtm, "static", [t.name for t in tests]) == {}
    with workroom() as scratch, ProcessPoolExecutor(2, initializer=prepare) as pool:
        beside = {t.name: pool.submit(play, zdtm, t, "limosa", scratch) for t in tests if not t.alone}
        wait(beside.values())
        with ProcessPoolExecutor(1, initializer=prepare) as one:
            yield beside | {t.name: one.submit(play, zdtm, t, "limosa", scratch) for t in tests if t.alone}


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(outcomes, name):
    outcome = outcomes[name].result(60)
    assert outcome.how == "pass", outcome.why
