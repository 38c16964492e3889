"""Requests and menus of one model on a group of GPUs, from its latency profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import numpy as np

from ray_cluster.policies.costs.latency import LatencyProfile
from ray_cluster.policies.sequence_parallel.types import DegreeMenu, menu_of
from ray_cluster.simulator.arrivals import constant_rate
from ray_cluster.simulator.groups.group import GroupTask
from ray_cluster.simulator.workload import Arrival, Kind, Mix, draw_workload

# an exact number of arrivals is cut from a workload that is longer by this factor and number
_SPARE, _SPARE_ARRIVALS = 1.5, 100


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Square images of one size: their deadline, and their computation.

    Attributes:
        slo_s: seconds from arrival to the deadline at a scale of 1.
        tflops: of all steps of one image.
    """

    side_px: int
    slo_s: float
    tflops: float


# TetriServe, section 6.1
FLUX_CLASSES = (
    SizeClass(256, 1.5, 556),
    SizeClass(512, 2.0, 1388),
    SizeClass(1024, 3.0, 5046),
    SizeClass(2048, 5.0, 24965),
)
MixName = Literal["uniform", "skewed"]
# a latent token stands for 16 x 16 pixels
_TOKEN_PX = 16


def size_mix(name: MixName, profile: LatencyProfile) -> Mix:
    """Return a mix in equal shares, or skewed to large images.

    Skewed shares grow with exp(tokens / most tokens) (TetriServe, section 6.1).
    """
    tokens = [(one.side_px / _TOKEN_PX) ** 2 for one in FLUX_CLASSES]
    steps = {row.key.width_px: row.key.num_steps for row in profile.of("image")}
    slo_s = {one.side_px: one.slo_s for one in FLUX_CLASSES}
    kinds = tuple(
        Kind(
            1.0 if name == "uniform" else math.exp(count / max(tokens)),
            profile.model,
            one.side_px,
            one.side_px,
            steps[one.side_px],
            uses_guidance=False,
            slo_class=str(one.side_px),
        )
        for one, count in zip(FLUX_CLASSES, tokens, strict=True)
    )
    return Mix(kinds, slo_s=lambda kind: slo_s[kind.width_px])


def menus_of(profile: LatencyProfile, *, num_gpus: int) -> dict[str, DegreeMenu]:
    """Return the menus by class: seconds per step from whole images, with the decoding as tail."""
    menus = {}
    for one in FLUX_CLASSES:
        images = [row for row in profile.of("image") if row.key.width_px == one.side_px]
        tails = [row for row in profile.of("decode") if row.key.width_px == one.side_px]
        menus[str(one.side_px)] = menu_of(
            str(one.side_px),
            {row.key.sp_degree: row.seconds / row.key.num_steps for row in images},
            num_gpus=num_gpus,
            tail_s=tails[0].seconds if tails else 0.0,
            work=one.tflops,
        )
    return menus


def draw_count(mix: Mix, rate_per_s: float, count: int, *, seed: int, cv: float) -> list[Arrival]:
    """Draw exactly so many arrivals at a constant rate.

    Raises:
        ValueError: there were too few, which a CV far above 1 may do.
    """
    duration_s = (_SPARE * count + _SPARE_ARRIVALS) / rate_per_s
    drawn = draw_workload(mix, constant_rate(rate_per_s, duration_s), seed=seed, cv=cv)
    if len(drawn) < count:
        raise ValueError(f"only {len(drawn)} of {count} arrivals came at a CV of {cv}")
    return drawn[:count]


def tasks_of(
    arrivals: Sequence[Arrival],
    menus: dict[str, DegreeMenu],
    *,
    scale: float,
    step_noise: float,
    time_error: float,
    rng: np.random.Generator,
) -> list[GroupTask]:
    """Return the requests of a workload for a group.

    Args:
        arrivals: with deadlines at a scale of 1.
        menus: what steps really take, by class.
        scale: of the deadlines.
        step_noise: coefficient of variation of each step's seconds.
        time_error: standard deviation of the factor, drawn once per class and workload, by which a
            planner's step times are wrong.
        rng: of noise and error.
    """
    factors = np.maximum(0.5, 1 + time_error * rng.standard_normal(len(menus)))
    believed = {
        name: replace(menu, step_s=tuple(seconds * float(factor) for seconds in menu.step_s))
        for (name, menu), factor in zip(menus.items(), factors, strict=True)
    }
    even = {one.num_steps: tuple(map(float, range(one.num_steps + 1))) for one in arrivals}
    return [
        GroupTask(
            number,
            believed[one.slo_class],
            one.arrival_s,
            one.arrival_s + scale * one.slo_s,
            menus[one.slo_class].step_s,
            _noisy(one.num_steps, step_noise, rng) if step_noise else even[one.num_steps],
        )
        for number, one in enumerate(arrivals)
    ]


def _noisy(num_steps: int, noise: float, rng: np.random.Generator) -> tuple[float, ...]:
    paces = np.maximum(0.2, 1 + noise * rng.standard_normal(num_steps))
    return tuple(accumulate(paces.tolist(), initial=0.0))
