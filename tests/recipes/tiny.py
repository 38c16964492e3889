"""A recipe of seconds, and runs of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ray_cluster.quality.scenes import STYLES
from recipes.discriminators.recipe import (
    REAL_OR_GENERATED,
    DiscriminatorRecipe,
    PictureSets,
)
from recipes.recipe import (
    ClassifierRecipe,
    CodecRecipe,
    ControlNetRecipe,
    DenoiserPhase,
    LoraRecipe,
    Recipe,
    TextRecipe,
    TransformerRecipe,
    UNetRecipe,
    UNetSize,
)
from recipes.recipe_parts import Optimisation, SizeBucket
from recipes.runs import TrainingRun, open_run
from recipes.stages import MODEL_STAGES, find_stage, train

TINY_BUCKETS = (SizeBucket(64, 64, 2, 0.5), SizeBucket(96, 64, 2, 0.5))
TINY_STEPS = Optimisation(steps=6, batch=4, rate=1e-3, warmup_steps=2, decay_steps=3, ema=0.9)
TINY: dict[str, Any] = {"buckets": TINY_BUCKETS, "optimisation": TINY_STEPS}
TINY_UNET = UNetSize(channels=(8, 8, 16), heads=2)
SD_STAGES = [stage.name for stage in MODEL_STAGES["shapes-sd"]]


def tiny_recipe() -> Recipe:
    """Every number that costs time as small as it goes."""
    big = (SizeBucket(64, 64, 20, 1.0),)
    codec = replace(CodecRecipe(), channels=4, fit_pictures=64, **TINY)
    usual = Recipe()
    phases = {name: tiny_phase(usual.denoiser, name) for name in ("first", "second")}
    light = {name: tiny_phase(usual.light, name) for name in ("first", "second")}
    return Recipe(
        seed=3,
        text=replace(TextRecipe(), width=16, layers=1, heads=2, optimisation=TINY_STEPS),
        codec=codec,
        denoiser=UNetRecipe(TINY_UNET, **phases),
        light=UNetRecipe(TINY_UNET, **light),
        edges=tiny_control("edges"),
        layout=tiny_control("layout"),
        **{
            style: replace(
                getattr(Recipe(), style), rank=2, phase=replace(LoraRecipe(style, 2).phase, **TINY)
            )
            for style in STYLES[1:]
        },
        transformer=replace(
            TransformerRecipe(),
            layers=2,
            head_layer=1,
            heads=2,
            head_width=8,
            codec=replace(codec, latent_channels=16, basis_file="basis16.safetensors"),
            **phases,
        ),
        pictures=PictureSets(
            sizes=((64, 64, 1), (96, 64, 1)), light=6, heavy=2, heavy_steps=2, renders=4
        ),
        discriminator=tiny_discriminator(DiscriminatorRecipe()),
        real_or_generated=tiny_discriminator(REAL_OR_GENERATED),
        classifier=replace(ClassifierRecipe(), channels=8, buckets=big, optimisation=TINY_STEPS),
    )


def tiny_discriminator(recipe: DiscriminatorRecipe) -> DiscriminatorRecipe:
    """A discriminator of a few steps; the sizes are as they are read."""
    counts = {"calibration_prompts": 6, "calibration_pairs": 1}
    return replace(recipe, channels=8, width=8, **counts, **TINY)


def tiny_phase(recipe: UNetRecipe, name: str) -> DenoiserPhase:
    """One of a UNet's phases, in a few steps."""
    return replace(getattr(recipe, name), **TINY)


def tiny_control(kind: Literal["edges", "layout"]) -> ControlNetRecipe:
    """A ControlNet's recipe of a few steps."""
    return ControlNetRecipe(kind, phase=replace(ControlNetRecipe(kind).phase, **TINY))


def tiny_run(
    path: Path,
    recipe: Recipe | None = None,
    stages: list[str] | None = None,
    base: Path | None = None,
    model: str = "shapes-sd",
) -> TrainingRun:
    """A run of the tiny recipe, with these stages of a model trained."""
    run = open_run(path, recipe=recipe or tiny_recipe(), base=base)
    assert train(run, [find_stage(model, name) for name in stages or []])
    return run
