"""The models that are measured: published configurations, or tiny ones of the same families."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import diffusers
import torch

VAE_SCALE_FACTOR = 8
# configurations as published, what tiny ones have instead, and what else a whole pipeline has.
# Of FLUX the usual guidance is 3.5: the 3500 that the model makes of it is none of bfloat16's
# numbers, and the rounding of that one input would outweigh all others
MODELS: Mapping[str, Any] = json.loads((Path(__file__).parent / "models.json").read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class Family:
    """A model with random weights.

    Attributes:
        name: short, as in ``--only``.
        source: where its configuration stands.
        kind: diffusers' class.
        config: its arguments; what is not there is the class's own default.
        scheduler: class and arguments of the noise scheduler that the pipeline comes with.
        prompt_tokens: that a prompt's embedding has in the pipeline.
        guidance_scale: usual with the model.
        embeds_guidance: whether the scale is an input, and takes no second model row.
        repeated: classes of the blocks that regional compilation compiles.
    """

    name: str
    source: str
    kind: str
    config: Mapping[str, Any]
    scheduler: Sequence[Any]
    prompt_tokens: int
    guidance_scale: float
    embeds_guidance: bool
    repeated: Sequence[str]

    @property
    def is_unet(self) -> bool:
        """Whether it is a UNet, and no transformer."""
        return self.kind == "UNet2DConditionModel"

    @property
    def is_guided(self) -> bool:
        """Whether guidance takes a second model row for each image."""
        return not self.embeds_guidance

    @property
    def prompt_width(self) -> int:
        """Channels of a prompt's embedding."""
        return int(self.config["cross_attention_dim" if self.is_unet else "joint_attention_dim"])

    @property
    def pooled_width(self) -> int:
        """Channels of a prompt's pooled embedding."""
        if not self.is_unet:
            return int(self.config["pooled_projection_dim"])
        ids = 6 * int(self.config["addition_time_embed_dim"])
        return int(self.config["projection_class_embeddings_input_dim"]) - ids

    def latent_shape(self, size_px: tuple[int, int]) -> tuple[int, int, int]:
        """Return ``(C, h, w)`` of the latents of an image of a width and height."""
        channels = int(self.config["in_channels"])
        # FLUX counts those of a patch of two by two
        channels = channels // 4 if self.kind == "FluxTransformer2DModel" else channels
        width, height = (side // VAE_SCALE_FACTOR for side in size_px)
        return (channels, height, width)

    def build(self, device: torch.device | str, dtype: torch.dtype, seed: int = 0) -> Any:
        """Return the model with random weights, made on the device in the dtype.

        PyTorch's usual ones times the square root of 3: a layer's outputs have its inputs'
        variance. With a third of it, as usual, little of the timestep would reach the prediction
        through the many layers of modulations, and a wrong one would hardly show.
        """
        kind = getattr(diffusers, self.kind)
        before = torch.get_default_dtype()
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = kind(**self.config)
        finally:
            torch.set_default_dtype(before)
        # some parts choose a dtype of their own
        model = model.to(dtype).eval().requires_grad_(False)
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(3**0.5)
        return model

    def noise_scheduler(self) -> Any:
        """Return a new noise scheduler."""
        name, config = self.scheduler
        return getattr(diffusers, name)(**config)


def published() -> tuple[Family, ...]:
    """Return the models as they are published."""
    return tuple(map(_family, MODELS["families"]))


def tiny() -> tuple[Family, ...]:
    """Return the same families so small that a CPU has all of them measured in seconds."""
    return tuple(
        replace(
            one,
            source=f"tiny; the same layers as {one.source}",
            config={**one.config, **MODELS["families"][one.name]["tiny"]},
            prompt_tokens=7,
        )
        for one in published()
    )


def _family(name: str) -> Family:
    row = MODELS["families"][name]
    columns = {column.name: row[column.name] for column in fields(Family) if column.name != "name"}
    return Family(name=name, **columns)
