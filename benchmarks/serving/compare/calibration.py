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
from benchmarks.serving.calls import image_body, post_image
from benchmarks.serving.compare.client import run_client
from benchmarks.serving.compare.outcomes import outcome_of
from benchmarks.serving.compare.settings import GUIDANCE, SAMPLER, Settings, Shape
from benchmarks.serving.compare.traces import Planned
from benchmarks.serving.contenders import CONTENDERS
from benchmarks.serving.service_process import running
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
        alone_s: seconds of an image alone by the name of its shape: the median, from prompt to
            pixels in the replica of the idle baseline ``one-by-one``.
        capacity_per_s: images per second of each baseline with all requests there at once.
    """

    alone_s: Mapping[str, float]
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
    load_before, alone_s, capacity_per_s = load_now(), {}, {}
    for index, name in enumerate(_UNGUARDED):
        report(index / len(_UNGUARDED), f"{name}: starting")
        log = folder / f"calibration-{name}.log"
        with running(CONTENDERS[name], dtype=settings.dtype, alone_s={}, log=log) as url:
            warm_up(url, name, settings, prompts)
            if name == ALONE:
                report((index + 0.3) / len(_UNGUARDED), "images alone")
                alone_s = measure_alone(url, settings, prompts)
            report((index + 0.7) / len(_UNGUARDED), f"{name}: capacity")
            capacity_per_s[name] = _capacity_per_s(url, settings, prompts)
    found = Calibration(alone_s, capacity_per_s, load_before)
    path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    return found


def is_calibrated(folder: Path) -> bool:
    """Whether a comparison has begun there."""
    return (folder / _FILE).exists()


def measure_alone(url: str, settings: Settings, prompts: Sequence[str]) -> dict[str, float]:
    """Return the seconds of an image alone in the replica, by shape."""
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        return {
            shape.name: statistics.median(
                post_image(client, image_call(shape, prompts[seed % len(prompts)], seed)).timing[
                    "work_s"
                ]
                for seed in range(settings.alone_repeats)
            )
            for shape in settings.shapes
        }


def warm_up(url: str, contender: str, settings: Settings, prompts: Sequence[str]) -> None:
    """Have a contender make an image of each shape, one after the other."""
    call = CONTENDERS[contender].call
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        for seed, shape in enumerate(settings.shapes):
            post_image(client, {**call, **image_call(shape, prompts[seed % len(prompts)], seed)})


def measure_profile(folder: Path, settings: Settings, name: str, pool: Mapping[str, Any]) -> Path:
    """Return the file of a pool's latency profile on this machine, measured if it is not there.

    Args:
        name: of the contender.
        pool: its section of the configuration.
    """
    path = folder / f"profile-{name.replace('/', '-')}.yaml"
    if path.exists():
        return path
    config = path.with_suffix(".config.yaml")
    config.write_text(yaml.safe_dump({"pools": [dict(pool)]}), encoding="utf-8")
    options = {
        "--config": str(config.resolve()),
        "--sizes": ",".join(f"{width}x{height}" for width, height in settings.sizes),
        "--batches": _BATCHES,
        "--repeats": str(settings.profile_repeats),
        "--out": str(path.resolve()),
    }
    words = [word for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "ray_cluster.cli", "profile", *words]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=_PROFILE_S)
    return path


def _capacity_per_s(url: str, settings: Settings, prompts: Sequence[str]) -> float:
    """Return images per second with requests of all shapes in equal numbers there at once."""
    shapes, count = settings.shapes, settings.capacity_requests
    planned = [
        Planned(
            0.0,
            shapes[index % len(shapes)],
            prompts[index % len(prompts)],
            _FIRST_SEED + index,
            _NO_DEADLINE_S,
        )
        for index in range(count)
    ]
    calls = [(0.0, image_call(one.shape, one.prompt, one.seed)) for one in planned]
    run = run_client(url, calls, timeout_s=_TIMEOUT_S)
    outcomes = [outcome_of(one, answer) for one, answer in zip(planned, run.answers, strict=True)]
    ends_s = [one.latency_s for one in outcomes if one.is_finished and one.latency_s is not None]
    if len(ends_s) < count:
        problems = {one.problem for one in outcomes if one.problem}
        raise RuntimeError(f"{count - len(ends_s)} of {count} images not made: {problems}")
    return count / max(ends_s)


def image_call(shape: Shape, prompt: str, seed: int) -> dict[str, Any]:
    """Return the body of a generation call, for any contender."""
    steps, size = shape.num_steps, shape.size
    body = image_body(seed, num_steps=steps, size=size, guidance_scale=GUIDANCE, prompt=prompt)
    return body | {"sampler": SAMPLER}
