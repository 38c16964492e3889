"""The sampler schedules of one model.

A :class:`SamplerTable` holds for each step what the model is called with and the row of
coefficients that :func:`ray_cluster.kernels.sampler_update.reference.sampler_update` applies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ray_cluster.engine.schedules.flow_schedules import FlowModel, flow_match_euler
from ray_cluster.engine.schedules.pndm_schedule import pndm
from ray_cluster.engine.schedules.sampler_schedules import (
    SamplerTable,
    ddim,
    dpmpp_2m,
    euler,
    euler_ancestral,
    lcm,
)
from ray_cluster.errors import InvalidRequest, ModelUnsupported
from ray_cluster.models.sampling import max_noise_steps
from ray_cluster.requests import FLOW_SAMPLER_NAMES, ImageRequest, SamplerName, noise_samplers

_BUILDERS: Mapping[SamplerName, Callable[[Mapping[str, Any], int, int], SamplerTable]] = {
    "ddim": ddim,
    "euler": euler,
    "euler_ancestral": euler_ancestral,
    "dpmpp_2m": dpmpp_2m,
    "lcm": lcm,
    "pndm": pndm,
}
# some 0.8 kB for each step; clients choose among samplers, steps and, with some models, sizes
_KEPT_TABLES = 256
# those whose config means the same to the schedulers that the samplers are built from; flow
# matching and EDM (Playground v2.5) share the keys' names, but not the noise that they describe
_COVERED_SCHEDULERS = (
    "DDIMScheduler",
    "DDPMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LCMScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "TCDScheduler",
    "UniPCMultistepScheduler",
)
# of several allowed values the first stands for a key that is not there
_COVERED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "_class_name": _COVERED_SCHEDULERS,
    "prediction_type": ("epsilon", "v_prediction", "sample"),
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "timestep_spacing": ("leading", "trailing", "linspace"),
    "thresholding": (False,),
    "use_flow_sigmas": (False,),
    "variance_type": ("fixed_small", "fixed_large", "fixed_small_log", None),
}
_COVERED_FLOW_VALUES: Mapping[str, tuple[Any, ...]] = {
    "_class_name": ("FlowMatchEulerDiscreteScheduler",),
    "stochastic_sampling": (False,),
    "invert_sigmas": (False,),
}


class SamplerTables:
    """All schedules of one model, built on demand from its ``scheduler_config``.

    Args:
        scheduler_config: the config of the model's own diffusers scheduler.
        flow: of a model that is trained on flows; None for those trained on noise schedules.

    Raises:
        ModelUnsupported: the schedule is not one of the alpha-cumprod family, or thresholds; or it
            is none for flows.
    """

    def __init__(self, scheduler_config: Mapping[str, Any], flow: FlowModel | None = None) -> None:
        self._config = dict(scheduler_config)
        self._flow = flow
        # a lock of its own keeps it whole while encode and step threads ask
        self._built = functools.lru_cache(_KEPT_TABLES)(self._build)
        covered = _COVERED_VALUES if flow is None else _COVERED_FLOW_VALUES
        for key, allowed in covered.items():
            given = self._config.get(key, allowed[0])
            if given not in allowed:
                raise ModelUnsupported(
                    f"scheduler {key}={given!r} is not covered; allowed: {allowed}. "
                    "Use a model whose scheduler_config.json says so."
                )
        if self._config.get("rescale_betas_zero_snr") and self._predicts("epsilon"):
            raise ModelUnsupported(
                "scheduler rescale_betas_zero_snr=True is not covered with "
                "prediction_type='epsilon': the first step would divide by zero. Use a model that "
                "predicts v, or set rescale_betas_zero_snr to false in its scheduler_config.json."
            )

    @property
    def names(self) -> tuple[SamplerName, ...]:
        """The samplers that are defined for what this model predicts."""
        if self._flow is not None:
            return FLOW_SAMPLER_NAMES
        return noise_samplers(self._config.get("prediction_type", "epsilon"))

    def _predicts(self, kind: str) -> bool:
        return bool(self._config.get("prediction_type", "epsilon") == kind)

    def max_steps(self, sampler: SamplerName, ceiling: int) -> int:
        """Return the most steps the sampler can take with this model, at most ``ceiling``."""
        if self._flow is not None:
            return min(int(self._config.get("num_train_timesteps", 1000)), ceiling)
        return min(max_noise_steps(self._config, sampler), ceiling)

    def of(self, request: ImageRequest) -> SamplerTable:
        """Return the schedule of a request; errors are those of :meth:`table`."""
        return self.table(
            request.sampler, request.schedule_steps, request.size_px, request.first_step
        )

    def table(
        self,
        sampler: SamplerName,
        num_steps: int,
        size_px: tuple[int, int] | None = None,
        first_step: int = 0,
    ) -> SamplerTable:
        """Return the schedule of ``sampler`` with ``num_steps`` steps; the last ones are kept.

        Args:
            size_px: width and height of the image; schedules of some flow models depend on it.
            first_step: index of the step that it begins with; later ones stay as they are.

        Raises:
            InvalidRequest: the model has no such sampler, or it cannot take so many steps.
        """
        return self._built(sampler, num_steps, self._num_tokens(size_px), first_step)

    def _num_tokens(self, size_px: tuple[int, int] | None) -> int | None:
        if self._flow is None or not self._config.get("use_dynamic_shifting", False):
            return None
        assert size_px is not None, "this schedule depends on the size"
        return self._flow.num_tokens(size_px)

    def _build(
        self, sampler: SamplerName, num_steps: int, num_tokens: int | None, first_step: int
    ) -> SamplerTable:
        if sampler not in self.names:
            raise InvalidRequest(
                f"sampler {sampler!r} is not defined for this model; allowed: {list(self.names)}",
                param="sampler",
            )
        allowed = self.max_steps(sampler, num_steps)
        if not 1 <= num_steps <= allowed:
            raise InvalidRequest(
                f"sampler {sampler!r} cannot take {num_steps} steps; allowed: 1 to {allowed}",
                param="num_inference_steps",
            )
        try:
            table = self._scheduled(sampler, num_steps, num_tokens, first_step)
        except IndexError as error:
            # a large steps_offset leads beyond the last timestep that the model was trained for
            raise InvalidRequest(
                f"sampler {sampler!r} cannot take {num_steps} steps with this model's "
                f"scheduler_config.json ({error}); choose fewer",
                param="num_inference_steps",
            ) from error
        num_left = num_steps - first_step
        if table.num_calls != num_left + (sampler == "pndm" and num_left > 1):
            raise InvalidRequest(
                f"sampler {sampler!r} would take {table.num_calls} steps instead of {num_left} "
                "with this model's scheduler_config.json; choose another sampler or number",
                param="num_inference_steps",
            )
        return table

    def _scheduled(
        self, sampler: SamplerName, num_steps: int, num_tokens: int | None, first_step: int
    ) -> SamplerTable:
        if self._flow is not None:
            return flow_match_euler(self._config, num_steps, self._flow, num_tokens, first_step)
        return _BUILDERS[sampler](self._config, num_steps, first_step)
