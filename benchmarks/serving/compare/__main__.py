"""Compares the service with the common practice: ``python -m benchmarks.serving.compare``.

Goes on where an earlier run into the same folder stopped.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_run, load_now
from benchmarks.progress import Reports, comma_list, progress_bar, wide_console
from benchmarks.report import Section, as_json, has_problems, markdown_report
from benchmarks.serving.compare.calibration import (
    Calibration,
    calibrate,
    is_calibrated,
    measure_profile,
)
from benchmarks.serving.compare.experiment import Experiment, missing_blocks
from benchmarks.serving.compare.images import compare_images
from benchmarks.serving.compare.plot import save_plot
from benchmarks.serving.compare.prediction import Prediction, Simulated, predict
from benchmarks.serving.compare.results import ResultStore, SettingsDiffer
from benchmarks.serving.compare.settings import GUIDANCE, SAMPLER, Settings, quick
from benchmarks.serving.compare.summary import Summary
from benchmarks.serving.compare.traces import Trace, draw_traces
from benchmarks.serving.contenders import CONTENDERS, OwnContender
from ray_cluster.quality.suite import suite_prompts

RESULTS = Path(__file__).resolve().parents[2] / "results"
_NUM_PROMPTS = 64
# about how long they take
_CALIBRATION_S, _PROFILE_S = 120.0, 90.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing and write the report; return the exit status."""
    options = _parser().parse_args(arguments)
    settings = Settings(
        contenders=options.contenders,
        loads=options.loads,
        num_traces=options.traces,
        steps=options.steps,
        dtype=options.dtype,
    )
    settings = quick(settings) if options.quick else settings
    folder = options.out or RESULTS / ("compare-quick" if options.quick else "compare")
    prompts = [one.caption for one in suite_prompts("easy", _NUM_PROMPTS)]
    try:
        store = ResultStore(folder, settings)
    except SettingsDiffer as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.report_only and not is_calibrated(folder):
        sys.stderr.write(f"{folder} has no runs that could be reported\n")
        return 2
    started = datetime.now(UTC)
    result = describe_run("ray-cluster comparison 2", quick=options.quick, started=started)
    calibration, traces, predictions = _prepare(folder, settings, prompts)
    if not options.report_only:
        _run(Experiment(folder, settings, calibration, store, prompts), settings, traces, store)
    summary = Summary(
        settings, traces, store, rate_per_s=calibration.rate_per_s, predictions=predictions
    )
    if not summary.traces:
        sys.stderr.write("no trace has run with every contender at every load yet\n")
        return 1
    result |= {
        "settings": asdict(settings),
        "calibration": asdict(calibration),
        "sections": summary.sections() | {"images": images_section(folder, settings, calibration)},
        "load_after": load_now(),
    }
    return write_report(folder, result)


def _prepare(
    folder: Path, settings: Settings, prompts: Sequence[str]
) -> tuple[Calibration, list[Trace], dict[str, list[Prediction]]]:
    """Measure what comes first, draw the traces, and simulate them."""
    weights = {"calibration": _CALIBRATION_S, "profile": _PROFILE_S}
    with progress_bar(wide_console()) as progress:
        reports = Reports(progress, weights)
        calibration = calibrate(folder, settings, prompts, reports.of("calibration"))
        traces = draw_traces(
            settings, prompts, rate_per_s=calibration.rate_per_s, alone_s=calibration.alone_s
        )
        reports.of("profile")(0.0, "of this machine, for the simulator")
        predictions = {}
        for name in settings.contenders:
            contender = CONTENDERS[name]
            if isinstance(contender, OwnContender) and contender.simulated_as is not None:
                pool = contender.pool_section(settings.dtype)
                profile = measure_profile(folder, settings, name, pool)
                simulated = Simulated(contender.simulated_as, profile, pool["max_batch"])
                predictions[name] = predict(folder, traces, sorted(settings.loads), simulated)
        reports.say("prepared", complete=True)
    return calibration, traces, predictions


def _run(
    experiment: Experiment, settings: Settings, traces: Sequence[Trace], store: ResultStore
) -> None:
    """Run what is missing, with the time left."""
    blocks = missing_blocks(settings, traces, store)
    if not blocks:
        return
    with progress_bar(wide_console()) as progress:
        reports = Reports(progress, {block.name: block.seconds for block in blocks})
        for block in blocks:
            experiment.run(block, reports.of(block.name))
        reports.say("done", complete=True)


def images_section(folder: Path, settings: Settings, calibration: Calibration) -> Section:
    """Return whether images are equal, and the seconds of each shape alone."""
    images = list(compare_images(folder, settings.contenders, settings.dtype))
    alone = [{"shape": name, "seconds": s} for name, s in calibration.alone_s.items()]
    return {
        "what": "images of the busiest run of the first traces beside those one by one, and "
        "seconds of an image alone in the pipeline, by size and steps",
        "tables": {"images": images, "alone": alone},
        "problems": [
            f"images of {row['contender']} on {row['trace']} differ"
            for row in images
            if not row["equal"]
        ],
    }


def write_report(folder: Path, result: dict[str, Any]) -> int:
    """Write and print the report; the status is 1 if requests were lost or images differ."""
    machine, settings, calibration = result["machine"], result["settings"], result["calibration"]
    capacities = ", ".join(
        f"{name} {rate:.2f}" for name, rate in calibration["capacity_per_s"].items()
    )
    cores = f"{machine['usable_cores']} of {machine['cores']} cores"
    head = [
        f"{machine['cpu']}, {cores}, {result['started'][:10]}, commit {result['commit'][:12]}",
        f"one replica, one torch thread, {settings['dtype']}, {SAMPLER}, guidance {GUIDANCE:g}",
        f"steps {settings['steps']}; traces of {settings['num_requests']} requests",
        f"load 1 is the capacity of the better baseline (images per second: {capacities})",
        f"deadlines: {settings['slo_times']:g} times what the pipeline takes for the image alone",
        "in time: an image with all its steps by the deadline, from the planned arrival on",
    ]
    sections = result["sections"]
    text = markdown_report("The service beside the common practice", head, sections)
    (folder / "report.json").write_text(as_json(result), encoding="utf-8")
    (folder / "report.md").write_text(text, encoding="utf-8")
    save_plot(result, folder / "attainment.png")
    print(text)
    return 1 if has_problems(sections) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.compare", description=__doc__
    )
    default, add = Settings(), parser.add_argument
    add("--out", type=Path, help="folder of results, in which a run goes on")
    add("--quick", action="store_true", help="some minutes, to see that all works")
    add("--report-only", action="store_true", help="run nothing, write the report anew")
    names = comma_list(CONTENDERS)
    add("--contenders", type=names, default=default.contenders, metavar="LIST")
    add("--loads", type=_floats, default=default.loads, metavar="LIST", help="such as 0.6,1,1.4")
    add("--traces", type=int, default=default.num_traces, help="of each arrival process")
    add("--steps", type=_ints, default=default.steps, metavar="LIST", help="such as 10,20,30")
    add("--dtype", choices=("float32", "bfloat16"), default=default.dtype)
    return parser


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    # so that a running service is stopped: by default SIGTERM would leave it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main())
