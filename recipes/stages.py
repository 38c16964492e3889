"""The models that can be trained, each as a chain of stages.

A stage builds on what earlier stages left in the run's folder or, where they have not been run, on
the finished model that the run builds on. Stages that don't need each other may run
side by side, each in a process of its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

import torch
from diffusers import UNet2DConditionModel
from torch import nn

from ray_cluster.quality.scenes import STYLES, Style
from recipes.discriminators.classifier_training import classifier_trainer
from recipes.discriminators.recipe import DiscriminatorRecipe
from recipes.discriminators.training import (
    discriminator_trainer,
    real_or_generated_trainer,
)
from recipes.networks.auxiliary_head import TransformerWithHead
from recipes.networks.codec import codec_trainer
from recipes.networks.controlnet import controlnet_trainer
from recipes.networks.denoiser import base_unet, lora_trainer, new_unet, unet_trainer
from recipes.networks.text_encoder import text_trainer
from recipes.networks.transformer import new_transformer, transformer_trainer
from recipes.recipe import (
    ClassifierRecipe,
    CodecRecipe,
    DenoiserPhase,
    HintKind,
    Recipe,
    TextRecipe,
)
from recipes.runs import TrainingRun
from recipes.trainer import Trainer, run_stage, stop_on_signals

StageOptions = TextRecipe | CodecRecipe | ClassifierRecipe | DiscriminatorRecipe | DenoiserPhase


@dataclass(frozen=True)
class Stage:
    """One stage of a model's training.

    Attributes:
        name: also names its files.
        part: the recipe's part with its data and optimisation, such as ``denoiser.first``.
        build: builds its trainer.
    """

    name: str
    part: str
    build: Callable[[TrainingRun], Trainer]

    def options(self, recipe: Recipe) -> StageOptions:
        """Its part of the recipe."""
        return cast(StageOptions, attrgetter(self.part)(recipe))


def find_stage(model: str, name: str) -> Stage:
    """Return a model's stage of this name; KeyError if it has none."""
    return {stage.name: stage for stage in MODEL_STAGES[model]}[name]


def train(run: TrainingRun, stages: Sequence[Stage], *, minutes: float | None = None) -> bool:
    """Train stages in their order, continuing whatever lies in the run's folder; one thread.

    A file PAUSE in the folder makes the run wait, FINISH begins the final decay.

    Args:
        run: what to train in.
        stages: of one model.
        minutes: begin each remaining stage's final decay after this time.

    Returns:
        Whether all stages are finished; SIGTERM and SIGINT checkpoint and stop the run.

    Raises:
        FileNotFoundError: a stage lacks what an earlier one makes.
    """
    torch.set_num_threads(1)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    with stop_on_signals() as stop:
        for stage in stages:
            if not run_stage(stage.build(run), run.folder, stop, deadline=deadline):
                return False
    return True


def _finished(trainer: Trainer, run: TrainingRun) -> nn.Module:
    """The model with averaged weights that a stage left.

    Raises:
        FileNotFoundError: if it has not been run to its end.
    """
    run.folder.restore(trainer)
    if not trainer.is_finished:
        raise FileNotFoundError(
            f"no finished {trainer.name} in {run.folder.path}; "
            f"train the stage {trainer.name!r} first"
        )
    trainer.use_average()
    return trainer.model


def _light(run: TrainingRun) -> Trainer:
    unet = new_unet(run, "light", run.recipe.light.size)
    return unet_trainer("light", run, run.recipe.light.first, unet)


def _light_refinement(run: TrainingRun) -> Trainer:
    unet = cast(UNet2DConditionModel, _finished(_light(run), run))
    return unet_trainer("light-refinement", run, run.recipe.light.second, unet)


def _denoiser(run: TrainingRun) -> Trainer:
    unet = new_unet(run, "denoiser", run.recipe.denoiser.size)
    return unet_trainer("denoiser", run, run.recipe.denoiser.first, unet)


def _refinement(run: TrainingRun) -> Trainer:
    if run.base is not None and not run.folder.index("denoiser"):
        unet = base_unet(run)
    else:
        unet = cast(UNet2DConditionModel, _finished(_denoiser(run), run))
    return unet_trainer("refinement", run, run.recipe.denoiser.second, unet)


def _transformer(run: TrainingRun) -> Trainer:
    name, phase = "transformer", run.recipe.transformer.first
    return transformer_trainer(name, run, phase, new_transformer(run, name))


def _transformer_refinement(run: TrainingRun) -> Trainer:
    model = cast(TransformerWithHead, _finished(_transformer(run), run))
    phase = run.recipe.transformer.second
    return transformer_trainer("transformer-refinement", run, phase, model)


def _control(kind: HintKind) -> Stage:
    return Stage(
        kind, f"{kind}.phase", lambda run: controlnet_trainer(run, getattr(run.recipe, kind))
    )


def _lora(style: Style) -> Stage:
    return Stage(style, f"{style}.phase", lambda run: lora_trainer(run, getattr(run.recipe, style)))


# the kind of each ControlNet's hints, which names its stage
CONTROLS: dict[str, HintKind] = {"shapes-sd-edges": "edges", "shapes-sd-layout": "layout"}
# what `python -m recipes train NAME` trains, stage by stage
MODEL_STAGES: dict[str, tuple[Stage, ...]] = {
    "attribute-classifier": (Stage("classifier", "classifier", classifier_trainer),),
    "shapes-discriminator": (Stage("discriminator", "discriminator", discriminator_trainer),),
    "shapes-real-or-generated": (
        Stage("real-or-generated", "real_or_generated", real_or_generated_trainer),
    ),
    "shapes-sd": (
        Stage("text", "text", text_trainer),
        Stage("codec", "codec", lambda run: codec_trainer("codec", run, run.recipe.codec)),
        Stage("denoiser", "denoiser.first", _denoiser),
        Stage("refinement", "denoiser.second", _refinement),
    ),
    "shapes-sd-light": (
        Stage("light", "light.first", _light),
        Stage("light-refinement", "light.second", _light_refinement),
    ),
    **{name: (_control(kind),) for name, kind in CONTROLS.items()},
    **{style: (_lora(style),) for style in STYLES[1:]},
    "shapes-sd3": (
        Stage(
            "codec16",
            "transformer.codec",
            lambda run: codec_trainer("codec16", run, run.recipe.transformer.codec),
        ),
        Stage("transformer", "transformer.first", _transformer),
        Stage("transformer-refinement", "transformer.second", _transformer_refinement),
    ),
}
