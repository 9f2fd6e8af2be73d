"""When an image's bytes are compared, and who may still say no by then."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from image_material import write_image

from limosa.errors import CancelledUndone
from limosa.operation.steps.returning import Checked
from limosa.operation.work import Work


def test_who_cancels_when_criu_has_let_the_job_go_is_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIMOSA_RUNTIME_DIR", str(tmp_path / "run"))
    cancel = threading.Event()
    with (
        write_image(tmp_path / "image") as image,
        Work("restore", cancel=cancel) as work,
        Checked(work, image, True) as checked,
    ):
        checked.wait()
        cancel.set()
        checked.compared()
        with pytest.raises(CancelledUndone):
            checked.wait()
