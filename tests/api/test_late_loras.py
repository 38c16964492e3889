"""How many of an image's first steps are without its LoRAs: by the call and the settings alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_cluster.api.input.validation import validate
from ray_cluster.api.output.reply_writer import as_made, fidelity_of
from ray_cluster.api.resolve.loras import BasedLora
from ray_cluster.api.resolve.resolver import WantedImages
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.errors import InvalidRequest
from ray_cluster.policies.fidelity import LoraStart
from ray_cluster.requests import ImageRequest, LoraUse, ModelProfile
from tests.api.test_fidelity import MEASURED
from tests.fakes import model_profile

START = LoraStart(balanced=0.4, fast=0.5)
UNMEASURED = replace(model_profile("shapes"), lora_start=START)
BOTH = replace(MEASURED, lora_start=START)
PASTEL = BasedLora(LoraUse("pastel", 0.8, "id-pastel"), "shapes")


def request_of(profile: ModelProfile, *loras: BasedLora, **body: Any) -> ImageRequest:
    """The first image of a call, whose 10 steps are the model's default."""
    wanted = WantedImages(validate({"prompt": "a", **body}), None, is_stored=False, loras=loras)
    return wanted.of(profile, LimitsConfig())[0]


@pytest.mark.parametrize(
    ("profile", "body", "steps", "start"),
    [
        (BOTH, {}, 10, 0),
        (BOTH, {"lora_start_step": 3}, 10, 3),
        (BOTH, {"lora_start_step": 0}, 10, 0),
        (model_profile("shapes"), {"lora_start_step": 9}, 10, 9),
        (BOTH, {"fidelity": "balanced"}, 5, 2),
        (BOTH, {"fidelity": "balanced", "num_inference_steps": 20}, 6, 2),
        (BOTH, {"fidelity": "fast"}, 3, 1),
        (UNMEASURED, {"fidelity": "balanced"}, 10, 4),
        (UNMEASURED, {"fidelity": "fast", "num_inference_steps": 1}, 1, 0),
    ],
)
def test_steps_without_loras(
    profile: ModelProfile, body: dict[str, Any], steps: int, start: int
) -> None:
    request = request_of(profile, PASTEL, **body)
    assert (request.num_steps, request.add_ons.lora_start_step) == (steps, start)
    assert request.add_ons.loras == (PASTEL.use,)
    assert request.reuse is None
    said = request.recipe().get("lora_start_step")
    assert said == (str(start) if start else None)


def test_the_recipe_of_an_image_makes_it_again() -> None:
    made = request_of(BOTH, PASTEL, fidelity="balanced", seed=3)
    recipe = made.recipe()
    numbers = {key: int(recipe[key]) for key in ("num_inference_steps", "seed", "lora_start_step")}
    again = request_of(replace(BOTH, lora_start=None), PASTEL, **numbers)
    assert again.recipe() == recipe
    assert again.fidelity == "exact"


@pytest.mark.parametrize(
    ("profile", "loras", "body", "param"),
    [
        (BOTH, (), {"lora_start_step": 3}, "lora_start_step"),
        (BOTH, (PASTEL,), {"lora_start_step": 10}, "lora_start_step"),
        (BOTH, (PASTEL,), {"lora_start_step": 1, "fidelity": "fast"}, "lora_start_step"),
        (BOTH, (PASTEL,), {"allow": ["fidelity"]}, "allow"),
        (BOTH, (PASTEL,), {"allow": ["fidelity"], "fidelity": "balanced"}, "allow"),
        (MEASURED, (PASTEL,), {"fidelity": "balanced"}, "fidelity"),
        (
            replace(BOTH, lora_start=LoraStart(fast=0.5)),
            (PASTEL,),
            {"fidelity": "balanced"},
            "fidelity",
        ),
        # a table is needed still where there are no LoRAs
        (UNMEASURED, (), {"fidelity": "balanced"}, "fidelity"),
    ],
)
def test_what_is_refused(
    profile: ModelProfile, loras: tuple[BasedLora, ...], body: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of(profile, *loras, **body)
    assert caught.value.param == param


@pytest.mark.parametrize("value", [-1, 1.5, "1", True])
def test_what_is_no_number_of_steps_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequest, match="lora_start_step"):
        request_of(BOTH, PASTEL, lora_start_step=value)


def test_a_reply_says_the_mode_that_was_asked_for_and_no_budget() -> None:
    for profile in (BOTH, UNMEASURED):
        card = fidelity_of(request_of(profile, PASTEL, fidelity="balanced"))
        assert (card.asked, card.got) == ("balanced", "balanced")
        assert (card.max_ssim_loss, card.budget_spent) == (None, None)
    # nor is it known of the fewer steps that a call allows
    card = fidelity_of(as_made(request_of(MEASURED, PASTEL, min_inference_steps=5), 5, None))
    assert (card.asked, card.got) == ("exact", None)
    assert (card.max_ssim_loss, card.budget_spent) == (None, None)
    # without LoRAs the budget is what it was
    card = fidelity_of(request_of(BOTH, fidelity="balanced"))
    assert (card.got, card.max_ssim_loss) == ("balanced", 0.05)


def test_fewer_steps_keep_the_share_that_is_without_loras() -> None:
    request = request_of(UNMEASURED, PASTEL, fidelity="balanced", min_inference_steps=5)
    assert (request.fewest_steps, request.add_ons.lora_start_step) == (5, 4)
    made = as_made(request, 6, None)
    assert (made.num_steps, made.add_ons.lora_start_step) == (6, 2)
    # and what the mode promises needs all of its own
    assert fidelity_of(made).got is None
    assert as_made(request, 10, None) == request
