"""A cascade through HTTP: what it costs, how good its images are, and deadlines under overload.

Every prompt is made three ways in turn, by the same models in the same service: by the light model
alone, by the heavy one alone, and routed. A routed image must be the very image of the model that
the reply names.
"""

from __future__ import annotations

import base64
import io
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any, Literal, NamedTuple

import httpx
import numpy as np
import numpy.typing as npt
import torch
import yaml
from PIL import Image

from benchmarks.figures import summarise
from benchmarks.harness import Row, Study
from benchmarks.machine import ROOT
from benchmarks.serving.processes import cpu_s_by_role
from benchmarks.serving.services import (
    OPEN_LIMITS,
    Config,
    Contender,
    Running,
    open_loop,
    rate_per_s,
    running,
    samples,
)
from ray_cluster.quality.classifier import load_classifier, read_pictures
from ray_cluster.quality.suite import SuitePrompt, suite_prompts
from recipes.figures.scoring import Drawn, Share

CASCADE, LIGHT, HEAVY = "shapes-auto", "shapes-sd-light", "shapes-sd"
FILE = ROOT / "ray_cluster" / "configs" / "cascade.yaml"
# of the same models, and ignores slack
UNADJUSTED = "shapes-late"
# fields of a call by the way that its image is made
WAYS: Mapping[str, dict[str, Any]] = {
    "light alone": {"quality": "low"},
    "heavy alone": {"quality": "high"},
    "routed": {},
}
_BLOCK = 10
_AIM_MS = 60.0
_CLIENTS = 8
_SHARES = (0.7, 1.0, 1.3)
# of the deadline under load, in heavy routes of an idle service
_SLACK = 4.0
_WORKERS = ("model replica", "discriminator")

Fate = Literal["in time", "late", "refused", "failed"]
Pixels = npt.NDArray[np.uint8]


class Made(NamedTuple):
    """What became of a call.

    Attributes:
        total_s: at the client.
        elapsed_s: from arrival to completion, in the dispatcher.
        cascade: what the reply says of it: stage, reason, confidence and threshold.
        image: a PNG file; empty without one.
    """

    fate: Fate
    total_s: float
    elapsed_s: float = 0.0
    cascade: Mapping[str, Any] = {}
    image: bytes = b""

    @property
    def is_heavy(self) -> bool:
        """Whether its image is the heavy model's."""
        return self.cascade.get("stage") == "heavy"


def post(client: httpx.Client, prompt: SuitePrompt, slo_s: float = 600.0, **fields: Any) -> Made:
    """Have an image made; nothing is raised, whatever becomes of it."""
    body = {"model": CASCADE, "prompt": prompt.caption, "seed": prompt.noise_seed()}
    began_s = time.perf_counter()
    try:
        reply = client.post("/v1/images/generations", json=body | {"slo_s": slo_s} | fields)
    except httpx.HTTPError as error:
        fate: Fate = "late" if isinstance(error, httpx.ReadTimeout) else "failed"
        return Made(fate, time.perf_counter() - began_s)
    total_s = time.perf_counter() - began_s
    if reply.status_code != httpx.codes.OK:
        is_refused = reply.status_code == httpx.codes.TOO_MANY_REQUESTS
        return Made("refused" if is_refused else "failed", total_s)
    found = reply.json()
    [image] = found["data"]
    return Made(
        "in time" if total_s <= slo_s else "late",
        total_s,
        found["deadline"]["elapsed_s"],
        image["cascade"],
        base64.b64decode(image["b64_json"]),
    )


def mixed_prompts(count: int) -> list[SuitePrompt]:
    """Return prompts of the suite, easy and hard in turn."""
    halves = [suite_prompts(kind, (count + 1) // 2) for kind in ("easy", "hard")]
    return list(chain.from_iterable(zip(*halves, strict=True)))[:count]


def pixels_of(image: bytes) -> Pixels:
    """Return the pixels [H, W, 3] of an image file."""
    with Image.open(io.BytesIO(image)) as opened:
        return np.asarray(opened.convert("RGB"))


def differ(first: Pixels, second: Pixels) -> bool:
    """Whether images are not the same; a batch of another size may round otherwise."""
    if first.shape != second.shape:
        return True
    return bool(np.abs(first.astype(int) - second.astype(int)).max() > 1)


def right_images(prompts: Sequence[SuitePrompt], images: Sequence[bytes]) -> list[bool]:
    """Return which images show what their prompts say, by the attribute classifier."""
    classifier, found = load_classifier(), list[bool]()
    for prompt, image in zip(prompts, images, strict=True):
        picture = torch.from_numpy(pixels_of(image).copy()).permute(2, 0, 1) / 255
        [reading] = read_pictures(classifier, picture[None])
        found.append(Drawn(prompt.scene, picture, reading).all_right)
    return found


def cascade_of(usual: Config) -> Config:
    """Return the configuration of ``configs/cascade.yaml``, with a second one without slack."""
    given = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    [cascade] = given["cascades"]
    both = [cascade, {**cascade, "name": UNADJUSTED, "reserve_s": None}]
    sections = {key: given[key] for key in ("pools", "discriminators")}
    return usual | sections | {"limits": OPEN_LIMITS, "cascades": both}


@dataclass(slots=True)
class _Way:
    made: list[Made] = field(default_factory=list)
    cpu_s: float = 0.0


def measure(study: Study) -> None:
    """Run the service of the cascade, and measure it."""
    prompts = mixed_prompts(study.pick(300, 12))
    study.found["what"] = (
        f"{len(prompts)} prompts of the held-out suite, easy and hard in turn, 64 px; one call at "
        "a time for the first table; CPU seconds are those of replicas and discriminator"
    )
    with running(Contender(what="a cascade", change=cascade_of)) as service:
        before = _counts(service)
        with study.part(0.0, 0.5):
            ways = _in_turns(study, service, prompts)
        counted = _counts(service) - before
        with study.part(0.5, 1.0):
            _under_load(study, service, prompts, study.pick(40.0, 4.0))
    for name, way in ways.items():
        study.row("three ways", way=name, **_row(way, prompts))
    added = summarise([1e3 * one for one in _added_s(ways)])
    study.row("what routing adds to the stages alone, ms", added=added)
    study.at_most("hand-over and score, p50", _AIM_MS, added, "ms")
    for problem in _disagreements(ways, counted):
        study.fail(problem)


def _in_turns(study: Study, service: Running, prompts: Sequence[SuitePrompt]) -> dict[str, _Way]:
    """Make every prompt in each way, in blocks of some prompts."""
    ways = {name: _Way() for name in WAYS}
    with service.client() as client:
        for fields in WAYS.values():
            post(client, prompts[0], **fields)
        for start in study.each(range(0, len(prompts), _BLOCK)):
            for name, way in ways.items():
                before = _worker_s()
                for prompt in prompts[start : start + _BLOCK]:
                    way.made.append(made := post(client, prompt, **WAYS[name]))
                    if not made.image:
                        raise RuntimeError(f"{prompt.caption!r} was not made: {made}")
                way.cpu_s += _worker_s() - before
    return ways


def _worker_s() -> float:
    used = cpu_s_by_role()
    return sum(used.get(role, 0.0) for role in _WORKERS)


def _row(way: _Way, prompts: Sequence[SuitePrompt]) -> Row:
    right = right_images(prompts, [one.image for one in way.made])
    return {
        "all right, %": str(Share(sum(right), len(right))),
        "easy, %": str(Share(sum(right[0::2]), len(right[0::2]))),
        "hard, %": str(Share(sum(right[1::2]), len(right[1::2]))),
        "heavy, %": round(100 * float(np.mean([one.is_heavy for one in way.made])), 1),
        "CPU s an image": round(way.cpu_s / len(way.made), 3),
        "elapsed": summarise([one.elapsed_s for one in way.made]),
    }


def _added_s(ways: Mapping[str, _Way]) -> Iterator[float]:
    """Yield what a routed call took beyond its stages alone."""
    light, heavy, routed = (ways[name].made for name in WAYS)
    for one, other, both in zip(light, heavy, routed, strict=True):
        yield both.elapsed_s - one.elapsed_s - (other.elapsed_s if both.is_heavy else 0.0)


def _disagreements(ways: Mapping[str, _Way], counted: Counter[tuple[str, str]]) -> Iterator[str]:
    """Yield where replies, images and metrics differ."""
    light, heavy, routed = (ways[name].made for name in WAYS)
    for number, one in enumerate(routed):
        expected = (heavy if one.is_heavy else light)[number]
        if differ(pixels_of(one.image), pixels_of(expected.image)):
            yield f"the routed image {number} is not that of its {one.cascade['stage']} model"
        if (one.cascade["confidence"] < one.cascade["threshold"]) != one.is_heavy:
            yield f"the routed image {number} was decided on against its threshold: {one.cascade}"
    every = chain.from_iterable(way.made for way in ways.values())
    told = Counter((one.cascade["stage"], one.cascade["reason"]) for one in every)
    for key, count in told.items():
        # one more of each way, to warm up
        if not count <= counted[key] <= count + len(WAYS):
            yield f"replies say {count} times {key}, /metrics {counted[key]} times"


def _counts(service: Running) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for sample in samples(service.url, "ray_cluster_cascade_images_total"):
        if sample.labels["cascade"] == CASCADE:
            found[sample.labels["stage"], sample.labels["reason"]] += int(sample.value)
    return found


def _under_load(
    study: Study, service: Running, prompts: Sequence[SuitePrompt], seconds: float
) -> None:
    """Measure the attainment of both cascades at shares of the capacity, in turns."""

    def act(client: httpx.Client, number: int, call: int) -> None:
        post(client, prompts[(number + _CLIENTS * call) % len(prompts)], model=UNADJUSTED)

    with service.client() as client:
        idle = [post(client, one) for one in prompts[: 2 * _BLOCK]]
        route_s = float(np.median([one.elapsed_s for one in idle if one.is_heavy] or [1.0]))
        capacity, slo_s = rate_per_s(service, _CLIENTS, act, seconds / 2), _SLACK * route_s
        for share, name in study.each(product(_SHARES, (CASCADE, UNADJUSTED))):
            per_s = share * capacity
            gaps_s = np.random.default_rng(7).exponential(1 / per_s, round(per_s * seconds))

            def send(number: int, name: str = name) -> Made:
                return post(client, prompts[number % len(prompts)], slo_s, model=name)

            ended = open_loop(np.cumsum(gaps_s).tolist(), send)
            made = [one for one in ended if one is not None and one.image]
            is_met = [one.elapsed_s <= slo_s for one in made]
            reasons = Counter(one.cascade["reason"] for one in made)
            heavy = [one.is_heavy for one in made] or [False]
            row = study.row(
                f"{_SLACK:g} heavy routes for a deadline, calls at a share of the capacity",
                **{
                    "share of capacity": share,
                    "threshold": "by slack" if name == CASCADE else "fixed",
                    "calls a second": round(per_s, 2),
                    "deadline, s": round(slo_s, 2),
                    "calls": len(ended),
                    "in time, %": str(Share(sum(is_met), len(ended))),
                    "heavy, %": round(100 * float(np.mean(heavy)), 1),
                    "for want of time, %": round(100 * reasons["no_time"] / max(1, len(made)), 1),
                    "failed or refused": len(ended) - len(made),
                },
            )
            if len(ended) > len(made):
                study.fail(f"{len(ended) - len(made)} calls failed or were refused: {row}")
