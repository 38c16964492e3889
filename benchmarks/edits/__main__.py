"""Measures edits: ``python -m benchmarks.edits``; see benchmarks/README.md."""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# before torch is imported: one thread is compared with one thread
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")

from benchmarks.edits import handling, speed
from benchmarks.edits.settings import EditSettings, quick_edit_settings
from benchmarks.machine import describe_run, load_now
from benchmarks.plots import save_figure, with_pyplot
from benchmarks.progress import Reports, progress_bar, wide_console
from benchmarks.report import Section, as_json, has_problems, print_sections
from benchmarks.run import RESULTS

# about how many seconds each takes
_SECTIONS = {"speed": (speed.measure, 200.0), "handling": (handling.measure, 60.0)}
_PARTS = ("upload", "check", "read", "encode", "paste_and_code")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results; return the exit status."""
    options, started = _parse(arguments), datetime.now(UTC)
    settings = quick_edit_settings() if options.quick else EditSettings()
    path = options.out or RESULTS / f"{started:%Y-%m-%d_%H%M%S}-edits.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    result = describe_run("ray-cluster edits 1", quick=options.quick, started=started)
    console, started_s = wide_console(), time.monotonic()
    warnings.filterwarnings("ignore", category=FutureWarning)
    sections: dict[str, Section] = {}
    with progress_bar(console) as progress:
        reports = Reports(progress, {name: weight for name, (_, weight) in _SECTIONS.items()})
        for name, (measure, _) in _SECTIONS.items():
            sections[name] = measure(settings, reports.of(name))
        reports.say("done", complete=True)
    duration_s = round(time.monotonic() - started_s, 1)
    result |= {"load_after": load_now(), "duration_s": duration_s, "sections": sections}
    path.write_text(as_json(result), encoding="utf-8")
    _plot(result, path.with_suffix(".png"))
    print_sections(console, sections, quick=options.quick)
    console.print(f"written: {path}")
    return 1 if has_problems(sections) else 0


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


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.edits")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--quick", action="store_true", help="shows only that it works")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
