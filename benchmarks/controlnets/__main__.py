"""Measures ControlNets: ``python -m benchmarks.controlnets``; see benchmarks/README.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# before torch is imported: one thread is compared with one thread
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")

from benchmarks.controlnets import images, steps
from benchmarks.controlnets.settings import ControlSettings, quick_control_settings
from benchmarks.plots import save_figure, with_pyplot
from benchmarks.sections import run_sections

# about how many seconds each takes
_SECTIONS = {
    "steps": (steps.measure, 30.0),
    "images": (images.measure, 400.0),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results; return the exit status."""
    return run_sections("controlnets", __doc__, arguments, _SECTIONS, _settings, _plot)


def _settings(is_quick: bool) -> ControlSettings:
    return quick_control_settings() if is_quick else ControlSettings()


def _plot(result: dict[str, Any], path: Path) -> None:
    plt = with_pyplot()
    if plt is None:
        return
    rows = result["sections"]["images"]["tables"]["images with ControlNets"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    labels = {"speed_up_wall": "wall clock", "speed_up_cpu": "CPU of all processes"}
    for one, (key, label) in zip(axes, labels.items(), strict=True):
        own = [row for row in rows if key in row]
        for kind in dict.fromkeys((row["way"], row["loras"], row["in_flight"]) for row in own):
            chosen = [row for row in own if (row["way"], row["loras"], row["in_flight"]) == kind]
            places = [row["controlnets"] for row in chosen]
            middles = [row[key]["median"] for row in chosen]
            name = f"{kind[0]}, {kind[1]} LoRAs, {kind[2]} in flight"
            one.plot(places, middles, "o-", label=name)
        one.set(xlabel="ControlNets of a request", ylabel=f"diffusers over ours, {label}")
        one.set_ylim(bottom=0)
        one.axhline(1, color="grey", linewidth=0.8)
    axes[0].legend(fontsize="small")
    save_figure(figure, result, path)


if __name__ == "__main__":
    raise SystemExit(main())
