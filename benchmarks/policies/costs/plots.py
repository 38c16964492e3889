"""Costs over the number of GPUs, one PNG file; it needs matplotlib, and is left out without it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.plots import save_figure, with_pyplot

Row = dict[str, Any]
_COLOURS = ("#1b6ca8", "#c98a1b", "#5a9e6f", "#8a4f9e", "#888888")


def save_cost_plot(result: dict[str, Any], path: Path) -> Path | None:
    """Draw what was measured beside what is aimed at; returns the file, if there is one."""
    plt = with_pyplot()
    if plt is None:
        return None
    parts = result["parts"]
    rounds = [row for row in parts.get("rounds", ()) if row["decision"].startswith("rounds/")]
    most = max((row["gpus"] for row in rounds), default=0)
    crowd = max((row["num_requests"] for row in rounds if row["gpus"] == most), default=0)
    panels = [
        ("dispatch decision", "replicas", "gpus", parts.get("dispatch", ())),
        (
            f"round decision, {crowd} requests, worst crowd",
            *("GPUs of the group", "gpus"),
            [row for row in rounds if row["num_requests"] == crowd],
        ),
        (
            f"round decision, {most} GPUs, worst crowd",
            *("requests", "num_requests"),
            [row for row in rounds if row["gpus"] == most],
        ),
        ("planning", "GPUs", "gpus", parts.get("allocation", ())),
    ]
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    for axis, (title, along, key, rows) in zip(axes.flat, panels, strict=False):
        _draw_decisions(axis, rows, key)
        _label(axis, title, along, "CPU ms; p99, and p50 dashed")
    _draw_hours(axes.flat[4], parts.get("hours", ()))
    _label(axes.flat[4], "an hour of simulation", "GPUs", "CPU seconds")
    axes.flat[5].set_axis_off()
    save_figure(figure, result, path)
    return path


def _draw_decisions(axis: Any, rows: Iterable[Row], key: str) -> None:
    by_decision: defaultdict[str, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    aims: set[float] = set()
    for row in rows:
        by_decision[row["decision"]][row[key]].append(row)
        aims |= {row["aim_ms"]} - {None}
    for (decision, by_scale), colour in zip(by_decision.items(), _COLOURS, strict=False):
        scales = sorted(by_scale)
        for cost, style, label in (("p99_ms", "-", decision), ("p50_ms", "--", None)):
            worst = [max(row[cost] for row in by_scale[scale]) for scale in scales]
            axis.plot(scales, worst, color=colour, marker=".", linestyle=style, label=label)
    _draw_aims(axis, {f"aim {aim:g} ms": aim for aim in aims})


def _draw_hours(axis: Any, rows: Iterable[Row]) -> None:
    by_what: defaultdict[str, list[Row]] = defaultdict(list)
    aims = {}
    for row in rows:
        by_what[row["what"]].append(row)
        if row["aim_s"] is not None:
            aims[f"aim of {row['what']}"] = row["aim_s"]
    for (what, some), colour in zip(by_what.items(), _COLOURS, strict=False):
        hours = [3600 / row["simulated_s"] * row["cpu_s"] for row in some]
        axis.plot([row["gpus"] for row in some], hours, color=colour, marker=".", label=what)
    _draw_aims(axis, aims)


def _draw_aims(axis: Any, aims: dict[str, float]) -> None:
    for (label, aim), style in zip(aims.items(), (":", "-."), strict=False):
        axis.axhline(aim, color="#b03030", linestyle=style, linewidth=1, label=label)


def _label(axis: Any, title: str, along: str, up: str) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel(along, fontsize=8)
    axis.set_ylabel(up, fontsize=8)
    axis.grid(visible=True, alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
