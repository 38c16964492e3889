"""How few steps the models keep which fidelity with: measured, or as the configuration says."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from ray_cluster.config.sections.pools import FidelityConfig, PoolConfig
from ray_cluster.models.builtin import BUILTIN_MODELS
from ray_cluster.policies.fidelity import StepTable


def step_table(pool: PoolConfig) -> StepTable | None:
    """Return the pool's own table, or the one that was measured of a built-in model, if any."""
    if pool.fidelity is not None:
        return pool.fidelity.table()
    file = builtin_table_file(pool.model)
    if pool.model not in BUILTIN_MODELS or not file.is_file():
        return None
    values = json.loads(file.read_text(encoding="utf-8"))["fidelity"]
    return FidelityConfig.model_validate(values).table()


def builtin_table_file(model: str) -> Path:
    """Return where the table of a built-in model would be."""
    folder = Path(str(resources.files("ray_cluster.models") / "fewer_steps"))
    return folder / f"{model}.json"
