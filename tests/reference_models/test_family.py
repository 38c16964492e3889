"""The committed measurements of the family meet its bars; `models evaluate` measures them again."""

import json
from typing import Any

import pytest

from ray_cluster.reference_models.registry import builtin_kinds, weights_folder

LORAS = [name for name, kind in builtin_kinds().items() if kind == "LoRA"]
CONTROLNETS = [name for name, kind in builtin_kinds().items() if kind == "ControlNet"]


def measured(name: str) -> dict[str, Any]:
    text = (weights_folder() / name / "evaluation.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def share(count: dict[str, int]) -> float:
    return count["right"] / count["total"]


@pytest.mark.parametrize("name", CONTROLNETS)
def test_objects_stand_where_the_hint_says(name: str) -> None:
    figures = measured(name)
    agreement, without = (
        figures[which]["edge agreement (F1 within 1 px)"] for which in ("with_part", "without")
    )
    assert agreement["total"] >= 1000
    assert agreement["value"] >= 0.8
    assert agreement["value"] >= without["value"] + 0.3


@pytest.mark.parametrize("name", LORAS)
def test_a_style_shows_and_leaves_the_content(name: str) -> None:
    with_style, without = (measured(name)[which] for which in ("with_part", "without"))
    assert with_style["style"]["total"] >= 1000
    assert share(with_style["style"]) >= 0.95
    assert share(without["style"]) >= 0.95
    assert share(with_style["all"]) >= share(without["all"]) - 0.10
