"""Calibrates and measures discriminators, on images of as many easy as hard prompts."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
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
    CascadeCurves,
    load_calibration,
    load_curves,
    save_calibration,
    save_curves,
)
from ray_cluster.models.discriminators import LoadedDiscriminator, load_discriminator
from ray_cluster.quality.cascade_fit import (
    area_under_curve,
    calibration_error,
    deferral_curve,
    fit_logistic,
    quality_at,
    quality_curve,
)
from ray_cluster.quality.suite import SUITE_SEED, Kind, SuitePrompt, suite_prompts
from recipes.discriminators.pictures import HEAVY, LIGHT, to_bytes
from recipes.discriminators.recipe import DiscriminatorRecipe
from recipes.figures.evaluate import Painter, load_pipeline, options_for
from recipes.figures.scoring import Figures, Rows

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

USUAL_PROMPTS, USUAL_PAIRS = 500, 300
_KINDS: tuple[Kind, ...] = ("easy", "hard")
_SIDE_PX = 64
# other images of the light model: kinds of prompts, width and height
_ELSEWHERE: tuple[tuple[str, tuple[Kind, ...], int, int], ...] = (
    ("128 x 128", _KINDS, 128, 128),
    ("96 x 64", _KINDS, 96, 64),
    ("64 x 128", _KINDS, 64, 128),
    ("bare prompts", ("bare",), _SIDE_PX, _SIDE_PX),
)
_MOST_ELSEWHERE = 150
_BATCH = 64
RATES = tuple(round(0.1 * tenth, 1) for tenth in range(11))
_MEASURE = "share of images that are all right"


@dataclass(frozen=True)
class Trial:
    """Images of both models for the same prompts, the easy ones first, and which are all right.

    Attributes:
        images: of the light model, [N, 3, 64, 64] uint8.
        is_pair: which of them the heavy model has made as well, as many easy as hard ones.
        heavy_right: of the pairs.
    """

    prompts: tuple[SuitePrompt, ...]
    images: Tensor
    light_right: Flags
    is_pair: Flags
    heavy_right: Flags

    @property
    def captions(self) -> list[str]:
        return [prompt.caption for prompt in self.prompts]

    @property
    def is_easy(self) -> Flags:
        return np.array([prompt.kind == "easy" for prompt in self.prompts])

    def scores(self, discriminator: LoadedDiscriminator) -> Floats:
        """Return raw scores of the light images."""
        return _scores(discriminator, self.captions, self.images)

    def quality(self, confidences: Floats, rates: Floats) -> Floats:
        """Return the share of pairs that is all right where these shares are made anew."""
        return quality_at(confidences[self.is_pair], *self.pairs, rates)

    @property
    def pairs(self) -> tuple[Floats, Floats]:
        """Which of the pairs are right, of the light and of the heavy model: 0 or 1."""
        light = self.light_right[self.is_pair]
        return light.astype(np.float64), self.heavy_right.astype(np.float64)


def _scores(discriminator: LoadedDiscriminator, captions: Sequence[str], images: Tensor) -> Floats:
    """Return raw scores of images [N, 3, H, W], uint8."""
    parts = [
        discriminator.scores(captions[start : start + _BATCH], part.float() / 255)
        for start, part in zip(range(0, len(images), _BATCH), images.split(_BATCH), strict=True)
    ]
    return torch.cat(parts).double().numpy()


def make_trial(count: int, seed: int, pairs: int, folder: Path | None = None) -> Trial:
    """Make the images of so many easy and so many hard prompts.

    Args:
        seed: of the prompts; the suite's or another.
        pairs: prompts of each kind for which the heavy model makes an image as well.
        folder: where they are kept for a second time; nowhere by default.
    """
    prompts = tuple(one for kind in _KINDS for one in suite_prompts(kind, count, seed=seed))
    pairs = min(pairs, count)
    is_pair = np.tile(np.arange(count) < pairs, len(_KINDS))
    path = None if folder is None else folder / f"trial-{seed}-{count}-{pairs}.safetensors"
    if path is not None and path.is_file():
        made = load_file(path)
    else:
        light, images = _made(LIGHT, prompts)
        paired = [prompt for prompt, chosen in zip(prompts, is_pair, strict=True) if chosen]
        made = {"images": images, "light": light, "heavy": _made(HEAVY, paired)[0]}
        if path is not None:
            part = path.with_suffix(".part")
            save_file(made, part)
            os.replace(part, path)
    return Trial(prompts, made["images"], made["light"].numpy(), is_pair, made["heavy"].numpy())


def _made(name: str, prompts: Sequence[SuitePrompt]) -> tuple[Tensor, Tensor]:
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
    seed, count = recipe.calibration_seed, recipe.calibration_prompts
    trial = make_trial(count, seed, recipe.calibration_pairs, kept)
    scores = trial.scores(load_discriminator(folder, torch.device("cpu")))
    scale, shift = fit_logistic(scores, trial.light_right) if takes_prompts else (1.0, 0.0)
    calibration = Calibration(scale, shift)
    save_calibration(calibration, folder)
    confidences = _confidences(calibration, scores)
    curves = CascadeCurves(
        deferral_curve(confidences),
        quality_curve(confidences[trial.is_pair], *trial.pairs),
        quality_name="share right",
        source=f"{LIGHT} before {HEAVY}, {2 * count} prompts of the suite from seed {seed}",
    )
    about = {
        "light": LIGHT,
        "heavy": HEAVY,
        "quality": _MEASURE,
        "prompts": {"easy": count, "hard": count, "seed": seed},
        "pairs": int(trial.is_pair.sum()),
    }
    save_curves(curves, folder / DEFERRAL, about)


def _confidences(calibration: Calibration, scores: Floats) -> Floats:
    return np.array([calibration.confidence(score) for score in scores.tolist()])


@dataclass(frozen=True)
class Deferral:
    """What becomes of a mix where a threshold should defer a share of it.

    Attributes:
        calibrated: the share that should be.
        threshold: that the calibration gives for it.
        measured: the share that is.
        quality: share of the images of pairs that is all right then.
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
        images: of each kind; 300 of them at most in pairs with the heavy model's.
        area: under the receiver operating characteristic, by kind.
        error: mean distance of confidences to the shares that are right, by kind.
        deferrals: at each tenth.
        elsewhere: area at other sizes, and of prompts that name shape and colour only.
    """

    images: int
    area: dict[str, float]
    error: dict[str, float]
    deferrals: tuple[Deferral, ...]
    elsewhere: dict[str, float]

    def as_json(self) -> str:
        """The figures as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def all_rows(self) -> list[Rows]:
        """See :class:`Figures`."""
        kinds = [[name, f"{self.area[name]:.3f}", f"{self.error[name]:.3f}"] for name in self.area]
        kinds += [[name, f"{area:.3f}", ""] for name, area in self.elsewhere.items()]
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
        prompts: of each kind; the heavy model makes images of 300 of them at most.
        kept: folder of the images; see :func:`make_trial`.
    """
    trial = make_trial(prompts, seed, USUAL_PAIRS, kept)
    discriminator = load_discriminator(folder, torch.device("cpu"))
    confidences = _confidences(load_calibration(folder), trial.scores(discriminator))
    found = figures_of(trial, confidences, load_curves(folder).deferral.threshold_for)
    elsewhere = _areas_elsewhere(discriminator, min(prompts, _MOST_ELSEWHERE), seed)
    return replace(found, elsewhere=elsewhere)


def _areas_elsewhere(discriminator: LoadedDiscriminator, count: int, seed: int) -> dict[str, float]:
    """Return areas under the curve, by what the images are; `count` of each kind of prompts."""
    painter = Painter(load_pipeline(weights_folder() / LIGHT), options_for(LIGHT))
    areas = {}
    for name, kinds, width, height in _ELSEWHERE:
        prompts = [one for kind in kinds for one in suite_prompts(kind, count, seed=seed)]
        drawn = painter.draw(prompts, width=width, height=height)
        images = to_bytes(torch.stack([one.pixels for one in drawn]))
        scores = _scores(discriminator, [one.caption for one in prompts], images)
        areas[name] = area_under_curve(scores, np.array([one.all_right for one in drawn]))
    return areas


def figures_of(
    trial: Trial, confidences: Floats, threshold_for: Callable[[float], float]
) -> DiscriminatorFigures:
    """Return the figures of these confidences and the threshold of each rate."""
    kinds = {"all": np.ones_like(trial.is_easy), "easy": trial.is_easy, "hard": ~trial.is_easy}
    right = trial.light_right
    area = {name: area_under_curve(confidences[one], right[one]) for name, one in kinds.items()}
    error = {name: calibration_error(confidences[one], right[one]) for name, one in kinds.items()}
    light, heavy = trial.pairs
    paired = confidences[trial.is_pair]
    deferrals = []
    for rate in RATES:
        threshold = threshold_for(rate)
        is_deferred = paired < threshold
        share = float(is_deferred.mean())
        deferrals.append(
            Deferral(
                calibrated=rate,
                threshold=threshold,
                measured=float((confidences < threshold).mean()),
                quality=float(np.where(is_deferred, heavy, light).mean()),
                random=float((1 - share) * light.mean() + share * heavy.mean()),
            )
        )
    return DiscriminatorFigures(int(trial.is_easy.sum()), area, error, tuple(deferrals), {})
