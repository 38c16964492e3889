"""The sampler schedules of one model.

A :class:`SamplerTable` holds for each step what the model is called with and the row of
coefficients that :func:`ray_cluster.kernels.sampler_update.reference.sampler_update` applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_cluster.engine.sampler_schedules import BUILDERS, SamplerTable
from ray_cluster.errors import InvalidRequest, ModelUnsupported
from ray_cluster.requests import SamplerName


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
        for key, allowed in (
            ("prediction_type", ("epsilon", "v_prediction", "sample")),
            ("thresholding", (False,)),
            ("use_flow_sigmas", (False,)),
            ("variance_type", ("fixed_small", "fixed_large", "fixed_small_log", None)),
        ):
            given = self._config.get(key, allowed[0])
            if given not in allowed:
                raise ModelUnsupported(
                    f"scheduler {key}={given!r} is not covered; allowed: {allowed}. "
                    "Use a model whose scheduler_config.json says so."
                )

    def max_steps(self, sampler: SamplerName, ceiling: int) -> int:
        """Return the most steps the sampler can take with this model, at most ``ceiling``."""
        limit = int(self._config.get("num_train_timesteps", 1000))
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
