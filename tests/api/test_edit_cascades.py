"""Edits that name a cascade: which of its models makes them, and on which part of the image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.requests import ImageRequest, LightStage, ModelProfile
from tests.api.checks import check_error, error_of
from tests.api.edit_calls import IMAGE, MASK, WHOLE_MASK, mask_of, picture, post_form
from tests.api.test_cascades import answered, profiles
from tests.fakes import FakeDispatcherClient


@pytest.fixture
def config() -> ClusterConfig:
    """A cascade beside its two models."""
    cascade = {"name": "auto", "light": "light", "heavy": "heavy", "discriminator": "judge"}
    return ClusterConfig.model_validate(
        {
            "pools": [{"name": name, "model": "shapes-sd"} for name in ("heavy", "light")],
            "discriminators": [{"name": "judge", "model": "shapes-discriminator"}],
            "cascades": [{**cascade, "threshold": 0.5}],
        }
    )


@pytest.fixture
def fake() -> FakeDispatcherClient:
    return FakeDispatcherClient(*profiles())


async def asked(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    image: bytes = IMAGE,
    mask: bytes | None = MASK,
    **fields: Any,
) -> ImageRequest:
    reply = await post_form(http, image, mask, model="auto", **fields)
    assert reply.status_code == 200, reply.text
    [request] = fake.offered[-1]
    assert request.called_model == "auto"
    return request


async def test_an_edit_that_both_models_make_is_routed(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fields = {"strength": 0.5, "num_inference_steps": 30, "seed": 3, "feather_px": 2}
    request = await asked(http, fake, **fields)
    assert request.cascade is not None
    assert (request.model, request.num_steps, request.schedule_steps) == ("heavy", 15, 30)
    # 1 of the light model's 2 steps
    stage = LightStage("light", "judge", 1, 1.0, "lcm", schedule_steps=2)
    assert request.cascade.light == stage
    light = request.light
    assert light is not None
    assert request.edit is not None
    assert light.edit == replace(request.edit, schedule_steps=2)
    assert (light.num_steps, light.schedule_steps, light.first_step) == (1, 2, 1)
    assert (light.size_px, light.output_px, light.seed) == ((64, 64), (64, 64), 3)


async def test_a_mask_of_everything_is_routed_as_text_to_image(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    request = await asked(http, fake, IMAGE, WHOLE_MASK)
    assert request.cascade is not None
    assert request.cascade.light is not None
    assert (request.edit, request.cascade.light.schedule_steps) == (None, None)


def light_masked(light: ModelProfile) -> ModelProfile:
    return replace(light, edits="masked")


def light_coarse(light: ModelProfile) -> ModelProfile:
    return replace(light, size_multiple_px=32)


@pytest.mark.parametrize(
    ("image", "mask", "fields", "changed"),
    [
        # the light model is an inpainting model
        (IMAGE, None, {}, light_masked),
        # none of its 2 steps is left
        (IMAGE, MASK, {"strength": 0.4}, None),
        # it would bring the image to 128 px
        (picture(200, 64), mask_of((0, 0, 9, 9), 200, 64), {}, None),
        # it would fill the image up to another size
        (picture(72, 64), mask_of((0, 0, 9, 9), 72, 64), {}, light_coarse),
        # its native size is another, and so is its window
        (picture(160, 160), mask_of((80, 80, 9, 9), 160, 160), {"crop": "auto"}, None),
    ],
    ids=["inpainting", "no step", "bounds", "grid", "window"],
)
async def test_an_edit_that_the_light_model_cannot_make_alike_is_the_heavy_ones(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    image: bytes,
    mask: bytes | None,
    fields: dict[str, Any],
    changed: Callable[[ModelProfile], ModelProfile] | None,
) -> None:
    if changed is not None:
        fake.profiles["light"] = changed(fake.profiles["light"])
    request = await asked(http, fake, image, mask, **fields)
    assert request.cascade is not None
    assert (request.model, request.light) == ("heavy", None)
    assert (request.cascade.entry, request.cascade.reason) == ("heavy", "edit")


@pytest.mark.parametrize(("quality", "model"), [("low", "light"), ("high", "heavy")])
async def test_quality_names_the_model_of_an_edit(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, quality: str, model: str
) -> None:
    request = await asked(http, fake, quality=quality)
    assert request.cascade is not None
    assert (request.model, request.cascade.reason) == (model, "quality")
    assert request.edit is not None


async def test_a_model_that_quality_names_must_be_able_to_edit(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.profiles["light"] = light_masked(fake.profiles["light"])
    reply = await post_form(http, IMAGE, model="auto", quality="low")
    check_error(reply, 400, param="mask")
    assert "light is an inpainting model" in error_of(reply)["message"]
    reply = await post_form(http, IMAGE, model="auto", quality="high")
    assert reply.status_code == 200


async def test_the_reply_says_which_schedule_the_published_image_has(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fields = {"model": "auto", "strength": 0.5, "num_inference_steps": 30}

    def by_light(request: ImageRequest) -> Any:
        return replace(answered(request, is_light=True), num_steps=1)

    def by_heavy(request: ImageRequest) -> Any:
        return answered(request, is_light=False)

    for outcome, steps, computed in ((by_light, 2, 1), (by_heavy, 30, 15)):
        fake.outcome = outcome
        [image] = (await post_form(http, IMAGE, MASK, **fields)).json()["data"]
        assert (image["num_inference_steps"], image["edit"]["strength"]) == (steps, 0.5)
        assert image["fidelity"]["steps_computed"] == computed
