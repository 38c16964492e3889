"""The committed measurements of the family meet its bars; `recipes evaluate` measures again."""

import json
from typing import Any

import pytest

from ray_cluster.models.builtin import builtin_kinds, weights_folder
from tests.recipes.cards import stated_shares

LORAS = [name for name, kind in builtin_kinds().items() if kind == "LoRA"]
CONTROLNETS = [name for name, kind in builtin_kinds().items() if kind == "ControlNet"]


def measured(name: str) -> dict[str, Any]:
    text = (weights_folder() / name / "evaluation.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def share(count: dict[str, int]) -> float:
    return count["right"] / count["total"]


def shares(name: str) -> dict[str, dict[str, float]]:
    return stated_shares(weights_folder() / name)


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


def test_the_light_model_is_as_good_where_it_is_easy_and_worse_where_it_is_hard() -> None:
    heavy, light = shares("shapes-sd"), shares("shapes-sd-light")
    assert light["easy"]["all"] >= heavy["easy"]["all"] - 0.05
    assert light["hard"]["all"] <= heavy["hard"]["all"] - 0.15
    # worse is not useless: it knows what should be where
    assert light["hard"]["position"] >= 0.9
    assert measured("shapes-sd-light")["options"]["steps"] <= 4


def test_the_light_model_keeps_the_layout_of_other_sizes_and_of_combinations_it_never_saw() -> None:
    light = shares("shapes-sd-light")
    for kind in ("easy", "hard"):
        seen, held_out = (light[f"{kind}, {which} combinations"] for which in ("seen", "held-out"))
        assert held_out["all"] >= seen["all"] - 0.10
    for size in ("128 x 128", "oblong together"):
        assert light[size]["all"] >= light["easy"]["all"] - 0.10


def test_the_transformer_draws_the_shapes_it_is_asked_for() -> None:
    transformer = shares("shapes-sd3")
    assert transformer["easy"]["shape"] >= 0.95
    assert transformer["hard"]["shape"] >= 0.95
    for kind in ("easy", "hard"):
        seen, held_out = (
            transformer[f"{kind}, {which} combinations"] for which in ("seen", "held-out")
        )
        assert held_out["all"] >= seen["all"] - 0.10
    for size in ("128 x 128", "oblong together"):
        assert transformer[size]["all"] >= transformer["easy"]["all"] - 0.10
