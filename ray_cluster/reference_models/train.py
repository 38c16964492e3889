"""Trains the reference model stage by stage.

The stages are classifier, text encoder, codec, denoiser and the denoiser's refinement.

The denoiser needs the text encoder and the codec's components, not the codec's networks; so once
the text encoder is there, the other stages may run side by side, each in a process of its own.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel

from ray_cluster.quality.training import classifier_trainer
from ray_cluster.reference_models.codec import PatchBasis, codec_trainer, fit_basis
from ray_cluster.reference_models.denoiser import denoiser_trainer, refinement_trainer
from ray_cluster.reference_models.recipe import Recipe
from ray_cluster.reference_models.text_encoder import SceneReader, text_trainer
from ray_cluster.reference_models.trainer import RunFolder, Trainer, run_stage, stop_on_signals

StageName = Literal["text", "denoiser", "refinement", "codec", "classifier"]
STAGES: tuple[StageName, ...] = ("classifier", "text", "codec", "denoiser", "refinement")


def load_basis(recipe: Recipe, folder: RunFolder) -> PatchBasis:
    """Load the run's patch components, or compute and keep them."""
    path = folder.path / "basis.safetensors"
    if not path.is_file():
        basis = fit_basis(recipe)
        folder.path.mkdir(parents=True, exist_ok=True)
        save_file({"mean": basis.mean, "axes": basis.axes, "scale": basis.scale}, path)
    tensors = load_file(path)
    return PatchBasis(tensors["mean"], tensors["axes"], tensors["scale"], recipe.codec.patch)


def trained_text_encoder(recipe: Recipe, folder: RunFolder) -> CLIPTextModel:
    """The run's text encoder, frozen.

    Raises:
        FileNotFoundError: if its stage has not been run.
    """
    trainer = text_trainer(recipe)
    if not folder.restore(trainer):
        raise FileNotFoundError(f"no text encoder in {folder.path}; train the stage 'text' first")
    reader = trainer.model
    assert isinstance(reader, SceneReader)
    reader.encoder.requires_grad_(False).eval()
    return reader.encoder


def trained_denoiser(
    recipe: Recipe, folder: RunFolder, basis: PatchBasis, encoder: CLIPTextModel
) -> UNet2DConditionModel:
    """The UNet that the run's first phase left, with averaged weights.

    Raises:
        FileNotFoundError: if its stage has not been run to its end.
    """
    trainer = denoiser_trainer(recipe, basis, encoder)
    if not folder.restore(trainer) or not trainer.is_finished:
        raise FileNotFoundError(
            f"no finished denoiser in {folder.path}; train the stage 'denoiser' first"
        )
    trainer.use_average()
    assert isinstance(trainer.model, UNet2DConditionModel)
    return trainer.model


def build_trainer(stage: StageName, recipe: Recipe, folder: RunFolder) -> Trainer:
    """Build one stage's trainer on what the stages before it left in the folder."""
    match stage:
        case "text":
            return text_trainer(recipe)
        case "denoiser":
            encoder = trained_text_encoder(recipe, folder)
            return denoiser_trainer(recipe, load_basis(recipe, folder), encoder)
        case "refinement":
            encoder, basis = trained_text_encoder(recipe, folder), load_basis(recipe, folder)
            unet = trained_denoiser(recipe, folder, basis, encoder)
            return refinement_trainer(recipe, unet, basis, encoder)
        case "codec":
            return codec_trainer(recipe, load_basis(recipe, folder))
        case "classifier":
            return classifier_trainer(recipe)


def train(
    run: Path,
    *,
    recipe: Recipe | None = None,
    stages: Sequence[StageName] = STAGES,
    minutes: float | None = None,
    checkpoint_seconds: float = 60.0,
) -> bool:
    """Train the given stages in `run`, continuing whatever lies there; one thread.

    Args:
        run: working folder. A file PAUSE in it makes the run wait, FINISH begins the final decay.
        recipe: all numbers; the committed recipe by default.
        stages: in this order.
        minutes: begin each remaining stage's final decay after this time.
        checkpoint_seconds: time between checkpoints.

    Returns:
        Whether all stages are finished; SIGTERM and SIGINT checkpoint and stop the run.
    """
    torch.set_num_threads(1)
    recipe, folder = recipe or Recipe(), RunFolder(run, checkpoint_seconds)
    run.mkdir(parents=True, exist_ok=True)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    with stop_on_signals() as stop:
        for stage in stages:
            if not run_stage(build_trainer(stage, recipe, folder), folder, stop, deadline=deadline):
                return False
    return True
