"""What a restore by containerd that failed has left: who still works on it is ended, its note is taken away."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from containers.engines import Engines

from limosa.containers import containerd_leftovers
from limosa.containers.containerd_leftovers import Leftovers

# Others look for the same at the same time.
OPERATION, SPACE = f"restore-20261128-{os.getpid():x}", f"space-{os.getpid()}"
pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]
STAYS = "import sys; sys.stdin.read()"


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runc notes the containers of that namespace."""
    monkeypatch.setattr(containerd_leftovers, "OF_CONTAINERD", str(tmp_path))
    monkeypatch.setattr(containerd_leftovers, "_QUIET_SECONDS", 0.3)
    (tmp_path / SPACE).mkdir()
    return tmp_path / SPACE


@pytest.fixture
def stays() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """``stays(operation, words)``: a process with these words and that operation's CRIU on its PATH."""
    begun = []

    def begin(operation: str, *words: object) -> subprocess.Popen[bytes]:
        env = {"PATH": f"/run/limosa/lent/criu-{operation}-x:/bin"}
        argv = [sys.executable, "-I", "-S", "-c", STAYS, *map(str, words)]
        begun.append(subprocess.Popen(argv, env=env, stdin=subprocess.PIPE))
        return begun[-1]

    yield begin
    for one in begun:
        one.kill()
        one.communicate(timeout=30)


@pytest.mark.parametrize("who", ["shim", "runc"])
def test_who_still_works_on_it_is_ended(notes: Path, stays: Callable[..., subprocess.Popen[bytes]], who: str) -> None:
    shim = ("-namespace", SPACE, "-id", "one", "-address", "/run/x")
    words = {"shim": shim, "runc": ("--root", notes, "restore", "--detach", "one")}[who]
    mine, others = stays(OPERATION, *words), stays(f"{OPERATION}0", *words)
    alike = stays(OPERATION, *(str(word).replace("one", "two") for word in words))
    threading.Timer(1.5, others.kill).start()  # containerd ends it, and is waited for
    Leftovers(SPACE, "one", OPERATION).see_off("/bin/false", {})
    assert mine.wait(30) == -9
    assert others.wait(30) == -9
    assert alike.poll() is None


def test_a_note_is_waited_for_while_containerd_may_take_it_away(notes: Path) -> None:
    (notes / "one").mkdir()
    threading.Timer(1.0, os.rmdir, [notes / "one"]).start()
    Leftovers(SPACE, "one", OPERATION).see_off("/bin/false", {})
    assert not (notes / "one").exists()


def test_a_note_that_nobody_takes_away_is_removed(
    notes: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """runc had made its folder and not written a state yet: a restore of that name would be refused for ever."""
    monkeypatch.setattr(containerd_leftovers, "_SECONDS", 1.0)
    for name in ("one", "two"):
        (notes / name).mkdir()
    Leftovers(SPACE, "one", "").see_off(str(engines["runc"]), {})
    assert (notes / "one").exists()  # containerd's own affair
    Leftovers(SPACE, "one", OPERATION).see_off(str(engines["runc"]), {})
    assert os.listdir(notes) == ["two"]


def test_a_note_of_a_runc_that_was_killed_is_removed_where_containerd_has_ended_the_task(
    notes: Path, engines: Engines
) -> None:
    """The runc alone was killed: containerd takes its own away, and knows of no folder."""
    (notes / "one").mkdir()
    begin = time.monotonic()
    Leftovers(SPACE, "one", OPERATION, ended=True).see_off(str(engines["runc"]), {})
    assert os.listdir(notes) == []
    assert time.monotonic() - begin < containerd_leftovers._SECONDS


def test_nobody_is_ended_where_containerd_has_ended_the_task(
    notes: Path, stays: Callable[..., subprocess.Popen[bytes]]
) -> None:
    shim = stays(OPERATION, "-namespace", SPACE, "-id", "one", "-address", "/run/x")
    threading.Timer(1.0, shim.terminate).start()
    Leftovers(SPACE, "one", OPERATION, ended=True).see_off("/bin/false", {})
    assert shim.wait(30) == -15


def test_where_nothing_is_left_there_is_no_wait(notes: Path) -> None:
    begin = time.monotonic()
    for _ in range(3):
        Leftovers(SPACE, "one", "").see_off("/bin/false", {})
    assert time.monotonic() - begin < 30.0
