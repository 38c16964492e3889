from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from ray_cluster.api.app import Surroundings, create_app
from ray_cluster.config.loading import ClusterConfig
from tests.api.checks import URL, error_of
from tests.api.conftest import app_of, http_of
from tests.fakes import FakeDispatcherClient, memory_results, sent_images, settings_for
from tests.keys import with_keys

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "line 1 column 1"),
        (b'{"prompt": "a",\n "n": }', "line 2 column 7"),
        (b'{"prompt": "a"} x', "Extra data"),
        (b'["prompt"]', "not an object"),
        (b"null", "not an object"),
        (b'{"prompt": "a", "guidance_scale": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "a", "slo_s": -Infinity}', "-Infinity"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "BOM"),
        (b'{"prompt":' * 1 + b"[" * 3000 + b"]" * 1000, "nested too deeply"),
        (b'{"a":' * 800, "line 1"),
        (b'{"prompt": "a", "seed": ' + b"9" * 4000 + b"}", "at most"),
        (b'{"prompt": "a", "n": 1, "n": 2}', "'n' is given more than once"),
    ],
)
async def test_a_body_that_is_not_a_json_object_is_refused(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, body: bytes, said: str
) -> None:
    response = await http.post(URL, content=body, headers=JSON)
    assert response.status_code == 400
    assert said in error_of(response)["message"]
    assert fake.offered == []


async def test_an_integer_of_thousands_of_digits_is_refused(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    limits = config.limits.model_copy(update={"max_body_bytes": 1 << 20})
    app = app_of(fake, config.model_copy(update={"limits": limits}))
    body = b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}"
    async with http_of(app) as http:
        response = await http.post(URL, content=body, headers=JSON)
    assert response.status_code == 400
    assert "thousands of digits" in error_of(response)["message"]


@pytest.mark.parametrize("name", ["prompt", "negative_prompt", "user", "model", "size"])
async def test_half_a_character_is_refused_by_name(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, name: str
) -> None:
    # what JSON's escapes allow and no text holds; beside it a whole character in two escapes
    body = json.dumps({"prompt": "a", name: "\U0001f534 \udfff"}).encode()
    response = await http.post(URL, content=body, headers=JSON)
    assert response.status_code == 400
    assert error_of(response)["param"] == name
    assert fake.offered == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "a", "guidance_scale": 1e999}',
        b'{"prompt": "a", "\\ud800": 1, "\\ud800": 2}',
        b'{"prompt": "a", "model": "\\u0000"}',
        b'{"prompt": "a", "size": {"a": [' + b"[" * 500 + b"]" * 500 + b"]}}",
    ],
)
async def test_values_that_json_allows_and_we_do_not_are_refused(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, body: bytes
) -> None:
    response = await http.post(URL, content=body, headers=JSON)
    assert response.status_code in {400, 404}
    error_of(response)
    assert fake.offered == []


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "text/plain"},
        {},
        {"content-type": "application/json; charset=latin-1"},
        {**JSON, "content-encoding": "gzip"},
    ],
)
async def test_another_content_type_is_a_415(
    http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    response = await http.post(URL, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 415
    error_of(response)


@pytest.mark.parametrize("charset", ["utf-8", "UTF-8", '"utf-8"', '"utf-8"; x=y'])
async def test_utf_8_may_be_said(http: httpx.AsyncClient, charset: str) -> None:
    headers = {"content-type": f"Application/JSON; charset={charset}"}
    response = await http.post(URL, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


async def test_a_large_body_is_a_413_and_is_not_read_to_its_end(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while num_sent < 1000:
            num_sent += 1
            yield b"x" * 1024

    response = await http.post(URL, content=endless(), headers=JSON)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    # the limit is 4 KiB, and 16 times that is drained
    assert num_sent <= 66
    assert fake.offered == []


async def test_a_body_of_just_the_limit_is_read(http: httpx.AsyncClient) -> None:
    body = b'{"prompt": "a"}'.ljust(4096)
    assert (await http.post(URL, content=body, headers=JSON)).status_code == 200
    assert (await http.post(URL, content=body + b" ", headers=JSON)).status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/images/nothing", 404),
        ("POST", "/v1/images/generations/", 404),
        ("GET", "/v1/images/generations", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/nothing", 404),
    ],
)
async def test_frameworks_own_errors_have_the_same_form(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await http.request(method, path)
    assert response.status_code == status
    assert path.rpartition("/")[2] in error_of(response)["message"]
    assert status != 405 or response.headers["allow"]


class TestKeys:
    @pytest.fixture
    def config(self, config: ClusterConfig) -> ClusterConfig:
        return with_keys(config, "first-key", "clé")

    @pytest.mark.parametrize(
        "given", [None, "Bearer wrong", "Basic first-key", "Bearer", "bearer "]
    )
    async def test_a_call_without_a_key_is_a_401(
        self, http: httpx.AsyncClient, fake: FakeDispatcherClient, given: str | None
    ) -> None:
        headers = {} if given is None else {"authorization": given}
        for method, path in [("POST", URL), ("GET", "/v1/models"), ("GET", "/v1/models/shapes")]:
            response = await http.request(method, path, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["code"] == "invalid_api_key"

    @pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
    async def test_a_key_opens(self, http: httpx.AsyncClient, scheme: str) -> None:
        headers = {"authorization": f"{scheme} first-key"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
        response = await http.post(URL, json={"prompt": "a"}, headers=headers)
        assert response.status_code == 200

    @pytest.mark.parametrize("path", ["/healthz", "/docs", "/openapi.json"])
    async def test_probes_and_documentation_are_open(
        self, http: httpx.AsyncClient, path: str
    ) -> None:
        assert (await http.get(path)).status_code == 200


class TestRequestIds:
    async def test_each_reply_has_its_own(self, http: httpx.AsyncClient) -> None:
        ids = {(await http.get("/healthz")).headers["x-request-id"] for _ in range(3)}
        assert len(ids) == 3
        assert all(one.startswith("req_") for one in ids)

    async def test_a_sane_one_is_kept(self, http: httpx.AsyncClient) -> None:
        response = await http.get("/v1/nothing", headers={"x-request-id": "trace-1.2_3"})
        assert response.headers["x-request-id"] == "trace-1.2_3"

    @pytest.mark.parametrize("given", ["a b", "x" * 101, "<script>", ""])
    async def test_another_is_replaced(self, http: httpx.AsyncClient, given: str) -> None:
        response = await http.get("/healthz", headers={"x-request-id": given})
        assert response.headers["x-request-id"].startswith("req_")

    async def test_behind_a_proxy_that_writes_the_header_it_is_not_written_twice(
        self, fake: FakeDispatcherClient, config: ClusterConfig
    ) -> None:
        app = create_app(
            fake,
            settings_for(config),
            around=Surroundings(request_id_writer="proxy"),
            results=memory_results(),
            images=sent_images(),
        )
        async with http_of(app) as http:
            response = await http.get("/healthz", headers={"x-request-id": "given"})
        assert "x-request-id" not in response.headers
