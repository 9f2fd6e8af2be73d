"""The live display: what is shown of steps that take turns."""

from __future__ import annotations

from limosa.cli.progress import Display
from limosa.progress import Progress


def test_a_step_without_an_end_of_its_own_goes_when_another_begins():
    """Also where a third one has spoken last: ``plan – looking`` stood there until the restore was over."""
    display = Display()
    try:
        for event in (
            Progress("plan", message="looking"),
            Progress("verify", done=0, total=10),
            Progress("verify", done=10, total=10),
            Progress("prepare", message="memory on the GPUs"),
        ):
            display.update(event)
        shown = [task.description for task in display._bars.tasks if task.visible]
    finally:
        display.close()
    assert shown == ["verify", "prepare – memory on the GPUs"]
