"""Quality over the share made anew, by who decides: ``python -m benchmarks.discriminators``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.machine import describe_run, load_now
from benchmarks.plots import save_figure, with_pyplot
from benchmarks.progress import wide_console
from benchmarks.report import Section, as_json, print_sections
from benchmarks.run import RESULTS
from benchmarks.verdicts import Aim
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
_PROMPTS, _PAIRS = 500, 300
_QUICK = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the images, measure all contenders on them; return the exit status."""
    options, started = _parse(arguments), datetime.now(UTC)
    path = options.out or RESULTS / f"{started:%Y-%m-%d_%H%M%S}-discriminators.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    result = describe_run("ray-cluster discriminators 1", quick=options.quick, started=started)
    count, pairs = (_QUICK, _QUICK) if options.quick else (_PROMPTS, _PAIRS)
    trial = make_trial(count, SUITE_SEED, pairs, options.images)
    confidences = contenders(trial)
    section = study(trial, confidences, load_curves(_MODELS[OURS]).deferral.rate_at)
    result |= {"load_after": load_now(), "sections": {"discriminators": section}}
    path.write_text(as_json(result), encoding="utf-8")
    _plot(result, section, path.with_suffix(".png"))
    print_sections(wide_console(), result["sections"], quick=options.quick)
    print(f"written: {path}")
    return 0


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


def study(trial: Trial, confidences: Mapping[str, Floats], rate_at: Any) -> Section:
    """Return tables and aims.

    Args:
        confidences: of every contender.
        rate_at: the calibrated share below a threshold.
    """
    rates = np.array(RATES)
    quality = {name: trial.quality(found, rates) for name, found in confidences.items()}
    rows = [
        {"deferral_rate": rate, **{name: float(found[index]) for name, found in quality.items()}}
        for index, rate in enumerate(RATES)
    ]
    light, heavy = trial.pairs
    ends = [{"model": "light alone", "all_right": float(light.mean())}]
    ends.append({"model": "heavy alone", "all_right": float(heavy.mean())})
    aims = [
        *_above(trial, confidences, rates),
        *_deferrals(confidences[OURS], rate_at),
    ]
    return {
        "what": "share of images all right over the share made anew by the heavy model, "
        f"{int(trial.is_pair.sum())} prompts of the suite, half of them easy",
        "tables": {
            "all right, by who decides": rows,
            "models alone": ends,
            "contenders": _contender_rows(trial, confidences),
            "deferral by threshold": _threshold_rows(confidences[OURS], rate_at),
        },
        "aims": [aim.as_dict() for aim in aims],
    }


def _contender_rows(trial: Trial, confidences: Mapping[str, Floats]) -> list[dict[str, Any]]:
    rows = []
    for name, found in confidences.items():
        kinds = {"all": np.ones_like(trial.is_easy), "easy": trial.is_easy, "hard": ~trial.is_easy}
        row: dict[str, Any] = {"contender": name}
        for kind, chosen in kinds.items():
            row[f"area_{kind}"] = area_under_curve(found[chosen], trial.light_right[chosen])
        if name in _MODELS:
            row["calibration_error"] = calibration_error(found, trial.light_right)
        rows.append(row)
    return rows


def _threshold_rows(found: Floats, rate_at: Any) -> list[dict[str, Any]]:
    thresholds = [*np.linspace(0.1, 0.9, 9).round(1).tolist()]
    return [
        {
            "threshold": threshold,
            "calibrated": rate_at(threshold),
            "measured": float((found < threshold).mean()),
        }
        for threshold in thresholds
    ]


def _above(trial: Trial, confidences: Mapping[str, Floats], rates: Floats) -> list[Aim]:
    """Return by how many points ours is above others at every rate between the ends."""
    light, heavy = trial.pairs
    paired = {name: found[trial.is_pair] for name, found in confidences.items()}
    easy, hard = (np.flatnonzero(one[trial.is_pair]) for one in (trial.is_easy, ~trial.is_easy))
    rng, inner = np.random.default_rng(0), rates[1:-1]
    drawn: dict[str, list[Floats]] = {LENGTH: [], RANDOM: []}
    for _ in range(_RESAMPLES):
        chosen = np.concatenate([rng.choice(one, len(one)) for one in (easy, hard)])
        ours = quality_at(paired[OURS][chosen], light[chosen], heavy[chosen], inner)
        for name, gains in drawn.items():
            other = quality_at(paired[name][chosen], light[chosen], heavy[chosen], inner)
            gains.append(100 * (ours - other))
    aims = []
    for name, gains in drawn.items():
        measured = 100 * (
            trial.quality(confidences[OURS], inner) - trial.quality(confidences[name], inner)
        )
        low, high = np.quantile(np.array(gains), [0.025, 0.975], axis=0)
        for index, rate in enumerate(inner.tolist()):
            interval = float(low[index]), float(high[index])
            aims.append(
                Aim(
                    name=f"above {name} at {rate:.1f}",
                    wanted="more than 0",
                    measured=float(measured[index]),
                    unit="points",
                    interval=interval,
                    verdict="yes" if interval[0] > 0 else "no" if interval[1] < 0 else "unsure",
                )
            )
    return aims


def _deferrals(found: Floats, rate_at: Any) -> list[Aim]:
    """Return how far the share below the served threshold is from the calibrated one."""
    rng = np.random.default_rng(0)
    half = len(found) // 2
    strata = found[:half], found[half:]
    shares = [
        np.mean([(rng.choice(one, half) < _THRESHOLD).mean() for one in strata])
        for _ in range(_RESAMPLES)
    ]
    measured = float((found < _THRESHOLD).mean())
    gaps = [
        100 * (share - rate_at(_THRESHOLD))
        for share in (measured, *np.quantile(shares, [0.025, 0.975]))
    ]
    gap, interval = gaps[0], (gaps[1], gaps[2])
    inside = max(abs(interval[0]), abs(interval[1])) <= _POINTS_AIM
    outside = interval[0] > _POINTS_AIM or interval[1] < -_POINTS_AIM
    return [
        Aim(
            name=f"deferral rate at threshold {_THRESHOLD:g} over the calibrated one",
            wanted=f"within {_POINTS_AIM:g}",
            measured=gap,
            unit="points",
            interval=interval,
            verdict="yes" if inside else "no" if outside else "unsure",
        )
    ]


def _plot(result: dict[str, Any], section: Section, path: Path) -> None:
    plt = with_pyplot()
    if plt is None:
        return
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    rows = section["tables"]["all right, by who decides"]
    for name, style in ((OURS, "o-"), (IMAGE_ONLY, "s--"), (LENGTH, "v-."), (RANDOM, ":")):
        axes.plot(
            [100 * row["deferral_rate"] for row in rows],
            [100 * row[name] for row in rows],
            style,
            label=name,
        )
    for row in section["tables"]["models alone"]:
        axes.axhline(100 * row["all_right"], color="grey", linewidth=0.8)
        axes.annotate(row["model"], (100, 100 * row["all_right"]), ha="right", va="bottom")
    axes.set(xlabel="made anew by the heavy model, %", ylabel="images all right, %")
    axes.legend(title="decided by")
    save_figure(figure, result, path)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m benchmarks.discriminators"
    )
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--quick", action="store_true", help="shows only that it works")
    parser.add_argument("--images", type=Path, help="folder that keeps the images for next time")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
