"""A cascade through HTTP: what it costs, how good its images are, and deadlines under overload.

Every prompt is made three ways in turn, by the same models in the same service: by the light model
alone, by the heavy one alone, and routed. A routed image must be the very image of the model that
the reply names.
"""

from __future__ import annotations

import base64
import io
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import yaml
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.machine import ROOT
from benchmarks.serving.contenders import OwnContender, Site
from benchmarks.serving.processes import cpu_s_by_role
from benchmarks.serving.service_process import running
from benchmarks.settings import Report, Settings
from benchmarks.stats import summarise
from benchmarks.verdicts import at_most
from ray_cluster.quality.classifier import AttributeClassifier, load_classifier, read_pictures
from ray_cluster.quality.suite import SuitePrompt, suite_prompts
from recipes.figures.scoring import Drawn, Share

CASCADE, UNADJUSTED = "shapes-auto", "shapes-late"
# fields of a call by the way that its image is made
WAYS: Mapping[str, Mapping[str, str]] = {
    "light alone": {"quality": "low"},
    "heavy alone": {"quality": "high"},
    "routed": {},
}
_CONFIG = ROOT / "configs" / "cascade.yaml"
_BLOCK = 10
_AIM_MS = 60.0
_CLIENTS = 8
_FACTORS = (0.7, 1.0, 1.3)
# of the deadline under load, in heavy routes of an idle service
_SLACK = 4.0
_TIMEOUT_S = 300.0
_WORKERS = ("model replica", "discriminator")


@dataclass(frozen=True, kw_only=True)
class CascadeContender(OwnContender):
    """The service of ``configs/cascade.yaml``, and a second cascade that ignores slack."""

    def config(self, site: Site, port: int) -> dict[str, Any]:
        """Return the service's configuration."""
        given = yaml.safe_load(_CONFIG.read_text(encoding="utf-8"))
        [cascade] = given["cascades"]
        both = [cascade, {**cascade, "name": UNADJUSTED, "reserve_s": None}]
        sections = {key: given[key] for key in ("pools", "discriminators")}
        limits = {"limits": {"max_queued_images": 10_000, "max_queue_s": 1e6}, "cascades": both}
        return super().config(site, port) | sections | limits


@dataclass(frozen=True, slots=True)
class Made:
    """A reply.

    Attributes:
        pixels: [3, H, W] in 0..1.
        elapsed_s: from arrival to completion, in the dispatcher.
    """

    pixels: torch.Tensor
    elapsed_s: float
    is_met: bool
    cascade: dict[str, Any]


@dataclass(slots=True)
class _Way:
    made: list[Made] = field(default_factory=list)
    cpu_s: float = 0.0


def measure(settings: Settings, report: Report) -> dict[str, Any]:
    """Run the service of the cascade, and measure it."""
    report(0.0, "starting Ray and Serve")
    contender = CascadeContender(what="a cascade")
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "log"
        with running(contender, dtype="float32", alone_s={}, log=log) as url:
            prompts = _mixed(settings.cascade_prompts)
            before = _counts(url)
            ways = _in_turns(url, prompts, lambda done: report(0.5 * done, "in turns"))
            counted = _counts(url) - before
            loads = list(_under_load(url, settings, prompts, report))
    rights = _rights(ways, prompts)
    cost_ms = [1e3 * one for one in _added_s(ways)]
    summary = summarise(cost_ms)
    return {
        "what": f"{len(prompts)} prompts of the held-out suite, easy and hard in turn, 64 px; one "
        "call at a time for the first table; CPU seconds are those of replicas and discriminator",
        "tables": {
            "three ways": [_row(name, way, rights[name]) for name, way in ways.items()],
            "what routing adds to the stages alone, ms": [{"added": summary.as_dict()}],
            f"{_SLACK:g} heavy routes for a deadline, calls at a share of the capacity": loads,
        },
        "aims": [
            at_most(
                "hand-over and score, p50",
                _AIM_MS,
                summary.as_dict()["median"],
                summary.as_dict()["ci95"],
                "ms",
            ).as_dict()
        ],
        "problems": [*_disagreements(ways, counted), *_lost(loads)],
    }


def _mixed(count: int) -> list[SuitePrompt]:
    halves = [suite_prompts(kind, (count + 1) // 2) for kind in ("easy", "hard")]
    return list(chain.from_iterable(zip(*halves, strict=True)))[:count]


def _call(client: httpx.Client, prompt: SuitePrompt, model: str = CASCADE, **fields: Any) -> Made:
    body = {"model": model, "prompt": prompt.caption, "seed": prompt.noise_seed(), **fields}
    reply = client.post("/v1/images/generations", json=body).raise_for_status().json()
    [image] = reply["data"]
    with Image.open(io.BytesIO(base64.b64decode(image["b64_json"]))) as opened:
        pixels = np.asarray(opened.convert("RGB"), dtype=np.float32) / 255
    deadline = reply["deadline"]
    return Made(
        torch.from_numpy(pixels).permute(2, 0, 1),
        deadline["elapsed_s"],
        deadline["met"],
        image["cascade"],
    )


def _in_turns(url: str, prompts: Sequence[SuitePrompt], say: Any) -> dict[str, _Way]:
    """Make every prompt in each way, in blocks of some prompts."""
    ways = {name: _Way() for name in WAYS}
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        for fields in WAYS.values():
            _call(client, prompts[0], **fields)
        for start in range(0, len(prompts), _BLOCK):
            say(start / len(prompts))
            for name, way in ways.items():
                before = _worker_s()
                block = prompts[start : start + _BLOCK]
                way.made += [_call(client, one, **WAYS[name]) for one in block]
                way.cpu_s += _worker_s() - before
    return ways


def _worker_s() -> float:
    used = cpu_s_by_role()
    return sum(used.get(role, 0.0) for role in _WORKERS)


def _rights(ways: Mapping[str, _Way], prompts: Sequence[SuitePrompt]) -> dict[str, list[bool]]:
    """Return which images show what their prompts say, by the attribute classifier."""
    classifier = load_classifier()
    return {
        name: [_is_right(classifier, *one) for one in zip(prompts, way.made, strict=True)]
        for name, way in ways.items()
    }


def _is_right(classifier: AttributeClassifier, prompt: SuitePrompt, made: Made) -> bool:
    [reading] = read_pictures(classifier, made.pixels[None])
    return Drawn(prompt.scene, made.pixels, reading).all_right


def _row(name: str, way: _Way, right: Sequence[bool]) -> dict[str, Any]:
    heavy = [one.cascade["stage"] == "heavy" for one in way.made]
    return {
        "way": name,
        "all right, %": str(Share(sum(right), len(right))),
        "easy, %": str(Share(sum(right[0::2]), len(right[0::2]))),
        "hard, %": str(Share(sum(right[1::2]), len(right[1::2]))),
        "heavy, %": round(100 * float(np.mean(heavy)), 1),
        "CPU s an image": round(way.cpu_s / len(way.made), 3),
        "elapsed": summarise([one.elapsed_s for one in way.made]).as_dict(),
    }


def _added_s(ways: Mapping[str, _Way]) -> Iterator[float]:
    """Yield what a routed call took beyond its stages alone."""
    light, heavy, routed = (ways[name].made for name in WAYS)
    for one, other, both in zip(light, heavy, routed, strict=True):
        is_deferred = both.cascade["stage"] == "heavy"
        yield both.elapsed_s - one.elapsed_s - (other.elapsed_s if is_deferred else 0.0)


def _disagreements(ways: Mapping[str, _Way], counted: Counter[tuple[str, str]]) -> Iterator[str]:
    """Yield where replies, images and metrics differ."""
    light, heavy, routed = (ways[name].made for name in WAYS)
    alone = {"light": light, "heavy": heavy}
    for number, one in enumerate(routed):
        expected = alone[one.cascade["stage"]][number]
        if float((one.pixels - expected.pixels).abs().max()) > 1.01 / 255:
            yield f"the routed image {number} is not that of its {one.cascade['stage']} model"
        is_below = one.cascade["confidence"] < one.cascade["threshold"]
        if is_below != (one.cascade["stage"] == "heavy"):
            yield f"the routed image {number} was decided on against its threshold: {one.cascade}"
    told = Counter(
        (one.cascade["stage"], one.cascade["reason"])
        for one in chain.from_iterable(way.made for way in ways.values())
    )
    # one more of each way, to warm up
    differing = {key: (count, counted[key]) for key, count in told.items()}
    for key, (count, metric) in differing.items():
        if not count <= metric <= count + len(WAYS):
            yield f"replies say {count} times {key}, /metrics {metric} times"


def _counts(url: str) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    text = httpx.get(f"{url}/metrics", timeout=_TIMEOUT_S).raise_for_status().text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "ray_cluster_cascade_images_total":
                labels = sample.labels
                if labels["cascade"] == CASCADE:
                    found[labels["stage"], labels["reason"]] += int(sample.value)
    return found


def _under_load(
    url: str, settings: Settings, prompts: Sequence[SuitePrompt], report: Report
) -> Iterator[dict[str, Any]]:
    """Yield the attainment of both cascades at shares of the capacity, in turns."""
    report(0.5, "capacity")
    capacity, route_s = _capacity(url, prompts, settings.cascade_load_s / 2)
    slo_s = _SLACK * route_s
    steps = [(share, name) for share in _FACTORS for name in (CASCADE, UNADJUSTED)]
    for number, (share, name) in enumerate(steps):
        report(0.55 + 0.45 * number / len(steps), f"{share:g} x capacity")
        made, failed, num = _poisson(
            url, prompts, name, share * capacity, slo_s, settings.cascade_load_s
        )
        heavy = [one.cascade["stage"] == "heavy" for one in made]
        reasons = Counter(one.cascade["reason"] for one in made)
        yield {
            "share of capacity": share,
            "threshold": "by slack" if name == CASCADE else "fixed",
            "calls a second": round(share * capacity, 2),
            "deadline, s": round(slo_s, 2),
            "calls": num,
            "in time, %": str(Share(sum(one.is_met for one in made), num)),
            "heavy, %": round(100 * float(np.mean(heavy)), 1) if heavy else 0.0,
            "for want of time, %": round(100 * reasons["no_time"] / max(1, len(made)), 1),
            "failed or refused": failed,
        }


def _capacity(url: str, prompts: Sequence[SuitePrompt], duration_s: float) -> tuple[float, float]:
    """Return routed images per second by many clients, and the seconds of an idle heavy route."""
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        idle = [_call(client, one) for one in prompts[: 2 * _BLOCK]]
    routes_s = [one.elapsed_s for one in idle if one.cascade["stage"] == "heavy"]
    stop, counts = threading.Event(), [0] * _CLIENTS

    def work(number: int) -> None:
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
            while not stop.is_set():
                index = number + _CLIENTS * counts[number]
                _call(client, prompts[index % len(prompts)], UNADJUSTED, slo_s=600)
                counts[number] += 1

    started_s = time.perf_counter()
    with ThreadPoolExecutor(_CLIENTS) as pool:
        running_calls = [pool.submit(work, number) for number in range(_CLIENTS)]
        time.sleep(duration_s)
        num, took_s = sum(counts), time.perf_counter() - started_s
        stop.set()
        for one in running_calls:
            one.result()
    median_s = float(np.median(routes_s)) if routes_s else float(np.max([1.0]))
    return num / took_s, median_s


def _poisson(
    url: str,
    prompts: Sequence[SuitePrompt],
    name: str,
    per_s: float,
    slo_s: float,
    duration_s: float,
) -> tuple[list[Made], int, int]:
    """Send calls at random instants; return those that were made, how many failed, and all."""
    gaps_s = np.random.default_rng(7).exponential(1 / per_s, round(per_s * duration_s))
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S, limits=limits) as client:

        def one(number: int) -> Made | None:
            try:
                return _call(client, prompts[number % len(prompts)], name, slo_s=slo_s)
            except httpx.HTTPError:
                return None

        with ThreadPoolExecutor(256) as pool:
            calls = []
            started_s = time.perf_counter()
            for number, at_s in enumerate(np.cumsum(gaps_s)):
                time.sleep(max(0.0, started_s + float(at_s) - time.perf_counter()))
                calls.append(pool.submit(one, number))
            ended = [call.result() for call in calls]
    made = [one for one in ended if one is not None]
    return made, len(ended) - len(made), len(ended)


def _lost(loads: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in loads:
        if row["failed or refused"]:
            yield f"{row['failed or refused']} calls failed or were refused: {row}"
