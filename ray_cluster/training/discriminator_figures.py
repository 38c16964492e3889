"""Calibrates and measures discriminators, on images of as many easy as hard prompts."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ray_cluster.models.builtin import weights_folder
from ray_cluster.models.cascade_curves import (
    DEFERRAL,
    Calibration,
    load_calibration,
    load_curves,
    save_calibration,
    save_curves,
)
from ray_cluster.models.discriminators import LoadedDiscriminator, load_discriminator
from ray_cluster.quality.cascade_fit import (
    area_under_curve,
    calibration_error,
    fit_curves,
    fit_logistic,
    quality_at,
)
from ray_cluster.training.discriminator_pictures import HEAVY, LIGHT, to_bytes
from ray_cluster.training.discriminator_recipe import DiscriminatorRecipe
from ray_cluster.training.evaluate import Painter, load_pipeline, options_for
from ray_cluster.training.scoring import Figures, Rows
from ray_cluster.training.suite import SUITE_SEED, Kind, SuitePrompt, suite_prompts

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

USUAL_PROMPTS = 500
_KINDS: tuple[Kind, ...] = ("easy", "hard")
_SIDE_PX = 64
_BATCH = 64
RATES = tuple(round(0.1 * tenth, 1) for tenth in range(11))
_MEASURE = "share of images that are all right"


@dataclass(frozen=True)
class Trial:
    """Images of both models for the same prompts, the easy ones first, and which are all right.

    Attributes:
        images: of the light model, [N, 3, 64, 64] uint8.
    """

    prompts: tuple[SuitePrompt, ...]
    images: Tensor
    light_right: Flags
    heavy_right: Flags

    @property
    def captions(self) -> list[str]:
        return [prompt.caption for prompt in self.prompts]

    @property
    def is_easy(self) -> Flags:
        return np.array([prompt.kind == "easy" for prompt in self.prompts])

    def scores(self, discriminator: LoadedDiscriminator) -> Floats:
        """Return raw scores of the light images."""
        parts = [
            discriminator.scores(self.captions[start : start + _BATCH], part.float() / 255)
            for start, part in zip(
                range(0, len(self.images), _BATCH), self.images.split(_BATCH), strict=True
            )
        ]
        return torch.cat(parts).double().numpy()

    def quality(self, confidences: Floats, rates: Floats) -> Floats:
        """Return the share that is all right where these shares are made anew."""
        light, heavy = (right.astype(float) for right in (self.light_right, self.heavy_right))
        return quality_at(confidences, light, heavy, rates)


def make_trial(count: int, seed: int, folder: Path | None = None) -> Trial:
    """Make the images of so many easy and so many hard prompts.

    Args:
        seed: of the prompts; the suite's or another.
        folder: where they are kept for a second time; nowhere by default.
    """
    prompts = tuple(one for kind in _KINDS for one in suite_prompts(kind, count, seed=seed))
    path = None if folder is None else folder / f"trial-{seed}-{count}.safetensors"
    if path is None or not path.is_file():
        light, images = _made(LIGHT, prompts)
        heavy, _ = _made(HEAVY, prompts)
        made = {"images": images, "light_right": light, "heavy_right": heavy}
        if path is None:
            return Trial(prompts, images, light.numpy(), heavy.numpy())
        part = path.with_suffix(".part")
        save_file(made, part)
        os.replace(part, path)
    stored = load_file(path)
    right = (stored[name].numpy() for name in ("light_right", "heavy_right"))
    return Trial(prompts, stored["images"], *right)


def _made(name: str, prompts: tuple[SuitePrompt, ...]) -> tuple[Tensor, Tensor]:
    painter = Painter(load_pipeline(weights_folder() / name), options_for(name))
    drawn = painter.draw(prompts, width=_SIDE_PX, height=_SIDE_PX)
    right = torch.tensor([one.all_right for one in drawn])
    return right, to_bytes(torch.stack([one.pixels for one in drawn]))


def calibrate(
    folder: Path, recipe: DiscriminatorRecipe, *, takes_prompts: bool, kept: Path | None = None
) -> None:
    """Write a discriminator's calibration and curves beside its weights.

    Args:
        takes_prompts: whether its confidence is that of being right. That of being a render is left
            as it was trained.
        kept: folder of the images; see :func:`make_trial`.
    """
    trial = make_trial(recipe.calibration_prompts, recipe.calibration_seed, kept)
    scores = trial.scores(load_discriminator(folder, torch.device("cpu")))
    scale, shift = fit_logistic(scores, trial.light_right) if takes_prompts else (1.0, 0.0)
    calibration = Calibration(scale, shift)
    save_calibration(calibration, folder)
    confidences = _confidences(calibration, scores)
    light, heavy = (right.astype(float) for right in (trial.light_right, trial.heavy_right))
    about = {
        "light": LIGHT,
        "heavy": HEAVY,
        "quality": _MEASURE,
        "easy_prompts": recipe.calibration_prompts,
        "hard_prompts": recipe.calibration_prompts,
        "seed": recipe.calibration_seed,
    }
    save_curves(fit_curves(confidences, light, heavy), folder / DEFERRAL, about)


def _confidences(calibration: Calibration, scores: Floats) -> Floats:
    return np.array([calibration.confidence(score) for score in scores.tolist()])


@dataclass(frozen=True)
class Deferral:
    """What becomes of a mix where a threshold should defer a share of it.

    Attributes:
        calibrated: the share that should be.
        threshold: that the calibration gives for it.
        measured: the share that is.
        quality: share of images all right then.
        random: likewise, of as many chosen at random.
    """

    calibrated: float
    threshold: float
    measured: float
    quality: float
    random: float


@dataclass(frozen=True)
class DiscriminatorFigures(Figures):
    """How well a discriminator tells, of both kinds of prompts together and of each.

    Attributes:
        images: of each kind.
        area: under the receiver operating characteristic, by kind.
        error: mean distance of confidences to the shares that are right, by kind.
        deferrals: at each tenth.
    """

    images: int
    area: dict[str, float]
    error: dict[str, float]
    deferrals: tuple[Deferral, ...]

    def as_json(self) -> str:
        """The figures as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def all_rows(self) -> list[Rows]:
        """See :class:`Figures`."""
        kinds = [[name, f"{self.area[name]:.3f}", f"{self.error[name]:.3f}"] for name in self.area]
        deferrals = [
            [
                f"{one.calibrated:.0%}",
                f"{one.threshold:.3g}",
                f"{one.measured:.1%}",
                f"{one.quality:.1%}",
                f"{one.random:.1%}",
            ]
            for one in self.deferrals
        ]
        head = ["should be deferred", "threshold", "is deferred", "all right", "at random"]
        return [
            Rows(["prompts", "area under the curve", "calibration error"], kinds),
            Rows(head, deferrals),
        ]


def measure_discriminator(
    folder: Path, *, prompts: int = USUAL_PROMPTS, seed: int = SUITE_SEED, kept: Path | None = None
) -> DiscriminatorFigures:
    """Measure a calibrated discriminator on the suite.

    Args:
        prompts: of each kind.
        kept: folder of the images; see :func:`make_trial`.
    """
    trial = make_trial(prompts, seed, kept)
    scores = trial.scores(load_discriminator(folder, torch.device("cpu")))
    confidences = _confidences(load_calibration(folder), scores)
    return figures_of(trial, confidences, load_curves(folder).deferral.threshold_for)


def figures_of(
    trial: Trial, confidences: Floats, threshold_for: Callable[[float], float]
) -> DiscriminatorFigures:
    """Return the figures of these confidences and the threshold of each rate."""
    kinds = {"all": np.ones_like(trial.is_easy), "easy": trial.is_easy, "hard": ~trial.is_easy}
    right = trial.light_right
    area = {name: area_under_curve(confidences[one], right[one]) for name, one in kinds.items()}
    error = {name: calibration_error(confidences[one], right[one]) for name, one in kinds.items()}
    deferrals = []
    for rate in RATES:
        threshold = threshold_for(rate)
        is_deferred = confidences < threshold
        published = np.where(is_deferred, trial.heavy_right, right)
        measured = float(is_deferred.mean())
        by_chance = (1 - measured) * right.mean() + measured * trial.heavy_right.mean()
        deferrals.append(
            Deferral(rate, threshold, measured, float(published.mean()), float(by_chance))
        )
    return DiscriminatorFigures(int(trial.is_easy.sum()), area, error, tuple(deferrals))
