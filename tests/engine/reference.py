"""Runs requests through diffusers, one by one: what the engine is held against."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    DDIMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
)
from torch import Tensor

from ray_cluster.requests import ImageRequest
from tests.engine.harness import RUN_TOLERANCE, difference

DIFFUSERS_BY_SAMPLER: dict[str, Any] = {
    "ddim": DDIMScheduler,
    "euler": EulerDiscreteScheduler,
    "euler_ancestral": EulerAncestralDiscreteScheduler,
    "dpmpp_2m": DPMSolverMultistepScheduler,
    "lcm": LCMScheduler,
    "pndm": PNDMScheduler,
}


@dataclass(frozen=True, slots=True)
class ReferenceOutcome:
    """What diffusers makes of a request: latents ``[C, H, W]`` and pixels ``[H, W, 3]``."""

    latents: Tensor
    pixels: np.ndarray[Any, Any]


class Reference:
    """The diffusers pipeline of a folder, run for one request at a time."""

    def __init__(self, folder: Path | str, dtype: torch.dtype = torch.float32) -> None:
        extra = {} if "sdxl" in str(folder) else {"safety_checker": None}
        self.pipeline = DiffusionPipeline.from_pretrained(folder, dtype=dtype, **extra)
        self.pipeline.set_progress_bar_config(disable=True)
        self.scheduler_config = self.pipeline.scheduler.config
        self._double: Any = None
        self._outcomes: dict[ImageRequest, ReferenceOutcome] = {}

    def outcome(self, one: ImageRequest) -> ReferenceOutcome:
        """Run the pipeline for the request alone; kept."""
        key = replace(one, request_id="", priority=0, slo_s=None)
        if key not in self._outcomes:
            latents = self._latents([one])
            with torch.inference_mode():
                pixels = np.asarray(self._decode(latents)[0])
            self._outcomes[key] = ReferenceOutcome(latents[0], pixels)
        return self._outcomes[key]

    def own_spread(self, one: ImageRequest) -> float:
        """Return by how much diffusers differs from itself: at batch 8, and in channels-last order.

        One changes the order of sums in linear layers, the other in convolutions and norms.
        """
        peers = [
            replace(one, seed=one.seed + index, prompt="blue " * index) for index in range(1, 8)
        ]
        outcome, unet = self.outcome(one).latents, getattr(self.pipeline, "unet", None)
        together = difference(self._latents([one, *peers])[0], outcome)
        if unet is None:
            return together
        try:
            self.pipeline.unet = copy.deepcopy(unet).to(memory_format=torch.channels_last)
            return max(together, difference(self._latents([one])[0], outcome))
        finally:
            self.pipeline.unet = unet

    @property
    def starts_at_zero_snr(self) -> bool:
        """Whether the Euler samplers start from sigma 4096, where float32 is 2e-4 coarse."""
        config = self.scheduler_config
        return bool(config.rescale_betas_zero_snr) and config.prediction_type == "v_prediction"

    def run_tolerance(self, one: ImageRequest) -> float:
        """Return what a whole run may differ, see docs/engine.md (Exactness)."""
        return max(RUN_TOLERANCE, 4 * self.own_spread(one))

    @torch.inference_mode()
    def truth(self, one: ImageRequest) -> Tensor:
        """Return the latents of the Euler samplers in float64, their formulas written out."""
        if self._double is None:
            self._double = copy.deepcopy(self.pipeline.unet).double()
        scheduler = DIFFUSERS_BY_SAMPLER[one.sampler].from_config(self.scheduler_config)
        scheduler.set_timesteps(one.num_steps)
        prompt, negative = (
            self.pipeline.encode_prompt(text, "cpu", 1, False)[0].double()
            for text in (one.prompt, one.negative_prompt or "")
        )
        generator = torch.Generator().manual_seed(one.seed)
        shape = (1, *self.outcome(one).latents.shape)
        x = torch.randn(shape, generator=generator).double() * float(scheduler.init_noise_sigma)
        sigmas = scheduler.sigmas.double()
        for sigma, end, timestep in zip(sigmas, sigmas[1:], scheduler.timesteps, strict=False):
            scaled = x / (sigma**2 + 1).sqrt()
            output = self._double(scaled, timestep, prompt).sample
            if one.uses_guidance:
                blank = self._double(scaled, timestep, negative).sample
                output = blank + one.guidance_scale * (output - blank)
            clean = x / (sigma**2 + 1) - output * sigma / (sigma**2 + 1).sqrt()
            fresh, noise = torch.zeros(()), torch.zeros(())
            if one.sampler == "euler_ancestral":
                fresh = end * (1 - (end / sigma) ** 2).sqrt()
                noise = torch.randn(shape, generator=generator).double()
            target = (end**2 - fresh**2).clamp(min=0).sqrt()
            x = x + (x - clean) / sigma * (target - sigma) + fresh * noise
        return x[0]

    def estimates(self, one: ImageRequest) -> list[Tensor]:
        """Return what diffusers' scheduler takes the image for at each step."""
        found: list[Tensor] = []
        self._run([one], "latent", watch=found)
        return found

    def pixels_of_the_pipeline(self, one: ImageRequest) -> Any:
        """Return the pixels that the pipeline's own last lines make."""
        return np.asarray(self._run([one], "pil")[0])

    def _latents(self, requests: Sequence[ImageRequest]) -> Tensor:
        latents: Tensor = self._run(requests, "latent")
        return latents

    def _run(
        self,
        requests: Sequence[ImageRequest],
        output_type: str,
        watch: list[Tensor] | None = None,
    ) -> Any:
        first = requests[0]
        pipeline = self.pipeline
        options = {"skip_prk_steps": True} if first.sampler == "pndm" else {}
        kind = DIFFUSERS_BY_SAMPLER[first.sampler]
        pipeline.scheduler = kind.from_config(self.scheduler_config, **options)
        if watch is not None:
            _watch_estimates(pipeline.scheduler, watch)
        negatives = [one.negative_prompt for one in requests]
        return pipeline(
            prompt=[one.prompt for one in requests],
            negative_prompt=None if first.negative_prompt is None else negatives,
            height=first.height_px,
            width=first.width_px,
            num_inference_steps=first.num_steps,
            guidance_scale=first.guidance_scale,
            generator=[torch.Generator().manual_seed(one.seed) for one in requests],
            output_type=output_type,
        ).images

    def _decode(self, latents: Tensor) -> Any:
        """Decode as the last lines of both pipelines' ``__call__`` do."""
        vae = self.pipeline.vae
        mean = vae.config.get("latents_mean")
        if mean is not None:
            shape = (1, -1, 1, 1)
            std = torch.tensor(vae.config.latents_std).reshape(shape)
            latents = latents * std / vae.config.scaling_factor + torch.tensor(mean).reshape(shape)
        else:
            latents = latents / vae.config.scaling_factor
        image = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return self.pipeline.image_processor.postprocess(image.float(), output_type="pil")


def _watch_estimates(scheduler: Any, found: list[Tensor]) -> None:
    step = scheduler.step

    # diffusers looks at the signature of ``step``
    @functools.wraps(step)
    def watched(*arguments: Any, **options: Any) -> Any:
        output = step(*arguments, **options | {"return_dict": True})
        found.append(output.pred_original_sample[0])
        return (output.prev_sample,)

    scheduler.step = watched
