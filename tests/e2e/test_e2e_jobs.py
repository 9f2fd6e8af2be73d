"""Jobs of every kind go on as they were: after a copy was taken while they ran, and after kill and restore.

Each victim looks after its own state with every tick and a last time at its end, so that anything that is lost, doubled
or stale makes it fail. Real CRIU, through the command line.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import semaphore_names, stat_of

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
    "mp_locks",
    "mp_churn",
    "named_shm",
    "own_sysv",
    "epoll",
    "threads",
    "unlinked",
    "proc_files",
    "folders",
]


def checkpointed(limosa, victim, image: Path, *options: str):
    """The job's image; the job has ended."""
    answer = limosa("checkpoint", victim.pid, "--output", image, "-v", "-o", "json", *options, rc=0)
    assert answer.stderr.count("hash and sync") == 1, answer.stderr
    done = answer.json
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


def semaphores_of(victim) -> set[int]:
    """The inodes of those that a process has mapped."""
    lines = Path(f"/proc/{victim.pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "/dev/shm/sem." in line}


@pytest.fixture
def semaphores() -> Iterator[Callable[[Any], set[Path]]]:
    """The names of a job's semaphores; those of a job that was killed are removed at the end."""
    asked = set()

    def names(victim: Any) -> set[Path]:
        asked.add(victim.pid)
        return semaphore_names(victim.pid)

    yield names
    for pid in asked:
        for path in semaphore_names(pid):
            path.unlink(missing_ok=True)


@pytest.mark.parametrize("program", ["counter", "mp_spawn", "mp_locks", "named_shm"])
@pytest.mark.parametrize("options", [[], ["--leave-running"]], ids=["", "copy"])
def test_an_image_brings_the_job_back_as_often_as_one_likes(
    start, limosa, tmp_path, semaphores, program, options
) -> None:
    """Also where its semaphores and named shared memory are gone meanwhile, or what is in them has changed."""
    victim = start(program)
    checkpointed(limosa, victim, tmp_path / "image", *options)
    if options:
        victim.kill()
    begun = []
    for gone in (False, True, False):
        for file in semaphores(victim):
            if gone:
                file.unlink()
            else:
                file.write_bytes(bytes(file.stat().st_size))  # taken, for ever
        ticks = len(victim.ticks())
        restored(limosa, victim, tmp_path / "image")
        victim.goes_on()
        begun.append([line for line in victim.text().splitlines() if line.startswith("tick ")][ticks].split()[1])
        if program == "mp_spawn":
            there = {path.stat().st_ino for path in semaphores(victim)}
            assert semaphores_of(victim) == there, "whoever opens one by its name has the same"
        assert not [path for path in semaphores(victim) if "link_remap" in path.name]
        victim.kill()
    assert len(set(begun)) == 1, "it began from the same number each time"


def test_jobs_with_semaphores_are_on_disk_side_by_side(start, limosa, tmp_path, semaphores) -> None:
    victims = [start("mp_spawn"), start("mp_spawn")]
    for number, victim in enumerate(victims):
        checkpointed(limosa, victim, tmp_path / str(number))
    for number, victim in enumerate(victims):
        restored(limosa, victim, tmp_path / str(number))
    for victim in victims:
        victim.goes_on()
        victim.finish()


def test_a_semaphore_that_somebody_uses_is_left_to_him(start, limosa, tmp_path, semaphores) -> None:
    victim = start("mp_spawn")
    checkpointed(limosa, victim, tmp_path / "image", "--leave-running")
    victim.kill()
    held = min(semaphores(victim))
    before = held.read_bytes()
    with held.open("rb+") as file, mmap.mmap(file.fileno(), held.stat().st_size):
        done = limosa("restore", tmp_path / "image", "-o", "json", rc=23).json
        assert done["error"]["id"] == "shm-used"
        assert held.read_bytes() == before
    restored(limosa, victim, tmp_path / "image")
    victim.goes_on()
    victim.finish()


def test_a_file_that_lost_one_of_its_names_needs_criu_s_way(start, limosa, tmp_path) -> None:
    victim = start("renamed")
    for options in ([], ["--link-remap", "--leave-running"]):
        done = limosa("checkpoint", victim.pid, "--output", tmp_path / "image", "-o", "json", *options, rc=13).json
        assert done["error"]["id"] == "link-remap"
    victim.goes_on()
    checkpointed(limosa, victim, tmp_path / "image", "--link-remap")
    restored(limosa, victim, tmp_path / "image")
    victim.goes_on()
    victim.finish()


def test_a_stopped_job_comes_back_stopped(start, limosa, tmp_path) -> None:
    victim = start("tree")
    os.kill(victim.pid, signal.SIGSTOP)
    victim.until(lambda: stat_of(victim.pid)[2] == "T", what="to be stopped")
    for options in (["--leave-running"], []):
        done = checkpointed(limosa, victim, tmp_path / f"image{len(options)}", *options)
        assert [r["id"] for r in done["warnings"]] == ["comes-back-stopped"]
        if options:
            victim.until(lambda: stat_of(victim.pid)[2] == "T", what="to be stopped again")
    done = restored(limosa, victim, tmp_path / "image0")
    assert [(r["id"], r["pid"]) for r in done["warnings"]] == [("comes-back-stopped", victim.pid)]
    victim.until(lambda: stat_of(victim.pid)[2] == "T", what="to be stopped as before")
    os.kill(victim.pid, signal.SIGCONT)
    victim.goes_on()
    victim.finish()


def test_the_pause_is_as_the_job_felt_it(start, limosa, tmp_path) -> None:
    victim = start("counter")
    tries = []
    for n in range(5):  # either may be held up for reasons of its own
        before = len(victim.ticks())
        done = checkpointed(limosa, victim, tmp_path / f"copy{n}", "--leave-running")
        victim.goes_on()
        felt = max(b - a for a, b in itertools.pairwise(victim.ticks()[max(0, before - 1) :]))
        told = done["timings"]["pause_seconds"]
        if abs(told - felt) <= max(0.2 * felt, 0.05):
            return
        tries.append((told, felt))
    raise AssertionError(tries)


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


def test_a_datagram_socket_to_a_name_outside_is_connected_anew(start, limosa, tmp_path) -> None:
    path = str(tmp_path / "log")
    victim = start("sends_to_name", path, ready=None)
    for generation in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:  # as syslog, which may be another one by then
            log.bind(path)
            log.settimeout(60)
            if generation:
                restored(limosa, victim, tmp_path / "image")
            else:
                victim.wait_for("READY")
            assert log.recv(100).startswith(b"tick ")
            if not generation:
                checkpointed(limosa, victim, tmp_path / "image", "--ext-unix-sk")
            else:
                victim.goes_on()
                victim.finish()
        os.unlink(path)
        if not generation:
            done = limosa("restore", tmp_path / "image", "-o", "json", rc=21).json
            assert "nobody has the name" in done["error"]["message"]


def test_a_connection_that_was_not_accepted_is_left_out_with_an_option(start, limosa, tmp_path) -> None:
    victim = start("slow_server")
    port = int((victim.folder / "port").read_text())
    with socket.create_connection(("127.0.0.1", port)) as waiting:
        done = limosa("checkpoint", victim.pid, "--output", tmp_path / "image", "-o", "json", rc=13).json
        assert done["error"]["id"] == "tcp-in-flight"
        checkpointed(limosa, victim, tmp_path / "image", "--skip-in-flight")
        waiting.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            assert waiting.recv(1) == b"", "its client sees it closed"
    restored(limosa, victim, tmp_path / "image")
    (victim.folder / "accept").touch()
    with socket.create_connection(("127.0.0.1", port)) as again:
        again.settimeout(60)
        assert again.recv(100) == b"hello"
    victim.finish()


def test_rm_takes_the_table_with_the_image(start, limosa, tmp_path, echo) -> None:
    victim = start("tcp_client", echo)
    checkpointed(limosa, victim, tmp_path / "image", "--tcp-established")
    with open_image(tmp_path / "image") as image:
        table = f"inet {image.manifest.nft_table}"
    assert table in network.tables(find())
    assert remove_image(tmp_path / "image") > 0
    assert table not in network.tables(find())
