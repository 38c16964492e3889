"""Models that are guided by an input of their own, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_cluster.api.input.validation import validate
from ray_cluster.api.resolve.generation import resolve
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.errors import InvalidRequest
from ray_cluster.requests import GuidanceKind
from tests.fakes import model_profile


@pytest.mark.parametrize(
    ("kind", "param", "value", "is_refused"),
    [
        ("embedded", "negative_prompt", "blur", True),
        ("embedded", "guidance_scale", 3.5, False),
        ("none", "negative_prompt", "blur", True),
        ("none", "guidance_scale", 3.5, True),
        ("none", "guidance_scale", 0, False),
    ],
)
def test_what_a_model_is_not_guided_by_is_refused(
    config: ClusterConfig, kind: GuidanceKind, param: str, value: object, *, is_refused: bool
) -> None:
    profile = replace(model_profile(), guidance=kind, default_guidance_scale=1.0)
    fields = validate({"prompt": "red", param: value})
    if is_refused:
        with pytest.raises(InvalidRequest, match=f"{param}' changes nothing") as error:
            resolve(fields, profile, config.limits)
        assert error.value.param == param
        return
    (one,) = resolve(fields, profile, config.limits)
    assert not one.uses_guidance
    assert one.embeds_guidance is (kind == "embedded")
