"""What the conformance tests share: the node, a controller, jobs, and who may run beside whom.

pytest itself stays outside of the node; every process that calls the driver is started in it (node.py) and asked over
a pipe (remote.py). With LIMOSA_CONFORMANCE=real there is no node but the machine and its own driver.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.counting import count
from conformance.jobs import MIB, WORDS, Controller, Job
from conformance.node import REAL, Node, SoftNode
from conformance.pool import Pool
from conformance.record import Recording

recording = Recording()
Start = Callable[..., Job]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: no other test of this suite may run beside it")
    config.addinivalue_line("markers", "hazard: may leave a process that nothing can help; run last")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is this suite's, keep together what shares a job, and run what may do damage last."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("conformance")
            if REAL:
                item.add_marker("gpu")
            shared = getattr(item, "callspec", None) and {"state", "target", "visible"} & set(item.callspec.params)
            for name in shared or ():
                item.add_marker(pytest.mark.xdist_group(f"{name}-{item.callspec.params[name]}"))
    items.sort(key=lambda item: bool(item.get_closest_marker("hazard")))


def pytest_report_collectionfinish(items: list[pytest.Item]) -> str:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    return f"conformance: {count(ours)} checks in {len(ours)} tests"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write down how each test went."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or report.failed:
        why = {"why": str(call.excinfo.value)[:1500], "when": report.when} if call.excinfo else {}
        recording(
            {
                "test": item.nodeid.rpartition("/")[2],
                "outcome": report.outcome,
                "seconds": round(call.duration, 3),
                **why,
            }
        )


@pytest.fixture(autouse=True)
def runtime() -> None:
    """No runtime folder is needed here, and its mark would end what several tests share (see tests/conftest.py)."""


# --- who may run beside whom ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def locks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    opened = tuple(os.open(shared / name, os.O_RDWR | os.O_CREAT) for name in ("door", "room"))
    yield opened[0], opened[1]
    for descriptor in opened:
        os.close(descriptor)


@pytest.fixture(autouse=True)
def turn(request: pytest.FixtureRequest, locks: tuple[int, int]) -> Iterator[None]:
    """Tests run side by side, except those marked "alone": they wait at the door until the room is empty."""
    recording.test = request.node.nodeid.rpartition("/")[2]
    door, room = locks
    if REAL:  # each process that runs tests has a software node of its own
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
    yield
    fcntl.flock(room, fcntl.LOCK_UN)


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """Two GPUs: software ones, each process that runs tests having its own; or the machine's."""
    made = Node() if REAL else SoftNode()
    yield made
    made.close()


@pytest.fixture(scope="session")
def controllers(node: Node) -> Iterator[list[Controller]]:
    """The one controller of all tests, replaced where a call of it has not come back."""
    made: list[Controller] = []
    yield made
    for one in made:
        one.kill()


@pytest.fixture
def controller(turn: None, node: Node, controllers: list[Controller]) -> Iterator[Controller]:
    """A process that has run cuInit, has no context, and checkpoints others."""
    if not controllers or not controllers[0].alive():
        controllers[:] = [Controller(node.prefix, dict(node.env), "controller", recording).init()]
    yield controllers[0]
    if not controllers[0].idle():
        controllers.pop().kill()


@pytest.fixture
def another_controller(turn: None, node: Node) -> Iterator[Callable[[], Controller]]:
    """Starts a second controller, ended with the test."""
    made: list[Controller] = []

    def go() -> Controller:
        made.append(Controller(node.prefix, dict(node.env), f"controller{len(made) + 2}", recording).init())
        return made[-1]

    yield go
    for one in made:
        one.kill()


@pytest.fixture
def start(turn: None, node: Node) -> Iterator[Start]:
    """Starts a process that has not called the driver yet: ``start()``, ended with the test.

    Args of the function: ``via`` (a command to put before the program), environment variables (None: unset).
    """
    made: list[Job] = []

    def go(via: tuple[str, ...] = (), **env: str | None) -> Job:
        made.append(Job([*node.prefix, *via], {**node.env, **env}, f"job{len(made)}", recording))
        return made[-1]

    yield go
    for job in made:
        job.kill()


@pytest.fixture
def job(start: Start) -> Job:
    """A job of the test's own, with a context on GPU 0 and the kernels loaded."""
    return start().start_up().load()


@pytest.fixture(scope="session")
def pool(node: Node) -> Iterator[Pool]:
    def make(kind: str) -> Job:
        name, _, value = kind.partition("=")
        job = Job(node.prefix, {**node.env, name: value} if value else dict(node.env), "pooled", recording)
        if kind == "initialised":
            return job.init()
        job.start_up().load()
        job.memory = job.stamped(job.do("cuMemAlloc", 8 * WORDS), WORDS)
        return job

    made = Pool(make)
    yield made
    made.close()


@pytest.fixture
def job_in(controller: Controller, pool: Pool) -> Iterator[Start]:
    """A job in a state (pool.STATES); tests leave it as they found it or not, as they like.

    Args of the function: the state; a kind of job: "" or "VARIABLE=value", what it has in its environment.
    """
    taken: list[tuple[str, Job, str]] = []

    def go(state: str, kind: str = "") -> Job:
        taken.append((state, pool.take(state, controller, kind), kind))
        return taken[-1][1]

    yield go
    for state, job, kind in taken:
        pool.give_back(state, job, controller, kind)


@pytest.fixture(scope="session")
def workers(node: Node) -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for one in made:
        one.kill()


@pytest.fixture
def work(turn: None, node: Node, workers: list[Job]) -> Iterator[Job]:
    """A job that tests of ordinary calls share; each leaves it with the context current and nothing under way."""
    if not workers:
        workers.append(Job(node.prefix, dict(node.env), "work", recording).start_up().load())
    job = workers[0]
    yield job
    well = job.alive() and job.idle() and job.says("cuCtxSetCurrent", job.context) == "SUCCESS"
    if not well or job.says("cuCtxSynchronize", limit=5) != "SUCCESS":
        workers.pop().kill()


@pytest.fixture
def memory(work: Job) -> Iterator[int]:
    """One MiB of device memory of ``work``."""
    address = work.do("cuMemAlloc", MIB)
    yield int(address)
    work.says("cuMemFree", address)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"conformance: {'the real driver' if REAL else 'software GPUs'}")
