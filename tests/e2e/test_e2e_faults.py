"""The first write, sync or rename fails, then the second, and so on: after each the same command without it succeeds.

Every change that the host side makes to a disk is tried: the image's (``limosa.image.files``), the journal's, the
claims' and records'. Of the many alike (each of CRIU's files gets a mode and is synced) some are.
"""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from limosa.image import open_image, unfinished, verify
from limosa.operation import remove_image

pytestmark = [pytest.mark.criu, pytest.mark.timeout(300)]

HARMLESS = {
    "image unlink",  # the marker in an image that is committed means nothing
}


def some(count: int) -> list[int]:
    """Of many alike the first, one between and the last; of few all."""
    return list(range(count)) if count <= 6 else sorted({0, 1, count // 2, *range(count - 3, count)})


def faults(calls: list[str]) -> list[tuple[str, int]]:
    return [(label, n) for label, count in Counter(calls).items() for n in some(count)]


def nothing_left(disturbed: Any, victim: Any, folder: Path) -> None:
    disturbed.settle(victim.pid)
    assert disturbed.litter() == []
    assert unfinished(folder) == []
    assert disturbed("recover")["result"] == []


@pytest.mark.parametrize("leave_running", [False, True], ids=["ended", "left running"])
def test_a_checkpoint_with_a_fault_leaves_the_job_as_it_was(start, disturbed, tmp_path, leave_running) -> None:
    victim, image = start("counter"), tmp_path / "image"
    options = {"leave_running": leave_running}

    def ended_again() -> None:
        if not leave_running:
            assert disturbed("restore", image, points=False)["rc"] == 0
        victim.goes_on(1)
        remove_image(image)

    noted = disturbed("checkpoint", victim.pid, image, options=options)
    assert noted["rc"] == 0, noted
    ended_again()
    todo = faults(noted["calls"])
    assert {"image fsync", "image rename", "image write", "journal write", "record write"} <= {c for c, _ in todo}
    for number, (call, n) in enumerate(todo[1::2] if leave_running else todo):
        full = number % 3 == 2 and call.startswith("image")
        fail = {"call": call, "n": n, "errno": errno.ENOSPC if full else errno.EIO}
        found = disturbed("checkpoint", victim.pid, image, options=options, fail=fail)
        where = f"{fail}: {found}"
        assert found["failed"] == [call], where
        nothing_left(disturbed, victim, tmp_path)
        if found["rc"] == 0:  # noticed too late to matter, or of no matter
            assert image.exists(), where
        else:
            assert found["rc"] == (15 if full and not found["image"] else 21), where
            assert victim.alive(), where
            victim.goes_on(1)
            assert image.exists() == bool(found["image"]), where
            if image.exists():
                remove_image(image)
            again = disturbed("checkpoint", victim.pid, image, options=options, points=False)
            assert again["rc"] == 0, f"{where}\nand again: {again}"
        with open_image(image) as opened:
            assert verify(opened).ok
        assert victim.alive() == leave_running, where
        ended_again()
    victim.finish()


def test_a_restore_with_a_fault_leaves_the_image_and_nothing_else(start, disturbed, tmp_path) -> None:
    victim, image = start("open_files"), tmp_path / "image"
    options = {"rewind_files": True}
    assert disturbed("checkpoint", victim.pid, image, points=False)["rc"] == 0
    for _ in range(2):
        noted = disturbed("restore", image, options=options)
        assert noted["rc"] == 0, noted
        victim.goes_on(1)
        victim.kill()
    todo = faults(noted["calls"])
    assert {"journal write", "record write"} <= {c for c, _ in todo}
    for call, n in todo:
        output = (victim.folder / "output").read_bytes()
        found = disturbed("restore", image, options=options, fail={"call": call, "n": n})
        where = f"{call} {n}: {found}"
        assert found["failed"] == [call], where
        nothing_left(disturbed, victim, tmp_path)
        if found["rc"] != 0:
            assert found["rc"] == 21, where
            assert not victim.alive(), where
            assert (victim.folder / "output").read_bytes() == output, where
            again = disturbed("restore", image, options=options, points=False)
            assert again["rc"] == 0, f"{where}\nand again: {again}"
        victim.goes_on(1)
        victim.kill()


def test_a_journal_that_fails_for_good_stops_nothing_from_being_undone(start, disturbed, tmp_path) -> None:
    """As on a full or broken /run: from the n-th record on, none can be written, that of the undo included."""
    victim, image = start("counter"), tmp_path / "image"
    noted = disturbed("checkpoint", victim.pid, image, options={"leave_running": True})
    remove_image(image)
    writes = noted["calls"].count("journal write")
    assert writes >= 6
    for n in range(writes):
        found = disturbed("checkpoint", victim.pid, image, fail={"call": "journal write", "n": n, "forever": True})
        assert found["failed"], found
        nothing_left(disturbed, victim, tmp_path)
        if victim.alive():
            assert found["rc"] == 21, (n, found)
            assert not image.exists(), (n, found)
        else:
            assert found["rc"] == 0, (n, found)
            assert disturbed("restore", image, points=False)["rc"] == 0
            remove_image(image)
        victim.goes_on(1)
    victim.finish()


def test_somebody_puts_something_at_the_destination_meanwhile(start, disturbed, tmp_path) -> None:
    victim = start("counter")
    fail = {"call": "image rename", "n": 0, "errno": errno.ENOTEMPTY}
    found = disturbed("checkpoint", victim.pid, tmp_path / "image", fail=fail)
    assert (found["rc"], found["id"]) == (17, "destination-exists")
    nothing_left(disturbed, victim, tmp_path)
    victim.goes_on()
    victim.finish()
