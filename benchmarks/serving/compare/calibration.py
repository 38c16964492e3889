"""What is measured before: images alone, the baselines' capacity, the machine's latency profile."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.machine import ROOT, load_now
from benchmarks.serving.compare.client_run import run_client
from benchmarks.serving.compare.contenders import CONTENDERS
from benchmarks.serving.compare.outcomes import outcome_of
from benchmarks.serving.compare.service_process import running
from benchmarks.serving.compare.settings import Settings, Shape
from benchmarks.serving.compare.traces import Planned
from benchmarks.serving.running import post_image
from benchmarks.settings import Report

ALONE = "one-by-one"
_FILE = "calibration.json"
_UNGUARDED = ("one-by-one", "static")
_TIMEOUT_S = 600.0
_PROFILE_S = 3600.0
_NO_DEADLINE_S = 3600.0
# of the burst that a capacity is measured with: no request of a trace has it
_FIRST_SEED = 5_000_000
_BATCHES = "1,2,4,8"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is known before the first trace.

    Attributes:
        alone_s: seconds of the pipeline for an image alone, by the name of its shape: the median,
            in the replica of the idle baseline ``one-by-one``, from prompt to pixels.
        alone_http_s: the same as a client sees it.
        capacity_per_s: images per second of each baseline with all requests there at once.
    """

    alone_s: Mapping[str, float]
    alone_http_s: Mapping[str, float]
    capacity_per_s: Mapping[str, float]
    load_before: Mapping[str, Any]

    @property
    def rate_per_s(self) -> float:
        """The rate of load 1: the capacity of the better baseline."""
        return max(self.capacity_per_s.values())


def calibrate(
    folder: Path, settings: Settings, prompts: Sequence[str], report: Report
) -> Calibration:
    """Return what is measured before; from the folder if it is there already."""
    path = folder / _FILE
    if is_calibrated(folder):
        return Calibration(**json.loads(path.read_text(encoding="utf-8")))
    load_before = load_now()
    capacity_per_s = {}
    alone: dict[str, tuple[float, float]] = {}
    for index, name in enumerate(_UNGUARDED):
        report(index / len(_UNGUARDED), f"{name}: starting")
        log = folder / f"calibration-{name}.log"
        with running(CONTENDERS[name], dtype=settings.dtype, alone_s={}, log=log) as url:
            if name == ALONE:
                report(index / len(_UNGUARDED), "images alone")
                alone = measure_alone(url, settings, prompts)
            else:
                warm_up(url, name, settings, prompts)
            report((index + 0.7) / len(_UNGUARDED), f"{name}: capacity")
            capacity_per_s[name] = _capacity_per_s(url, settings, prompts)
    found = Calibration(
        alone_s={shape: work_s for shape, (work_s, _) in alone.items()},
        alone_http_s={shape: total_s for shape, (_, total_s) in alone.items()},
        capacity_per_s=capacity_per_s,
        load_before=load_before,
    )
    path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    return found


def is_calibrated(folder: Path) -> bool:
    """Whether a comparison has begun there."""
    return (folder / _FILE).exists()


def measure_alone(
    url: str, settings: Settings, prompts: Sequence[str]
) -> dict[str, tuple[float, float]]:
    """Return the seconds of an image alone in the replica and at the client, by shape."""
    found = {}
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        for shape in settings.shapes:
            samples = []
            # the first one warms up
            for repeat in range(settings.alone_repeats + 1):
                body = _body(settings, shape, prompts[repeat % len(prompts)], repeat)
                total_s, timing, _ = post_image(client, body)
                samples.append((timing["work_s"], total_s))
            in_replica_s, at_client_s = zip(*samples[1:], strict=True)
            found[shape.name] = (statistics.median(in_replica_s), statistics.median(at_client_s))
    return found


def warm_up(url: str, contender: str, settings: Settings, prompts: Sequence[str]) -> None:
    """Have a contender make an image of each shape, one after the other."""
    call = CONTENDERS[contender].call
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        for index, shape in enumerate(settings.shapes):
            prompt = prompts[index % len(prompts)]
            post_image(client, {**call, **_body(settings, shape, prompt, index)})


def measure_profile(folder: Path, settings: Settings, name: str, pool: Mapping[str, Any]) -> Path:
    """Return the file of a pool's latency profile on this machine, measured if it is not there.

    Args:
        folder: of the comparison.
        settings: of it.
        name: of the contender.
        pool: its section of the configuration.
    """
    path = folder / f"profile-{name.replace('/', '-')}.yaml"
    if path.exists():
        return path
    config = path.with_suffix(".config.yaml")
    config.write_text(yaml.safe_dump({"pools": [dict(pool)]}), encoding="utf-8")
    sizes = ",".join(f"{width}x{height}" for width, height in settings.sizes)
    command = [
        sys.executable,
        "-m",
        "ray_cluster.cli",
        "profile",
        "--config",
        str(config.resolve()),
    ]
    command += ["--sizes", sizes, "--batches", _BATCHES, "--out", str(path.resolve())]
    command += ["--repeats", str(settings.profile_repeats)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=_PROFILE_S)
    return path


def _capacity_per_s(url: str, settings: Settings, prompts: Sequence[str]) -> float:
    """Return images per second with requests of all shapes in equal numbers there at once."""
    shapes = [
        settings.shapes[index % len(settings.shapes)] for index in range(settings.capacity_requests)
    ]
    asked = [
        Planned(0.0, shape, prompts[index % len(prompts)], _FIRST_SEED + index, _NO_DEADLINE_S)
        for index, shape in enumerate(shapes)
    ]
    calls = [(0.0, _body(settings, one.shape, one.prompt, one.seed)) for one in asked]
    run = run_client(url, calls, timeout_s=_TIMEOUT_S)
    outcomes = [outcome_of(one, answer) for one, answer in zip(asked, run.answers, strict=True)]
    ends_s = [one.latency_s for one in outcomes if one.is_finished and one.latency_s is not None]
    if len(ends_s) < len(asked):
        problems = {one.problem for one in outcomes if one.problem}
        raise RuntimeError(f"{len(asked) - len(ends_s)} of {len(asked)} not made: {problems}")
    return len(ends_s) / max(ends_s)


def _body(settings: Settings, shape: Shape, prompt: str, seed: int) -> dict[str, Any]:
    return image_call(shape, prompt, seed, sampler=settings.sampler)


def image_call(shape: Shape, prompt: str, seed: int, *, sampler: str) -> dict[str, Any]:
    """Return the body of a generation call, for any contender."""
    return {
        "prompt": prompt,
        "size": shape.size,
        "num_inference_steps": shape.num_steps,
        "guidance_scale": shape.guidance_scale,
        "seed": seed,
        "sampler": sampler,
    }
