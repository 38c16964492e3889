"""Costs as tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_TITLES = {
    "dispatch": "Dispatch decisions: CPU ms of the thread",
    "rounds": "Rounds of groups, the worst sort of requests: CPU ms of the thread",
    "allocation": "Allocations and whole planning rounds: CPU ms of the thread",
    "control": "Rounds of a controller, its dispatcher's part among them: CPU ms of the process",
    "hours": "Simulated time: seconds of CPU (on_time is simulated)",
}


def print_costs(console: Console, result: dict[str, Any]) -> None:
    """Print every part that was measured."""
    for part, rows in result["parts"].items():
        if rows:
            table = Table(*rows[0], title=_TITLES[part], title_justify="left")
            for row in rows if part == "hours" else _worst(rows):
                table.add_row(*map(_text, row.values()))
            console.print()
            console.print(table)
    if result["quick"]:
        console.print("[yellow]a quick run: it shows that everything works, not how fast[/yellow]")


def _worst(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The row of most p99 of each decision at each scale."""
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for row in rows:
        case = row["decision"], row["gpus"], row["num_requests"]
        found[case] = max(found.get(case, row), row, key=lambda one: one["p99_ms"])
    return list(found.values())


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "" if value is None else str(value)
