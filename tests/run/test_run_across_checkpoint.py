"""``run`` and ``restore --attach`` around a checkpoint: 75, the job's name, its signals and its exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from support import VICTIMS

from limosa.process.records import RunRecord

pytestmark = pytest.mark.criu

COUNTER = [sys.executable, VICTIMS / "counter.py"]


def wait_text(path: Path, text: str, limit: float = 60) -> None:
    end = time.monotonic() + limit
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end, path.read_text() if path.exists() else f"{path} is not there"
        time.sleep(0.01)


def wait_known(limit: float = 60) -> None:
    """Until an attached run has noted its job, which runs by then."""
    end = time.monotonic() + limit
    while not RunRecord.all():
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_more(path: Path, limit: float = 60) -> None:
    """Until the counter goes on."""
    before, end = path.stat().st_size, time.monotonic() + limit
    while path.stat().st_size <= before:
        assert time.monotonic() < end
        time.sleep(0.01)


def wait_following(pid: int, limit: float = 60) -> None:
    """Until a limosa catches what it passes on: SIGUSR1 says so, which no other verb catches."""
    end = time.monotonic() + limit
    while True:
        caught = next(s for s in Path(f"/proc/{pid}/status").read_text().splitlines() if s.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1:
            return
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_attached_run_whose_job_is_checkpointed_exits_75_and_restore_attach_goes_on_with_it(limosa, tmp_path):
    log, image = tmp_path / "log", tmp_path / "image"
    first = limosa("run", "--name", "counter", "--log", log, "--", *COUNTER, tmp_path, wait=False)
    wait_text(log, "tick 5 ")
    wait_known()
    written = limosa("checkpoint", "counter", "--output", image, "-o", "json", rc=0).json
    shown, told = first.communicate(timeout=60)
    assert first.returncode == 75
    assert str(image) in told
    assert shown == log.read_text()

    second = limosa("restore", image, "--attach", wait=False)
    wait_following(second.pid)
    (record,) = RunRecord.all()
    assert (record.name, record.root.pid, record.log) == ("counter", written["pid"], str(log))
    (tmp_path / "stop").touch()
    shown_later, _ = second.communicate(timeout=60)
    assert second.returncode == 0
    assert shown + shown_later == log.read_text()
    ticks = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("tick")]
    assert ticks == list(range(1, len(ticks) + 1))
    assert RunRecord.all() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_restore_attach_passes_signals_on(limosa, tmp_path, number):
    log, image = tmp_path / "log", tmp_path / "image"
    limosa("run", "-d", "--name", "counter", "--log", log, "--", *COUNTER, tmp_path, rc=0)
    wait_text(log, "tick 5 ")
    limosa("checkpoint", "counter", "--output", image, rc=0)
    attached = limosa("restore", image, "--attach", wait=False)
    wait_following(attached.pid)
    attached.send_signal(number)
    attached.communicate(timeout=60)
    assert attached.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]


def test_with_leave_running_an_attached_run_notices_nothing(limosa, tmp_path):
    log, image = tmp_path / "log", tmp_path / "image"
    attached = limosa("run", "--name", "counter", "--log", log, "--", *COUNTER, tmp_path, wait=False)
    wait_text(log, "tick 5 ")
    wait_known()
    limosa("checkpoint", "counter", "--output", image, "--leave-running", rc=0)
    wait_more(log)
    (tmp_path / "stop").touch()
    attached.communicate(timeout=60)
    assert attached.returncode == 0


def test_a_job_without_io_uring_can_be_checkpointed_and_one_with_it_is_refused(limosa, tmp_path):
    log = tmp_path / "log"
    ring = [sys.executable, VICTIMS / "io_uring.py", tmp_path]
    limosa("run", "-d", "--name", "without", "--log", log, "--", *ring, rc=0)
    wait_text(log, "tick 3 ")
    limosa("checkpoint", "without", "--output", tmp_path / "image", rc=0)
    other = tmp_path / "other"
    limosa("run", "-d", "--no-seccomp", "--name", "with", "--log", other, "--", *ring, rc=0)
    wait_text(other, "tick 3 ")
    if "io_uring open" in other.read_text():
        refused = limosa("checkpoint", "with", "--output", tmp_path / "image2", "-o", "json", rc=13).json
        assert "io_uring" in refused["error"]["message"]
        wait_more(other)


def test_a_job_whose_folder_and_arguments_are_no_utf_8_is_known_all_the_same(limosa, tmp_path):
    """Records are JSON. It was started, and said not to have been: somebody would start it once more."""
    latin = tmp_path / os.fsdecode(b"caf\xe9")
    latin.mkdir()
    run = ("run", "-d", "-q", "--name", "latin", "--", "sh", "-c", "while sleep 0.1; do :; done", latin)
    pid = int(limosa(*run, cwd=latin, rc=0).stdout)
    try:
        assert [job["name"] for job in limosa("ps", "-o", "json", rc=0).json["jobs"]] == ["latin"]
        for folder in (latin / "image", tmp_path / "link" / "image"):
            (tmp_path / "link").unlink(missing_ok=True)
            (tmp_path / "link").symlink_to(latin)
            assert limosa("checkpoint", "latin", "--output", folder, "-o", "json", rc=2).json["error"]["id"] == "usage"
        limosa("checkpoint", "latin", "--output", tmp_path / "image", rc=0)
        (tmp_path / "image").rename(latin / "image")
        for verb in ("restore", "plan restore"):
            assert "is no UTF-8" in limosa(*verb.split(), latin / "image", rc=2).stderr
        (latin / "image").rename(tmp_path / "image")
        assert limosa("restore", tmp_path / "image", "-o", "json", rc=0).json["name"] == "latin"
    finally:
        limosa("stop", "latin", "--kill")
    assert not Path(f"/proc/{pid}").exists()
