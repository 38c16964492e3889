"""Attainment over loads, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.plots import save_figure, with_pyplot


def save_plot(result: dict[str, Any], path: Path) -> None:
    """Draw a panel for each group of traces, if matplotlib is there."""
    plt = with_pyplot()
    if plt is None:
        return
    tables = {name: one["tables"].get("in time") for name, one in result["sections"].items()}
    panels = {name: rows for name, rows in tables.items() if rows}
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 3.8), squeeze=False, layout="constrained"
    )
    for axis, (name, rows) in zip(axes[0], panels.items(), strict=True):
        for contender in dict.fromkeys(row["contender"] for row in rows):
            own = [row for row in rows if row["contender"] == contender]
            found = [row["in_time_percent"] for row in own]
            around = [
                [one["value"] - one["low"] for one in found],
                [one["high"] - one["value"] for one in found],
            ]
            loads, values = [row["load"] for row in own], [one["value"] for one in found]
            axis.errorbar(loads, values, yerr=around, marker="o", capsize=3, label=contender)
            simulated = [row.get("predicted_percent_simulated", float("nan")) for row in own]
            axis.plot(loads, simulated, "kx:", markersize=4)
        axis.axhline(90, color="#888888", linewidth=0.8, linestyle="--")
        axis.set_ylim(0, 102)
        axis.set_title(f"{name} (crosses: simulated)", fontsize=9)
        axis.set_xlabel("load, in capacities of the better baseline", fontsize=8)
        axis.set_ylabel("in time, %", fontsize=8)
        axis.grid(visible=True, alpha=0.3)
    axes[0][0].legend(fontsize=7)
    save_figure(figure, result, path)
