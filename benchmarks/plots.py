"""Plots as small PNG files; without matplotlib there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image


def with_pyplot() -> Any:
    """Return pyplot, set up to draw into files, or None without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save_figure(figure: Any, result: dict[str, Any], path: Path) -> None:
    """Write a figure as a small PNG file that names machine, date and commit."""
    from matplotlib import pyplot as plt

    figure.suptitle(
        f"{result['machine']['cpu']}, {result['started'][:10]}, {result['commit'][:12]}",
        fontsize=9,
    )
    # few colours: a third of the bytes
    figure.savefig(path, dpi=70)
    with Image.open(path) as drawn:
        drawn.convert("P", palette=Image.Palette.ADAPTIVE, colors=24).save(path, optimize=True)
    plt.close(figure)
