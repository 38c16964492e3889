"""What a step is to last: FLUX.1-dev on H100 as the simulator's profile has it, on a small model.

Sides stand for eight times as many pixels. Per degree, a cost of constant, area and squared area is
fitted to the profile's whole images: the terms by which the service prices steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.sequence_parallel.types import DegreeMenu, menu_of
from ray_cluster.simulator.groups.workload import FLUX_CLASSES

PROFILE, NUM_RANKS, NUM_STEPS = "flux-h100-a", 4, 10
# published pixels along a side, for each of ours
SCALE = 8
# deadlines are those of eight GPUs, times this: on four, the largest image takes twice as long
SLO_SCALE = 2.4
CLASSES = {one.side_px // SCALE: SLO_SCALE * one.slo_s for one in FLUX_CLASSES}
"""Seconds from arrival to the deadline, by our pixels along a side."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long a step is to last.

    Attributes:
        terms: by degree: seconds of a constant, per pixel, and per squared pixel of the image.
        errors: by degree, the largest relative difference from the published rows.
    """

    terms: Mapping[int, tuple[float, float, float]]
    errors: Mapping[int, float]

    def step_s(self, degree: int, pixels: float) -> float:
        """Return the seconds of a step of an image."""
        constant, linear, squared = self.terms[degree]
        return constant + linear * pixels + squared * pixels**2

    def menu(self, side_px: int, tail_s: float) -> DegreeMenu:
        """Return the menu of square images, under the name that the service has for it."""
        seconds = {degree: self.step_s(degree, side_px**2) for degree in self.terms}
        return menu_of(
            f"{side_px}x{side_px}",
            seconds,
            num_gpus=NUM_RANKS,
            tail_s=tail_s,
            work=NUM_STEPS * side_px**2 / 1e6,
        )


def step_times(pace: float) -> StepTimes:
    """Fit the terms; a whole image lasts `pace` times as long as published."""
    terms, errors = {}, {}
    for degree in (1, 2, 4):
        rows = [row for row in load_profile(PROFILE).of("image") if row.key.sp_degree == degree]
        pixels = np.array([(row.key.width_px / SCALE) ** 2 for row in rows])
        seconds = np.array([pace * row.seconds / NUM_STEPS for row in rows])
        powers = np.stack([pixels**0, pixels, pixels**2], axis=1)
        found, *_ = np.linalg.lstsq(powers / seconds[:, None], np.ones(len(rows)))
        constant, linear, squared = map(float, found)
        terms[degree] = constant, linear, squared
        errors[degree] = float(np.abs(powers @ found / seconds - 1).max())
    return StepTimes(terms, errors)
