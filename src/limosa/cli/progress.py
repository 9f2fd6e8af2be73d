"""The live display on stderr: one line a step, with bytes, GiB/s and time left where the bytes are known."""

from __future__ import annotations

import threading

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from limosa.cli import words
from limosa.progress import Progress

_WITH_BAR, _WITH_RATE = 100, 72  # columns: in fewer the words need the place


def _fixed() -> Column:
    """A column that is never wrapped."""
    return Column(no_wrap=True)


class Rate(ProgressColumn):
    """GiB/s and the time left, where both are known."""

    def render(self, task: Task) -> Text:
        """Draw it for one step."""
        if not task.total or not task.speed:
            return Text("")
        text = words.rate(task.speed)
        if task.time_remaining is not None and not task.finished:
            text += f" {task.time_remaining:.0f} s left"
        return Text(text)


class Bytes(ProgressColumn):
    """Bytes done of all, where they are known."""

    def render(self, task: Task) -> Text:
        """Draw it for one step."""
        return Text(f"{words.size(task.completed)} of {words.size(task.total)}" if task.total else "")


class Display:
    """Steps as they come; safe to call from any thread. A step is one line, however narrow the terminal is."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a Ctrl-C may close it in the middle of an update
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        columns = self._console.width
        self._bars = Bars(
            SpinnerColumn(finished_text="✓", table_column=_fixed()),
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1, min_width=8),
            ),
            *([BarColumn(bar_width=20, table_column=_fixed())] if columns >= _WITH_BAR else []),
            Bytes(table_column=_fixed()),
            *([Rate(table_column=_fixed())] if columns >= _WITH_RATE else []),
            TimeElapsedColumn(table_column=_fixed()),
            console=self._console,
            transient=True,
            expand=True,
        )
        self._steps: dict[str, TaskID] = {}
        self._bars.start()

    def update(self, event: Progress) -> None:
        """Show one message of the operation."""
        with self._lock:
            text = words.clean(f"{event.step} – {event.message}" if event.message else event.step)
            if event.step not in self._steps:
                self._finish_untold()
                self._steps[event.step] = self._bars.add_task(text, total=event.total)
            task = self._steps[event.step]
            self._bars.update(task, description=text, total=event.total, completed=event.done or 0)

    def _finish_untold(self) -> None:
        """Take away the steps of which nobody says when they are done: another one has begun."""
        for task in self._bars.tasks:
            if task.total is None:
                self._bars.update(task.id, total=1, completed=1, visible=False)

    def above(self, text: str) -> None:
        """Print a line above the display."""
        self._console.print(text)

    def close(self) -> None:
        """Take the display away."""
        with self._lock:
            self._bars.stop()
