"""Measures LoRAs in the engine: ``python -m benchmarks.loras``; see benchmarks/README.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# before torch is imported: one thread is compared with one thread
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")

from benchmarks.loras import images, loading, steps
from benchmarks.loras.settings import LoraSettings, quick_lora_settings
from benchmarks.plots import save_figure, with_pyplot
from benchmarks.sections import run_sections

# about how many seconds each takes
_SECTIONS = {
    "steps": (steps.measure, 60.0),
    "images": (images.measure, 120.0),
    "loading": (loading.measure, 40.0),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results; return the exit status."""
    return run_sections("loras", __doc__, arguments, _SECTIONS, _settings, _plot)


def _settings(is_quick: bool) -> LoraSettings:
    return quick_lora_settings() if is_quick else LoraSettings()


def _plot(result: dict[str, Any], path: Path) -> None:
    plt = with_pyplot()
    if plt is None:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    sections = result["sections"]
    rows = sections["steps"]["tables"]["steps with LoRAs"]
    _plot_figures(left, rows, "batch", "loras", "over_base")
    left.set(xlabel="requests of a step", ylabel="CPU time of a step over one without LoRAs")
    rows = sections["images"]["tables"]["requests with LoRAs in flight"]
    rows = [row | {"name": f"{row['loras']} LoRAs, {row['way']}"} for row in rows]
    _plot_figures(right, [row for row in rows if "speed_up_cpu" in row], "in_flight", "name")
    right.set(xlabel="requests in flight", ylabel="CPU time of diffusers one by one, over ours")
    right.set_ylim(bottom=0)
    save_figure(figure, result, path)


def _plot_figures(
    axes: Any, rows: Sequence[Any], across: str, name: str, figure: str = "speed_up_cpu"
) -> None:
    for label in dict.fromkeys(row[name] for row in rows):
        own = [row for row in rows if row[name] == label]
        figures = [row[figure] for row in own]
        middles = [one["median"] for one in figures]
        spread = [[abs(one[end] - one["median"]) for one in figures] for end in ("min", "max")]
        places = [row[across] for row in own]
        axes.errorbar(places, middles, yerr=spread, fmt="o-", capsize=3, label=label)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.legend(fontsize=7)


if __name__ == "__main__":
    raise SystemExit(main())
