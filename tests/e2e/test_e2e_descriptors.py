"""A program that calls Limosa again and again has as many descriptors as before, also where it fails."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import operator
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from limosa import operation
from limosa.errors import FailedUndone
from limosa.image import open_image

pytestmark = pytest.mark.criu


def descriptors() -> list[str]:
    gc.collect()  # what another test of this process has left
    for thread in threading.enumerate():
        if thread.name == "limosa-worker-replies":  # a worker that nobody needs any more ends beside us
            thread.join(timeout=60)
    looks = [Counter(_open_now()) for _ in range(5) if not time.sleep(0.05)]
    return sorted(functools.reduce(operator.and_, looks).elements())  # what stays: other threads look at /proc


def _open_now() -> Iterator[str]:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{fd}")


def test_a_checkpoint_that_fails_when_its_image_is_committed_leaves_none(
    start: Callable[..., Any], tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU is killed when the image is there and the tree has not ended: the job runs on, and the image is named."""
    module = importlib.import_module("limosa.operation.steps.dumping")
    real = module.dump

    def killed(*arguments: Any, on_action: Any, on_start: Any, **options: Any) -> Any:
        criu: list[int] = []

        def started(who: Any) -> None:
            criu.append(who.pid)
            on_start(who)

        def act(action: str) -> bool:
            said = bool(on_action(action))
            if action == "post-dump":
                os.kill(criu[0], signal.SIGKILL)
            return said

        return real(*arguments, on_action=act, on_start=started, **options)

    victim = start("counter")
    with monkeypatch.context() as patch:
        patch.setattr(module, "dump", killed)
        with pytest.raises(FailedUndone):  # what is loaded once is loaded now
            operation.checkpoint(victim.pid, tmp_path / "first")
        before = descriptors()
        with pytest.raises(FailedUndone, match="committed all the same") as failed:
            operation.checkpoint(victim.pid, tmp_path / "image")
        assert descriptors() == before
    assert failed.value.fields["image"] == str(tmp_path / "image")
    open_image(tmp_path / "image").close()
    victim.goes_on()
