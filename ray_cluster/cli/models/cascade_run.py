"""Makes the images of a cascade in this process, and fits its discriminator to their scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ray_cluster.cli.models.calibration_folder import (
    USUAL_PROMPTS,
    claim,
    device_words,
    model_words,
    prompts_in,
    save_arrays,
)
from ray_cluster.cli.output import stderr, stdout
from ray_cluster.cli.progress import step_progress
from ray_cluster.cli.service.model_plans import profile_of
from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.sections.cascades import CascadeConfig, DiscriminatorConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.device.timing import SizePx, make_timed
from ray_cluster.engine.models.loading import LoadedModel, load_model
from ray_cluster.engine.scorers.loading import UncalibratedScorer, load_uncalibrated
from ray_cluster.engine.stages.warmup import prepare_threads
from ray_cluster.errors import ConfigError
from ray_cluster.imaging.small_images import small_image
from ray_cluster.models.builtin import BUILTIN_MODELS
from ray_cluster.models.cascade_curves import (
    CALIBRATION,
    DEFERRAL,
    Calibration,
    CascadeCurves,
    save_calibration,
    save_curves,
)
from ray_cluster.quality.cascade_fit import (
    area_under_curve,
    deferral_curve,
    fit_logistic,
    quality_curve,
)
from ray_cluster.quality.suite import CALIBRATION_SEED, suite_prompts
from ray_cluster.requests import ImageRequest, ModelProfile

Images = npt.NDArray[np.uint8]
Stage = Literal["light", "heavy"]
_BATCH = 8
_SEED = 30_000
_FEWEST = 10


@dataclass(frozen=True, slots=True)
class CascadeOptions:
    """What ``models calibrate-cascade`` was asked for."""

    config: Path
    cascade: str | None
    prompts: Path | None
    num_images: int
    label: str | None
    out: Path | None


class CascadeFit(NamedTuple):
    """What a calibration found.

    Attributes:
        area: under the curve: the chance that, of a light image that scores at least as well as the
            heavy one and one that does not, the first has the higher score.
    """

    calibration: Calibration
    curves: CascadeCurves
    area: float


def run_cascade_calibration(options: CascadeOptions) -> None:
    """Make the images that are missing, score them, and write ``calibration.json`` and curves.

    Raises:
        ConfigError: an option can't be used, a model can't be loaded, or the scores say nothing.
    """
    config = load_config(options.config)
    cascade = _cascade(config, options.cascade)
    judge = config.worker(DiscriminatorConfig, cascade.discriminator)
    pools: dict[Stage, PoolConfig] = {
        "light": _pool(config, cascade.light),
        "heavy": _pool(config, cascade.heavy),
    }
    prepare_threads(pools["light"].num_threads)
    profiles = {stage: profile_of(pool) for stage, pool in pools.items()}
    size = common_size(profiles["light"], profiles["heavy"])
    prompts = _prompts(options, pools["light"])
    folder = options.out or Path(judge.calibration or f".runs/calibrate-{cascade.name}")
    # an unusable discriminator is reported before images are made
    scorer = load_uncalibrated(judge.model, torch.device(judge.device), label=options.label)
    work = folder / "images"
    setting: dict[str, Any] = {"prompts": prompts, "size": size, "num_images": options.num_images}
    for stage, pool in pools.items():
        setting[stage] = [model_words(pool), device_words(pool), pool.defaults.model_dump_json()]
    claim(work, setting)
    images = {
        stage: _kept(work, stage, pool, size, prompts, options.num_images)
        for stage, pool in pools.items()
    }
    asked = _repeated(prompts, options.num_images)
    fit = fit_cascade(scorer, asked, images["light"], images["heavy"], label=options.label)
    about = {
        "light": cascade.light,
        "heavy": cascade.heavy,
        "discriminator": judge.model,
        "prompts": len(prompts),
        "pairs": options.num_images,
    }
    save_calibration(fit.calibration, folder)
    save_curves(fit.curves, folder / DEFERRAL, about)
    stdout().print(f"written: {folder / CALIBRATION}, {folder / DEFERRAL}", markup=False)
    stdout().print(f"area under the curve: {fit.area:.3f} (0.5 would be chance)", markup=False)
    if judge.calibration is None or Path(judge.calibration) != folder:
        said = f"for the discriminator {judge.name}:\n\n    calibration: {folder}"
        stdout().print(said, markup=False)


def make_images(
    model: LoadedModel,
    prompts: Sequence[str],
    size: SizePx,
    *,
    first: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Images:
    """Make an image of each prompt as calls get it by default, ``[N, H, W, 3]``.

    Args:
        first: number of the first image, which seeds follow.
    """
    profile = model.profile
    requests = [
        ImageRequest(
            request_id=f"image-{index}",
            model=profile.model,
            prompt=prompt,
            width_px=size[0],
            height_px=size[1],
            num_steps=profile.default_num_steps,
            guidance_scale=profile.default_guidance_scale,
            sampler=profile.default_sampler,
            seed=_SEED + index,
            embeds_guidance=profile.guidance == "embedded",
        )
        for index, prompt in enumerate(prompts, first)
    ]
    return make_timed(model, requests, clock).images


def fit_cascade(
    scorer: UncalibratedScorer,
    prompts: Sequence[str],
    light: Images,
    heavy: Images,
    *,
    label: str | None = None,
) -> CascadeFit:
    """Fit what makes of a light image's score the chance that it is as good as the heavy one.

    As good is what has at least the same score for the same prompt.

    Args:
        prompts: one for each pair.
        light: ``[N, H, W, 3]``, of the light model.
        heavy: likewise, of the heavy one.
        label: with which the scorer was loaded.

    Raises:
        ConfigError: the scores do not tell which images are as good.
    """
    scores = {
        name: np.array([score for part in _scored(scorer, prompts, images) for score in part])
        for name, images in (("light", light), ("heavy", heavy))
    }
    if not all(np.isfinite(found).all() for found in scores.values()):
        raise ConfigError("a score is not a number: the discriminator cannot be used")
    is_as_good = scores["light"] >= scores["heavy"]
    scale, shift = fit_logistic(scores["light"], is_as_good)
    calibration = Calibration(scale, shift, scorer.sha256, label)
    confidences = np.array([calibration.confidence(one) for one in scores["light"].tolist()])
    curves = CascadeCurves(
        deferral_curve(confidences),
        quality_curve(confidences, scores["light"], scores["heavy"]),
        quality_name="mean score",
        source=f"models calibrate-cascade, {len(prompts)} images of each model",
    )
    return CascadeFit(calibration, curves, area_under_curve(confidences, is_as_good))


def _scored(
    scorer: UncalibratedScorer, prompts: Sequence[str], images: Images
) -> Iterator[list[float]]:
    for start in range(0, len(prompts), _BATCH):
        part = [small_image(image) for image in images[start : start + _BATCH]]
        yield scorer.raw.raw_scores(prompts[start : start + _BATCH], part)


def _kept(
    work: Path,
    stage: Stage,
    pool: PoolConfig,
    size: SizePx,
    prompts: Sequence[str],
    num_images: int,
) -> Images:
    """Return a stage's images; those that are not in the folder are made, and kept there.

    The model is loaded when it is first needed, and let go: the heavy one may need the memory.
    """
    asked = _repeated(prompts, num_images)
    files = {start: work / f"{stage}-{start:05}.npz" for start in range(0, num_images, _BATCH)}
    missing = [start for start, path in files.items() if not path.is_file()]
    model = load_model(pool) if missing else None
    with step_progress(stderr()) as progress:
        task = progress.add_task(stage, total=len(missing))
        for start in missing:
            assert model is not None
            made = make_images(model, asked[start : start + _BATCH], size, first=start)
            save_arrays(files[start], {"images": made})
            progress.advance(task)
    parts = []
    for path in files.values():
        with np.load(path) as file:
            parts.append(file["images"])
    return np.concatenate(parts)


def common_size(light: ModelProfile, heavy: ModelProfile) -> SizePx:
    """Return width and height that both models take: the default of the first that suits both.

    Raises:
        ConfigError: neither's default suits the other.
    """
    for one, other in ((light, heavy), (heavy, light)):
        sides = one.default_width_px, one.default_height_px
        if all(
            side % other.size_multiple_px == 0 and other.min_px <= side <= other.max_px
            for side in sides
        ):
            return sides
    raise ConfigError(
        f"{light.model} makes {light.default_width_px}x{light.default_height_px} px by default and "
        f"{heavy.model} {heavy.default_width_px}x{heavy.default_height_px}, and neither takes the "
        "other's size; set defaults.size of a pool to one that both take"
    )


def _cascade(config: ClusterConfig, name: str | None) -> CascadeConfig:
    names = [one.name for one in config.cascades]
    found = [one for one in config.cascades if name in {None, one.name}]
    if len(found) != 1:
        given = "is needed where there is not one alone" if name is None else f"{name!r}"
        raise ConfigError(
            f"--cascade {given}; the configuration has {', '.join(names) or 'no cascades'}"
        )
    return found[0]


def _pool(config: ClusterConfig, model: str) -> PoolConfig:
    """Return the first pool that serves a model; the configuration has been checked for it."""
    pool = next(pool for pool in config.pools if pool.model_name == model)
    # images with all steps: a table of fewer ones is not asked for
    return pool.model_copy(update={"fidelity": None})


def _prompts(options: CascadeOptions, light: PoolConfig) -> tuple[str, ...]:
    if options.num_images < _FEWEST:
        raise ConfigError(
            f"--images {options.num_images}: give at least {_FEWEST}, better some hundred"
        )
    if options.prompts is not None:
        return prompts_in(options.prompts)
    if light.model not in BUILTIN_MODELS:
        return USUAL_PROMPTS
    # not those of the suite, by which discriminators are measured
    seed, count = CALIBRATION_SEED, -(-options.num_images // 2)
    kinds = (suite_prompts(kind, count, seed=seed) for kind in ("easy", "hard"))
    return tuple(prompt.caption for prompt in chain.from_iterable(zip(*kinds, strict=True)))


def _repeated(prompts: Sequence[str], count: int) -> list[str]:
    return [prompts[index % len(prompts)] for index in range(count)]
