"""One bar for everything that is measured, with the time left."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.settings import Report

_FILE_WIDTH = 130
_LINE_EVERY_S = 20.0


class Reports:
    """Maps the progress of parts to one bar.

    The bar is drawn from the measuring thread: a thread of its own would take CPU time from it.

    Args:
        progress: the bar.
        weights: how long each part takes beside the others, in the order in which they come.
    """

    def __init__(self, progress: Progress, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._progress = progress
        self._task = progress.add_task("", total=sum(weights.values()))
        self._printed_s = 0.0

    def of(self, part: str) -> Report:
        """Return the report of one part."""
        names = list(self._weights)
        before = sum(self._weights[name] for name in names[: names.index(part)])
        weight = self._weights[part]

        def report(done: float, text: str) -> None:
            self._progress.update(
                self._task, completed=before + weight * done, description=f"{part}: {text}"
            )
            self._progress.refresh()
            self._print_line()

        return report

    def _print_line(self) -> None:
        """Where no bar can be drawn (a log file), say now and then how far it is."""
        console, task = self._progress.console, self._progress.tasks[0]
        if console.is_terminal or time.monotonic() < self._printed_s + _LINE_EVERY_S:
            return
        self._printed_s = time.monotonic()
        console.print(
            f"{task.percentage:3.0f} % after {task.elapsed or 0:.0f} s: {task.description}"
        )

    def say(self, text: str, *, complete: bool = False) -> None:
        """Show a text, and a full bar at the end."""
        total = sum(self._weights.values())
        self._progress.update(self._task, description=text)
        if complete:
            self._progress.update(self._task, completed=total)
        self._progress.refresh()


def progress_bar(console: Console) -> Progress:
    """Return a bar that is drawn when it is told to be."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        # every report is one sample of the speed
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        auto_refresh=False,
        speed_estimate_period=600,
    )


def wide_console() -> Console:
    """Return the terminal, or a file with room for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)
