"""Attainment over loads, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.plots import save_figure, with_pyplot

_COLOURS = ("#c98a1b", "#8a5a00", "#5a9e6f", "#2f6b42", "#1b6ca8", "#7a4a9e", "#b0413e", "#444444")


def save_plot(result: dict[str, Any], path: Path) -> bool:
    """Draw a panel for each group of traces; False without matplotlib."""
    plt = with_pyplot()
    if plt is None:
        return False
    groups = result["groups"]
    figure, axes = plt.subplots(
        1, len(groups), figsize=(4.6 * len(groups), 3.8), squeeze=False, layout="constrained"
    )
    for axis, (name, group) in zip(axes[0], groups.items(), strict=True):
        _draw(axis, group)
        axis.set_title(f"{name}: {len(group['traces'])} traces", fontsize=9)
    axes[0][0].legend(fontsize=7)
    save_figure(figure, result, path)
    return True


def _draw(axis: Any, group: dict[str, Any]) -> None:
    contenders = list(dict.fromkeys(row["contender"] for row in group["rows"]))
    for contender, colour in zip(contenders, _COLOURS * len(contenders), strict=False):
        rows = [row for row in group["rows"] if row["contender"] == contender]
        loads = [row["load"] for row in rows]
        values = [100 * row["attainment"]["value"] for row in rows]
        around = [
            [100 * (row["attainment"]["value"] - row["attainment"]["low"]) for row in rows],
            [100 * (row["attainment"]["high"] - row["attainment"]["value"]) for row in rows],
        ]
        axis.errorbar(
            loads, values, yerr=around, color=colour, marker="o", capsize=3, label=contender
        )
        simulated = [(row["load"], 100 * row["simulated"]) for row in rows if "simulated" in row]
        if simulated:
            axis.plot(
                *zip(*simulated, strict=True),
                color=colour,
                linestyle=":",
                marker="x",
                label=f"{contender}, simulated",
            )
    axis.axhline(90, color="#888888", linewidth=0.8, linestyle="--")
    axis.set_ylim(0, 102)
    axis.set_xlabel("load, in capacities of the better baseline", fontsize=8)
    axis.set_ylabel("in time, %", fontsize=8)
    axis.grid(visible=True, alpha=0.3)
