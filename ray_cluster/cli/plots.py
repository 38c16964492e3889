"""Draws the plots of simulated experiments."""

from __future__ import annotations

import math
from pathlib import Path

from ray_cluster.simulator.reports import Plot

# of Okabe and Ito: told apart by everybody
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999"),
)
_MARKERS = "osv^DPX*"


def draw_plot(plot: Plot, path: Path) -> Path:
    """Draw a plot as PNG, and return its file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
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
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
