"""The sampler schedules of one model.

A :class:`SamplerTable` holds for each step what the model is called with and the row of
coefficients that :func:`ray_cluster.kernels.sampler_update.reference.sampler_update` applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_cluster.engine.sampler_schedules import BUILDERS, SamplerTable
from ray_cluster.errors import InvalidRequest, ModelUnsupported
from ray_cluster.requests import SAMPLER_NAMES, SamplerName

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


class SamplerTables:
    """All schedules of one model, built on demand from its ``scheduler_config``.

    Args:
        scheduler_config: the config of the model's own diffusers scheduler.

    Raises:
        ModelUnsupported: the schedule is not one of the alpha-cumprod family, or thresholds.
    """

    def __init__(self, scheduler_config: Mapping[str, Any]) -> None:
        self._config = dict(scheduler_config)
        self._tables: dict[tuple[SamplerName, int], SamplerTable] = {}
        for key, allowed in _COVERED_VALUES.items():
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
        if self._predicts("sample"):
            return tuple(name for name in SAMPLER_NAMES if name != "euler_ancestral")
        return SAMPLER_NAMES

    def _predicts(self, kind: str) -> bool:
        return bool(self._config.get("prediction_type", "epsilon") == kind)

    def max_steps(self, sampler: SamplerName, ceiling: int) -> int:
        """Return the most steps the sampler can take with this model, at most ``ceiling``."""
        # with as many steps as timesteps some schedulers repeat a timestep, or pass the last one
        limit = int(self._config.get("num_train_timesteps", 1000)) - 1
        limit -= int(self._config.get("steps_offset", 0))
        if sampler == "lcm":
            limit = int(self._config.get("original_inference_steps", 50))
        return min(limit, ceiling)

    def table(self, sampler: SamplerName, num_steps: int) -> SamplerTable:
        """Return the schedule of ``sampler`` with ``num_steps`` steps; built once and kept.

        Raises:
            InvalidRequest: the sampler cannot take so many steps.
        """
        key = (sampler, num_steps)
        if key not in self._tables:
            allowed = self.max_steps(sampler, num_steps)
            if not 1 <= num_steps <= allowed:
                raise InvalidRequest(
                    f"sampler {sampler!r} cannot take {num_steps} steps; allowed: 1 to {allowed}",
                    param="num_inference_steps",
                )
            self._tables[key] = BUILDERS[sampler](self._config, num_steps)
        return self._tables[key]
