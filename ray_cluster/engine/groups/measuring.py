"""The first steps of a group: every set of ranks is warmed up, and every way of a step measured."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np
import torch

from ray_cluster.engine.groups.degree_costs import DegreeCosts, Way
from ray_cluster.engine.groups.ranks import Ranks, RankStep, StepEnd
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.stages.warmup import other_size
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.policies.sequence_parallel.sets import aligned_sets
from ray_cluster.policies.types import StepCost
from ray_cluster.requests import ImageRequest

SizePx = tuple[int, int]

_REPEATS, _SWITCHES = 4, 8
_GUIDED = 3.0
_NUM_STEPS = 4
# a step takes something, however small the image
_LEAST_S = 1e-5


class GroupTimer:
    """Takes steps on sets of ranks, one after the other, and times them.

    Args:
        news: set whenever ranks have news.
    """

    def __init__(self, model: LoadedModel, ranks: Ranks, news: threading.Event) -> None:
        self._model, self._ranks, self._news = model, ranks, news
        self._calls = itertools.count(1)
        self._keys = {
            guided: ranks.keep(self._conditioning(guided=guided), None) for guided in (False, True)
        }

    def close(self) -> None:
        """Have the ranks forget what the steps were conditioned on."""
        for key in self._keys.values():
            self._ranks.forget(key)

    def _conditioning(self, *, guided: bool) -> Conditioning:
        profile = self._model.profile
        width, height = profile.default_width_px, profile.default_height_px
        has_rows = guided and profile.guidance == "rows"
        request = ImageRequest(
            request_id="measured",
            model=profile.model,
            prompt="",
            width_px=width,
            height_px=height,
            num_steps=_NUM_STEPS,
            sampler=profile.default_sampler,
            guidance_scale=_GUIDED if has_rows else 1.0,
            seed=0,
        )
        (found,) = self._model.encoder.encode([request])
        return found

    def steps_s(self, size: SizePx, ways: Sequence[tuple[Way, range]]) -> list[float]:
        """Take a step on each of some sets that share no rank, at once; return their seconds.

        Rows that lie together are a request's without guidance.

        Raises:
            RuntimeError: the ranks were lost.
        """
        return [end.seconds for end in self.ends(size, ways)]

    def ends(
        self, size: SizePx, ways: Sequence[tuple[Way, range]], *, guided: bool = False
    ) -> list[StepEnd]:
        """Likewise, but return all of their ends; rows that lie together may be guided, too."""
        calls = {next(self._calls): pair for pair in ways}
        for call, (way, ranks) in calls.items():
            is_guided = guided or way.rows == "apart"
            self._ranks.begin(self._step(call, size, way, ranks, guided=is_guided))
        found: dict[int, StepEnd] = {}
        while len(found) < len(calls):
            self._news.wait()
            self._news.clear()
            for end in self._ranks.ends():
                if end.prediction is None:
                    raise RuntimeError("the ranks were lost while their steps were measured")
                found[end.call] = end
        return [found[call] for call in calls]

    def _step(self, call: int, size: SizePx, way: Way, ranks: range, *, guided: bool) -> RankStep:
        channels, height, width = self._model.executor.latent_shape(*size)
        return RankStep(
            call,
            self._keys[guided],
            ranks,
            way.rows,
            (height, width),
            torch.randn(height * width, channels),
            500.0,
            _GUIDED if guided else 1.0,
        )


def warm_up_sets(timer: GroupTimer, model: LoadedModel, ways: Sequence[Way], num: int) -> None:
    """Take a step of the default size in every way on every set of so many ranks."""
    for way in ways:
        timer.steps_s(
            _default_size(model), [(way, ranks) for ranks in aligned_sets(num, [way.degree])]
        )


def measured_ways(
    timer: GroupTimer, model: LoadedModel, costs: DegreeCosts, clock: Callable[[], float]
) -> Mapping[Way, StepCost]:
    """Return what a step costs in every way, by the fastest of some of two sizes."""
    size, token_px = _default_size(model), costs.current.token_px
    coding = _coding(model, size, clock)
    found = {}
    for way in costs.ways:
        points = []
        for one in sorted({other_size(model.profile), size}):
            if one != size and (one[0] // token_px) * (one[1] // token_px) < way.degree:
                continue
            seconds = [timer.steps_s(one, [(way, range(way.degree))])[0] for _ in range(_REPEATS)]
            rows = 2 if way.rows == "apart" else 1
            points.append((rows * one[0] * one[1] / 1e6, min(seconds[1:])))
        found[way] = _through(sorted(points), *coding)
    return found


def _default_size(model: LoadedModel) -> SizePx:
    return model.profile.default_width_px, model.profile.default_height_px


def _through(points: Sequence[tuple[float, float]], decode_s: float, encode_s: float) -> StepCost:
    """Return the cost through pairs of megapixels and seconds."""
    (least, least_s), (most, most_s) = points[0], points[-1]
    slope = (most_s - least_s) / (most - least) if most > least else most_s / most
    # what is measured of small images is noise, and a larger one never costs less
    slope = min(max(slope, 0.1 * most_s / most), most_s / most)
    return StepCost(
        fixed_s=max(_LEAST_S, most_s - slope * most),
        per_megapixel_s=slope,
        decode_per_megapixel_s=decode_s,
        encode_per_megapixel_s=encode_s,
    )


def _coding(model: LoadedModel, size: SizePx, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds per megapixel of decoding and of encoding an image."""
    width, height = size
    megapixels = width * height / 1e6
    latents = torch.randn(model.executor.latent_shape(width, height))
    pixels = np.zeros((height, width, 3), np.uint8)
    works = (lambda: model.decoder.decode([latents]), lambda: model.images.encode([pixels]))
    found = []
    for work in works:
        seconds = []
        for _ in range(_REPEATS):
            began_s = clock()
            work()
            seconds.append(clock() - began_s)
        found.append(min(seconds[1:]) / megapixels)
    return found[0], found[1]


def measured_switch_s(timer: GroupTimer, model: LoadedModel, costs: DegreeCosts) -> float:
    """Return the seconds that a step on other ranks than the last one's takes longer."""
    degree = costs.ways[0].degree
    way, one, other = Way(degree), range(degree), range(degree, 2 * degree)
    if other.stop > costs.current.num_ranks:
        return 0.0
    same, changed = (
        [
            timer.steps_s(_default_size(model), [(way, ranks)])[0]
            for _ in range(_SWITCHES)
            for ranks in pair
        ]
        for pair in ((one, one), (one, other))
    )
    return max(0.0, median(changed) - median(same))
