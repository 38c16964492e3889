"""Draws the plots, stacks of them and timelines of simulated experiments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_cluster.simulator.reports import Bar, Line, Plot, Stack, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# of Okabe and Ito: told apart by everybody
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"),
)
# one fewer than colours, so that no two of 56 lines look alike
_MARKERS = "osv^DPX"
# of a line with more points than can be marked
_MOST_MARKED = 40
_MOST_INSIDE = 6
# of a timeline, for which a bar's edges would hide it if it were shorter
_EDGED = 0.004
_STYLES = ("-", "--", ":", "-.")
_BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
_DPI = 110
_MOST_INCHES = 60.0


def draw_plot(plot: Plot, path: Path) -> Path:
    """Draw a plot as PNG, and return its file."""
    figure, axes = _canvas(8, 5)
    if plot.is_ordered:
        _draw_ordered(axes, plot.lines)
    else:
        _draw_lines(axes, plot.lines)
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    if plot.x_scale == "symlog":
        # a decade as wide as the part that is linear
        axes.set_xscale("symlog", linthresh=1.0, linscale=1.0)
        axes.xaxis.set_major_formatter("{x:g}")
    # points may lie anywhere, a few lines leave some room
    are_points = any(line.x_half_widths for line in plot.lines.values())
    _legend(axes, len(plot.lines), is_beside=are_points)
    figure.savefig(path, dpi=_DPI)
    return path


def draw_stack(stack: Stack, path: Path) -> Path:
    """Draw panels one below the other as PNG, and return their file."""
    from matplotlib.figure import Figure

    num = len(stack.panels)
    figure = Figure(figsize=(10, 1 + 1.9 * num), layout="constrained")
    column: list[Axes] = list(figure.subplots(num, 1, sharex=True, squeeze=False)[:, 0])
    for axes, panel in zip(column, stack.panels, strict=True):
        _draw_lines(axes, panel.lines)
        axes.set(ylabel=panel.y_label)
        axes.legend(**_BESIDE)
    column[0].set(title=stack.title)
    column[-1].set(xlabel=stack.x_label)
    figure.savefig(path, dpi=_DPI)
    return path


def _draw_lines(axes: Axes, lines: Mapping[str, Line]) -> None:
    for number, (label, line) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        marker = _MARKERS[number % len(_MARKERS)]
        has_intervals = bool(line.half_widths) and not any(map(math.isnan, line.half_widths))
        if line.x_half_widths:
            # whose colour another has already is filled
            face = "none" if number < len(_COLOURS) else colour
            _draw_points(axes, label, line, (colour, face, marker), has_intervals=has_intervals)
            continue
        # of many points marks would hide the line
        is_marked = len(line.x) <= _MOST_MARKED
        style = _STYLES[number // len(_COLOURS) % len(_STYLES)]
        marks = marker if is_marked else ""
        axes.plot(line.x, line.y, label=label, color=colour, marker=marks, linestyle=style)
        if has_intervals:
            low = [y - half for y, half in zip(line.y, line.half_widths, strict=True)]
            high = [y + half for y, half in zip(line.y, line.half_widths, strict=True)]
            axes.fill_between(line.x, low, high, color=colour, alpha=0.15)
    axes.grid(alpha=0.3)


def _draw_ordered(axes: Axes, lines: Mapping[str, Line]) -> None:
    """Draw lines from dark blue over red to orange."""
    from matplotlib import colormaps

    shades = colormaps["plasma"]
    for number, (label, line) in enumerate(lines.items()):
        # what comes after orange is hardly seen on white
        axes.plot(line.x, line.y, label=label, color=shades(0.85 * number / max(1, len(lines) - 1)))
    axes.grid(alpha=0.3)


def _draw_points(
    axes: Axes, label: str, line: Line, look: tuple[str, str, str], *, has_intervals: bool
) -> None:
    """Draw points that stand for themselves, hollow so that equal ones are seen."""
    colour, face, marker = look
    axes.errorbar(
        line.x,
        line.y,
        yerr=line.half_widths if has_intervals else None,
        xerr=line.x_half_widths if has_intervals else None,
        label=label,
        color=colour,
        fmt=marker,
        markersize=9,
        markerfacecolor=face,
        markeredgewidth=1.5,
        elinewidth=1.5,
    )


def draw_timeline(timeline: Timeline, path: Path) -> Path:
    """Draw a timeline as PNG, and return its file."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    # of very many rows the names run into each other, but a file can be drawn
    figure, axes = _canvas(12, min(_MOST_INCHES, 1.5 + 0.45 * len(timeline.rows)))
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


def _legend(axes: Axes, num_lines: int, *, is_beside: bool) -> None:
    """Show which line is which: beside the lines where there are too many to leave room."""
    if is_beside or num_lines > _MOST_INSIDE:
        axes.legend(**_BESIDE)
    elif num_lines > 1:
        axes.legend()


def _corners(bar: Bar) -> list[tuple[float, float]]:
    """Return a bar's corners; rows are numbered from above, a bar's height from below."""
    top, bottom = (bar.row + 0.45 - 0.9 * share for share in (bar.high, bar.low))
    return [(bar.begin_s, top), (bar.end_s, top), (bar.end_s, bottom), (bar.begin_s, bottom)]


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    # without pyplot, which keeps every figure and looks for a screen
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()
