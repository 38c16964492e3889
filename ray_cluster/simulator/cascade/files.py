"""What an experiment of the kind ``cascade`` reads: profiles, curves, and arrivals if replayed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ray_cluster.models.cascade_curves import CascadeCurves, load_curves
from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.costs.latency import LatencyProfile
from ray_cluster.simulator.arrivals import Floats
from ray_cluster.simulator.control.experiment import Column
from ray_cluster.simulator.experiment import MOST_REQUESTS
from ray_cluster.simulator.traces import read_instants

# of a replayed trace, of which the busiest counts as its peak: hours of a day
_NUM_PARTS = 24


@dataclass(frozen=True)
class Replay:
    """Arrivals of a trace.

    Attributes:
        instants_s: [N], rising from 0.
    """

    instants_s: Floats

    @property
    def duration_s(self) -> float:
        """Until the last arrival."""
        return float(self.instants_s[-1])

    def peak_per_s(self, least_s: float) -> float:
        """Return the rate in the busiest 24th of the trace, or of so many seconds if longer."""
        part_s = max(least_s, self.duration_s / _NUM_PARTS)
        return int(np.bincount((self.instants_s // part_s).astype(int)).max()) / part_s

    def mean_per_s(self, least_s: float) -> float:
        """Return the rate over the whole trace, or over so many seconds if longer."""
        return len(self.instants_s) / max(least_s, self.duration_s)


@dataclass(frozen=True)
class CascadeFiles:
    """What was read.

    Attributes:
        replay: None where arrivals are drawn.
    """

    light: LatencyProfile
    heavy: LatencyProfile
    curves: CascadeCurves
    replay: Replay | None

    @property
    def device(self) -> str:
        """Of all GPUs.

        Raises:
            ValueError: the profiles are of different ones.
        """
        if self.light.device != self.heavy.device:
            raise ValueError(
                f"heavy_profile: given one of {self.heavy.device}; allowed: of "
                f"{self.light.device}, as light_profile: all GPUs are of one type"
            )
        return self.light.device

    @property
    def quality(self) -> Column:
        """The quality, by its name; with as many decimals as its scores differ in."""
        scores = self.curves.quality.scores
        spread = max(scores) - min(scores)
        digits = 2 - min(0, math.floor(math.log10(spread))) if spread else 2
        name = self.curves.quality_name
        return Column(re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"), name, 1, digits)

    @property
    def better(self) -> str:
        """Which scores are better, in a word."""
        return "lower" if self.curves.quality.lower_is_better else "higher"

    @property
    def quality_axis(self) -> Column:
        """The quality, with which scores are better."""
        return replace(self.quality, title=f"{self.quality.title}, {self.better} is better")

    def score(self, deferral_rate: float, *, is_random: bool) -> float:
        """Return the quality of all images at a share of the heavy model.

        Args:
            is_random: whether images are deferred by chance: on the line between the two models.
        """
        curve = self.curves.quality
        if not is_random:
            return curve.score_at(deferral_rate)
        light, heavy = curve.score_at(0.0), curve.score_at(1.0)
        return light + deferral_rate * (heavy - light)


def read_files(
    folder: Path, *, light: str, heavy: str, curves: str, trace: str | None
) -> CascadeFiles:
    """Read what an experiment names; relative paths lie in the folder.

    Raises:
        ConfigError: a file can't be read, or says something that is not allowed.
        ValueError: a trace has too many requests.
    """
    replay = None
    if trace is not None:
        instants_s = read_instants(folder / trace)
        if len(instants_s) > MOST_REQUESTS:
            raise ValueError(
                f"trace: given {trace} with {len(instants_s):,} requests; allowed: at most "
                f"{MOST_REQUESTS:,}"
            )
        replay = Replay(np.array(instants_s))
    return CascadeFiles(
        load_profile(light, folder),
        load_profile(heavy, folder),
        load_curves(curves, folder),
        replay,
    )
