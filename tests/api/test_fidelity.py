"""``fidelity``, ``allow`` and ``min_inference_steps``: only what a call allows is given up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from httpx import AsyncClient

from ray_cluster.api.input.validation import validate
from ray_cluster.api.output.reply_writer import fidelity_of
from ray_cluster.api.resolve.generation import resolve
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.config.sections.pools import FidelityConfig
from ray_cluster.errors import InvalidRequest
from ray_cluster.requests import ImageRequest, ModelProfile
from tests.fakes import FakeDispatcherClient, completed, model_profile

CONFIG = FidelityConfig.model_validate(
    {
        "sampler": "ddim",
        "max_guidance_scale": 3.0,
        "steps": [
            {"asked": 10, "balanced": 5, "fast": 3, "balanced_ssim": 0.96, "fast_ssim": 0.91},
            {"asked": 20, "balanced": 6, "fast": 4},
        ],
    }
)
MEASURED = replace(
    model_profile("shapes"),
    max_steps_by_sampler={"ddim": 100, "euler": 100},
    fewer_steps=CONFIG.table(),
)


def request_of(profile: ModelProfile = MEASURED, **body: Any) -> ImageRequest:
    """The first image of a call, whose 10 steps are the model's default."""
    fields = validate({"prompt": "a red circle", **body})
    return resolve(fields, profile, LimitsConfig())[0]


@pytest.mark.parametrize(
    ("body", "steps", "fewest"),
    [
        ({}, 10, None),
        ({"fidelity": "exact"}, 10, None),
        ({"allow": []}, 10, None),
        ({"fidelity": "balanced"}, 5, None),
        ({"fidelity": "fast"}, 3, None),
        ({"fidelity": "balanced", "num_inference_steps": 11}, 6, None),
        ({"fidelity": "balanced", "num_inference_steps": 2}, 2, None),
        ({"allow": ["fidelity"]}, 10, 3),
        ({"fidelity": "balanced", "allow": ["fidelity"]}, 5, 3),
        ({"min_inference_steps": 7}, 10, 7),
        ({"min_inference_steps": 7, "allow": ["steps"]}, 10, 7),
        ({"min_inference_steps": 7, "allow": ["steps", "fidelity"]}, 10, 3),
        ({"min_inference_steps": 2, "allow": ["fidelity", "steps"]}, 10, 2),
        ({"min_inference_steps": 4, "fidelity": "balanced"}, 5, 4),
    ],
)
def test_steps_and_the_fewest_of_them(body: dict[str, Any], steps: int, fewest: int | None) -> None:
    request = request_of(**body)
    assert (request.num_steps, request.fewest_steps) == (steps, fewest)


def test_an_exact_request_is_what_it_was_before_there_were_modes() -> None:
    plain = request_of(model_profile("shapes"), seed=1)
    for body in ({}, {"fidelity": "exact"}, {"allow": []}):
        request = request_of(seed=1, **body)
        assert request == replace(plain, request_id=request.request_id)


UNMEASURED = model_profile("shapes")


@pytest.mark.parametrize(
    ("body", "profile", "param", "said"),
    [
        ({"fidelity": "fast"}, UNMEASURED, "fidelity", "has not been measured. Leave it out"),
        ({"allow": ["fidelity"]}, UNMEASURED, "allow", "has not been measured"),
        ({"fidelity": "fast", "sampler": "euler"}, MEASURED, "fidelity", "sampler 'ddim' only"),
        ({"fidelity": "fast", "guidance_scale": 4}, MEASURED, "fidelity", "guidance_scale 3; giv"),
        ({"fidelity": "fast", "num_inference_steps": 21}, MEASURED, "fidelity", "up to 20 steps"),
        ({"fidelity": "fast", "allow": ["fidelity"]}, MEASURED, "allow", "changes nothing"),
        ({"fidelity": "best"}, MEASURED, "fidelity", "'exact', 'balanced' or 'fast'"),
        ({"allow": ["quality"]}, MEASURED, "allow", "'fidelity' or 'steps'; given 'quality'"),
        ({"allow": "steps"}, MEASURED, "allow", "a list; given 'steps'"),
        ({"allow": ["steps"]}, MEASURED, "allow", "but not how few"),
        (
            {"allow": ["fidelity"], "min_inference_steps": 5},
            MEASURED,
            "min_inference_steps",
            "does not hold 'steps'",
        ),
        ({"allow": [], "min_inference_steps": 5}, MEASURED, "min_inference_steps", "does not hold"),
        (
            {"fidelity": "balanced", "min_inference_steps": 6},
            MEASURED,
            "min_inference_steps",
            "5 (balanced of 10); given 6",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(
    body: dict[str, Any], profile: ModelProfile, param: str, said: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_of(profile, **body)
    assert caught.value.param == param
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("body", "made_with", "got", "budget", "spent"),
    [
        ({}, 10, "exact", 0.0, 0.0),
        ({"fidelity": "balanced"}, 5, "balanced", 0.05, 0.8),
        ({"fidelity": "fast"}, 3, "fast", 0.15, 0.6),
        ({"allow": ["fidelity"]}, 10, "exact", 0.15, 0.0),
        ({"allow": ["fidelity"]}, 7, "balanced", 0.15, 0.267),
        ({"allow": ["fidelity"]}, 4, "fast", 0.15, 0.6),
        ({"min_inference_steps": 2}, 2, None, None, None),
    ],
)
def test_a_reply_says_what_an_image_got(
    body: dict[str, Any],
    made_with: int,
    got: str | None,
    budget: float | None,
    spent: float | None,
) -> None:
    found = fidelity_of(replace(request_of(**body), num_steps=made_with))
    assert found is not None
    assert found.model_dump() == {
        "asked": body.get("fidelity", "exact"),
        "got": got,
        "steps_asked": 10,
        "steps_computed": made_with,
        "steps_reused": 0,
        "max_ssim_loss": budget,
        "budget_spent": spent,
    }


async def test_a_call_goes_through_with_its_terms(
    http: AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.profiles = {"shapes": MEASURED}
    fake.outcome = lambda request: replace(completed(request), num_steps=4)
    body = {"prompt": "a red circle", "fidelity": "balanced", "allow": ["fidelity"]}
    reply = (await http.post("/v1/images/generations", json=body)).json()
    [request] = fake.offered[0]
    assert (request.num_steps, request.fewest_steps) == (5, 3)
    [image] = reply["data"]
    assert image["num_inference_steps"] == 4
    assert image["fidelity"]["asked"] == "balanced"
    assert (image["fidelity"]["got"], image["fidelity"]["budget_spent"]) == ("fast", 0.6)
    card = (await http.get("/v1/models/shapes")).json()
    assert card["fewer_steps"]["steps"][1] == {
        "asked": 20,
        "balanced": 6,
        "fast": 4,
        "balanced_reuse": None,
        "fast_reuse": None,
    }
