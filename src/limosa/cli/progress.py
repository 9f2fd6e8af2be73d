"""The live display on stderr: one line a step, with bytes, GB/s and time left where the bytes are known."""

from __future__ import annotations

import threading

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from limosa.progress import Progress


class Rate(ProgressColumn):
    """GB/s and the time left, where both are known."""

    def render(self, task: Task) -> Text:
        """Draw it for one step."""
        if not task.total or not task.speed:
            return Text("")
        text = f"{task.speed / 1e9:.2f} GB/s"
        if task.time_remaining is not None and not task.finished:
            text += f" {task.time_remaining:.0f} s left"
        return Text(text)


class Bytes(DownloadColumn):
    """Bytes done of all, where they are known."""

    def render(self, task: Task) -> Text:
        """Draw it for one step."""
        return super().render(task) if task.total else Text("")


class Display:
    """Steps as they come; safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._console = Console(stderr=True, highlight=False, markup=False)
        self._bars = Bars(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            Bytes(),
            Rate(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._steps: dict[str, TaskID] = {}
        self._current = ""
        self._bars.start()

    def update(self, event: Progress) -> None:
        """Show one message of the operation."""
        with self._lock:
            if event.step not in self._steps:
                self._finish(self._current)
                self._steps[event.step] = self._bars.add_task(event.step, total=event.total)
            self._current = event.step
            text = f"{event.step} – {event.message}" if event.message else event.step
            task = self._steps[event.step]
            self._bars.update(task, description=text[:60], total=event.total, completed=event.done or 0)

    def _finish(self, step: str) -> None:
        if step in self._steps:
            done = next((t for t in self._bars.tasks if t.id == self._steps[step]), None)
            if done is not None and done.total is None:
                self._bars.update(done.id, total=1, completed=1, visible=False)

    def above(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(text)

    def close(self) -> None:
        """Take the display away."""
        with self._lock:
            self._bars.stop()
