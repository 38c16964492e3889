"""Quality over the share made anew, by who decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.figures import absolute
from benchmarks.harness import Plot, Study
from ray_cluster.engine.scorers.loading import load_scorer
from ray_cluster.imaging.small_images import small_image
from ray_cluster.models.cascade_curves import load_curves
from ray_cluster.quality.cascade_fit import (
    area_under_curve,
    calibration_error,
    quality_at,
)
from ray_cluster.quality.suite import SUITE_SEED
from recipes.discriminators.figures import RATES, Trial, make_trial

Floats = npt.NDArray[np.float64]

OURS, IMAGE_ONLY, LENGTH, RANDOM = "prompt and image", "image only", "prompt length", "random"
_MODELS = {OURS: "shapes-discriminator", IMAGE_ONLY: "shapes-real-or-generated"}
_BATCH = 16
_RESAMPLES = 2000
_POINTS_AIM = 3.0
# of configs/cascade.yaml
_THRESHOLD = 0.5


def measure(study: Study) -> None:
    """Make the images, and measure all contenders on them."""
    torch.set_num_threads(1)
    count, pairs = study.pick((500, 300), (12, 12))
    trial = make_trial(count, SUITE_SEED, pairs, None)
    judge(study, trial, contenders(trial), load_curves(_MODELS[OURS]).deferral.rate_at)


def contenders(trial: Trial) -> dict[str, Floats]:
    """Return what each contender thinks of the light images; the least is made anew first."""
    found = {name: scored(trial, model) for name, model in _MODELS.items()}
    # the longest prompts first; of equal ones a part
    found[LENGTH] = np.array([-float(len(text.split())) for text in trial.captions])
    found[RANDOM] = np.zeros(len(trial.prompts))
    return found


def scored(trial: Trial, model: str) -> Floats:
    """Return the confidences of a discriminator as it is served."""
    scorer = load_scorer(model, torch.device("cpu"))
    images = [small_image(one) for one in trial.images.permute(0, 2, 3, 1).contiguous().numpy()]
    found: list[float] = []
    for start in range(0, len(images), _BATCH):
        part = slice(start, start + _BATCH)
        found += scorer.score(trial.captions[part], images[part])
    return np.array(found)


def judge(
    study: Study, trial: Trial, confidences: Mapping[str, Floats], rate_at: Callable[[float], float]
) -> None:
    """Add tables and aims.

    Args:
        confidences: of every contender.
        rate_at: the calibrated share below a threshold.
    """
    study.found["what"] = (
        "share of images all right over the share made anew by the heavy model, "
        f"{int(trial.is_pair.sum())} prompts of the suite, half of them easy"
    )
    quality = {name: trial.quality(own, np.array(RATES)) for name, own in confidences.items()}
    for index, rate in enumerate(RATES):
        row = {name: float(found[index]) for name, found in quality.items()}
        study.row("all right, by who decides", deferral_rate=rate, **row)
    light, heavy = trial.pairs
    study.row("models alone", light=float(light.mean()), heavy=float(heavy.mean()))
    for name, found in confidences.items():
        kinds = {"all": np.ones_like(trial.is_easy), "easy": trial.is_easy, "hard": ~trial.is_easy}
        areas = {
            f"area_{kind}": area_under_curve(found[chosen], trial.light_right[chosen])
            for kind, chosen in kinds.items()
        }
        if name in _MODELS:
            areas["calibration_error"] = calibration_error(found, trial.light_right)
        study.row("contenders", contender=name, **areas)
    own = confidences[OURS]
    for threshold in np.linspace(0.1, 0.9, 9).round(1).tolist():
        shares = {"calibrated": rate_at(threshold), "measured": float((own < threshold).mean())}
        study.row("deferral by threshold", threshold=threshold, **shares)
    _above(study, trial, confidences)
    _deferrals(study, own, rate_at)
    study.plots.append(Plot("all right, by who decides", "deferral_rate", tuple(confidences)))


def _above(study: Study, trial: Trial, confidences: Mapping[str, Floats]) -> None:
    """Add by how many points ours is above others at every rate between the ends."""
    light, heavy = trial.pairs
    paired = {name: found[trial.is_pair] for name, found in confidences.items()}
    easy, hard = (np.flatnonzero(one[trial.is_pair]) for one in (trial.is_easy, ~trial.is_easy))
    rng, inner = np.random.default_rng(0), np.array(RATES)[1:-1]
    drawn: dict[str, list[Floats]] = {LENGTH: [], RANDOM: []}
    for _ in range(_RESAMPLES):
        chosen = np.concatenate([rng.choice(one, len(one)) for one in (easy, hard)])
        ours = quality_at(paired[OURS][chosen], light[chosen], heavy[chosen], inner)
        for name, gains in drawn.items():
            other = quality_at(paired[name][chosen], light[chosen], heavy[chosen], inner)
            gains.append(100 * (ours - other))
    for name, gains in drawn.items():
        ours, other = (trial.quality(confidences[one], inner) for one in (OURS, name))
        ends = np.quantile(np.array(gains), [0.025, 0.975], axis=0)
        for rate, value, low, high in zip(inner, 100 * (ours - other), *ends, strict=True):
            figure = {"value": float(value), "low": float(low), "high": float(high)}
            study.at_least(f"above {name} at {rate:.1f}", 0.0, figure, "points")


def _deferrals(study: Study, found: Floats, rate_at: Callable[[float], float]) -> None:
    """Add how far the share below the served threshold is from the calibrated one."""
    rng, half = np.random.default_rng(0), len(found) // 2
    shares = [
        np.mean(
            [(rng.choice(one, half) < _THRESHOLD).mean() for one in (found[:half], found[half:])]
        )
        for _ in range(_RESAMPLES)
    ]
    wanted = rate_at(_THRESHOLD)
    low, high = (100 * (end - wanted) for end in np.quantile(shares, [0.025, 0.975]))
    value = 100 * (float((found < _THRESHOLD).mean()) - wanted)
    figure = absolute({"value": value, "low": low, "high": high})
    name = f"deferral rate at threshold {_THRESHOLD:g} off the calibrated one"
    study.at_most(name, _POINTS_AIM, figure, "points")
