"""Runs requests through diffusers one by one, and through the engine in any company."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
)
from torch import Tensor

from ray_cluster.config import PoolConfig
from ray_cluster.engine.loading import LoadedModel
from ray_cluster.engine.state import RequestState
from ray_cluster.engine.step_engine import FailedRow, StepEngine
from ray_cluster.policies.step_batching import choose_batch
from ray_cluster.policies.types import BatchDecision, RowView
from ray_cluster.requests import ImageRequest

# DESIGN.md, Exactness
CALL_TOLERANCE = 2e-5
RUN_TOLERANCE = 1e-4
PIXEL_TOLERANCE = 1
CONTROL_FACTOR = 100

DIFFUSERS_BY_SAMPLER: dict[str, Any] = {
    "ddim": DDIMScheduler,
    "euler": EulerDiscreteScheduler,
    "euler_ancestral": EulerAncestralDiscreteScheduler,
    "dpmpp_2m": DPMSolverMultistepScheduler,
    "lcm": LCMScheduler,
}
TAKES_NOISE = ("euler_ancestral", "lcm")


def request(request_id: str = "a", **changes: Any) -> ImageRequest:
    """A request of 6 steps for 64 x 64 pixels with guidance, unless told otherwise."""
    values: dict[str, Any] = {
        "model": "m",
        "prompt": "a small red circle",
        "width_px": 64,
        "height_px": 64,
        "num_steps": 6,
        "guidance_scale": 3.0,
        "sampler": "ddim",
        "seed": 1,
    }
    return ImageRequest(request_id=request_id, **(values | changes))


def pool(folder: Path | str, **changes: Any) -> PoolConfig:
    return PoolConfig(name="m", model=str(folder), **({"max_px": 128} | changes))


def difference(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite if either holds NaN."""
    gap = float((one.float() - other.float()).abs().max())
    return float("inf") if math.isnan(gap) else gap


@dataclass(frozen=True, slots=True)
class Outcome:
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
        self._outcomes: dict[ImageRequest, Outcome] = {}

    def outcome(self, one: ImageRequest) -> Outcome:
        """Run the pipeline for the request alone; kept."""
        key = replace(one, request_id="", priority=0, slo_s=None)
        if key not in self._outcomes:
            latents = self._latents([one])
            with torch.inference_mode():
                pixels = np.asarray(self._decode(latents)[0])
            self._outcomes[key] = Outcome(latents[0], pixels)
        return self._outcomes[key]

    def own_spread(self, one: ImageRequest) -> float:
        """Return by how much diffusers at batch 8 differs from diffusers at batch 1."""
        peers = [
            replace(one, seed=one.seed + index, prompt="blue " * index) for index in range(1, 8)
        ]
        return difference(self._latents([one, *peers])[0], self.outcome(one).latents)

    @property
    def starts_at_zero_snr(self) -> bool:
        """Whether the Euler samplers start from sigma 4096, where float32 is 2e-4 coarse."""
        config = self.scheduler_config
        return bool(config.rescale_betas_zero_snr) and config.prediction_type == "v_prediction"

    def run_tolerance(self, one: ImageRequest) -> float:
        """Return what DESIGN.md allows a whole run to differ."""
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
            for text in (one.prompt, one.negative_prompt)
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
        pipeline.scheduler = DIFFUSERS_BY_SAMPLER[first.sampler].from_config(self.scheduler_config)
        if watch is not None:
            _watch_estimates(pipeline.scheduler, watch)
        negatives = [one.negative_prompt for one in requests]
        return pipeline(
            prompt=[one.prompt for one in requests],
            negative_prompt=negatives if any(negatives) else None,
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


def start(model: LoadedModel, one: ImageRequest, **changes: Any) -> RequestState:
    """Encode a request alone and return its state before the first step."""
    return start_all(model, [one], **changes)[0]


def start_all(
    model: LoadedModel, requests: Sequence[ImageRequest], **changes: Any
) -> list[RequestState]:
    with torch.inference_mode():
        return [
            RequestState.start(
                one,
                conditioning,
                latent_shape=model.executor.latent_shape(one.width_px, one.height_px),
                table=model.tables.table(one.sampler, one.num_steps),
                arrival_s=0.0,
                deadline_s=1e9,
                **changes,
            )
            for one, conditioning in zip(requests, model.encoder.encode(requests), strict=True)
        ]


def all_of_a_size(rows: Sequence[RowView], now_s: float) -> BatchDecision:
    """The production policy with room for every row."""
    sizes = {row.request.size_px for row in rows}
    return choose_batch(rows, max_batch_by_size=dict.fromkeys(sizes, 64), now_s=now_s)


def engine_of(model: LoadedModel, policy: Any = all_of_a_size, executor: Any = None) -> StepEngine:
    return StepEngine(executor or model.executor, policy, model.tables, time.monotonic)


@dataclass(slots=True)
class Run:
    """What came out of an engine, by request id."""

    finished: dict[str, RequestState] = field(default_factory=dict)
    failed: dict[str, FailedRow] = field(default_factory=dict)
    batch_sizes: list[int] = field(default_factory=list)

    def latents(self, request_id: str) -> Tensor:
        return self.finished[request_id].latents


def drive(
    engine: StepEngine,
    joining: Mapping[int, Sequence[RequestState]],
    leaving: Mapping[int, Sequence[str]] | None = None,
    until: Callable[[StepEngine], bool] = lambda engine: len(engine) == 0,
) -> Run:
    """Step until all is done; rows join and are aborted before the step of that number."""
    run, index = Run(), 0
    with torch.inference_mode():
        while index <= max(joining) or not until(engine):
            for state in joining.get(index, ()):
                engine.add(state)
            for request_id in (leaving or {}).get(index, ()):
                engine.abort(request_id)
            report = engine.step()
            run.batch_sizes.append(len(report.stepped))
            run.finished |= {state.request.request_id: state for state in report.finished}
            run.failed |= {row.state.request.request_id: row for row in report.failed}
            index += 1
    return run


def run_together(model: LoadedModel, requests: Sequence[ImageRequest]) -> dict[str, Tensor]:
    """Return the final latents of requests that all start at once."""
    run = drive(engine_of(model), {0: start_all(model, requests)})
    assert not run.failed
    return {request_id: state.latents for request_id, state in run.finished.items()}


def run_alone(model: LoadedModel, one: ImageRequest) -> Tensor:
    return run_together(model, [one])[one.request_id]


def pixel_difference(one: Any, other: Any) -> int:
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other.astype(int)).max())
