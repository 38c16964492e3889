"""Shows what starts or stops and for how long: live on a terminal, else one line per change."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class StateScreen:
    """Rows of things that start or stop, each with its state and the seconds it took.

    Args:
        console: where to write.
        quiet: write nothing.
    """

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._started_s = time.monotonic()
        self._states: dict[str, str] = {}
        self._rows: dict[str, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            TextColumn("{task.fields[state]}", style="dim"),
            TimeElapsedColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def show(self, name: str, state: str, *, is_done: bool = False) -> None:
        """Set the state of a row; a new name begins a row."""
        if self._states.get(name) == state:
            return
        self._states[name] = state
        if name not in self._rows:
            self._rows[name] = self._progress.add_task(name, total=1, state=state)
        self._progress.update(self._rows[name], state=state, completed=int(is_done))
        if not self._quiet and not self._console.is_terminal:
            self._console.print(f"{self.elapsed_s:6.1f} s  {name}: {state}", markup=False)

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
