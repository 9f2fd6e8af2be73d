"""Maps on a node of four GPUs, as they were measured on four real ones; the conformance suite has only two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance.jobs import Controller, Job
from conformance.node import SoftNode
from conformance.record import Recording

WORDS = 4096


@pytest.fixture(scope="module")
def four(libraries: None) -> Iterator[SoftNode]:
    node = SoftNode(gpus=4, memory="256MiB")
    yield node
    node.close()


@pytest.fixture
def controller(four: SoftNode) -> Iterator[Controller]:
    made = Controller(four.prefix, dict(four.env), "controller", Recording()).init()
    yield made
    made.kill()


@pytest.fixture
def job(four: SoftNode) -> Iterator[Job]:
    """On GPU 0, with stamped memory."""
    made = Job(four.prefix, dict(four.env), "job", Recording()).start_up().load()
    made.memory = made.stamped(made.do("cuMemAlloc", 8 * WORDS), WORDS)
    yield made
    made.kill()


def pairs(words: str, controller: Controller) -> list[tuple[str, str]]:
    """ "ab ba cc dd": GPU 0 to 1, 1 to 0, the others stay."""
    return [
        (controller.uuids["abcd".index(word[0])], controller.uuids["abcd".index(word[1])]) for word in words.split()
    ]


@pytest.mark.parametrize(("words", "lands"), [("ab ba cc dd", 1), ("ab bc cd da", 1), ("ad ba cb dc", 3)])
def test_a_full_permutation_is_taken(words: str, lands: int, job: Job, controller: Controller) -> None:
    controller.cycle(job.pid, pairs(words, controller))
    assert controller.gpus_of(job.pid) == {lands}
    job.check_stamps()


@pytest.mark.parametrize("words", ["ab ba", "ab ba cc", "ab bb", "ab bc ca", "aa"])
def test_anything_shorter_is_refused(words: str, job: Job, controller: Controller) -> None:
    controller.suspend(job.pid)
    assert controller.restore(job.pid, pairs(words, controller)) == "INVALID_VALUE"
    assert controller.state(job.pid) == "CHECKPOINTED"
    controller.resume(job.pid)
    job.check_stamps()


def test_four_rotations_lead_back(job: Job, controller: Controller) -> None:
    places = []
    for _ in range(4):
        controller.cycle(job.pid, pairs("ab bc cd da", controller))
        places.append(controller.gpus_of(job.pid))
    assert places == [{1}, {2}, {3}, {0}]
    job.check_stamps()
