"""What is under way: a row for each thing that starts or stops, and the bar over steps."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


class StateScreen:
    """Things that start or stop, with their states: live rows on a terminal, else a line each.

    Args:
        quiet: write nothing.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._started_s = time.monotonic()
        self._states: dict[str, str] = {}
        self._rows: dict[str, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[state]}", style="dim", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )

    def show(self, name: str, state: str, *, is_done: bool = False) -> None:
        """Set the state of a row, and write it once; a new name begins a row."""
        if self._states.get(name) == state:
            return
        self._states[name] = state
        if name not in self._rows:
            self._rows[name] = self._progress.add_task(name, total=1, state=state)
        self._progress.update(self._rows[name], state=state, completed=int(is_done))
        if not self._quiet and not self._console.is_terminal:
            elapsed_s = time.monotonic() - self._started_s
            self._console.print(f"{elapsed_s:6.1f} s  {name}: {state}", markup=False)

    def start(self) -> None:
        """Begin to show rows; harmless a second time."""
        if not self._rows:
            self._started_s = time.monotonic()
        self._progress.start()

    def stop(self) -> None:
        """Leave the rows as they are; harmless a second time."""
        self._progress.stop()

    def __enter__(self) -> StateScreen:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def step_progress(console: Console) -> Progress:
    """Return a bar over denoising steps; it goes when it is done, and needs a terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
