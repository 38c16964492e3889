from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import httpx
import pytest

from ray_cluster.api.advice import REFUSED
from ray_cluster.api.app import create_app
from ray_cluster.api.input.schemas import ImageGenerationRequest
from ray_cluster.api.output.image_schemas import ImagesResponse
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.pools import DefaultsConfig
from ray_cluster.requests import ImageRequest, OutputSpec
from tests.api.checks import URL, refused
from tests.api.conftest import NOW_S, http_of
from tests.fakes import FakeDispatcherClient, completed, memory_results, sent_images, settings_for

RED = {"prompt": "a red circle"}


async def make(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await http.post(URL, json={**RED, **body})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    ImagesResponse.model_validate(reply, strict=True, extra="forbid")
    return reply


async def test_a_prompt_alone_takes_every_default(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    reply = await make(http)
    ((request,),) = fake.offered
    assert request == ImageRequest(
        request_id=request.request_id,
        model="shapes",
        prompt="a red circle",
        width_px=64,
        height_px=64,
        num_steps=10,
        guidance_scale=3.0,
        sampler="ddim",
        seed=request.seed,
    )
    assert request.owner == "open"
    assert len(request.request_id) > 30
    assert 0 <= request.seed < 2**53
    assert reply["created"] == int(NOW_S)
    assert reply["size"] == "64x64"
    assert reply["background"] == "opaque"
    assert reply["output_format"] == "png"
    (image,) = reply["data"]
    assert base64.b64decode(image["b64_json"]) == b"coded pixels"
    assert image["seed"] == request.seed
    assert image["timing"] == {
        "queue_s": 0.25,
        "encode_s": 0.25,
        "denoise_s": 0.75,
        "decode_s": 0.25,
        "upscale_s": 0.0,
        "total_s": 1.5,
    }
    assert reply["deadline"] == {"slo_s": 60.0, "elapsed_s": 1.5, "met": True}


async def test_every_parameter_reaches_the_request(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    await make(
        http,
        model="shapes",
        size="96x40",
        negative_prompt="blurry",
        seed=7,
        num_inference_steps=50,
        guidance_scale=2,
        sampler="lcm",
        priority=-3,
        slo_s=1.25,
        output_format="webp",
        output_compression=40,
    )
    ((request,),) = fake.offered
    assert request == ImageRequest(
        request_id=request.request_id,
        model="shapes",
        prompt="a red circle",
        negative_prompt="blurry",
        width_px=96,
        height_px=40,
        num_steps=50,
        guidance_scale=2.0,
        sampler="lcm",
        seed=7,
        priority=-3,
        slo_s=1.25,
        output=OutputSpec("webp", 40, False),
    )
    assert isinstance(request.guidance_scale, float)


async def test_pool_defaults_come_before_the_models(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    defaults = DefaultsConfig(size="32x40", num_inference_steps=70, guidance_scale=0, sampler="lcm")
    pool = config.pools[0].model_copy(update={"defaults": defaults})
    app = create_app(
        fake,
        settings_for(config.model_copy(update={"pools": (pool,)})),
        results=memory_results(),
        images=sent_images(),
    )
    async with http_of(app) as other:
        await make(other)
    ((request,),) = fake.offered
    assert (request.width_px, request.height_px, request.sampler) == (32, 40, "lcm")
    assert request.guidance_scale == 0.0
    # a default never exceeds what the sampler can do
    assert request.num_steps == 50


async def test_n_images_are_one_offer_with_consecutive_seeds(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.outcome = lambda request: completed(request, f"seed {request.seed}".encode())
    reply = await make(http, n=3, seed=40)
    (group,) = fake.offered
    assert [request.seed for request in group] == [40, 41, 42]
    assert len({request.request_id for request in group}) == 3
    assert [image["seed"] for image in reply["data"]] == [40, 41, 42]
    images = [base64.b64decode(image["b64_json"]) for image in reply["data"]]
    assert images == [b"seed 40", b"seed 41", b"seed 42"]


async def test_images_of_any_length_are_coded_right(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    slice_bytes = 3 * 128 * 1024
    for length in (0, 1, 2, slice_bytes - 1, slice_bytes, slice_bytes + 1, 2 * slice_bytes + 5):
        data = bytes(range(256)) * (length // 256 + 1)
        fake.outcome = lambda request, data=data[:length]: completed(request, data)
        reply = await make(http)
        assert base64.b64decode(reply["data"][0]["b64_json"], validate=True) == data[:length]


async def test_the_deadline_is_met_only_if_every_image_is(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.outcome = lambda request: replace(completed(request), elapsed_s=1.0 + request.seed)
    reply = await make(http, n=3, seed=0, slo_s=2.5)
    assert reply["deadline"] == {"slo_s": 2.5, "elapsed_s": 3.0, "met": False}


@pytest.mark.parametrize(
    ("param", "value", "said"),
    [
        ("prompt", "", "not empty"),
        ("prompt", "  \n", "blank"),
        ("prompt", "x" * 201, "201 characters; at most 200"),
        ("prompt", "a\0b", "NUL"),
        ("prompt", None, "is required"),
        ("prompt", 7, "must be a string; given 7"),
        ("prompt", ["a"], "given an array"),
        ("negative_prompt", "x" * 201, "Shorten"),
        ("n", 0, "at least 1; given 0"),
        ("n", 11, "at most 10; given 11"),
        ("n", "3", "a whole number; given '3'. Write 3 without quotes."),
        ("guidance_scale", "2.5", "Write 2.5 without quotes."),
        ("stream", "true", "Write true without quotes."),
        ("num_inference_steps", 20.0, "given 20.0. Write 20."),
        ("n", True, "a whole number; given true"),
        ("n", 2.0, "a whole number; given 2.0"),
        ("n", 10**4000, "at most 10"),
        ("size", "65x64", "Nearest: 64x64, 72x64"),
        ("size", "1024x16", "Nearest: 256x32"),
        ("size", "0x64", "WIDTHxHEIGHT"),
        ("size", "64X64", "WIDTHxHEIGHT in pixels, like '64x64'; given '64X64'. Write '64x64'."),
        ("size", "64*32", "Write '64x32'."),
        ("size", " 64 \u00d7 32 ", "Write '64x32'."),
        ("size", 64, "WIDTHxHEIGHT"),
        ("size", [64, 64], "WIDTHxHEIGHT"),
        ("size", "square_hd", "WIDTHxHEIGHT"),
        ("size", "64x64\n", "WIDTHxHEIGHT"),
        ("size", "٦٤x64", "WIDTHxHEIGHT"),
        ("size", "64", "WIDTHxHEIGHT"),
        ("seed", -1, "at least 0; given -1. For a random seed leave it out, or send null."),
        ("seed", "random", "For a random seed leave it out, or send null."),
        ("seed", 2**63, f"at most {2**63 - 1}"),
        ("num_inference_steps", 0, "at least 1; given 0. For the model's own number leave it out"),
        ("num_inference_steps", 101, "from 1 to 100 with sampler 'ddim' on shapes; given 101"),
        ("min_inference_steps", 0, "at least 1"),
        ("guidance_scale", -0.5, "at least 0"),
        ("guidance_scale", 30.5, "at most 30"),
        ("guidance_scale", True, "a number; given true"),
        ("guidance_scale", 10**400, "a finite number; given 1000"),
        ("allow", "steps", "must be a list; given 'steps'"),
        ("allow", ["x"], "must be a list of 'fidelity' or 'steps'; given 'x'"),
        ("stream", 0, "true or false; given 0"),
        ("partial_images", False, "a whole number; given false"),
        ("sampler", "plms", "'ddim', 'euler'"),
        ("sampler", "dpmpp_2m", "ddim, euler, lcm"),
        ("priority", 101, "at most 100"),
        ("slo_s", 0, "greater than 0"),
        ("slo_s", 86401, "at most 86400"),
        ("metadata", 1, "true or false"),
        ("output_format", "gif", "'png', 'jpeg' or 'webp'"),
        ("output_compression", 50, "lossless"),
        ("response_format", "link", "url"),
        ("steps", 5, "Did you mean 'num_inference_steps'"),
        ("colour", 5, "There are prompt, model"),
        ("a", 5, "There are prompt, model"),
        ("deadline", 5, "There are prompt, model"),
        ("sedd", 5, "Did you mean 'seed'?"),
        ("PROMPT", "a", "Did you mean 'prompt'?"),
        ("Prompts", 5, "Did you mean 'prompt'?"),
        ("negativePrompt", 5, "Did you mean 'negative_prompt'?"),
        ("cfg_scale", 5, "Did you mean 'guidance_scale'?"),
        ("width", 64, "Did you mean 'size'?"),
        ("images", [], "not offered here. It belongs to edits"),
        ("guidence_scale", 5, "Did you mean 'guidance_scale'?"),
    ],
)
async def test_a_wrong_value_is_refused_by_name(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, param: str, value: object, said: str
) -> None:
    assert said in await refused(http, param, **{**RED, param: value})
    assert fake.offered == []


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("negative_prompt", {"negative_prompt": "blur", "guidance_scale": 1}),
        ("negative_prompt", {"negative_prompt": "blur", "guidance_scale": 0.5}),
        ("metadata", {"metadata": True, "output_format": "jpeg"}),
        ("output_compression", {"output_compression": 99, "output_format": "png"}),
        ("output_compression", {"output_compression": 101, "output_format": "jpeg"}),
        ("num_inference_steps", {"num_inference_steps": 51, "sampler": "lcm"}),
        ("min_inference_steps", {"num_inference_steps": 5, "min_inference_steps": 6}),
        ("seed", {"seed": 2**63 - 2, "n": 3}),
    ],
)
async def test_what_does_not_fit_together_is_refused(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, param: str, body: dict[str, Any]
) -> None:
    await refused(http, param, **RED, **body)
    assert fake.offered == []


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"prompt": 7}, "invalid_type"),
        ({"guidance_scale": "2"}, "invalid_type"),
        ({"guidance_scale": True}, "invalid_type"),
        # a number, but none that there is a float for
        ({"guidance_scale": 10**400}, "invalid_value"),
    ],
)
async def test_a_wrong_type_is_told_from_a_wrong_value(
    http: httpx.AsyncClient, body: dict[str, Any], code: str
) -> None:
    response = await http.post(URL, json={**RED, **body})
    assert response.json()["error"]["code"] == code


async def test_null_means_absent_whatever_the_field(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    names = [*ImageGenerationRequest.model_fields, *REFUSED, "style_preset"]
    first = await make(http, seed=1)
    assert await make(http, **{**dict.fromkeys(names), **RED, "seed": 1}) == first


async def test_several_problems_are_told_at_once(http: httpx.AsyncClient) -> None:
    message = await refused(http, "complexity", prompt="", complexity="low", n=0, bogus=1)
    assert all(repr(name) in message for name in ("complexity", "prompt", "n", "bogus"))


@pytest.mark.parametrize("image_format", ["jpeg", "webp"])
async def test_a_format_without_metadata_may_be_asked_for_none(
    http: httpx.AsyncClient, image_format: str
) -> None:
    await make(http, metadata=False, output_format=image_format)


async def test_the_last_seeds_and_bounds_are_allowed(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    await make(http, n=10, seed=2**63 - 10, priority=100, slo_s=86400, guidance_scale=30)
    await make(http, n=1, seed=0, priority=-100, size="32x256", num_inference_steps=100)
    assert fake.offered[0][-1].seed == 2**63 - 1
