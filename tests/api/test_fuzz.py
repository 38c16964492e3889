"""Any body gives an image or a refusal of the right form; what is refused never gets further."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_cluster.api.advice import REFUSED
from ray_cluster.api.input.schemas import ImageGenerationRequest
from ray_cluster.config.loading import ClusterConfig
from tests.api.checks import URL, error_of
from tests.api.conftest import app_of, http_of, shapes_profile
from tests.fakes import FakeDispatcherClient

CONFIG = ClusterConfig.model_validate({"pools": [{"name": "shapes", "model": "shapes-sd"}]})

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.text(alphabet=st.characters(categories=["Cs", "Cc", "Lu"]))
)
ANY_JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
# values that some field takes, so that examples get past the first check
LIKELY = st.sampled_from(
    ["auto", "64x64", "65x64", "png", "jpeg", "webp", "b64_json", "opaque", "lcm", "shapes"]
) | st.integers(-2, 130)
NAMES = [*ImageGenerationRequest.model_fields, *REFUSED]
BODIES = st.dictionaries(st.sampled_from(NAMES) | st.text(), LIKELY | ANY_JSON, max_size=8)
PROMPTED = BODIES.map(lambda body: {**body, "prompt": "a red circle"})


async def post(content: bytes) -> tuple[httpx.Response, FakeDispatcherClient]:
    fake = FakeDispatcherClient(shapes_profile())
    async with http_of(
        app_of(fake, CONFIG),
        raise_app_exceptions=True,
    ) as http:
        headers = {"content-type": "application/json"}
        return await http.post(URL, content=content, headers=headers), fake


def check(content: bytes) -> None:
    response, fake = asyncio.run(post(content))
    if response.status_code == 200:
        assert len(fake.offered) == 1
        assert len(response.json()["data"]) == len(fake.offered[0])
    else:
        assert response.status_code in {400, 404, 413}, response.text
        error_of(response)
        assert fake.offered == []


@settings(max_examples=25, deadline=None)
@given(ANY_JSON | BODIES | PROMPTED)
def test_any_json_body_gives_an_image_or_a_clear_refusal(body: Any) -> None:
    check(json.dumps(body).encode())


@settings(max_examples=15, deadline=None)
@given(st.binary() | st.text().map(str.encode))
def test_any_bytes_give_a_clear_refusal(content: bytes) -> None:
    check(content)
