"""Draws the day of the controller's benchmark: ``python -m`` this module, and a file of results."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import save_figure, with_pyplot
from benchmarks.serving.controller import OVER_TIME
from benchmarks.serving.controller_comparison import RIVALS

_PANELS = ("violations, %", "all right, %", "of calls right in time, %", "heavy, %")


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw violations and quality of the live runs over time; nothing without matplotlib."""
    plt = with_pyplot()
    if plt is None:
        return
    rows = result["sections"]["controller"]["tables"][OVER_TIME]
    figure, panels = plt.subplots(
        len(_PANELS) + 1, 1, figsize=(8, 11), sharex=True, layout="constrained"
    )
    from_s = [row["from_s"] for row in rows]
    panels[0].step(from_s, [row["calls"] for row in rows], where="post", color="grey")
    panels[0].set_ylabel("calls")
    for axes, title in zip(panels[1:], _PANELS, strict=True):
        for name in RIVALS:
            values = [row[f"{name}: {title}"] for row in rows]
            known = [math.nan if one is None else one for one in values]
            axes.plot(from_s, known, "o-", markersize=3, label=name)
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
    panels[1].legend(fontsize=8)
    panels[-1].set_xlabel("seconds")
    save_figure(figure, result, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the plot beside the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="JSON file of benchmarks.run")
    path = parser.parse_args(arguments).results
    plot(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
