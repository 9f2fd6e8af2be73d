"""The victims themselves: each runs undisturbed to a good end, and notices what a bad restore would do to it."""

import pytest

SMALL = [
    "counter",
    "tree",
    "open_files",
    "sockets",
    "shm",
    "mp_queue",
    "mp_spawn",
    "mp_locks",
    "posix_mq",
    "epoll",
    "threads",
    "unlinked",
    "sysv",
]


@pytest.mark.parametrize("name", SMALL)
def test_victim_runs_to_a_good_end(start, name):
    victim = start(name)
    victim.goes_on(5)
    victim.finish(20)


def test_numpy_twins_agree_to_the_bit_and_another_seed_does_not(start):
    twins = [start("train_numpy", 40, 0.0, seed) for seed in (1, 1, 2)]
    for twin in twins:
        twin.ended_well()
    one, two, other = (twin.losses() for twin in twins)
    assert len(one) == 40
    assert one == two
    assert not set(one) & set(other)
