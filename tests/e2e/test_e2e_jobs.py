"""Jobs of every kind go on as they were: after a copy was taken while they ran, and after kill and restore.

Each victim looks after its own state with every tick and a last time at its end, so that anything that is lost, doubled
or stale makes it fail. Real CRIU, through the command line.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from limosa.image import open_image
from limosa.operation import remove_image
from limosa.process.criu import network
from limosa.process.criu.find import find

pytestmark = pytest.mark.criu

JOBS = [
    "counter",
    "tree",
    "open_files",
    "sockets",
    "shm",
    "mp_queue",
    "mp_spawn",
    "epoll",
    "threads",
    "unlinked",
]


def checkpointed(limosa, victim, image: Path, *options: str):
    """The job's image; the job has ended."""
    done = limosa("checkpoint", victim.pid, "--output", image, "-o", "json", *options, rc=0).json
    assert {"schema", "image", "id", "bytes", "pid", "left_running", "timings", "warnings"} <= set(done)
    assert (done["image"], done["pid"], done["left_running"]) == (str(image), victim.pid, "--leave-running" in options)
    return done


def restored(limosa, victim, image: Path, *options: str):
    """The job runs again."""
    done = limosa("restore", image, "-o", "json", *options, rc=0).json
    assert {"schema", "pid", "id", "map", "timings", "warnings"} <= set(done)
    assert (done["pid"], done["map"]) == (victim.pid, {})
    return done


@pytest.mark.parametrize("program", JOBS)
def test_a_job_goes_on_after_a_copy_and_after_kill_and_restore(start, limosa, tmp_path, program) -> None:
    victim = start(program)
    copy = checkpointed(limosa, victim, tmp_path / "copy", "--leave-running")
    assert victim.alive()
    victim.goes_on()
    image = checkpointed(limosa, victim, tmp_path / "image")
    assert not victim.alive()
    ticks = len(victim.ticks())
    done = restored(limosa, victim, tmp_path / "image")
    assert done["id"] == image["id"] != copy["id"]
    victim.goes_on()
    assert len(victim.ticks()) > ticks
    victim.finish()


def test_a_restored_job_can_be_checkpointed_and_restored_again_and_again(start, limosa, tmp_path) -> None:
    victim = start("tree")
    for round_ in range(3):
        checkpointed(limosa, victim, tmp_path / f"image{round_}")
        restored(limosa, victim, tmp_path / f"image{round_}", "--no-verify")
        victim.goes_on()
    victim.finish()


@pytest.mark.parametrize("program", ["counter", "mp_spawn"])
@pytest.mark.parametrize("options", [[], ["--leave-running"]], ids=["", "copy"])
def test_an_image_brings_the_job_back_as_often_as_one_likes(start, limosa, tmp_path, program, options) -> None:
    """Also where the only names of its files (of its semaphores) are gone meanwhile, or what is in them has changed."""
    shared = Path("/dev/shm")
    before = set(shared.iterdir())
    victim = start(program)
    checkpointed(limosa, victim, tmp_path / "image", *options)
    if options:
        victim.kill()
    begun = []
    for gone in (False, True, False):
        for file in set(shared.glob("sem.mp-*")) - before:
            file.write_bytes(bytes(file.stat().st_size))  # all taken, for ever
            if gone:
                file.unlink()
        ticks = len(victim.ticks())
        restored(limosa, victim, tmp_path / "image")
        victim.goes_on()
        begun.append([line for line in victim.text().splitlines() if line.startswith("tick ")][ticks].split()[1])
        victim.kill()
    assert len(set(begun)) == 1, "it began from the same number each time"
    left = set(shared.iterdir()) - before
    assert not [path for path in left if path.name.startswith("link_remap")]
    for path in left:
        path.unlink()


def test_the_pause_is_as_the_job_felt_it(start, limosa, tmp_path) -> None:
    victim = start("counter")
    done = checkpointed(limosa, victim, tmp_path / "copy", "--leave-running")
    victim.goes_on()
    ticks = victim.ticks()
    felt = max(b - a for a, b in itertools.pairwise(ticks))
    told = done["timings"]["pause_seconds"]
    assert abs(told - felt) <= max(0.2 * felt, 0.05), (told, felt)


# --- connections to somebody outside -----------------------------------------------------------------------------


def test_a_connection_to_somebody_outside_stays_with_tcp_established(start, limosa, tmp_path, echo) -> None:
    victim = start("tcp_client", echo)
    checkpointed(limosa, victim, tmp_path / "copy", "--leave-running", "--tcp-established")
    victim.goes_on()
    checkpointed(limosa, victim, tmp_path / "image", "--tcp-established")
    with open_image(tmp_path / "image") as image:
        table = f"inet {image.manifest.nft_table}"
    assert table in network.tables(find())  # it keeps the peer's packets from a socket that is not there
    restored(limosa, victim, tmp_path / "image")
    victim.goes_on()
    assert table not in network.tables(find())
    victim.finish()


def test_a_connection_to_somebody_outside_comes_back_closed_with_tcp_close(start, limosa, tmp_path, echo) -> None:
    victim = start("tcp_redial", echo)
    checkpointed(limosa, victim, tmp_path / "image", "--tcp-close")
    assert "redial" not in victim.text()
    restored(limosa, victim, tmp_path / "image")
    victim.wait_for("redial")
    victim.goes_on()
    victim.finish()


def test_rm_takes_the_table_with_the_image(start, limosa, tmp_path, echo) -> None:
    victim = start("tcp_client", echo)
    checkpointed(limosa, victim, tmp_path / "image", "--tcp-established")
    with open_image(tmp_path / "image") as image:
        table = f"inet {image.manifest.nft_table}"
    assert table in network.tables(find())
    assert remove_image(tmp_path / "image") > 0
    assert table not in network.tables(find())
