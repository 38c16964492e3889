"""Runs the benchmarks: ``python -m benchmarks.run``; see benchmarks/README.md."""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# before torch is imported: what is compared is one thread with one thread
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")

from rich.console import Console

from benchmarks.aims import check_aims
from benchmarks.machine import describe_run, load_now
from benchmarks.plots import save_plots
from benchmarks.progress import Reports, progress_bar, wide_console
from benchmarks.report import print_report
from benchmarks.settings import Settings, quick_settings

SECTIONS = (
    *("engine", "sizes", "overhead", "exports", "family", "kernels"),
    *("dispatcher", "service", "memory", "load"),
)
RESULTS = Path(__file__).resolve().parent / "results"
# share of the whole run that a section takes, for the time left
_WEIGHTS = {
    "engine": 60.0,
    "sizes": 25.0,
    "overhead": 8.0,
    "exports": 8.0,
    "family": 2.0,
    "kernels": 3.0,
    "service": 32.0,
    "dispatcher": 30.0,
    "load": 70.0,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; returns the exit status."""
    options = _parse(arguments)
    console = wide_console()
    started = datetime.now(UTC)
    result = describe_run("ray-cluster benchmarks 1", quick=options.quick, started=started)
    started_s = time.monotonic()
    settings = quick_settings() if options.quick else Settings()
    path = options.out or RESULTS / f"{started:%Y-%m-%d_%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    sections: dict[str, Any] = {}
    try:
        measure(settings, frozenset(options.only), console, sections)
    finally:
        # a section that fails does not cost the figures of those before it
        result |= {
            "load_after": load_now(),
            "duration_s": round(time.monotonic() - started_s, 1),
            "aims": [aim.as_dict() for aim in check_aims(sections)],
            "sections": sections,
        }
        path.write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
    print_report(console, result)
    console.print(f"written: {path}")
    for plot in save_plots(result, path.with_suffix(".png")):
        console.print(f"written: {plot}")
    return 0 if _images_equal(sections) and not _errors(sections) else 1


def measure(
    settings: Settings, wanted: frozenset[str], console: Console, sections: dict[str, Any]
) -> None:
    """Put the results of the sections that are wanted into ``sections``, one by one."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    names = {"service" if name == "memory" else name for name in wanted}
    weights = {name: weight for name, weight in _WEIGHTS.items() if name in names}
    with progress_bar(console) as progress:
        reports = Reports(progress, weights)
        if wanted & {"engine", "sizes", "overhead", "exports", "service", "memory"}:
            _measure_model(settings, wanted, reports, sections)
        if "family" in wanted:
            from benchmarks.engine.family import measure_family

            sections["family"] = measure_family(settings, reports.of("family"))
        if "kernels" in wanted:
            from benchmarks.kernels.section import measure_kernels

            sections["kernels"] = measure_kernels(settings, reports.of("kernels"))
        if "dispatcher" in wanted:
            from benchmarks.dispatcher.section import measure_dispatcher

            sections["dispatcher"] = measure_dispatcher(settings, reports.of("dispatcher"))
        if "load" in wanted:
            from benchmarks.serving.load import measure_load

            sections["load"] = measure_load(settings, reports.of("load"))
        reports.say("done", complete=True)


def _measure_model(
    settings: Settings, wanted: frozenset[str], reports: Reports, sections: dict[str, Any]
) -> None:
    """The sections that need the model in this process."""
    from benchmarks.engine.exports import ExportBenchmark
    from benchmarks.engine.mixed_sizes import MixedSizes
    from benchmarks.engine.mixed_steps import MixedSteps
    from benchmarks.engine.overhead import OverheadBenchmark
    from benchmarks.engine.speed import SpeedBenchmark
    from benchmarks.engine.subject import load_subject

    reports.say("loading the model")
    subject = load_subject()
    if "engine" in wanted:
        report = reports.of("engine")
        sections["engine"] = SpeedBenchmark(subject, settings).run(
            lambda done, text: report(0.9 * done, text)
        )
        sections["mixed_steps"] = MixedSteps(subject, settings).run(
            lambda done, text: report(0.9 + 0.1 * done, text)
        )
    if "sizes" in wanted:
        sections["sizes"] = MixedSizes(subject, settings).run(reports.of("sizes"))
    if "overhead" in wanted:
        sections["overhead"] = OverheadBenchmark(subject, settings).run(reports.of("overhead"))
    if "exports" in wanted:
        sections["exports"] = ExportBenchmark(subject, settings).run(reports.of("exports"))
    if wanted & {"service", "memory"}:
        from benchmarks.serving.section import measure_service

        sections |= measure_service(subject, settings, reports.of("service"), wanted=wanted)


def _images_equal(sections: dict[str, Any]) -> bool:
    """Whether every image was the pipeline's; the exit status says so."""
    cells = sections.get("engine", {}).get("cells", [])
    streams = sections.get("mixed_steps", {}).get("streams", [])
    sizes = sections.get("sizes", {}).get("streams", [])
    return all(
        row["images_equal"] for one in (*cells, *streams) for row in one["contenders"]
    ) and all(one["images_equal"] for one in sizes if one["dtype"] == "float32")


def _errors(sections: dict[str, Any]) -> dict[str, int]:
    """Return the errors of the load section, with how often each came."""
    kinds = sections.get("load", {}).get("kinds", {}).values()
    return {what: count for kind in kinds for what, count in kind["errors"].items()}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute, to see that all works")
    parser.add_argument(
        "--only",
        type=_sections,
        default=SECTIONS,
        metavar="LIST",
        help=f"comma-separated: {', '.join(SECTIONS)}",
    )
    parser.add_argument("--out", type=Path, help="JSON file; the plot is written beside it")
    return parser.parse_args(arguments)


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{unknown or 'nothing'}; allowed: {', '.join(SECTIONS)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
