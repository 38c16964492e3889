"""Measures edits: ``python -m benchmarks.edits``; see benchmarks/README.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# before torch is imported: one thread is compared with one thread
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")

from benchmarks.edits import handling, speed
from benchmarks.edits.settings import EditSettings, quick_edit_settings
from benchmarks.plots import save_figure, with_pyplot
from benchmarks.report import Section
from benchmarks.sections import run_sections

# about how many seconds each takes
_SECTIONS = {"speed": (speed.measure, 200.0), "handling": (handling.measure, 60.0)}
_PARTS = ("upload", "check", "read", "encode", "paste_and_code")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results; return the exit status."""
    return run_sections("edits", __doc__, arguments, _SECTIONS, _settings, _plot)


def _settings(is_quick: bool) -> EditSettings:
    return quick_edit_settings() if is_quick else EditSettings()


def _plot(result: dict[str, Any], path: Path) -> None:
    plt = with_pyplot()
    if plt is None:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    _plot_speed(left, result["sections"]["speed"])
    _plot_handling(right, result["sections"]["handling"])
    save_figure(figure, result, path)


def _plot_speed(axes: Any, section: Section) -> None:
    rows = [row for row in section["tables"]["edits in flight"] if "speed_up_cpu" in row]
    styles = {True: "o-", False: "s--"}
    for guidance, style in styles.items():
        for strength in dict.fromkeys(row["strength"] for row in rows):
            own = [
                row for row in rows if (row["guidance"], row["strength"]) == (guidance, strength)
            ]
            figures = [row["speed_up_cpu"] for row in own]
            middles = [one["median"] for one in figures]
            spread = [[abs(one[end] - one["median"]) for one in figures] for end in ("min", "max")]
            label = f"strength {strength:g}, guidance {'on' if guidance else 'off'}"
            flights = [row["in_flight"] for row in own]
            axes.errorbar(flights, middles, yerr=spread, fmt=style, capsize=3, label=label)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="edits in flight", ylabel="CPU time of diffusers one by one, over ours")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _plot_handling(axes: Any, section: Section) -> None:
    [rows] = section["tables"].values()
    names = [f"{row['px']} px" for row in rows]
    width = 0.8 / len(_PARTS)
    for index, part in enumerate(_PARTS):
        places = [place + (index - len(_PARTS) / 2 + 0.5) * width for place in range(len(rows))]
        figures = [row[f"{part}_ms"]["median"] for row in rows]
        axes.bar(places, figures, width, label=part.replace("_", " "))
    axes.set_xticks(range(len(rows)), names)
    axes.set(ylabel="ms of one edit, beside its steps", yscale="log")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    raise SystemExit(main())
