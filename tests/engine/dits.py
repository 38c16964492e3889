"""Diffusion transformers in diffusers' own pipelines, and single calls of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, FluxFillPipeline, FluxKontextPipeline, FluxPipeline
from torch import Tensor

from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.requests import ImageRequest
from tests.engine.harness import call_model, difference, request, start_all
from tests.engine.reference import Reference

SIZES_PX = ((64, 64), (96, 96), (128, 128), (64, 128), (128, 64))
PROMPT = "a large blue star at the top left on a white background"
_SCALES = (1.0, 3.0, 7.5)


def dit_request(request_id: str = "a", **changes: Any) -> ImageRequest:
    values = {"sampler": "flow_match_euler", "prompt": PROMPT, "num_steps": 4}
    return request(request_id, **(values | changes))


class DiTReference(Reference):
    """The SD3 or FLUX pipeline of a folder, run for one request at a time."""

    def __init__(self, folder: Path | str, dtype: torch.dtype = torch.float32) -> None:
        left_out = {}
        if not (Path(folder) / "text_encoder_3").exists() and "sd3" in str(folder):
            left_out = {"text_encoder_3": None, "tokenizer_3": None}
        self.pipeline = DiffusionPipeline.from_pretrained(folder, dtype=dtype, **left_out)
        self.pipeline.set_progress_bar_config(disable=True)
        self.scheduler_config = self.pipeline.scheduler.config
        self._outcomes = {}

    @property
    def is_flux(self) -> bool:
        return isinstance(self.pipeline, FluxPipeline | FluxKontextPipeline | FluxFillPipeline)

    def _run(
        self,
        requests: Sequence[ImageRequest],
        output_type: str,
        watch: list[Tensor] | None = None,
    ) -> Any:
        assert watch is None
        first, more = requests[0], {}
        if not self.is_flux:
            more = {"negative_prompt": [one.negative_prompt or "" for one in requests]}
        images = self.pipeline(
            prompt=[one.prompt for one in requests],
            height=first.height_px,
            width=first.width_px,
            num_inference_steps=first.num_steps,
            guidance_scale=first.guidance_scale,
            generator=[torch.Generator().manual_seed(one.seed) for one in requests],
            output_type=output_type,
            **more,
        ).images
        if output_type != "latent" or not self.is_flux:
            return images
        factor = self.pipeline.vae_scale_factor
        return self.pipeline._unpack_latents(images, first.height_px, first.width_px, factor)

    def _decode(self, latents: Tensor) -> Any:
        vae = self.pipeline.vae
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        image = vae.decode(latents, return_dict=False)[0]
        return self.pipeline.image_processor.postprocess(image, output_type="pil")

    def predict(
        self, latents: Tensor, timestep: Tensor, prompt: tuple[Tensor, Tensor], scale: float
    ) -> Tensor:
        """Call the transformer for one image ``[C, h, w]`` as the pipeline does."""
        embeds, pooled = (one[None] for one in prompt)
        dtype = self.pipeline.transformer.dtype
        row = latents[None].to(dtype)
        if not self.is_flux:
            prediction = self.pipeline.transformer(row, embeds, pooled, timestep[None]).sample
            return prediction[0].float()
        _, channels, height, width = row.shape
        pipeline = self.pipeline
        ids = pipeline._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", torch.float32)
        guides = pipeline.transformer.config.guidance_embeds
        prediction = pipeline.transformer(
            pipeline._pack_latents(row, 1, channels, height, width),
            embeds,
            pooled,
            timestep[None].to(dtype) / 1000,
            ids,
            torch.zeros(embeds.shape[1], 3),
            torch.tensor([scale]) if guides else None,
        ).sample
        factor = pipeline.vae_scale_factor
        return pipeline._unpack_latents(prediction, height * factor, width * factor, factor)[
            0
        ].float()


@dataclass(slots=True)
class MixedCall:
    """What one model call over images of mixed sizes is made with.

    Attributes:
        latents: ``[C, h, w]`` each.
    """

    latents: list[Tensor]
    timesteps: Tensor
    conditionings: list[Conditioning]
    scales: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, model: LoadedModel, count: int = 8) -> MixedCall:
        """Make a call over all sizes, at different timesteps, guided and not."""
        requests = [
            dit_request(
                f"r{i}",
                prompt="red " * (i + 1),
                guidance_scale=_SCALES[i % 3],
                width_px=SIZES_PX[i % 5][0],
                height_px=SIZES_PX[i % 5][1],
            )
            for i in range(count)
        ]
        states = start_all(model, requests)
        generator = torch.Generator().manual_seed(0)
        return cls(
            [torch.randn(state.latents.shape, generator=generator) for state in states],
            torch.linspace(5, 995, count),
            [state.conditioning for state in states],
            [one.guidance_scale for one in requests],
        )

    def run(self, model: LoadedModel) -> list[Tensor]:
        """Call the engine's executor once."""
        return call_model(
            model.executor, self.latents, self.timesteps, self.conditionings, self.scales
        )

    def cast(self, dtype: torch.dtype) -> MixedCall:
        """Return the call with its prompts in another dtype."""
        owned = [
            Conditioning(**{name: part.to(dtype) for name, part in one.tensors().items()})
            for one in self.conditionings
        ]
        return replace(self, conditionings=owned)

    @torch.inference_mode()
    def expected(self, reference: DiTReference) -> list[Tensor]:
        """Return what the transformer predicts for each image alone, guided by the scales."""
        predictions = []
        for index, owned in enumerate(self.conditionings):
            scale, row = self.scales[index], (self.latents[index], self.timesteps[index])
            positive = (owned.prompt_embeds, owned.pooled_embeds)
            prediction = reference.predict(*row, positive, scale)
            if owned.is_guided:
                negative = (owned.negative_embeds, owned.negative_pooled_embeds)
                blank = reference.predict(*row, negative, scale)
                prediction = blank + scale * (prediction - blank)
            predictions.append(prediction)
        return predictions

    def errors(self, found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
        """Return per image how far two predictions are apart.

        Guided ones are told as one of their two rows: ``(1 - s) * u + s * c`` has the errors of
        these ``2 s - 1`` times.
        """
        return [
            difference(one, other) / (2 * scale - 1 if owned.is_guided else 1.0)
            for one, other, scale, owned in zip(
                found, expected, self.scales, self.conditionings, strict=True
            )
        ]
