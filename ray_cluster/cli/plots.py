"""Draws the plots and timelines of simulated experiments."""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from ray_cluster.simulator.reports import Plot, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# of Okabe and Ito: told apart by everybody
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"),
)
# one fewer than colours, so that no two of 56 lines look alike
_MARKERS = "osv^DPX"
_DPI = 110


def draw_plot(plot: Plot, path: Path) -> Path:
    """Draw a plot as PNG, and return its file."""
    figure, axes = _canvas(8, 5)
    for number, (label, line) in enumerate(plot.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(line.x, line.y, label=label, color=colour, marker=marker)
        if line.half_widths and not any(map(math.isnan, line.half_widths)):
            low = [y - half for y, half in zip(line.y, line.half_widths, strict=True)]
            high = [y + half for y, half in zip(line.y, line.half_widths, strict=True)]
            axes.fill_between(line.x, low, high, color=colour, alpha=0.15)
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=_DPI)
    return path


def draw_timeline(timeline: Timeline, path: Path) -> Path:
    """Draw a timeline as PNG, and return its file."""
    from matplotlib.patches import Patch

    figure, axes = _canvas(12, 1.5 + 0.35 * len(timeline.rows))
    colour_by_label = dict(zip(timeline.labels, cycle(_COLOURS), strict=False))
    for row in range(len(timeline.rows)):
        own = [bar for bar in timeline.bars if bar.row == row]
        axes.broken_barh(
            [(bar.begin_s, bar.end_s - bar.begin_s) for bar in own],
            (row - 0.45, 0.9),
            facecolors=[colour_by_label[bar.label] for bar in own],
            edgecolors="white",
            linewidth=0.5,
        )
    axes.set(title=timeline.title, xlabel="seconds")
    axes.set_yticks(range(len(timeline.rows)), timeline.rows)
    axes.invert_yaxis()
    patches = [Patch(color=colour, label=label) for label, colour in colour_by_label.items()]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=_DPI)
    return path


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    # without pyplot, which keeps every figure and looks for a screen
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()
