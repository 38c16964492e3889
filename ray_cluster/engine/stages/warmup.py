"""The first steps of a replica: they warm the model up and measure what a step costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from ray_cluster.engine.adapters.random_lora import random_lora
from ray_cluster.engine.controlnets.local import LocalControlNets
from ray_cluster.engine.device.timing import (
    OperationTimer,
    SizePx,
    StageCall,
    TimedControlNet,
    call_here,
)
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.errors import ModelUnsupported
from ray_cluster.policies.costs.cost_learning import remote_controlnet_share
from ray_cluster.policies.costs.cost_model import (
    ExtraWork,
    StepWork,
    TimedStep,
    control_share,
    fitted_cost,
    lora_share,
)
from ray_cluster.policies.types import StepCost
from ray_cluster.process.machine import cpu_model
from ray_cluster.requests import ModelProfile

logger = logging.getLogger(__name__)

_REPEATS = 6
# a share needs less precision
_SHARE_REPEATS = 3
_GUIDED = 3.0
# enough for a table of its schedule
_NUM_STEPS = 4


def prepare_threads(num_threads: int) -> None:
    """Set this process's torch threads and quieten its model libraries; call before loading."""
    torch.set_num_threads(num_threads)
    diffusers_logging.set_verbosity_error()
    transformers_logging.set_verbosity_error()
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


def device_name(device: torch.device) -> str:
    """Return what a device is, in words: the name of the accelerator, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def warm_up(
    model: LoadedModel,
    *,
    max_batch: int,
    clock: Callable[[], float],
    call: StageCall,
    controls: LocalControlNets | None = None,
) -> StepCost:
    """Run what requests will run, in the threads that will run it; return what a step costs.

    Beside what is measured, a step with guidance of which one image draws noise; on a GPU its
    kernels, plans and workspaces are there when the first request comes.

    Args:
        call: does the work of a stage in that stage's thread.
        controls: ControlNets of this process.
    """
    cost = measure_step_cost(model, max_batch=max_batch, clock=clock, call=call, controls=controls)
    profile, tables = model.profile, model.tables
    size = (profile.default_width_px, profile.default_height_px)
    noisy = [name for name in tables.names if any(tables.table(name, _NUM_STEPS, size).takes_noise)]
    OperationTimer(model, clock, 1, call).steps_s(
        [size] * min(2, model.max_batch_by_size[size]),
        guidance_scale=_GUIDED if profile.guidance == "rows" else 1.0,
        samplers=[*noisy[:1], profile.default_sampler],
    )
    return cost


def measure_step_cost(
    model: LoadedModel,
    *,
    max_batch: int,
    clock: Callable[[], float],
    call: StageCall = call_here,
    controls: LocalControlNets | None = None,
) -> StepCost:
    """Run a few real steps and fit the cost of a step through the fastest of each kind.

    Alone and in a full batch of the default size, both with LoRAs and with each ControlNet of this
    process too, and of two sizes together, all without guidance; the first step of each batch is
    not counted, nor the first image that is decoded or encoded. What else the machine does only
    ever makes them slower; the steps of requests correct the figure later, but for the share of
    LoRAs.

    Args:
        call: does the work of a stage; in the calling thread unless given.
        controls: ControlNets of this process; without any, what one elsewhere costs is estimated.
    """
    profile = model.profile
    size = (profile.default_width_px, profile.default_height_px)
    largest = max(2, min(max_batch, model.max_batch_by_size[size]))
    timer = OperationTimer(model, clock, _REPEATS, call)

    def fastest_s(sizes: Sequence[SizePx]) -> float:
        return min(timer.steps_s(sizes))

    other = other_size(profile)
    cost = fitted_cost(
        size,
        alone_s=fastest_s([size]),
        together_s=fastest_s([size] * largest),
        num_together=largest,
        beside=None if other == size else (other, fastest_s([size, other])),
    )
    megapixels = size[0] * size[1] / 1e6
    batches, shares = {1, largest}, OperationTimer(model, clock, _SHARE_REPEATS, call)
    if controls is not None and controls.names:
        of_controls = _control_share(model, cost, batches, shares, controls)
    else:
        of_controls = remote_controlnet_share(cost, size, largest)
    return replace(
        cost,
        lora_share=_lora_share(model, cost, batches, shares),
        control_share=of_controls,
        decode_per_megapixel_s=min(timer.decodes_s(size, 1)) / megapixels,
        encode_per_megapixel_s=min(timer.image_encodes_s(size, 1)) / megapixels,
    )


def _control_share(
    model: LoadedModel,
    cost: StepCost,
    batches: Iterable[int],
    timer: OperationTimer,
    controls: LocalControlNets,
) -> float:
    """Return the share of a row's work that a ControlNet of this process costs in the mean.

    Args:
        cost: of steps without any.
        batches: numbers of images of the default size that are stepped together.
    """
    size = (model.profile.default_width_px, model.profile.default_height_px)
    steps = []
    for name in controls.names:
        for count in batches:
            megapixels = count * size[0] * size[1] / 1e6
            work = StepWork(megapixels, 0.0, extra=ExtraWork(control_megapixels=megapixels))
            seconds = min(timer.steps_s([size] * count, control=TimedControlNet(name, controls)))
            steps.append(TimedStep(work, seconds))
    return control_share(cost, steps)


def _lora_share(
    model: LoadedModel, cost: StepCost, batches: Iterable[int], timer: OperationTimer
) -> float:
    """Return the share of a row's pixels that a LoRA costs; 0 where the model can have none.

    Args:
        cost: of steps without any.
        batches: numbers of images of the default size that are stepped together.
    """
    try:
        # two are enough: no neighbours in a batch have the same
        loras = [one for seed in range(2) if (one := random_lora(model.executor, seed))]
    except ModelUnsupported as error:
        logger.warning("what LoRAs cost is not measured: %s", error)
        return 0.0
    if not loras:
        return 0.0
    profile = model.profile
    size = (profile.default_width_px, profile.default_height_px)
    steps = []
    for count in batches:
        megapixels = count * size[0] * size[1] / 1e6
        work = StepWork(megapixels, 0.0, extra=ExtraWork(lora_megapixels=megapixels))
        steps.append(TimedStep(work, min(timer.steps_s([size] * count, deltas=loras))))
    return lora_share(cost, steps)


def other_size(profile: ModelProfile) -> SizePx:
    """Return a size that is not the default one, about half of it if there is such a size."""
    width, height = profile.default_width_px, profile.default_height_px
    half = max(profile.min_px, height // 2 // profile.size_multiple_px * profile.size_multiple_px)
    return (width, half)
