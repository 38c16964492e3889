"""Runs the benchmarks: ``python -m benchmarks.run``; see benchmarks/README.md."""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

# before torch is imported: one thread is compared with one thread
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")

from benchmarks.machine import describe_run, load_now
from benchmarks.progress import Reports, comma_list, progress_bar, wide_console
from benchmarks.report import as_json, has_problems, print_sections
from benchmarks.settings import Settings, quick_settings

RESULTS = Path(__file__).resolve().parent / "results"
# the module whose `measure` makes the section, and about how many seconds it takes
SECTIONS: dict[str, tuple[str, float]] = {
    "engine": ("benchmarks.engine.speed", 300.0),
    "sizes": ("benchmarks.engine.mixed_sizes", 120.0),
    "overhead": ("benchmarks.engine.overhead", 40.0),
    "exports": ("benchmarks.engine.exports", 40.0),
    "family": ("benchmarks.engine.family", 10.0),
    "groups": ("benchmarks.engine.groups", 90.0),
    "kernels": ("benchmarks.kernels.section", 15.0),
    "dispatcher": ("benchmarks.dispatcher.section", 150.0),
    "service": ("benchmarks.serving.service", 160.0),
    "load": ("benchmarks.serving.load", 350.0),
    "cascade": ("benchmarks.serving.cascade", 700.0),
    "loras": ("benchmarks.serving.loras", 500.0),
    "controlnets": ("benchmarks.serving.controlnets", 300.0),
    "floods": ("benchmarks.serving.floods", 900.0),
    "flooded-plans": ("benchmarks.serving.flooded_plans", 330.0),
    "controller": ("benchmarks.serving.controller", 1500.0),
    "controller-turns": ("benchmarks.serving.controller_turns", 1050.0),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; return the exit status."""
    options = _parse(arguments)
    console, started = wide_console(), datetime.now(UTC)
    result = describe_run("ray-cluster benchmarks 2", quick=options.quick, started=started)
    started_s = time.monotonic()
    path = options.out or RESULTS / f"{started:%Y-%m-%d_%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    sections: dict[str, Any] = {}
    warnings.filterwarnings("ignore", category=FutureWarning)
    settings = quick_settings() if options.quick else Settings()
    weights = {name: SECTIONS[name][1] for name in SECTIONS if name in options.only}
    try:
        with progress_bar(console) as progress:
            reports = Reports(progress, weights)
            for name in weights:
                reports.say(f"{name}: starting")
                measure = import_module(SECTIONS[name][0]).measure
                sections[name] = measure(settings, reports.of(name))
            reports.say("done", complete=True)
    finally:
        # a section that fails does not cost the figures of those before it
        result["load_after"] = load_now()
        result["duration_s"] = round(time.monotonic() - started_s, 1)
        result["sections"] = sections
        path.write_text(as_json(result), encoding="utf-8")
    print_sections(console, sections, quick=options.quick)
    console.print(f"written: {path}")
    return 1 if has_problems(sections) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="minutes, to see that all works")
    parser.add_argument(
        "--only",
        type=comma_list(SECTIONS),
        default=tuple(SECTIONS),
        metavar="LIST",
        help=f"comma-separated: {', '.join(SECTIONS)}",
    )
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
