"""What a configuration with a controller must have."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ray_cluster.config.loading import ClusterConfig

POOLS = [{"name": name, "model": "shapes-sd"} for name in ("a", "b", "c")]
JUDGE = {"name": "judge", "model": "shapes-discriminator"}


def cascade(name: str, light: str, heavy: str) -> dict[str, Any]:
    models = {"light": light, "heavy": heavy, "discriminator": "judge"}
    return {"name": name, **models, "threshold": 0.5}


def configured(
    *, enabled: bool = True, scaling: str = "endpoint", **sections: Any
) -> ClusterConfig:
    control = {"enabled": enabled, "scaling": scaling}
    return ClusterConfig.model_validate(
        {"control": control, "pools": POOLS, "discriminators": [JUDGE]} | sections
    )


def test_it_needs_the_dashboard_or_a_policy() -> None:
    told = r"set ray\.include_dashboard: true, control\.scaling: policy, or"
    with pytest.raises(ValidationError, match=told):
        configured(ray={"include_dashboard": False})
    configured(scaling="policy", ray={"include_dashboard": False})
    configured(enabled=False, ray={"include_dashboard": False})


def test_a_policy_scales_only_where_somebody_plans() -> None:
    assert configured(scaling="policy").control.scales_by_policy
    assert not configured().control.scales_by_policy
    assert not configured(enabled=False, scaling="policy").control.scales_by_policy


def test_a_model_is_planned_for_one_cascade() -> None:
    both = [cascade("x", "a", "b"), cascade("y", "c", "b")]
    with pytest.raises(ValidationError, match="x and y share the model b"):
        configured(cascades=both)
    configured(enabled=False, cascades=both)
    configured(cascades=both[:1])


def test_its_name_is_reserved() -> None:
    with pytest.raises(ValidationError, match="taken by an application of the service"):
        configured(pools=[{"name": "controller", "model": "shapes-sd"}])
