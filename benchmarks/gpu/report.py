"""Tables of the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_result(console: Console, result: Mapping[str, Any]) -> None:
    """Print every part, and what failed or was left out."""
    for name, part in result["parts"].items():
        if "ops" in part:
            console.print(_ops(part["ops"]))
        for section, title in (
            ("steps", "ms a step (speed-up)"),
            ("compiled", "ms a step, diffusers compiled"),
            ("mixes", "ms a step of several sizes"),
        ):
            if part.get(section, {}).get("cells"):
                console.print(_cells(f"{name}: {title}", part[section]["cells"]))
    for line in notes(result):
        console.print(line, markup=False)


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what failed and what was left out, a line each; of tracebacks the last line."""
    for name, part in result["parts"].items():
        for section, found in part.items():
            for problem in found.get("problems", ()):
                lines = problem.strip().splitlines()
                ends = dict.fromkeys((lines[0], lines[-1]))
                yield f"FAILED {name}, {section}: {' ... '.join(ends)}"
            for one in found.get("left_out", ()):
                yield f"left out {name}, {section}: {one['what']} ({one['why']})"
    for problem in result.get("problems", ()):
        yield f"FAILED {problem}"


def has_failed(result: Mapping[str, Any]) -> bool:
    """Whether anything failed or differs from its reference; the exit status says so."""
    sections = (found for part in result["parts"].values() for found in part.values())
    return bool(result.get("problems")) or any(
        found.get("status") not in ("ok", "partial") for found in sections
    )


def _ops(found: Mapping[str, Any]) -> Table:
    table = Table("op", "shape", "kind", "µs", "share of copy", "over naive", title="kernels")
    for row in found.get("rows", ()):
        for one in row["contenders"]:
            shares = [one.get(key, {}).get("median") for key in ("share_of_copy", "speed_up")]
            table.add_row(
                row["op"],
                row["shape"],
                one["kind"],
                f"{1e6 * one['seconds']['median']:.1f}",
                *("wrong" if share is None else f"{share:.2f}" for share in shares),
            )
    return table


def _cells(title: str, cells: list[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for cell in cells for name in cell["contenders"]))
    table = Table("", *names, title=title)
    for cell in cells:
        what = cell.get("mix") or f"{cell['side_px']} px, batch {cell['batch']}"
        if "layout" in cell:
            what += f" (policy: {cell['layout']})"
        table.add_row(what, *(_figure(cell["contenders"].get(name)) for name in names))
    return table


def _figure(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    milliseconds = f"{1e3 * found['seconds']['median']:.2f}"
    if "speed_up" not in found:
        return milliseconds
    low, high = found["speed_up"]["ci95"]
    return f"{milliseconds} ({found['speed_up']['median']:.2f}, {low:.2f} to {high:.2f})"
