"""What the command lines share: a progress bar with the time left, the console, lists of names."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Mapping

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
        """Print the progress now and then where no bar can be drawn, as in a log file."""
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
    """Return a bar that is drawn on request."""
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


def comma_list(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Return the parser of an option that takes some of these names, separated by commas."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(",") if name.strip())
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{unknown or 'nothing'}; allowed: {', '.join(known)}")
        return names

    return parse
