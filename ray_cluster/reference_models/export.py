"""Writes a run's newest weights as a folder that diffusers' own pipeline loads."""

import json
from pathlib import Path
from typing import cast

import torch
from diffusers import AutoencoderTiny, StableDiffusionPipeline, UNet2DConditionModel

from ray_cluster.quality.classifier import CLASSIFIER_FOLDER, AttributeClassifier, save_classifier
from ray_cluster.reference_models.denoiser import build_scheduler
from ray_cluster.reference_models.recipe import Recipe
from ray_cluster.reference_models.tokenizer import build_tokenizer
from ray_cluster.reference_models.train import StageName, build_trainer, trained_text_encoder
from ray_cluster.reference_models.trainer import RunFolder, Trainer

WEIGHTS = Path(__file__).parent / "weights"
SHAPES_SD = WEIGHTS / "shapes-sd"

_DROPPED = object()
_CONFIG_CHANGES: dict[str, dict[str, object]] = {
    # transformers would load the text encoder in the files' float16, diffusers the rest in float32
    "text_encoder/config.json": {"dtype": "float32"},
    # derived by the class itself
    "vae/config.json": {"block_out_channels": _DROPPED, "_name_or_path": _DROPPED},
    # the name that every version of transformers knows
    "model_index.json": {"tokenizer": ["transformers", "PreTrainedTokenizerFast"]},
}


def export_classifier(
    run: Path, target: Path = CLASSIFIER_FOLDER, recipe: Recipe | None = None
) -> Path:
    """Write the run's attribute classifier in float16 and return the file's path."""
    trainer = _trained("classifier", recipe or Recipe(), RunFolder(run))
    return save_classifier(cast(AttributeClassifier, trainer.model), target)


def assemble_pipeline(run: Path, recipe: Recipe) -> StableDiffusionPipeline:
    """Build the pipeline of a run's averaged weights, in float32.

    Raises:
        FileNotFoundError: if a stage has no checkpoint in the run.
    """
    folder = RunFolder(run)
    return StableDiffusionPipeline(
        vae=cast(AutoencoderTiny, _trained("codec", recipe, folder).model),
        text_encoder=trained_text_encoder(recipe, folder),
        tokenizer=build_tokenizer(),
        unet=cast(UNet2DConditionModel, _trained("refinement", recipe, folder).model),
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def export(run: Path, target: Path = SHAPES_SD, recipe: Recipe | None = None) -> Path:
    """Write a run's newest weights to `target` in float16, in diffusers' layout, and return it."""
    pipeline = assemble_pipeline(run, recipe or Recipe())
    pipeline.to(dtype=torch.float16)
    pipeline.save_pretrained(target, safe_serialization=True)
    _tidy_configs(target)
    return target


def _trained(stage: StageName, recipe: Recipe, folder: RunFolder) -> Trainer:
    trainer = build_trainer(stage, recipe, folder)
    if not folder.restore(trainer):
        raise FileNotFoundError(f"no checkpoint of stage {stage!r} in {folder.path}; train it")
    trainer.use_average()
    trainer.model.eval()
    return trainer


def _tidy_configs(folder: Path) -> None:
    """Make the folder load plainly: one dtype for all parts, no keys that loaders dislike."""
    for file, changes in _CONFIG_CHANGES.items():
        path = folder / file
        config = {**json.loads(path.read_text(encoding="utf-8")), **changes}
        kept = {key: value for key, value in config.items() if value is not _DROPPED}
        path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)
