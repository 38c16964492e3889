"""A diffusers pipeline, called with a list of requests of one kind; its sampler is DDIM."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline

from ray_cluster.engine.files.folders import resolve_folder
from ray_cluster.engine.stages.warmup import prepare_threads
from ray_cluster.imaging.encoder import Pixels


class Call(NamedTuple):
    """One image to make; its deadline is in Unix time, infinite without one."""

    prompt: str
    width_px: int
    height_px: int
    num_steps: int
    guidance_scale: float
    seed: int
    deadline_s: float

    @property
    def key(self) -> Hashable:
        """Calls with the same key can share a pipeline call."""
        return (self.width_px, self.height_px, self.num_steps, self.guidance_scale)


class BaselinePipeline:
    """One model in one torch thread, with weights and activations of a dtype."""

    def __init__(self, model: str, dtype: str) -> None:
        prepare_threads(1)
        self._pipeline: Any = StableDiffusionPipeline.from_pretrained(
            resolve_folder(model),
            dtype=getattr(torch, dtype),
            local_files_only=True,
            safety_checker=None,
        )
        self._pipeline.set_progress_bar_config(disable=True)
        # the usual advice for convolutions on CPUs
        self._pipeline.unet.to(memory_format=torch.channels_last)
        self._pipeline.vae.to(memory_format=torch.channels_last)
        config = self._pipeline.scheduler.config
        self._pipeline.scheduler = DDIMScheduler.from_config(config)

    @torch.inference_mode()
    def make(self, calls: Sequence[Call]) -> list[Pixels]:
        """Return uint8 pixels [H, W, 3] of each; all calls have the same key."""
        first = calls[0]
        images = self._pipeline(
            prompt=[call.prompt for call in calls],
            width=first.width_px,
            height=first.height_px,
            num_inference_steps=first.num_steps,
            guidance_scale=first.guidance_scale,
            generator=[torch.Generator("cpu").manual_seed(call.seed) for call in calls],
        ).images
        return [np.asarray(image) for image in images]
