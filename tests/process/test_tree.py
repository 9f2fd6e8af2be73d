"""The job tree, also while it grows and shrinks; and processes grouped into jobs."""

from __future__ import annotations

import os
import signal
import time

import pytest
from support import quickest

from limosa.errors import NoSuchProcess, PidReused
from limosa.process.identity import Identity, read_stat
from limosa.process.tree import group_by_topmost, job_tree


def test_the_tree_has_all_descendants_each_parent_first(job):
    victim = job(
        "for _ in range(2):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        for _ in range(2): os.fork()\n        time.sleep(60)\ntime.sleep(0.3)"
    )
    end = time.monotonic() + 60  # the children's children are there when they are there
    while len(job_tree(victim.identity)) < 9 and time.monotonic() < end:
        time.sleep(0.01)
    tree = job_tree(victim.identity)
    assert len(tree) == 1 + 2 * 4
    assert tree[0] == victim.identity
    seen = set()
    for identity in tree:
        assert identity == victim.identity or read_stat(identity.pid).ppid in seen
        seen.add(identity.pid)


def test_zombies_are_left_out(job):
    victim = job("p = os.fork()\nif p == 0: os._exit(0)\nos.waitid(os.P_PID, p, os.WEXITED | os.WNOWAIT)")
    assert job_tree(victim.identity) == [victim.identity]


def test_a_tree_that_forks_all_the_time_is_read_and_its_lasting_children_are_there(job):
    victim = job(
        "kept = [os.fork() for _ in range(3)]\n"
        "if 0 in kept: time.sleep(60)\n"
        "open(folder + '/ready', 'w').close()\n"
        "while True:\n    p = os.fork()\n    if p == 0: os._exit(0)\n    os.waitpid(p, 0)"
    )
    direct = {pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent(pid) == victim.pid}
    assert quickest(lambda: job_tree(victim.identity), 2) < 2
    for _ in range(10):
        tree = {identity.pid for identity in job_tree(victim.identity)}
        assert victim.pid in tree
        assert len(tree & direct) >= 3


def parent(pid: int) -> int:
    try:
        return read_stat(pid).ppid
    except NoSuchProcess:
        return 0


def test_the_root_is_checked(job):
    victim = job("")
    identity = victim.identity
    with pytest.raises(PidReused):
        job_tree(Identity(identity.pid, identity.start_time + 1))
    os.kill(victim.pid, signal.SIGKILL)
    victim.process.wait()
    with pytest.raises(NoSuchProcess):
        job_tree(identity)


#    1 ── 10 (run) ── 11 (agent) ── 12, 13 (ranks)      20 ── 21 (CUDA) ── 22 (CUDA)      30 (CUDA)
PARENTS = {10: 1, 11: 10, 12: 11, 13: 11, 20: 1, 21: 20, 22: 21, 30: 1}


def test_processes_are_grouped_under_their_topmost_ancestor():
    assert group_by_topmost({12, 13, 21, 22, 30}, set(), PARENTS) == {12: [12], 13: [13], 21: [21, 22], 30: [30]}
    assert group_by_topmost({12, 13, 21, 22, 30}, {10, 20}, PARENTS) == {10: [12, 13], 20: [21, 22], 30: [30]}
    assert group_by_topmost({11, 12, 13}, set(), PARENTS) == {11: [11, 12, 13]}
    assert group_by_topmost(set(), {10}, PARENTS) == {}


def test_a_parent_loop_in_a_racy_snapshot_ends():
    assert group_by_topmost({1, 2}, set(), {1: 2, 2: 1}) in ({1: [2], 2: [1]}, {1: [1, 2]}, {2: [1, 2]})


def test_grouping_reads_proc_where_no_snapshot_is_given(job):
    victim = job("p = os.fork()\nif p == 0: time.sleep(60)\nopen(folder + '/child', 'w').write(str(p))")
    child = int((victim.folder / "child").read_text())
    assert group_by_topmost({child}, {victim.pid}) == {victim.pid: [child]}
