"""How a model is sampled where neither a call nor its pool says so: as its folder does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_cluster.models.builtin import builtin_sampling
from ray_cluster.requests import (
    FLOW_SAMPLER_NAMES,
    GuidanceKind,
    SamplerName,
    noise_samplers,
)

# the scheduler classes whose method a sampler is
_SAMPLERS: Mapping[str, SamplerName] = {
    "DDIMScheduler": "ddim",
    "DPMSolverMultistepScheduler": "dpmpp_2m",
    "EulerAncestralDiscreteScheduler": "euler_ancestral",
    "EulerDiscreteScheduler": "euler",
    "FlowMatchEulerDiscreteScheduler": "flow_match_euler",
    "LCMScheduler": "lcm",
    "PNDMScheduler": "pndm",
}
# those that are another method, and the sampler that comes nearest
_NEAREST: Mapping[str, SamplerName] = {
    "DDPMScheduler": "euler_ancestral",
    "DEISMultistepScheduler": "dpmpp_2m",
    "DPMSolverSinglestepScheduler": "dpmpp_2m",
    "HeunDiscreteScheduler": "euler",
    "KDPM2AncestralDiscreteScheduler": "euler_ancestral",
    "KDPM2DiscreteScheduler": "euler",
    "LMSDiscreteScheduler": "euler",
    "TCDScheduler": "lcm",
    "UniPCMultistepScheduler": "dpmpp_2m",
}
# settings that make a class the method of its sampler, and what they are where they are not there
_METHOD: Mapping[str, Mapping[str, tuple[Any, Any]]] = {
    "DPMSolverMultistepScheduler": {
        "algorithm_type": ("dpmsolver++", "dpmsolver++"),
        "solver_order": (2, 2),
        "solver_type": ("midpoint", "midpoint"),
    },
    "PNDMScheduler": {"skip_prk_steps": (True, False)},
}
# steps and guidance scale that the pipelines of diffusers take
_BY_PIPELINE = {
    "StableDiffusionPipeline": (50, 7.5),
    "StableDiffusionXLPipeline": (50, 5.0),
    "StableDiffusion3Pipeline": (28, 7.0),
    "FluxPipeline": (28, 3.5),
    "FluxKontextPipeline": (28, 3.5),
    "FluxFillPipeline": (50, 30.0),
}
_UNGUIDED = 1.0
# what the cards of distilled models say: of LCM with the scale as an input of the UNet, of FLUX.1
# schnell, of SDXL Turbo, of SDXL Lightning and SD Turbo
_LCM_GUIDANCE = 8.0
_FEW_STEPS = 4
_TURBO_STEPS = 1


@dataclass(frozen=True, slots=True)
class FolderSampling:
    """What a model's folder says of its sampling.

    Attributes:
        is_exact: whether the sampler is the method of the folder's own scheduler.
        origin: where the values come from, in words.
    """

    sampler: SamplerName
    num_steps: int
    guidance_scale: float
    is_exact: bool
    origin: str


def folder_sampling(
    model: str, pipeline: str, scheduler: Mapping[str, Any], guidance: GuidanceKind
) -> FolderSampling:
    """Return how a model is sampled where nobody says otherwise.

    Args:
        model: as in the pool's configuration; built-in models are sampled as their cards say.
        pipeline: class of the folder's pipeline.
        scheduler: the folder's ``scheduler_config.json``, of a class that is covered.
        guidance: how the model is guided.
    """
    builtin, name = builtin_sampling(model), str(scheduler["_class_name"])
    if builtin is not None:
        steps, scale = builtin.num_steps, builtin.guidance_scale
        return FolderSampling(_SAMPLERS[name], steps, scale, True, "its card")
    sampler, is_exact = _sampler(name, scheduler)
    few = _few_steps(name, scheduler, guidance)
    steps, scale = few or _BY_PIPELINE[pipeline]
    if few:
        origin = f"the folder's {name}, of a model made for few steps"
    else:
        origin = f"the folder's {name} and {pipeline}"
    return FolderSampling(sampler, steps, scale, is_exact, origin)


def nearest_sampler(scheduler: str) -> SamplerName:
    """Return the sampler that a scheduler class comes nearest to, whatever it is."""
    is_flow = scheduler.startswith("FlowMatch")
    usual: SamplerName = "flow_match_euler" if is_flow else "euler"
    return _SAMPLERS.get(scheduler) or _NEAREST.get(scheduler) or usual


def max_noise_steps(scheduler: Mapping[str, Any], sampler: SamplerName) -> int:
    """Return the most steps that a sampler can take with the noise schedule of a scheduler."""
    if sampler == "lcm":
        return int(scheduler.get("original_inference_steps", 50))
    # with as many steps as timesteps some schedulers repeat a timestep, or pass the last one
    limit = int(scheduler.get("num_train_timesteps", 1000)) - 1
    return limit - int(scheduler.get("steps_offset", 0))


def _sampler(name: str, scheduler: Mapping[str, Any]) -> tuple[SamplerName, bool]:
    """Return the sampler of a scheduler class, and whether it is the same method."""
    sampler, is_exact = _SAMPLERS.get(name), True
    if sampler is None:
        sampler, is_exact = _NEAREST[name], False
    for key, (needed, usual) in _METHOD.get(name, {}).items():
        is_exact &= scheduler.get(key, usual) == needed
    if sampler in FLOW_SAMPLER_NAMES:
        return sampler, is_exact
    offered = noise_samplers(scheduler.get("prediction_type", "epsilon"))
    return (sampler, is_exact) if sampler in offered else ("ddim", False)


def _few_steps(
    name: str, scheduler: Mapping[str, Any], guidance: GuidanceKind
) -> tuple[int, float] | None:
    """Return steps and guidance scale of a distilled model; None if nothing says that it is one."""
    if guidance == "none":
        return _FEW_STEPS, _UNGUIDED
    if name == "LCMScheduler":
        return _FEW_STEPS, _LCM_GUIDANCE if guidance == "embedded" else _UNGUIDED
    if name == "TCDScheduler":
        return _FEW_STEPS, _UNGUIDED
    # models of v-prediction space their steps like that too, to start from pure noise
    is_trailing = (
        scheduler.get("timestep_spacing") == "trailing"
        and scheduler.get("prediction_type", "epsilon") == "epsilon"
    )
    if is_trailing and name == "EulerAncestralDiscreteScheduler":
        return _TURBO_STEPS, _UNGUIDED
    if is_trailing and name == "EulerDiscreteScheduler":
        return _FEW_STEPS, _UNGUIDED
    return None
