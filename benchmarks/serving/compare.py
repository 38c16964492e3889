"""The service beside the common practice: one Serve deployment around the diffusers pipeline.

The same requests on the same machine: contenders in turns on every trace, loads in turns.
"""

from __future__ import annotations

import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import yaml
from PIL import Image

from benchmarks.figures import percentile
from benchmarks.harness import Plot, Study
from benchmarks.machine import ROOT
from benchmarks.serving.attainment import Attainments
from benchmarks.serving.client import ClientRun, run_client
from benchmarks.serving.processes import CpuMeter
from benchmarks.serving.services import Baseline, Contender, Running, post_image, running
from benchmarks.serving.traces import (
    CV_BY_PROCESS,
    FATES,
    FINISHED,
    SHAPES,
    CallOutcome,
    Planned,
    Trace,
    draw_trace,
    loses_nothing,
    outcome_of,
)
from ray_cluster.quality.distances import similarity
from ray_cluster.quality.suite import suite_prompts
from ray_cluster.simulator.traces import write_trace

T = TypeVar("T")
_DTYPE = "bfloat16"
_OPEN = {"when_late": "accept", "metadata": False}
_GUARDED = "with a bounded queue and a deadline drop"
OURS = "ours"
CONTENDERS: Mapping[str, Contender] = {
    "one-by-one": Baseline(what="pipeline, one image after the other", batching="one-by-one"),
    "one-by-one/guarded": Baseline(
        what=f"one-by-one {_GUARDED}", batching="one-by-one", is_guarded=True
    ),
    "static": Baseline(what="pipeline, batches of one size and step count", batching="static"),
    "static/guarded": Baseline(what=f"static {_GUARDED}", batching="static", is_guarded=True),
    OURS: Contender(what="the service, late ones refused", simulated_as="deadline"),
    # the service without one of its parts
    "ours/open": Contender(what="nobody refused", call=_OPEN, simulated_as="deadline/open"),
    "ours/no-deadlines": Contender(
        what="nobody refused, and first come first served", call=_OPEN, omits=("slo_s",)
    ),
    "ours/one-size": Contender(
        what="batches of one size",
        simulated_as="deadline/one-size",
        pool={"batches": "one-size"},
    ),
    "ours/grouped": Contender(what="a model call for each size", pool={"layout": "grouped"}),
    "ours/one-by-one": Contender(what="one image after the other", pool={"max_batch": 1}),
}
_WHOLE = ("one-by-one/guarded", "static/guarded", OURS)
_PARTS = (OURS, *(name for name in CONTENDERS if name.startswith("ours/")), "static")
GOODPUT_LEVEL, STRAINED_LEVEL, GOODPUT_RATIO, PREDICTION_POINTS = 0.9, 0.6, 2.0, 5.0
# structural similarity: other batches round other products, and many steps add that up
LEAST_SIMILARITY = 0.98
_TIMEOUT_S, _SETTLE_S, _PROFILE_S, _NO_DEADLINE_S = 600.0, 5.0, 3600.0, 3600.0
# of the burst that a capacity is measured with: no request of a trace has it
_BURST_SEED = 5_000_000
_NUM_PROMPTS, _NUM_IMAGES = 64, 60


class Cell(NamedTuple):
    """One run of a contender on a trace at a load."""

    contender: str
    load: float
    trace: str


class Calibration(NamedTuple):
    """What is known before the first trace.

    Attributes:
        alone_s: seconds of an image alone by the name of its shape: the median, from prompt to
            pixels in the replica of the idle baseline ``one-by-one``.
        capacity_per_s: images per second of each baseline with all requests there at once.
    """

    alone_s: Mapping[str, float]
    capacity_per_s: Mapping[str, float]

    @property
    def rate_per_s(self) -> float:
        """The rate of load 1: the capacity of the better baseline."""
        return max(self.capacity_per_s.values())


def measure(study: Study, kind: str = "whole") -> None:
    """Compare the service with guarded baselines, or with itself without one of its parts."""
    is_whole = kind == "whole"
    names = _WHOLE if is_whole else _PARTS
    loads = study.pick((0.3, 0.6, 1.0) if is_whole else (0.9,), (1.0,))
    processes = study.pick(tuple(CV_BY_PROCESS), ("poisson",))
    prompts = [one.caption for one in suite_prompts("easy", _NUM_PROMPTS)]
    with study.part(0.0, 0.1):
        known = _calibrate(study, prompts)
    about = {"rate_per_s": known.rate_per_s, "alone_s": known.alone_s}
    traces = [
        draw_trace(process, number, study.pick(150, 30), prompts, **about)  # type: ignore[arg-type]
        for number, process in product(range(study.pick(1 + is_whole, 1)), processes)
    ]
    with study.part(0.1, 0.15):
        predicted = dict(_predictions(study, names, traces, loads))
    rows: dict[Cell, dict[str, Any]] = {}
    images: dict[tuple[str, str], list[bytes]] = {}
    with study.part(0.15, 1.0):
        todo = [(n, place) for n in range(len(traces)) for place in range(len(names))]
        for number, place in study.each(todo):
            # every trace has another contender first, and another load
            name, trace = _rotated(names, number)[place], traces[number]
            contender = _known(CONTENDERS[name], known)
            with running(contender) as service:
                _warm_up(contender, service, prompts)
                for load in _rotated(loads, number + place):
                    outcomes, row = _run(contender, service, trace, load)
                    rows[cell := Cell(name, load, trace.name)] = row
                    # so that a run that is stopped does not lose those before it
                    study.found.setdefault("cells", []).append(cell._asdict() | row)
                    if load == max(loads) and number < len(processes):
                        images[name, trace.name] = [one.png for one in outcomes[:_NUM_IMAGES]]
    tabulate(study, names, loads, [one.name for one in traces], rows, predicted, known=known)
    _compare_images(study, images)
    study.found["calibration"] = known._asdict()


def _rotated(items: Sequence[T], by: int) -> list[T]:
    by %= len(items)
    return [*items[by:], *items[:by]]


def _known(contender: Contender, known: Calibration | None = None) -> Contender:
    if isinstance(contender, Baseline) and known is not None:
        return replace(contender, dtype=_DTYPE, alone_s=known.alone_s)
    return replace(contender, dtype=_DTYPE)


def _calibrate(study: Study, prompts: Sequence[str]) -> Calibration:
    alone_s, capacity_per_s = {}, {}
    for name in study.each(("one-by-one", "static")):
        contender = _known(CONTENDERS[name])
        with running(contender) as service:
            _warm_up(contender, service, prompts)
            if name == "one-by-one":
                alone_s = _alone_s(contender, service, prompts, study.pick(5, 2))
            capacity_per_s[name] = _capacity_per_s(contender, service, prompts, study.pick(60, 15))
    return Calibration(alone_s, capacity_per_s)


def _planned(prompts: Sequence[str], first: int, count: int) -> list[Planned]:
    """Return requests of all shapes in turn, all at once, and without a deadline."""
    return [
        Planned(0.0, SHAPES[i % len(SHAPES)], prompts[i % len(prompts)], first + i, _NO_DEADLINE_S)
        for i in range(count)
    ]


def _warm_up(contender: Contender, service: Running, prompts: Sequence[str]) -> None:
    with service.client() as client:
        for one in _planned(prompts, 0, len(SHAPES)):
            post_image(client, one.body(contender))


def _alone_s(
    contender: Contender, service: Running, prompts: Sequence[str], repeats: int
) -> dict[str, float]:
    """Return the seconds of an image alone in the replica, by shape."""
    found: dict[str, list[float]] = {shape.name: [] for shape in SHAPES}
    with service.client() as client:
        for one in _planned(prompts, 0, repeats * len(SHAPES)):
            timing = post_image(client, one.body(contender)).timing
            found[one.shape.name].append(timing["work_s"])
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def _capacity_per_s(
    contender: Contender, service: Running, prompts: Sequence[str], count: int
) -> float:
    """Return images per second with requests of all shapes in equal numbers there at once."""
    planned = _planned(prompts, _BURST_SEED, count)
    outcomes, _ = _send(contender, service, planned)
    ends_s = [one.latency_s for one in outcomes if one.fate in FINISHED and one.latency_s]
    if len(ends_s) < count:
        problems = {one.problem for one in outcomes if one.problem}
        raise RuntimeError(f"{count - len(ends_s)} of {count} images not made: {problems}")
    return count / max(ends_s)


def _send(
    contender: Contender, service: Running, planned: Sequence[Planned]
) -> tuple[list[CallOutcome], ClientRun]:
    calls = [(one.arrival_s, one.body(contender)) for one in planned]
    run = run_client(service.url, calls, timeout_s=_TIMEOUT_S)
    return [outcome_of(*pair) for pair in zip(planned, run.answers, strict=True)], run


def _run(
    contender: Contender, service: Running, trace: Trace, load: float
) -> tuple[list[CallOutcome], dict[str, Any]]:
    before, meter = _settled(contender, service, 0), CpuMeter()
    outcomes, run = _send(contender, service, trace.at(load))
    usage = meter.read(client_cpu_s=run.cpu_s)
    accepted = sum(one.fate != "refused" for one in outcomes)
    counts = _settled(contender, service, before.accepted + accepted).since(before)
    fates = Counter(one.fate for one in outcomes)
    return outcomes, {
        "attainment": fates["in time"] / len(outcomes),
        "fates": {fate: fates[fate] for fate in FATES},
        "seconds": [one.latency_s for one in outcomes if one.fate in FINISHED],
        "loses_nothing": loses_nothing(outcomes, counts),
        "client_cores": run.cpu_s / run.wall_s,
        "client_late_s": max(one.late_send_s for one in run.answers),
        **usage,
    }


def _settled(contender: Contender, service: Running, accepted: int) -> Any:
    """Return the service's counts once it has accepted so many, and all have ended.

    Or after some seconds as they are then: counts may be late, but not for long.
    """
    until_s = time.monotonic() + _SETTLE_S
    while True:
        counts = contender.counts(service.url)
        if (counts.open == 0 and counts.accepted >= accepted) or time.monotonic() > until_s:
            return counts
        time.sleep(0.2)


def _predictions(
    study: Study, names: Sequence[str], traces: Sequence[Trace], loads: Sequence[float]
) -> Iterator[tuple[Cell, float]]:
    """Yield what the simulator expects, with a latency profile of this machine."""
    for name in study.each([one for one in names if CONTENDERS[one].simulated_as]):
        pool = _known(CONTENDERS[name]).pool_section()
        with tempfile.TemporaryDirectory() as folder:
            _profile(Path(folder), pool, study.pick(10, 3))
            for trace in traces:
                policy, most = CONTENDERS[name].simulated_as, pool["max_batch"]
                content = replay_of(Path(folder), trace.name, most, policy, loads)
                write_trace(Path(folder) / "trace.csv", trace.arrivals())
                for row in simulated(Path(folder), content):
                    yield Cell(name, row["speed"], trace.name), row["attainment"]["value"]


def replay_of(
    folder: Path, name: str, max_batch: int, policy: str, loads: Sequence[float]
) -> dict[str, Any]:
    """Return the experiment of a trace on one replica, with the profile in a folder."""
    return {
        "kind": "cell",
        "name": "replayed",
        "what": f"The requests of {name} on one replica of this machine.",
        "profile": f"{folder}/profile.yaml",
        "trace": "trace.csv",
        "speeds": sorted(loads),
        "replicas": 1,
        "max_batch": max_batch,
        "policies": [policy],
    }


def _profile(folder: Path, pool: Mapping[str, Any], repeats: int) -> None:
    path = folder / "pool.yaml"
    path.write_text(yaml.safe_dump({"pools": [dict(pool)]}), encoding="utf-8")
    sizes = ",".join(dict.fromkeys(shape.size for shape in SHAPES))
    own = ("--config", str(path), "--sizes", sizes, "--batches", "1,2,4,8")
    _cli("profile", *own, "--repeats", str(repeats), "--out", str(folder / "profile.yaml"))


def simulated(folder: Path, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of an experiment, by ``ray-cluster simulate``."""
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(dict(content)), encoding="utf-8")
    _cli("simulate", str(path), "--out", str(folder))
    found = json.loads((folder / f"{content['name']}.json").read_text(encoding="utf-8"))
    cells: list[dict[str, Any]] = found["cells"]
    return cells


def _cli(*words: str) -> None:
    command = [sys.executable, "-m", "ray_cluster.cli", *words]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=_PROFILE_S)


def tabulate(
    study: Study,
    names: Sequence[str],
    loads: Sequence[float],
    traces: Sequence[str],
    rows: Mapping[Cell, Mapping[str, Any]],
    predicted: Mapping[Cell, float],
    *,
    known: Calibration,
) -> None:
    """Add attainment and goodput of all traces and of each process, and what became of requests."""
    study.found["what"] = (
        f"one replica, one torch thread, {_DTYPE}; load 1 is the capacity of the better baseline, "
        f"{known.rate_per_s:.2f} images a second; in time: an image with all its steps by the "
        "deadline, from the planned arrival on; intervals by a bootstrap over traces"
    )
    processes = dict.fromkeys(name.partition("-")[0] for name in traces)
    groups = {"all": list(traces)}
    if len(processes) > 1:
        groups |= {one: [name for name in traces if name.startswith(one)] for one in processes}
    for group, own in groups.items():
        shares = {
            name: np.array([[rows[Cell(name, x, t)]["attainment"] for t in own] for x in loads])
            for name in names
        }
        _attainment(study, group, Attainments(loads, shares), own, predicted, known)
    for load, name in product(loads, names):
        found = [rows[Cell(name, load, trace)] for trace in traces]
        seconds = [one for row in found for one in row["seconds"]]
        columns = {fate: sum(row["fates"][fate] for row in found) for fate in FATES}
        study.row(
            "requests",
            load=load,
            contender=name,
            **columns,
            **{f"p{p}_s": percentile(seconds, p) if seconds else None for p in (50, 95, 99)},
            client_late_s=max(row["client_late_s"] for row in found),
            cores_of_others=max(row["cores_of_others"] for row in found),
        )
        if not all(row["loses_nothing"] for row in found):
            study.fail(f"{name} lost requests at load {load:g}")
    for name in names:
        study.note(f"{name}: {CONTENDERS[name].what}")
    study.plots.append(Plot("in time", "load", ("in_time_percent",), ("contender", "traces")))


def _attainment(
    study: Study,
    group: str,
    shares: Attainments,
    traces: Sequence[str],
    predicted: Mapping[Cell, float],
    known: Calibration,
) -> None:
    names = list(shares._shares)
    baselines = [name for name in names if isinstance(CONTENDERS[name], Baseline)]
    for index, load in enumerate(shares.loads):
        best = max(baselines, key=lambda name: float(shares.mean(name)[index]))
        for name in names:
            live = shares.at(name, index)
            row = study.row(
                "in time",
                traces=group,
                load=load,
                per_s=load * known.rate_per_s,
                contender=name,
                in_time_percent=live,
            )
            if name not in baselines:
                row |= {"points_over_best": shares.gain(name, best, index), "best_baseline": best}
            expected = [
                predicted[cell] for t in traces if (cell := Cell(name, load, t)) in predicted
            ]
            if expected:
                row["simulated_percent"] = 100 * float(np.mean(expected))
                # the prediction may be off by some points, or by the live interval
                sure = max(PREDICTION_POINTS, 0.5 * (live["high"] - live["low"]))
                off = abs(row["simulated_percent"] - live["value"])
                what = f"{group} traces: simulated beside live, {name}, load {load:g}"
                study.at_most(what, sure, off, "points")
    for name in names:
        found = shares.crossing(name, GOODPUT_LEVEL)
        columns = {"load": str(found), "per_s": known.rate_per_s * found.load}
        study.row("goodput: 90 % in time up to", traces=group, contender=name, **columns)
    if OURS in names and baselines:
        _headlines(study, group, shares, baselines)


def _headlines(study: Study, group: str, shares: Attainments, baselines: Sequence[str]) -> None:
    """Add ours beside the best baseline, as an aim where the level was reached."""
    best = shares.best_at(baselines, GOODPUT_LEVEL)
    theirs, ours = (shares.crossing(name, GOODPUT_LEVEL) for name in (best, OURS))
    if ours.bound == "below" or theirs.bound == "above":
        who = OURS if ours.bound == "below" else best
        side = "less than 90" if ours.bound == "below" else "90"
        study.note(f"{group} traces: {who} has {side} % in time at every load that was tried")
    else:
        ratio = shares.goodput_ratio(OURS, best, GOODPUT_LEVEL)
        if theirs.bound or ours.bound:
            # the level was not reached at the loads that were tried: or more
            ratio["high"] = float("inf")
        what = f"{group} traces: goodput at 90 % in time, over {best}"
        study.at_least(what, GOODPUT_RATIO, ratio, "x")
    strained = shares.best_at(baselines, STRAINED_LEVEL)
    bound = shares.crossing(strained, STRAINED_LEVEL).bound
    if bound:
        side = "less" if bound == "below" else "more"
        study.note(f"{group} traces: {strained} has {side} than 60 % in time at every load")
    else:
        what = f"{group} traces: ours in time where {strained} has 60 %"
        there = shares.where(strained, STRAINED_LEVEL, OURS)
        study.at_least(what, 100 * GOODPUT_LEVEL, there, "%")


def _compare_images(study: Study, images: Mapping[tuple[str, str], Sequence[bytes]]) -> None:
    """Compare images of the busiest runs with those that were made one after the other."""
    for (name, trace), own in images.items():
        reference = next((one for one in CONTENDERS if (one, trace) in images), name)
        pairs = [pair for pair in zip(own, images[reference, trace], strict=True) if all(pair)]
        if name == reference or not pairs:
            continue
        found = [float(similarity(*(_pixels(one)[None] for one in pair))) for pair in pairs]
        columns = {"contender": name, "trace": trace, "reference": reference}
        study.row("images", **columns, num_images=len(found), least_ssim=min(found))
        if min(found) < LEAST_SIMILARITY:
            study.fail(f"images of {name} on {trace} differ: SSIM {min(found):.3f}")


def _pixels(png: bytes) -> torch.Tensor:
    """[3, H, W], 0 to 1."""
    values = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(np.float32)
    return torch.from_numpy(values).permute(2, 0, 1) / 255
