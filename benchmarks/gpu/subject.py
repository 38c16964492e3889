"""One family with the same weights as diffusers' model and as the engine's executor."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.families import VAE_SCALE_FACTOR, Family
from benchmarks.gpu.pipeline import Denoiser, PipelineSteps
from ray_cluster.engine.dit.executor import DiTExecutor
from ray_cluster.engine.schedules.flow_schedules import FlowModel
from ray_cluster.engine.schedules.samplers import SamplerTables
from ray_cluster.engine.step.state import Conditioning, RequestState
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.engine.unet.executor import UNetExecutor
from ray_cluster.policies.steps.batch_layout import BatchLayout
from ray_cluster.requests import ImageRequest

SizePx = tuple[int, int]
# more than are ever taken: no request is done while it is measured
NUM_STEPS = 400
_DIT_PATCH = 2


@dataclass(frozen=True, slots=True)
class Contest:
    """What is measured: a family, both sides of it.

    Attributes:
        denoiser: diffusers'.
        executor: ours, with weights of its own.
        channels_last: diffusers' with its convolutions in that memory format, if it has any.
    """

    family: Family
    denoiser: Denoiser
    executor: Any
    channels_last: Denoiser | None = None

    def with_channels_last(self) -> Contest:
        """Return the contest with a copy of diffusers' model in that memory format."""
        if not self.family.is_unet:
            return self
        model = copy.deepcopy(self.denoiser.model).to(memory_format=torch.channels_last)
        return replace(self, channels_last=Denoiser(self.family, model))

    @property
    def device(self) -> torch.device:
        """Where both are."""
        return self.denoiser.device

    def pipeline_steps(self, sizes: Sequence[SizePx]) -> PipelineSteps:
        """Return diffusers' steps of images that have one size."""
        owned = conditionings(self.denoiser, sizes, [self.family.is_guided] * len(sizes))
        shape = self.executor.latent_shape(*sizes[0])
        generator = torch.Generator().manual_seed(len(sizes))
        latents = torch.randn((len(sizes), *shape), generator=generator)
        return PipelineSteps(self.denoiser, latents, owned, NUM_STEPS)

    def engine_steps(
        self,
        sizes: Sequence[SizePx],
        *,
        layout: BatchLayout = "mixed",
        executor: Any = None,
        guided: bool | None = None,
    ) -> Callable[[], None]:
        """Return whole steps of our engine: decision, model, samplers' update, check of the result.

        Args:
            executor: one around ours.
            guided: as the family is, unless it is given.
        """
        tables = sampler_tables(self.family)
        engine = StepEngine(
            executor or self.executor,
            lambda rows, _now_s: [row.request.request_id for row in rows],
            tables,
            time.perf_counter,
            layout=lambda _num_sizes: layout,
        )
        is_guided = self.family.is_guided if guided is None else guided
        owned = conditionings(self.denoiser, sizes, [is_guided] * len(sizes))
        for index, (size, conditioning) in enumerate(zip(sizes, owned, strict=True)):
            request = self._request(index, size)
            state = RequestState.start(
                request,
                conditioning,
                latent_shape=self.executor.latent_shape(*size),
                table=tables.table(request.sampler, request.num_steps, request.size_px),
                arrival_s=0.0,
                deadline_s=float("inf"),
            )
            engine.add(state)

        def step() -> None:
            report = engine.step()
            if report.failed:
                raise RuntimeError(f"a step failed: {report.failed[0].error}")
            assert len(report.stepped) == len(sizes), report.stepped

        return step

    def _request(self, index: int, size: SizePx) -> ImageRequest:
        return ImageRequest(
            request_id=f"{index}",
            model=self.family.name,
            prompt="",
            width_px=size[0],
            height_px=size[1],
            num_steps=NUM_STEPS,
            guidance_scale=self.family.guidance_scale,
            sampler="euler" if self.family.is_unet else "flow_match_euler",
            seed=index,
            embeds_guidance=self.family.embeds_guidance,
        )


def executor_of(family: Family, model: Any) -> Any:
    """Return our executor of a copy of a diffusers model's weights."""
    kind = UNetExecutor if family.is_unet else DiTExecutor
    device = next(model.parameters()).device
    return kind(copy.deepcopy(model), vae_scale_factor=VAE_SCALE_FACTOR, device=device)


def sampler_tables(family: Family) -> SamplerTables:
    """Return the schedules of the family's own noise scheduler."""
    flow = None
    if not family.is_unet:
        is_flux = family.embeds_guidance
        flow = FlowModel(token_px=VAE_SCALE_FACTOR * _DIT_PATCH, spaces_sigmas=is_flux)
    scheduler = family.noise_scheduler()
    return SamplerTables({**scheduler.config, "_class_name": family.scheduler[0]}, flow)


def conditionings(
    denoiser: Denoiser, sizes: Sequence[SizePx], guided: Sequence[bool]
) -> list[Conditioning]:
    """Return random prompts of requests, another for each; the same in every call."""
    return [
        _conditioning(denoiser, index, size, with_negative)
        for index, (size, with_negative) in enumerate(zip(sizes, guided, strict=True))
    ]


def _conditioning(denoiser: Denoiser, seed: int, size: SizePx, guided: bool) -> Conditioning:
    family = denoiser.family
    generator = torch.Generator().manual_seed(1000 + seed)

    def draw(*shape: int) -> Tensor:
        # values that bfloat16 has, so that the model in float32 has the very same inputs
        drawn = torch.randn(shape, generator=generator).bfloat16()
        return drawn.to(denoiser.device, denoiser.dtype)

    prompt = (family.prompt_tokens, family.prompt_width)
    embeds, pooled = draw(*prompt), draw(family.pooled_width)
    negative = (draw(*prompt), draw(family.pooled_width)) if guided else (None, None)
    time_ids = None
    if family.is_unet:
        width, height = size
        ids = [float(one) for one in (height, width, 0, 0, height, width)]
        time_ids = torch.tensor(ids).to(denoiser.device, denoiser.dtype)
    return Conditioning(embeds, negative[0], pooled, negative[1], time_ids)


def free_memory(device: torch.device) -> None:
    """Give back what nothing on a GPU refers to any more."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
