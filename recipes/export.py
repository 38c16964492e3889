"""Writes a run's newest weights as a folder that diffusers' own classes load."""

import json
from pathlib import Path
from typing import cast

import torch
from diffusers import (
    AutoencoderTiny,
    ControlNetModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from peft import get_peft_model_state_dict
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from ray_cluster.models.builtin import BUILTIN_DISCRIMINATORS, weights_folder
from ray_cluster.models.discriminators import (
    Discriminator,
    PromptDiscriminator,
    save_discriminator,
)
from ray_cluster.quality.classifier import AttributeClassifier, save_classifier
from ray_cluster.quality.scenes import STYLES
from recipes.discriminators.figures import calibrate
from recipes.discriminators.recipe import DiscriminatorRecipe
from recipes.networks.auxiliary_head import TransformerWithHead
from recipes.networks.denoiser import build_scheduler
from recipes.networks.text_encoder import trained_text_encoder
from recipes.networks.tokenizer import build_prompt_ids, build_tokenizer
from recipes.networks.transformer import build_flow_scheduler
from recipes.runs import TrainingRun
from recipes.stages import CONTROLS, MODEL_STAGES, find_stage
from recipes.trainer import Trainer

WEIGHTS = weights_folder()
SHAPES_SD = WEIGHTS / "shapes-sd"

_DROPPED = object()
_TOKENIZER = ["transformers", "PreTrainedTokenizerFast"]
_CONFIG_CHANGES: dict[str, dict[str, object]] = {
    # transformers would load the text encoder in the files' float16, diffusers the rest in float32
    "text_encoder/config.json": {"dtype": "float32"},
    "text_encoder_2/config.json": {"dtype": "float32"},
    # derived by the class itself
    "vae/config.json": {"block_out_channels": _DROPPED, "_name_or_path": _DROPPED},
    "transformer/config.json": {"_name_or_path": _DROPPED},
    "unet/config.json": {"_name_or_path": _DROPPED},
    # the name that every version of transformers knows
    "model_index.json": {"tokenizer": _TOKENIZER, "tokenizer_2": _TOKENIZER},
}


def export(model: str, run: TrainingRun, target: Path) -> Path:
    """Write a run's newest weights to `target` in float16, and return it.

    In diffusers' layout, but for the classifier and the discriminators.

    Raises:
        FileNotFoundError: if a stage has no checkpoint in the run, and there is no base.
    """
    if model == "attribute-classifier":
        trainer = _trained(model, "classifier", run)
        return save_classifier(cast(AttributeClassifier, trainer.model), target).parent
    if model in BUILTIN_DISCRIMINATORS:
        return _export_discriminator(model, run, target)
    if model in STYLES:
        return _export_lora(model, run, target)
    if model in CONTROLS:
        control = cast(ControlNetModel, _trained(model, CONTROLS[model], run).model)
        control.half().save_pretrained(target)
        _tidy_configs(target)
        return target
    pipeline = assemble_sd3(run) if model == "shapes-sd3" else assemble_sd(model, run)
    pipeline.to(dtype=torch.float16)
    pipeline.save_pretrained(target, safe_serialization=True)
    _tidy_configs(target)
    return target


def _export_discriminator(name: str, run: TrainingRun, target: Path) -> Path:
    """Write a discriminator with its calibration, on images that the run's folder keeps."""
    [stage] = MODEL_STAGES[name]
    model = cast(Discriminator, _trained(name, stage.name, run).model)
    takes_prompts = isinstance(model, PromptDiscriminator)
    save_discriminator(model, target, build_prompt_ids() if takes_prompts else None)
    recipe = cast(DiscriminatorRecipe, stage.options(run.recipe))
    calibrate(target, recipe, takes_prompts=takes_prompts, kept=run.folder.path)
    return target


def _export_lora(style: str, run: TrainingRun, target: Path) -> Path:
    """Write a LoRA as diffusers does, so that `load_lora_weights` takes the folder."""
    unet = cast(UNet2DConditionModel, _trained(style, style, run).model)
    weights = get_peft_model_state_dict(unet)
    halves = {name: value.half().contiguous() for name, value in weights.items()}
    StableDiffusionPipeline.save_lora_weights(target, unet_lora_layers=halves)
    _tidy_configs(target)
    return target


def assemble_sd(model: str, run: TrainingRun) -> StableDiffusionPipeline:
    """Build the pipeline of a UNet's run with averaged weights, in float32.

    Raises:
        FileNotFoundError: as in `export`.
    """
    last = MODEL_STAGES[model][-1].name
    if run.base is not None and not run.folder.index("codec"):
        codec = AutoencoderTiny.from_pretrained(run.base / "vae")
    else:
        codec = _trained("shapes-sd", "codec", run).model
    if model == "shapes-sd" and run.base is not None and not run.folder.index(last):
        unet = UNet2DConditionModel.from_pretrained(run.base / "unet")
    else:
        unet = _trained(model, last, run).model
    return StableDiffusionPipeline(
        vae=cast(AutoencoderTiny, codec),
        text_encoder=trained_text_encoder(run),
        tokenizer=build_tokenizer(),
        unet=cast(UNet2DConditionModel, unet),
        scheduler=build_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def assemble_sd3(run: TrainingRun) -> StableDiffusion3Pipeline:
    """Build the transformer's pipeline, in float32; both of its text encoders are the shared one.

    Raises:
        FileNotFoundError: as in `export`.
    """
    encoder = with_projection(trained_text_encoder(run))
    trained = _trained("shapes-sd3", MODEL_STAGES["shapes-sd3"][-1].name, run).model
    return StableDiffusion3Pipeline(
        transformer=cast(TransformerWithHead, trained).transformer,
        scheduler=build_flow_scheduler(),
        vae=cast(AutoencoderTiny, _trained("shapes-sd3", "codec16", run).model),
        text_encoder=encoder,
        tokenizer=build_tokenizer(),
        text_encoder_2=encoder,
        tokenizer_2=build_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


def with_projection(encoder: CLIPTextModel) -> CLIPTextModelWithProjection:
    """The same text encoder with a projection that changes nothing."""
    projected = CLIPTextModelWithProjection(encoder.config)
    state = encoder.state_dict()
    names = {name.removeprefix("text_model."): name for name in projected.state_dict()}
    renamed = {names[name.removeprefix("text_model.")]: value for name, value in state.items()}
    renamed["text_projection.weight"] = torch.eye(int(encoder.config.hidden_size))
    projected.load_state_dict(renamed)
    return projected.requires_grad_(False).eval()


def _trained(model: str, stage: str, run: TrainingRun) -> Trainer:
    trainer = find_stage(model, stage).build(run)
    if not run.folder.restore(trainer):
        raise FileNotFoundError(f"no checkpoint of stage {stage!r} in {run.folder.path}; train it")
    trainer.use_average()
    trainer.model.eval()
    return trainer


def _tidy_configs(folder: Path) -> None:
    """Make the folder load plainly: one dtype for all parts, no keys that loaders dislike."""
    for file, changes in _CONFIG_CHANGES.items():
        path = folder / file
        if not path.is_file():
            continue
        config = json.loads(path.read_text(encoding="utf-8"))
        changed = {k: v for k, v in changes.items() if v is _DROPPED or k in config or k == "dtype"}
        tidy = {k: v for k, v in {**config, **changed}.items() if v is not _DROPPED}
        path.write_text(json.dumps(tidy, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)
