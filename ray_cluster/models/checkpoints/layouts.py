"""What a Stable Diffusion checkpoint in one file is, from the names and shapes in its header.

Its configurations are not in it. ``kinds.json`` has what the published models of each kind have in
common, and the rest follows from the shapes: eight heads (SD1), or heads of 64 channels.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ray_cluster.errors import ConfigError
from ray_cluster.models.checkpoints.clip_tokenizer import END, MAX_TOKENS, VOCABULARY
from ray_cluster.models.weight_files import CLIP, OPEN_CLIP, OPEN_CLIP_2, UNET, VAE, read_header

Prediction = Literal["epsilon", "v_prediction"]
Config = dict[str, Any]

_KINDS = Path(__file__).with_name("kinds.json")
_HEAD_WIDTH = 64
_SD1_HEADS = 8
_SD2_V_LATENTS = 96
# OpenCLIP has one more, which Stable Diffusion 2 leaves out
_SD2_TEXT_LAYERS = 23
_TIME_IDS = 6
# published models have four; each is searched for in all names
_MAX_LEVELS = 16
# what only files of other kinds have, and what those are
_OTHERS: Mapping[str, str] = {
    "lora_unet_": "a LoRA: register it with the service",
    "lora_te": "a LoRA: register it with the service",
    "lora_A.": "a LoRA: register it with the service",
    "control_model.": "a ControlNet: name it in controlnets",
    "controlnet_cond_embedding.": "a ControlNet: name it in controlnets",
    "edm_mean": "of the EDM schedule (Playground), which is not covered",
    "edm_vpred.": "of the EDM schedule (CosXL), which is not covered",
    "scaled_fp8": "in ComfyUI's scaled fp8, which is not covered: take fp16 or plain fp8",
    ".scale_weight": "in ComfyUI's scaled fp8, which is not covered: take fp16 or plain fp8",
    "joint_blocks.": "Stable Diffusion 3: give its folder as model, and this file as transformer",
    "double_blocks.": "FLUX: give a folder of its kind as model, and this file as transformer",
    "down_blocks.": "one part of a folder in diffusers' layout: give that folder",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """The folder that a checkpoint stands for.

    Attributes:
        configs: JSON objects by their paths in it.
        pad_by_tokenizer: the padding tokens of its tokenizers, by name.
        parts: the components whose weights are in the file.
    """

    configs: Mapping[str, Config]
    pad_by_tokenizer: Mapping[str, str]
    parts: tuple[str, ...]


def read_layout(path: Path, prediction: Prediction | None = None) -> Layout:
    """Return what a file stands for.

    Args:
        prediction: what the model predicts, where the file does not say.

    Raises:
        ConfigError: the file is damaged or of another kind, lacks a part, or does not say what it
            predicts and nobody else does.
    """
    header = read_header(path)
    return _Reader(path, header.shapes, header.metadata, prediction).layout()


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    metadata: Mapping[str, str]
    given: Prediction | None

    def layout(self) -> Layout:
        kind = self._kind()
        configs: dict[str, Config] = json.loads(_KINDS.read_text(encoding="utf-8"))[kind]
        index, unet = configs["model_index.json"], configs["unet/config.json"]
        try:
            unet |= self._unet(kind)
            configs["vae/config.json"] |= self._vae()
            encoders = self._encoders(kind)
        except (LookupError, ValueError) as error:
            raise self._error(f"lacks {error.args[0]}, or has it in another shape") from error
        pads = {}
        for name, one in encoders.items():
            config = configs[f"{name}/config.json"]
            config |= one
            if (one["vocab_size"], one["max_position_embeddings"]) != (VOCABULARY, MAX_TOKENS):
                tokens = one["vocab_size"]
                raise self._error(f"has a {name} for {tokens} tokens, and CLIP's has {VOCABULARY}")
            # OpenCLIP fills up with its token of number 0
            tokenizer = name.replace("text_encoder", "tokenizer")
            pads[tokenizer] = "!" if config["hidden_act"] == "gelu" else END
        if unet["in_channels"] > unet["out_channels"]:
            index["_class_name"] = index["_class_name"].replace("Pipeline", "InpaintPipeline")
        self._predict(kind, configs)
        return Layout(configs, pads, ("unet", "vae", *encoders))

    def _kind(self) -> Literal["sd1", "sd2", "sdxl"]:
        """Return the kind of a file that has all parts; ConfigError for what has not."""
        for part, what in _OTHERS.items():
            if any(part in name for name in self.shapes):
                raise self._error(f"is {what}")
        if not self._has(UNET):
            raise self._error(
                "has no UNet (model.diffusion_model.…): take the whole checkpoint; a transformer "
                "alone goes into transformer, beside a folder of its kind as model"
            )
        if not self._has(VAE):
            raise self._error("has no autoencoder (first_stage_model.…); take one with a baked VAE")
        if self._has(OPEN_CLIP_2):
            if not self._has(CLIP[1]):
                raise self._error("has only the second of SDXL's text encoders")
            return "sdxl"
        if self._has("conditioner."):
            raise self._error("is SDXL's refiner, which makes no image from text: take the base")
        if self._has(OPEN_CLIP):
            return "sd2"
        if self._has(CLIP[0]):
            return "sd1"
        raise self._error("has no text encoder (cond_stage_model.…); take the whole checkpoint")

    def _has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.shapes)

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path} {what}")

    def _unet(self, kind: str) -> Config:
        shapes, blocks = self.shapes, f"{UNET}input_blocks."
        levels: list[list[str]] = [[]]
        for block in (f"{blocks}{index}." for index in range(1, _count(shapes, blocks))):
            if f"{block}0.op.weight" in shapes:
                levels.append([])
            else:
                levels[-1].append(block)
        if len(levels) > _MAX_LEVELS:
            raise self._error(f"has a UNet of {len(levels)} levels, more than {_MAX_LEVELS}")
        takes, gives = shapes[f"{blocks}0.0.weight"][1], shapes[f"{UNET}out.2.weight"][0]
        if takes not in {gives, 2 * gives + 1}:
            raise self._error(
                f"has a UNet for {takes} channels; covered are {gives}, and {2 * gives + 1} of "
                "inpainting models"
            )
        widths = [shapes[f"{level[0]}0.out_layers.3.weight"][0] for level in levels]
        depths = [_count(shapes, f"{level[0]}1.transformer_blocks.") for level in levels]
        attention = f"{UNET}middle_block.1."
        heads = [max(1, one // _HEAD_WIDTH) for one in widths]
        config: Config = {
            "in_channels": takes,
            "out_channels": gives,
            "block_out_channels": widths,
            "layers_per_block": len(levels[0]),
            "down_block_types": [f"{'CrossAttn' * (one > 0)}DownBlock2D" for one in depths],
            "up_block_types": [f"{'CrossAttn' * (one > 0)}UpBlock2D" for one in reversed(depths)],
            "cross_attention_dim": shapes[f"{attention}transformer_blocks.0.attn2.to_k.weight"][1],
            "use_linear_projection": len(shapes[f"{attention}proj_in.weight"]) == 2,
            "attention_head_dim": _SD1_HEADS if kind == "sd1" else heads,
        }
        if max(depths) > 1:
            config["transformer_layers_per_block"] = [max(1, one) for one in depths]
        added = shapes.get(f"{UNET}label_emb.0.0.weight")
        if kind == "sdxl":
            width = shapes[f"{UNET}label_emb.0.0.weight"][1]
            pooled = shapes[f"{OPEN_CLIP_2}text_projection"][1]
            config["addition_time_embed_dim"] = (width - pooled) // _TIME_IDS
            config["projection_class_embeddings_input_dim"] = width
        elif added is not None:
            raise self._error("is a model of classes or of CLIP's images, which is not covered")
        return config

    def _vae(self) -> Config:
        down = f"{VAE}encoder.down."
        levels = range(_count(self.shapes, down))
        return {
            "block_out_channels": [
                self.shapes[f"{down}{level}.block.0.conv1.weight"][0] for level in levels
            ],
            "layers_per_block": _count(self.shapes, f"{down}0.block."),
            "down_block_types": ["DownEncoderBlock2D"] * len(levels),
            "up_block_types": ["UpDecoderBlock2D"] * len(levels),
            "latent_channels": self.shapes[f"{VAE}decoder.conv_in.weight"][1],
        }

    def _encoders(self, kind: str) -> dict[str, Config]:
        if kind == "sd1":
            return {"text_encoder": self._clip(CLIP[0])}
        if kind == "sd2":
            found = self._open_clip(OPEN_CLIP)
            layers = min(found["num_hidden_layers"], _SD2_TEXT_LAYERS)
            return {"text_encoder": found | {"num_hidden_layers": layers}}
        second = self._open_clip(OPEN_CLIP_2)
        second["projection_dim"] = self.shapes[f"{OPEN_CLIP_2}text_projection"][1]
        return {"text_encoder": self._clip(CLIP[1]), "text_encoder_2": second}

    def _clip(self, prefix: str) -> Config:
        # files that newer versions of transformers wrote leave the first part out
        inner = f"{prefix}text_model."
        inner = inner if self._has(f"{inner}embeddings.token_embedding.") else prefix
        layers, table = f"{inner}encoder.layers.", f"{inner}embeddings."
        positions = f"{table}position_embedding.weight"
        return self._text(f"{table}token_embedding.weight", positions, layers, "mlp.fc1")

    def _open_clip(self, prefix: str) -> Config:
        layers, positions = f"{prefix}transformer.resblocks.", f"{prefix}positional_embedding"
        return self._text(f"{prefix}token_embedding.weight", positions, layers, "mlp.c_fc")

    def _text(self, tokens: str, positions: str, layers: str, inner: str) -> Config:
        """Return what a text encoder's tensors say of it, given the names of some."""
        vocabulary, width = self.shapes[tokens]
        return {
            "vocab_size": vocabulary,
            "hidden_size": width,
            "projection_dim": width,
            "intermediate_size": self.shapes[f"{layers}0.{inner}.weight"][0],
            "num_hidden_layers": _count(self.shapes, layers),
            "num_attention_heads": max(1, width // _HEAD_WIDTH),
            "max_position_embeddings": self.shapes[positions][0],
        }

    def _predict(self, kind: str, configs: Mapping[str, Config]) -> None:
        """Write into a folder's configurations what its UNet predicts."""
        unet, scheduler = configs["unet/config.json"], configs["scheduler/scheduler_config.json"]
        is_inpainting = unet["in_channels"] > unet["out_channels"]
        scheduler["prediction_type"] = self._prediction(kind, is_inpainting=is_inpainting)
        if scheduler["prediction_type"] == "epsilon":
            return
        if kind != "sdxl":
            scheduler["_class_name"] = "DDIMScheduler"
            configs["model_index.json"]["scheduler"][1] = "DDIMScheduler"
        if kind == "sd2":
            unet["sample_size"] = _SD2_V_LATENTS
        if "ztsnr" in self.shapes:
            scheduler |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}

    def _prediction(self, kind: str, *, is_inpainting: bool) -> Prediction:
        if self.given is not None:
            return self.given
        said = self.metadata.get("modelspec.prediction_type", "").lower()
        if "v_pred" in self.shapes or said in {"v", "v_prediction", "v-prediction"}:
            return "v_prediction"
        # the published SD2 for inpainting is of 512 px
        if said == "epsilon" or kind != "sd2" or is_inpainting:
            return "epsilon"
        raise self._error(
            "is a Stable Diffusion 2, and does not say what it predicts: set prediction: "
            "v_prediction (models of 768 px) or epsilon (of 512 px) beside it"
        )


def _count(names: Collection[str], prefix: str) -> int:
    """Return how many numbers follow a prefix in names."""
    return len({name[len(prefix) :].partition(".")[0] for name in names if name.startswith(prefix)})
