"""The official client on a real socket: replies, error classes, and what it retries by itself."""

from __future__ import annotations

import base64
from dataclasses import replace

import openai
import pytest
from fastapi import FastAPI

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.policies.fidelity import FewerSteps, StepTable
from ray_cluster.policies.types import Offer
from ray_cluster.requests import Failure
from tests.api.conftest import Serve, app_of
from tests.fakes import FakeDispatcherClient, model_profile
from tests.keys import with_keys

FULL = Offer(False, reason="queue_full", retry_after_s=0.5)
ACCEPTED = Offer(True)


@pytest.fixture
def client(app: FastAPI, serve: Serve) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serve(app)}/v1", api_key="any", timeout=60)


def test_an_image_comes_back(client: openai.OpenAI, fake: FakeDispatcherClient) -> None:
    reply = client.images.generate(
        model="shapes",
        prompt="a red circle",
        n=2,
        size="auto",
        output_format="jpeg",
        output_compression=80,
        quality="hd",
        style="vivid",
        background="opaque",
        moderation="low",
        user="someone",
        extra_body={"seed": 5, "sampler": "euler", "slo_s": 9.5},
    )
    assert reply.data is not None
    assert [base64.b64decode(image.b64_json or "") for image in reply.data] == [b"coded pixels"] * 2
    assert reply.data[1].model_extra is not None
    assert reply.data[1].model_extra["seed"] == 6
    assert reply.data[1].model_extra["timing"]["denoise_s"] == 0.75
    assert reply.model_extra is not None
    assert reply.model_extra["deadline"]["slo_s"] == 9.5
    assert (reply.size, reply.output_format, reply.background) == ("64x64", "jpeg", "opaque")
    # what was used
    assert reply.quality == "auto"
    assert reply._request_id is not None
    assert reply._request_id.startswith("req_")
    assert [request.sampler for request in fake.offered[0]] == ["euler", "euler"]


def test_a_fidelity_goes_in_and_comes_back(
    client: openai.OpenAI, fake: FakeDispatcherClient
) -> None:
    row = FewerSteps(asked=10, balanced=6, fast=3)
    table = StepTable("ddim", 3.0, (row,))
    fake.profiles = {"shapes": replace(model_profile("shapes"), fewer_steps=table)}
    reply = client.images.generate(
        prompt="a red circle", extra_body={"fidelity": "balanced", "allow": ["fidelity"]}
    )
    assert reply.data is not None
    extra = reply.data[0].model_extra
    assert extra is not None
    assert (extra["num_inference_steps"], extra["fidelity"]["got"]) == (6, "balanced")
    assert extra["fidelity"]["max_ssim_loss"] == 0.15
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(
            prompt="a red circle", extra_body={"fidelity": "fast", "num_inference_steps": 11}
        )
    assert (caught.value.param, caught.value.code) == ("fidelity", "fidelity_not_offered")


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["shapes"]
    assert client.models.retrieve("shapes").owned_by == "ray-cluster"


def test_a_wrong_parameter_raises_bad_request(
    client: openai.OpenAI, fake: FakeDispatcherClient
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="a red circle", size="65x64")
    assert caught.value.param == "size"
    assert caught.value.code == "invalid_value"
    assert caught.value.type == "invalid_request_error"
    assert "72x64" in caught.value.message
    assert fake.offered == []


def test_an_unknown_model_raises_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(prompt="a red circle", model="dall-e-3")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("dall-e-3")


def test_a_wrong_key_raises_authentication_error(
    fake: FakeDispatcherClient, config: ClusterConfig, serve: Serve
) -> None:
    url = serve(app_of(fake, with_keys(config, "right")))
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        client.images.generate(prompt="a red circle")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="right")
    assert client.images.generate(prompt="a red circle").data


def test_a_large_body_raises_a_status_error_rather_than_a_broken_connection(
    client: openai.OpenAI, fake: FakeDispatcherClient
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.images.generate(prompt="x" * 60_000)
    assert caught.value.status_code == 413
    assert fake.offered == []


def test_a_full_queue_is_retried_until_it_has_room(
    client: openai.OpenAI, fake: FakeDispatcherClient
) -> None:
    fake.offers = [FULL, ACCEPTED]
    assert client.images.generate(prompt="a red circle").data
    assert len(fake.offered) == 2


def test_a_queue_that_stays_full_raises_rate_limit_error_after_two_retries(
    client: openai.OpenAI, fake: FakeDispatcherClient
) -> None:
    fake.offers = [FULL]
    with pytest.raises(openai.RateLimitError) as caught:
        client.images.generate(prompt="a red circle")
    assert len(fake.offered) == 3
    assert caught.value.response.headers["retry-after"] == "1"


def test_without_retries_a_full_queue_raises_at_once(
    client: openai.OpenAI, fake: FakeDispatcherClient
) -> None:
    fake.offers = [FULL]
    with pytest.raises(openai.RateLimitError):
        client.with_options(max_retries=0).images.generate(prompt="a red circle")
    assert len(fake.offered) == 1


def test_a_model_error_raises_internal_server_error_and_is_not_retried(
    client: openai.OpenAI, fake: FakeDispatcherClient
) -> None:
    fake.outcome = lambda request: Failure(request.request_id, "error", "NaN", "denoise")
    with pytest.raises(openai.InternalServerError) as caught:
        client.images.generate(prompt="a red circle")
    assert caught.value.status_code == 500
    assert caught.value.request_id is not None
    assert fake.offered[0][0].request_id in caught.value.message
    assert len(fake.offered) == 1


def test_a_request_under_which_replicas_die_is_not_retried(
    client: openai.OpenAI, fake: FakeDispatcherClient
) -> None:
    fake.outcome = lambda request: Failure(request.request_id, "lost", "5 died", "replica")
    with pytest.raises(openai.InternalServerError) as caught:
        client.images.generate(prompt="a red circle")
    assert caught.value.status_code == 503
    assert len(fake.offered) == 1


def test_a_model_that_is_not_ready_raises_503(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.with_options(max_retries=0).images.generate(prompt="a red circle", model="late")
    assert caught.value.status_code == 503
    assert caught.value.code == "model_not_ready"
    assert caught.value.response.headers["x-should-retry"] == "true"
