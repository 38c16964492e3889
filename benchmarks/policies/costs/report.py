"""Costs as tables in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_TITLES = {
    "dispatch": "Dispatch decisions",
    "rounds": "Rounds of sequence-parallel groups, of each case the sort of requests with most p99",
    "allocation": "Allocations and whole planning rounds",
}


def print_costs(console: Console, result: dict[str, Any]) -> None:
    """Print every part that was measured."""
    for part, rows in result["parts"].items():
        console.print()
        console.print(_hours(rows) if part == "hours" else _decisions(_TITLES[part], rows))
    if result["quick"]:
        console.print("[yellow]a quick run: it shows that everything works, not how fast[/yellow]")


def _worst(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The row of most p99 of each decision at each scale."""
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for row in rows:
        case = row["decision"], row["gpus"], row["num_requests"]
        found[case] = max(found.get(case, row), row, key=lambda one: one["p99_ms"])
    return list(found.values())


def _decisions(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{title}: CPU ms of the thread", title_justify="left")
    for name in ("decision", "GPUs", "over", "number", "p50", "p99", "max", "aim", "met", "proven"):
        table.add_column(name, justify="left" if name in {"decision", "over"} else "right")
    for row in _worst(rows):
        aim_ms, proven = row["aim_ms"], row["num_proven"]
        measure = "max" if row["of_all"] else "p99"
        table.add_row(
            row["decision"],
            str(row["gpus"]),
            row["load"],
            str(row["count"]),
            *(f"{row[key]:.3f}" for key in ("p50_ms", "p99_ms", "max_ms")),
            "" if aim_ms is None else f"{measure} <= {aim_ms:g}",
            _yes_or_no(row["is_met"]),
            "" if proven is None else str(proven),
        )
    return table


def _hours(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Simulated time: seconds of CPU", title_justify="left")
    columns = ("simulated", "GPUs", "requests", "for", "CPU", "wall", "on time", "aim", "met")
    for name in columns:
        table.add_column(name, justify="left" if name == "simulated" else "right")
    for row in rows:
        table.add_row(
            row["what"],
            str(row["gpus"]),
            str(row["requests"]),
            f"{row['simulated_s']:g} s",
            f"{row['cpu_s']:.2f} s",
            f"{row['wall_s']:.2f} s",
            f"{row['on_time']:.1%} (simulated)",
            "" if row["aim_s"] is None else f"<= {row['aim_s']:g} s",
            _yes_or_no(row["is_met"]),
        )
    return table


def _yes_or_no(is_met: bool | None) -> str:
    return {None: "", True: "yes", False: "no"}[is_met]
