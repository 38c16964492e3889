"""What diffusers does in a denoising step: model call, guidance, and its own scheduler's update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.families import VAE_SCALE_FACTOR, Family
from ray_cluster.engine.schedules.flow_schedules import FlowModel, flow_shift
from ray_cluster.engine.step.state import Conditioning

_TRAIN_TIMESTEPS = 1000
_FLUX_PATCH = 2
Side = Literal["prompt", "negative"]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Of several model rows.

    Attributes:
        embeds: ``[R, T, D]``.
        pooled: ``[R, P]``.
        time_ids: ``[R, 6]``, only of SDXL.
    """

    embeds: Tensor
    pooled: Tensor
    time_ids: Tensor | None

    @classmethod
    def of(cls, owned: Sequence[Conditioning], *sides: Side) -> Prompts:
        """Return the rows of requests, those of the first side before those of the second."""
        is_negative = [side == "negative" for side in sides for _ in owned]
        rows = list(zip([*owned] * len(sides), is_negative, strict=True))
        ids = [one.time_ids for one, _ in rows if one.time_ids is not None]
        embeds = [one.negative_embeds if negative else one.prompt_embeds for one, negative in rows]
        pooled = [
            one.negative_pooled_embeds if negative else one.pooled_embeds for one, negative in rows
        ]
        return cls(_stacked(embeds), _stacked(pooled), torch.stack(ids) if ids else None)


def _stacked(rows: Sequence[Tensor | None]) -> Tensor:
    return torch.stack([one for one in rows if one is not None])


class Denoiser:
    """A diffusers model that is called as its pipeline calls it.

    Args:
        model: on its device in its dtype.
    """

    def __init__(self, family: Family, model: Any) -> None:
        self.family, self.model = family, model
        weight: Tensor = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self._ids: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, latents: Tensor, timesteps: Tensor, prompts: Prompts) -> Tensor:
        """Return the prediction ``[R, C, h, w]`` for latents of that shape and timesteps ``[R]``.

        Models that take a guidance scale as an input get the family's.
        """
        rows = latents.to(self.dtype)
        found: Tensor
        match self.family.kind:
            case "UNet2DConditionModel":
                added = {"text_embeds": prompts.pooled, "time_ids": prompts.time_ids}
                found = self.model(
                    rows,
                    timesteps,
                    encoder_hidden_states=prompts.embeds,
                    added_cond_kwargs=added,
                    return_dict=False,
                )[0]
                return found
            case "SD3Transformer2DModel":
                found = self.model(
                    hidden_states=rows,
                    timestep=timesteps,
                    encoder_hidden_states=prompts.embeds,
                    pooled_projections=prompts.pooled,
                    return_dict=False,
                )[0]
                return found
            case _:
                return self._flux(rows, timesteps, prompts)

    def _flux(self, rows: Tensor, timesteps: Tensor, prompts: Prompts) -> Tensor:
        count, channels, height, width = rows.shape
        high, wide, side = height // _FLUX_PATCH, width // _FLUX_PATCH, _FLUX_PATCH
        packed = rows.view(count, channels, high, side, wide, side).permute(0, 2, 4, 1, 3, 5)
        image_ids, prompt_ids = self._positions(high, wide, prompts.embeds.shape[1])
        scales = torch.full((count,), self.family.guidance_scale, device=self.device)
        found: Tensor = self.model(
            hidden_states=packed.reshape(count, high * wide, -1),
            timestep=timesteps.to(self.dtype) / _TRAIN_TIMESTEPS,
            guidance=scales,
            pooled_projections=prompts.pooled,
            encoder_hidden_states=prompts.embeds,
            txt_ids=prompt_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        patches = found.view(count, high, wide, channels, side, side).permute(0, 3, 1, 4, 2, 5)
        return patches.reshape(count, channels, height, width)

    def _positions(self, high: int, wide: int, num_prompt: int) -> tuple[Tensor, Tensor]:
        key = (high, wide, num_prompt)
        if key not in self._ids:
            image = torch.zeros(high, wide, 3)
            image[..., 1] += torch.arange(high)[:, None]
            image[..., 2] += torch.arange(wide)[None, :]
            prompt = torch.zeros(num_prompt, 3)
            made = (image.flatten(0, 1), prompt)
            self._ids[key] = tuple(one.to(self.device, self.dtype) for one in made)  # type: ignore[assignment]
        return self._ids[key]


class PipelineSteps:
    """Denoising steps of images of one size, one after the other as in the pipeline's loop.

    Args:
        latents: ``[n, C, h, w]`` of unit variance.
        owned: of each image; with or without guidance, all alike.
        num_steps: of the schedule; at its end it begins anew.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        latents: Tensor,
        owned: Sequence[Conditioning],
        num_steps: int,
    ) -> None:
        self._denoiser, self._is_guided = denoiser, owned[0].is_guided
        self._scheduler = denoiser.family.noise_scheduler()
        self._noise = latents.to(denoiser.device, denoiser.dtype)
        sides: tuple[Side, ...] = ("negative", "prompt") if self._is_guided else ("prompt",)
        self._prompts, self._num_steps = Prompts.of(owned, *sides), num_steps
        self._restart()

    def _restart(self) -> None:
        family, scheduler, device = self._denoiser.family, self._scheduler, self._denoiser.device
        options: dict[str, Any] = {"num_inference_steps": self._num_steps}
        if scheduler.config.get("use_dynamic_shifting", False):
            height, width = self._noise.shape[2:]
            tokens = FlowModel(VAE_SCALE_FACTOR * _FLUX_PATCH, spaces_sigmas=True).num_tokens(
                (width * VAE_SCALE_FACTOR, height * VAE_SCALE_FACTOR)
            )
            sigmas = np.linspace(1.0, 1 / self._num_steps, self._num_steps)
            options = {"sigmas": sigmas, "mu": flow_shift(scheduler.config, tokens)}
        scheduler.set_timesteps(**options, device=device)
        scheduler.set_begin_index(0)
        sigma = scheduler.init_noise_sigma if family.is_unet else 1.0
        self._latents, self._index = self._noise * sigma, 0

    def __call__(self) -> Tensor:
        """Take one step; return the latents."""
        if self._index >= len(self._scheduler.timesteps):
            self._restart()
        denoiser, scheduler, latents = self._denoiser, self._scheduler, self._latents
        timestep = scheduler.timesteps[self._index]
        rows = torch.cat([latents] * 2) if self._is_guided else latents
        if denoiser.family.is_unet:
            rows = scheduler.scale_model_input(rows, timestep)
        output = denoiser(rows, timestep.expand(len(rows)), self._prompts)
        if self._is_guided:
            blank, wanted = output.chunk(2)
            output = blank + denoiser.family.guidance_scale * (wanted - blank)
        self._latents = scheduler.step(output, timestep, latents, return_dict=False)[0]
        self._index += 1
        return self._latents
