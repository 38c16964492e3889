"""Draws the plots and timelines of simulated experiments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_cluster.simulator.reports import Bar, Line, Plot, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# of Okabe and Ito: distinct for the colour-blind, too
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"),
)
# one fewer than colours, so that no two of 56 lines look alike
_MARKERS = "osv^DPX"
_STYLES = ("-", "--", ":", "-.")
# points of a line above which markers would hide it
_MOST_MARKED = 40
# lines above which a legend inside would hide some
_MOST_INSIDE = 6
# share of a timeline below which a bar's edges would hide it
_EDGED = 0.004
_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
_DPI = 110
_MOST_INCHES = 60.0


def draw_plot(plot: Plot, path: Path) -> Path:
    """Draw a plot as PNG, and return its file."""
    # without pyplot, which keeps every figure and looks for a screen
    from matplotlib.figure import Figure

    num = len(plot.panels)
    size = (8, 5) if num == 1 else (10, 1 + 1.9 * num)
    figure = Figure(figsize=size, layout="constrained")
    column: list[Axes] = list(figure.subplots(num, 1, sharex=True, squeeze=False)[:, 0])
    for axes, (y_label, lines) in zip(column, plot.panels.items(), strict=True):
        _draw_lines(axes, lines)
        axes.set(ylabel=y_label)
        # points may lie anywhere, a few lines leave some space
        are_points = any(line.x_half_widths for line in lines.values())
        if num > 1 or are_points or len(lines) > _MOST_INSIDE:
            axes.legend(**_BESIDE)
        elif len(lines) > 1:
            axes.legend()
    column[0].set(title=plot.title)
    column[-1].set(xlabel=plot.x_label)
    if plot.is_wide:
        # a decade as wide as the part that is linear
        column[-1].set_xscale("symlog", linthresh=1.0, linscale=1.0)
        column[-1].xaxis.set_major_formatter("{x:g}")
    figure.savefig(path, dpi=_DPI)
    return path


def _draw_lines(axes: Axes, lines: Mapping[str, Line]) -> None:
    for number, (label, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        marker = _MARKERS[number % len(_MARKERS)]
        has_intervals = bool(line.half_widths) and not any(map(math.isnan, line.half_widths))
        if line.x_half_widths:
            axes.errorbar(
                line.x,
                line.y,
                yerr=line.half_widths if has_intervals else None,
                xerr=line.x_half_widths if has_intervals else None,
                label=label,
                color=colour,
                fmt=marker,
                markersize=9,
                # hollow, so that equal ones are seen; filled where the colour comes again
                markerfacecolor="none" if number < len(_COLOURS) else colour,
                markeredgewidth=1.5,
                elinewidth=1.5,
            )
            continue
        axes.plot(
            line.x,
            line.y,
            label=label,
            color=colour,
            marker=marker if len(line.x) <= _MOST_MARKED else "",
            linestyle=_STYLES[number // len(_COLOURS) % len(_STYLES)],
        )
        if has_intervals:
            low = [y - half for y, half in zip(line.y, line.half_widths, strict=True)]
            high = [y + half for y, half in zip(line.y, line.half_widths, strict=True)]
            axes.fill_between(line.x, low, high, color=colour, alpha=0.15)
    axes.grid(alpha=0.3)


def draw_timeline(timeline: Timeline, path: Path) -> Path:
    """Draw a timeline as PNG, and return its file."""
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # the names of very many rows overlap, but larger files can't be drawn
    height = min(_MOST_INCHES, 1.5 + 0.45 * len(timeline.rows))
    figure = Figure(figsize=(12, height), layout="constrained")
    axes = figure.add_subplot()
    colour_by_label = dict(zip(timeline.labels, cycle(_COLOURS), strict=False))
    begin_s = min((bar.begin_s for bar in timeline.bars), default=0.0)
    end_s = max((bar.end_s for bar in timeline.bars), default=1.0)
    edged_s = _EDGED * (end_s - begin_s)
    axes.add_collection(
        PolyCollection(
            [_corners(bar) for bar in timeline.bars],
            facecolors=[colour_by_label[bar.label] for bar in timeline.bars],
            edgecolors="white",
            linewidths=[0.5 if bar.end_s - bar.begin_s > edged_s else 0 for bar in timeline.bars],
        )
    )
    axes.set_xlim(begin_s, end_s)
    axes.set(title=timeline.title, xlabel="seconds")
    axes.set_yticks(range(len(timeline.rows)), timeline.rows)
    axes.set_ylim(len(timeline.rows) - 0.3, -0.7)
    patches = [Patch(color=colour, label=label) for label, colour in colour_by_label.items()]
    axes.legend(handles=patches, **_BESIDE)
    figure.savefig(path, dpi=_DPI)
    return path


def _corners(bar: Bar) -> list[tuple[float, float]]:
    """Return a bar's corners; rows are numbered from above, a bar's height from below."""
    top, bottom = (bar.row + 0.45 - 0.9 * share for share in (bar.high, bar.low))
    return [(bar.begin_s, top), (bar.end_s, top), (bar.end_s, bottom), (bar.begin_s, bottom)]
