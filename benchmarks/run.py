"""Runs the benchmarks: ``python -m benchmarks.run``; see benchmarks/README.md."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

# before torch is imported: one thread is compared with one thread
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")

from benchmarks.harness import Plot, Study
from benchmarks.machine import ROOT, describe_run, load_now
from benchmarks.tables import (
    Bar,
    Section,
    as_json,
    comma_list,
    draw,
    has_problems,
    print_sections,
    wide_console,
)

RESULTS = ROOT / "benchmarks" / "results"


class Measured(NamedTuple):
    """A section.

    Attributes:
        by: module and function that measure it, and what the function is called with.
        seconds: about how long it takes.
        by_default: whether it is measured if no section is named.
    """

    by: str
    seconds: float
    by_default: bool = True
    arguments: tuple[Any, ...] = ()


SECTIONS: dict[str, Measured] = {
    "engine": Measured("engine.speed:measure", 300.0),
    "sizes": Measured("engine.mixed_sizes:measure", 120.0),
    "overhead": Measured("engine.overhead:measure", 40.0),
    "family": Measured("engine.family:measure", 10.0),
    "groups": Measured("engine.groups:measure", 90.0),
    "kernels": Measured("kernels.section:measure", 15.0),
    "dispatcher": Measured("dispatcher.section:measure", 150.0),
    "edits": Measured("edits.speed:measure", 200.0, False),
    "loras-steps": Measured("loras.steps:measure", 60.0, False),
    "loras-images": Measured("loras.images:measure", 120.0, False),
    "loras-loading": Measured("loras.images:measure_loading", 40.0, False),
    "controlnets-images": Measured("controlnets.images:measure", 400.0, False),
    "controlnets-steps": Measured("controlnets.images:measure_steps", 40.0, False),
    "transport": Measured("transport.trips:measure", 30.0, False),
    "groups-uniform": Measured("groups.policies:measure", 1200.0, False, ("uniform",)),
    "groups-skewed": Measured("groups.policies:measure", 1200.0, False, ("skewed",)),
    "service": Measured("serving.service:measure", 160.0),
    "load": Measured("serving.load:measure", 350.0),
    "cascade": Measured("serving.cascade:measure", 700.0),
    "loras": Measured("serving.loras:measure", 500.0),
    "controlnets": Measured("serving.controlnets:measure", 300.0),
    "controller": Measured("serving.reshapes:measure", 540.0),
    "controller-turns": Measured("serving.controller:measure", 1050.0),
    "compare": Measured("serving.compare:measure", 5400.0, False),
    "compare-parts": Measured("serving.compare:measure", 9000.0, False, ("parts",)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; return the exit status: 1 if something is wrong in one."""
    options = _parse(arguments)
    console, started, started_s = wide_console(), datetime.now(UTC), time.monotonic()
    path = options.out or RESULTS / f"{started:%Y-%m-%d_%H%M%S}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        print(f"error: --out {path}: {error}", file=sys.stderr)
        return 2
    result = describe_run("ray-cluster benchmarks 3", quick=options.quick, started=started)
    sections, plots = dict[str, Section](), list[tuple[Section, Plot]]()
    warnings.filterwarnings("ignore", category=FutureWarning)
    bar = Bar(console, {name: SECTIONS[name].seconds for name in options.only})
    try:
        with bar.progress:
            for name in options.only:
                study = Study(quick=options.quick, report=bar.of(name))
                sections[name] = study.found
                study.say(0.0, "starting")
                try:
                    resolve_name(f"benchmarks.{SECTIONS[name].by}")(
                        study, *SECTIONS[name].arguments
                    )
                except KeyboardInterrupt:
                    study.fail("stopped before its end")
                    break
                study.say(1.0, "done")
                plots += [(study.found, plot) for plot in study.plots]
    finally:
        # a section that fails does not cost the figures of those before it
        result |= {"load_after": load_now(), "sections": sections}
        result["duration_s"] = round(time.monotonic() - started_s, 1)
        path.write_text(as_json(result), encoding="utf-8")
    if plots:
        draw(result, plots, path.with_suffix(".png"))
    print_sections(console, sections, quick=options.quick)
    console.print(f"written: {path}")
    return 1 if has_problems(sections) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="minutes, to see that all works")
    parser.add_argument(
        "--only",
        type=comma_list(SECTIONS),
        default=tuple(name for name, one in SECTIONS.items() if one.by_default),
        metavar="LIST",
        help=f"names or patterns, with commas between: {', '.join(SECTIONS)}",
    )
    parser.add_argument("--out", type=Path, help="JSON file of the results; plots go beside it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # so that a running service is stopped: by default SIGTERM would leave it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
