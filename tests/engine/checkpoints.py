"""Stable Diffusion with random weights, as a folder and as the checkpoint in one file it came from.

Names and shapes are those of the published files, with narrower layers: the inverse of what
diffusers converts, written from the files' own names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from ray_cluster.models.checkpoints.clip_tokenizer import END, tokenizer_files

_SCHEDULE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
_WIDTHS = (64, 128)
_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_WHOLE = {
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}
_VAE_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A layout of checkpoints.

    Attributes:
        dtype: of the file.
        is_zero_snr: whether it has the key that says so.
        says: what of its header and keys tells that it predicts v.
        has_ema: whether averaged weights lie beside the UNet's.
        is_newer: whether its CLIP was written by a newer transformers.
    """

    family: Literal["sd1", "sd2", "sdxl"]
    dtype: torch.dtype = torch.float32
    inpaints: bool = False
    prediction: Literal["epsilon", "v_prediction"] = "epsilon"
    is_zero_snr: bool = False
    says: Literal["key", "header", "nothing"] = "nothing"
    has_ema: bool = False
    is_newer: bool = False
    pool: Mapping[str, Any] = field(default_factory=dict)


KINDS = {
    "sd15": Kind("sd1"),
    "sd15-fp16": Kind("sd1", torch.float16),
    "sd15-fp8": Kind("sd1", torch.float8_e4m3fn),
    "sd15-ema": Kind("sd1", has_ema=True),
    "sd15-newer-clip": Kind("sd1", is_newer=True),
    "sd15-inpainting": Kind("sd1", inpaints=True),
    "sd15-v-zero-snr": Kind("sd1", prediction="v_prediction", is_zero_snr=True, says="key"),
    "sd2-base": Kind("sd2", pool={"prediction": "epsilon"}),
    "sd2-v": Kind("sd2", torch.float16, prediction="v_prediction", says="header"),
    "sd2-inpainting": Kind("sd2", inpaints=True),
    "sdxl-fp16": Kind("sdxl", torch.float16),
    "sdxl-fp8": Kind("sdxl", torch.float8_e4m3fn),
    "sdxl-v-zero-snr": Kind("sdxl", prediction="v_prediction", is_zero_snr=True, says="key"),
    "sdxl-inpainting": Kind("sdxl", inpaints=True),
}


def save_kind(root: Path, kind: Kind) -> tuple[Path, Path]:
    """Write a model as a folder and as a checkpoint in one file; return both."""
    torch.manual_seed(0)
    pipeline = _pipeline(root, kind)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            # what a file of half precision, or less, has of them
            part.to(kind.dtype).to(torch.float32)
    pipeline.save_pretrained(root / "folder")
    file = root / "model.safetensors"
    save_checkpoint(file, pipeline, kind)
    return root / "folder", file


def save_checkpoint(file: Path, pipeline: DiffusionPipeline, kind: Kind) -> None:
    tensors = {name: one.to(kind.dtype).contiguous() for name, one in _tensors(pipeline, kind)}
    header = {}
    if kind.has_ema:
        tensors |= {
            f"model_ema.{name.removeprefix('model.').replace('.', '')}": torch.zeros_like(one)
            for name, one in tensors.items()
            if name.startswith("model.diffusion_model.")
        }
    if kind.says == "key":
        tensors["v_pred"] = torch.zeros(0)
    elif kind.says == "header":
        header = {"modelspec.prediction_type": "v"}
    if kind.is_zero_snr:
        tensors["ztsnr"] = torch.zeros(0)
    save_file(tensors, file, metadata=header or None)


def _tensors(pipeline: Any, kind: Kind) -> Any:
    """Yield a pipeline's weights under a checkpoint's names."""
    for name, one in pipeline.unet.state_dict().items():
        yield f"model.diffusion_model.{_unet_name(name)}", one
    num_levels = len(pipeline.vae.config["block_out_channels"])
    for name, one in pipeline.vae.state_dict().items():
        is_map = "mid_block.attentions" in name and one.ndim == 2
        path = _vae_name(name, num_levels)
        yield f"first_stage_model.{path}", one[:, :, None, None] if is_map else one
    first = "conditioner.embedders.0." if kind.family == "sdxl" else "cond_stage_model."
    if kind.family == "sd2":
        yield from _open_clip(pipeline.text_encoder, f"{first}model.")
        # OpenCLIP's last layer, and its projection, which nothing takes
        for name, one in list(_open_clip(pipeline.text_encoder, f"{first}model.")):
            if ".resblocks.22." in name:
                yield name.replace(".22.", ".23."), torch.zeros_like(one)
        yield f"{first}model.text_projection", torch.zeros(64, 64)
    else:
        for name, one in pipeline.text_encoder.state_dict().items():
            bare = name.removeprefix("text_model.")
            yield f"{first}transformer.{'' if kind.is_newer else 'text_model.'}{bare}", one
        # as half precision has spoilt them in some files
        yield f"{first}transformer.text_model.embeddings.position_ids", torch.arange(77)[None] + 0.3
    if kind.family == "sdxl":
        yield from _open_clip(pipeline.text_encoder_2, "conditioner.embedders.1.model.")


def _unet_name(name: str) -> str:
    path, _, last = name.rpartition(".")
    if path in _WHOLE:
        return f"{_WHOLE[path]}.{last}"
    block, *rest = path.split(".")
    number = 0 if block == "mid_block" else int(rest.pop(0))
    kind, index, inner = rest[0], int(rest[1]), ".".join([*rest[2:], last])
    if kind == "resnets":
        inner = inner.replace(path.split(".")[-1], _RESNET[path.split(".")[-1]])
    match block, kind:
        case "mid_block", _:
            return f"middle_block.{1 if kind == 'attentions' else 2 * index}.{inner}"
        case "down_blocks", "downsamplers":
            return f"input_blocks.{3 * number + 3}.0.op.{last}"
        case "up_blocks", "upsamplers":
            # behind the attention, where there is one
            return f"output_blocks.{3 * number + 2}.2.conv.{last}"
    side, place = ("input", 1) if block == "down_blocks" else ("output", 0)
    return f"{side}_blocks.{3 * number + index + place}.{int(kind == 'attentions')}.{inner}"


def _vae_name(name: str, num_levels: int) -> str:
    name = name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda one: f"mid.block_{int(one[1]) + 1}", name)
    for ours, theirs in _VAE_ATTENTION.items():
        name = name.replace(f"mid_block.attentions.0.{ours}", f"mid.attn_1.{theirs}")
    name = re.sub(r"up_blocks\.(\d)", lambda one: f"up_blocks.{num_levels - 1 - int(one[1])}", name)
    for side in ("up", "down"):
        name = name.replace(f"{side}_blocks.", f"{side}.")
        name = name.replace(f"{side}samplers.0.conv", f"{side}sample.conv")
    return name.replace(".resnets.", ".block.")


def _open_clip(encoder: Any, prefix: str) -> Any:
    weights = {k.removeprefix("text_model."): v for k, v in encoder.state_dict().items()}
    yield f"{prefix}positional_embedding", weights["embeddings.position_embedding.weight"]
    yield f"{prefix}token_embedding.weight", weights["embeddings.token_embedding.weight"]
    if "text_projection.weight" in weights:
        yield f"{prefix}text_projection", weights["text_projection.weight"].T
    for end in ("weight", "bias"):
        yield f"{prefix}ln_final.{end}", weights[f"final_layer_norm.{end}"]
        for layer in range(encoder.config.num_hidden_layers):
            ours, theirs = f"encoder.layers.{layer}.", f"{prefix}transformer.resblocks.{layer}."
            joined = [weights[f"{ours}self_attn.{one}_proj.{end}"] for one in "qkv"]
            yield f"{theirs}attn.in_proj_{end}", torch.cat(joined)
            yield f"{theirs}attn.out_proj.{end}", weights[f"{ours}self_attn.out_proj.{end}"]
            for index in (1, 2):
                yield f"{theirs}ln_{index}.{end}", weights[f"{ours}layer_norm{index}.{end}"]
            yield f"{theirs}mlp.c_fc.{end}", weights[f"{ours}mlp.fc1.{end}"]
            yield f"{theirs}mlp.c_proj.{end}", weights[f"{ours}mlp.fc2.{end}"]


def tokenizer_of(root: Path, pad: str) -> CLIPTokenizer:
    folder = root / f"tokenizer-{len(pad)}"
    folder.mkdir(exist_ok=True)
    for name, text in tokenizer_files(pad).items():
        (folder / name).write_text(text)
    return CLIPTokenizer.from_pretrained(folder)


def text_encoder(kind: type[Any], activation: str, num_layers: int, width: int = 64) -> Any:
    return kind(
        CLIPTextConfig(
            vocab_size=49408,
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_hidden_layers=num_layers,
            num_attention_heads=width // 64,
            hidden_act=activation,
            bos_token_id=49406,
            eos_token_id=49407,
        )
    )


def _unet(kind: Kind) -> UNet2DConditionModel:
    is_xl = kind.family == "sdxl"
    types = ("DownBlock2D", "CrossAttnDownBlock2D")
    added: dict[str, Any] = {}
    if is_xl:
        added = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "transformer_layers_per_block": (1, 2),
            "projection_class_embeddings_input_dim": 6 * 256 + 64,
        }
    side = 64 if kind.family == "sd1" or kind.prediction == "epsilon" else 96
    return UNet2DConditionModel(
        sample_size=128 if is_xl else side,
        in_channels=9 if kind.inpaints else 4,
        out_channels=4,
        block_out_channels=_WIDTHS,
        down_block_types=types if is_xl else types[::-1],
        up_block_types=tuple(
            one.replace("Down", "Up") for one in (types[::-1] if is_xl else types)
        ),
        attention_head_dim=8 if kind.family == "sd1" else (1, 2),
        use_linear_projection=kind.family != "sd1",
        cross_attention_dim=128 if is_xl else 64,
        **added,
    )


def _pipeline(root: Path, kind: Kind) -> Any:
    is_xl = kind.family == "sdxl"
    vae = AutoencoderKL(
        block_out_channels=(32, 64, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
        scaling_factor=0.13025 if is_xl else 0.18215,
    )
    predicts: dict[str, Any] = {"prediction_type": kind.prediction, "steps_offset": 1}
    predicts |= _SCHEDULE
    if is_xl:
        predicts["timestep_spacing"] = "leading"
    if kind.is_zero_snr:
        predicts |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    if is_xl:
        return (StableDiffusionXLInpaintPipeline if kind.inpaints else StableDiffusionXLPipeline)(
            vae=vae,
            unet=_unet(kind),
            text_encoder=text_encoder(CLIPTextModel, "quick_gelu", 2),
            text_encoder_2=text_encoder(CLIPTextModelWithProjection, "gelu", 3),
            tokenizer=tokenizer_of(root, END),
            tokenizer_2=tokenizer_of(root, "!"),
            scheduler=EulerDiscreteScheduler(**predicts),
        )
    is_sd2, is_v = kind.family == "sd2", kind.prediction == "v_prediction"
    if is_v:
        scheduler: Any = DDIMScheduler(**predicts, clip_sample=False, set_alpha_to_one=False)
    else:
        scheduler = PNDMScheduler(**predicts, skip_prk_steps=True)
    return (StableDiffusionInpaintPipeline if kind.inpaints else StableDiffusionPipeline)(
        vae=vae,
        unet=_unet(kind),
        text_encoder=text_encoder(
            CLIPTextModel, "gelu" if is_sd2 else "quick_gelu", 23 if is_sd2 else 2
        ),
        tokenizer=tokenizer_of(root, "!" if is_sd2 else END),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def rewritten(file: Path, change: Any) -> Path:
    """Write a checkpoint anew after a change of its tensors by name; return its path."""
    tensors: dict[str, Tensor] = load_file(file)
    change(tensors)
    changed = file.with_name("changed.safetensors")
    save_file(tensors, changed)
    return changed
