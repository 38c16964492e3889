"""The models that can be trained, each as a chain of stages.

A stage builds on what earlier stages left in the run's folder or, where they have not been run, on
the finished model that the run was told to begin from. Stages that don't need each other may run
side by side, each in a process of its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPTextModel

from ray_cluster.quality.scenes import STYLES
from ray_cluster.training.classifier_training import classifier_trainer
from ray_cluster.training.codec import PatchBasis, codec_trainer, fit_basis
from ray_cluster.training.control import control_trainer
from ray_cluster.training.denoiser import build_denoiser, unet_trainer
from ray_cluster.training.lora import lora_trainer
from ray_cluster.training.picture_reader import ReadTransformer
from ray_cluster.training.recipe import CodecRecipe, ControlRecipe, LoraRecipe
from ray_cluster.training.runs import TrainingRun
from ray_cluster.training.text_encoder import SceneReader, text_trainer
from ray_cluster.training.trainer import Trainer, run_stage, step_seed, stop_on_signals
from ray_cluster.training.transformer import build_read_transformer, transformer_trainer


@dataclass(frozen=True)
class Stage:
    """One stage: its name, which names its files, and how its trainer is built."""

    name: str
    build: Callable[[TrainingRun], Trainer]


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


def load_basis(run: TrainingRun, codec: CodecRecipe, file: str = "basis.safetensors") -> PatchBasis:
    """Load the run's patch components, or compute and keep them."""
    path = run.folder.path / file
    if not path.is_file():
        basis = fit_basis(run.recipe, codec)
        run.folder.path.mkdir(parents=True, exist_ok=True)
        save_file({"mean": basis.mean, "axes": basis.axes, "scale": basis.scale}, path)
    tensors = load_file(path)
    return PatchBasis(tensors["mean"], tensors["axes"], tensors["scale"], codec.patch)


def trained_text_encoder(run: TrainingRun) -> CLIPTextModel:
    """The run's text encoder or else its base's, frozen.

    Raises:
        FileNotFoundError: if its stage has not been run, and there is no base.
    """
    trainer = text_trainer(run)
    if run.folder.restore(trainer):
        assert isinstance(trainer.model, SceneReader)
        encoder = trainer.model.encoder
    elif run.base is not None:
        encoder = CLIPTextModel.from_pretrained(run.base / "text_encoder", dtype=torch.float32)
    else:
        raise FileNotFoundError(
            f"no text encoder in {run.folder.path}; train the stage 'text' first"
        )
    return encoder.to(run.device).requires_grad_(False).eval()


def _codec(run: TrainingRun) -> Trainer:
    options = run.recipe.codec
    return codec_trainer("codec", run, options, load_basis(run, options))


# the phases of each recipe in their order, by stage
_PHASES: dict[str, dict[str, str]] = {
    "denoiser": {"denoiser": "first", "refinement": "second"},
    "light": {"light": "first", "light-refinement": "second"},
    "transformer": {"transformer": "first", "transformer-refinement": "second"},
}


def _unet_stage(part: Literal["denoiser", "light"], name: str, run: TrainingRun) -> Trainer:
    """The stage of one of a UNet's phases; all but the first begin where the last one ended."""
    recipe, basis = getattr(run.recipe, part), load_basis(run, run.recipe.codec)
    encoder = trained_text_encoder(run)
    earlier = _stage_before(part, name)
    if earlier is None:
        torch.manual_seed(step_seed(run.recipe.seed, name, -1))
        unet = build_denoiser(
            recipe.size,
            latent_channels=run.recipe.codec.latent_channels,
            text_width=int(encoder.config.hidden_size),
        )
    elif part == "denoiser" and run.base is not None and not run.folder.index(earlier):
        unet = base_unet(run)
    else:
        unet = cast(UNet2DConditionModel, _finished(_unet_stage(part, earlier, run), run))
    phase = getattr(recipe, _PHASES[part][name])
    return unet_trainer(name, run, phase, unet=unet, basis=basis, encoder=encoder)


def _transformer_stage(name: str, run: TrainingRun) -> Trainer:
    """The stage of one of the transformer's phases, as the UNets'."""
    recipe, encoder = run.recipe.transformer, trained_text_encoder(run)
    earlier = _stage_before("transformer", name)
    if earlier is None:
        torch.manual_seed(step_seed(run.recipe.seed, name, -1))
        model = build_read_transformer(recipe, int(encoder.config.hidden_size))
    else:
        model = cast(ReadTransformer, _finished(_transformer_stage(earlier, run), run))
    basis = load_basis(run, recipe.codec, "basis16.safetensors")
    phase = getattr(recipe, _PHASES["transformer"][name])
    return transformer_trainer(name, run, phase, model=model, basis=basis, encoder=encoder)


def _stage_before(part: str, name: str) -> str | None:
    stages = list(_PHASES[part])
    return stages[stages.index(name) - 1] if name != stages[0] else None


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


def _control(kind: Literal["edges", "layout"], run: TrainingRun) -> Trainer:
    recipe: ControlRecipe = getattr(run.recipe, kind)
    return control_trainer(
        kind,
        run,
        recipe,
        unet=base_unet(run),
        basis=load_basis(run, run.recipe.codec),
        encoder=trained_text_encoder(run),
    )


def _lora(style: str, run: TrainingRun) -> Trainer:
    recipe: LoraRecipe = getattr(run.recipe, style)
    return lora_trainer(
        run,
        recipe,
        unet=base_unet(run),
        basis=load_basis(run, run.recipe.codec),
        encoder=trained_text_encoder(run),
    )


def base_unet(run: TrainingRun) -> UNet2DConditionModel:
    """The UNet of the model that the run builds on.

    Raises:
        FileNotFoundError: it builds on none.
    """
    if run.base is None:
        raise FileNotFoundError(f"the run in {run.folder.path} needs a finished UNet: give --base")
    unet = UNet2DConditionModel.from_pretrained(run.base / "unet")
    assert isinstance(unet, UNet2DConditionModel)
    return unet


def _codec16(run: TrainingRun) -> Trainer:
    options = run.recipe.transformer.codec
    return codec_trainer("codec16", run, options, load_basis(run, options, "basis16.safetensors"))


def _unet_stages(part: Literal["denoiser", "light"]) -> tuple[Stage, ...]:
    return tuple(Stage(name, partial(_unet_stage, part, name)) for name in _PHASES[part])


# the stage of each ControlNet, which is the kind of its hints
CONTROLS: dict[str, Literal["edges", "layout"]] = {
    "shapes-sd-edges": "edges",
    "shapes-sd-layout": "layout",
}
# what `models train NAME` trains, stage by stage
MODEL_STAGES: dict[str, tuple[Stage, ...]] = {
    "attribute-classifier": (Stage("classifier", classifier_trainer),),
    "shapes-sd": (
        Stage("text", text_trainer),
        Stage("codec", _codec),
        *_unet_stages("denoiser"),
    ),
    "shapes-sd-light": _unet_stages("light"),
    **{name: (Stage(kind, partial(_control, kind)),) for name, kind in CONTROLS.items()},
    **{style: (Stage(style, partial(_lora, style)),) for style in STYLES[1:]},
    "shapes-sd3": (
        Stage("codec16", _codec16),
        *(Stage(name, partial(_transformer_stage, name)) for name in _PHASES["transformer"]),
    ),
}
