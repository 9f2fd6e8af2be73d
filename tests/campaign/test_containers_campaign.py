"""What CI runs of the campaign of containers: more than 100 faulted runs, every operation, every kind of fault.

``make faults WAY=containers`` runs all of it; a failure here names the line that replays it.
"""

from __future__ import annotations

import os

import pytest
from containers.engines import engines

from campaign import cases, containers
from campaign.__main__ import spread
from campaign.twice import part, points_are_known, run_and_replay, run_what_failed_once

COUNTS = {"runc": 54, "runc-shim": 20, "podman": 8, "podman-shim": 3, "containerd": 10, "containerd-shim": 4}
PODMAN_ALONE, SHIM_ALONE, SOCKET_ALONE = 10, 8, 4
CHUNKS = 4
SEED = int(os.environ.get("LIMOSA_CAMPAIGN_SEED", "1"))

FOUND = (
    "recover-exchanged/runc/call.restore.0/after-999",
    "recover-exchanged/runc/call.state.1/state-1",
    "restore/runc/run/none",
    "recover-writing/runc/run/limosa-nofile.0",
    "checkpoint/podman/point.after-note-post-dump-done.0/restarted+kill-both",
    "restore-to/runc/point.during-restore.7/kill-runtime-both",
    "recover-making/podman/run/random-kill-runtime.0",
    "checkpoint/podman/point.during-the-end.3/kill-runtime-oci-criu",
    "clone/containerd/run/random-sigterm.0",
    "leave-running/podman/point.after-note-checkpoint-done.0/paused",
    "checkpoint/podman/point.during-the-end.1/kill-runtime-oci-criu-both",
    "recover-there/runc-shim/call.restore.0/result-1",
)
"""What failed when more of it was run, one of each cause (docs/reliability.md)."""

pytestmark = [pytest.mark.criu, pytest.mark.slow, pytest.mark.whole]


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    """The runtimes' programs are fetched once."""
    engines()


def sample() -> list[tuple[cases.Case, int]]:
    """Most of them of runc, which takes a third of podman's time; what only podman can meet besides."""
    everything = cases.everything(way="containers")
    of = {victim: [case for case in everything if case.victim == victim] for victim in COUNTS}
    kinds = {cases.kind_of_fault(case.fault) for case in of["runc"]}
    alone = [case for case in of["podman"] if cases.kind_of_fault(case.fault) not in kinds]
    picked: list[cases.Case] = []
    held = [case for case in of["runc-shim"] if case.operation in containers.HOLDING]
    asked = [case for case in of["containerd"] if case.operation in containers.BY_SOCKET]
    daemon = [case for case in of["containerd"] if cases.kind_of_fault(case.fault) == "daemon-killed"]
    by_victim = [(of[victim], count) for victim, count in COUNTS.items()]
    for some, count in [
        *by_victim,
        (alone, PODMAN_ALONE),
        (held, SHIM_ALONE),
        *((some, SOCKET_ALONE) for some in (asked, daemon)),
    ]:
        picked += cases.chosen(some, count, SEED)
    return spread(picked, SEED)


def test_the_sample_has_every_operation_victim_and_fault_of_containers() -> None:
    everything = cases.everything(way="containers")
    picked = [case for case, _ in sample()]
    assert cases.once(everything) > 4000
    assert len({case.name for case in picked}) == sum(COUNTS.values()) + PODMAN_ALONE + SHIM_ALONE + 2 * SOCKET_ALONE
    assert len([case for case in picked if case.fault != "none"]) > 100
    for field in ("operation", "victim"):
        assert {getattr(c, field) for c in picked} == {getattr(c, field) for c in everything}
    kinds = {cases.kind_of_fault(c.fault) for c in everything}
    asked = {*containers.ACTS, "kill-runtime", "kill-criu", "kill-oci", "monitor-killed", "kill-both"}
    asked |= {"kill-vault", "kill-mover", "daemon-killed"}
    assert asked <= kinds & {cases.kind_of_fault(c.fault) for c in picked}
    assert len(kinds - {cases.kind_of_fault(c.fault) for c in picked}) <= len(kinds) // 4
    assert all(cases.Case.named(case.name) == case for case in everything)


@pytest.mark.timeout(600)
def test_the_steps_are_those_that_the_operations_take_now() -> None:
    """A new step is a new row: ``make faults WAY=containers RECORD=1`` writes them down."""
    only = [f"{operation}/runc" for operation in ("move", "checkpoint", "restore-to", "recover-boxed-dump")]
    only.append("move/runc-shim")
    points_are_known(containers.STEPS, only, "containers")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_one_container_is_left_or_an_image(chunk: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    run_and_replay(part(sample(), chunk, CHUNKS), tmp_path_factory)


@pytest.mark.timeout(600)
def test_what_has_failed_once() -> None:
    run_what_failed_once(FOUND)
