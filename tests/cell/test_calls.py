"""Calls of many clients: what one gets when others fail, flood the service or come back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.cell.local_service import LocalService
from tests.e2e.openai_clients import OLDER_CLIENT, client_that_works
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import API_KEY, POISONED_WORD, images, post

pytestmark = [pytest.mark.xdist_group("local"), pytest.mark.timeout(400)]


@pytest.mark.slow
def test_an_older_official_client_works(service: LocalService) -> None:
    assert OLDER_CLIENT.is_dir(), "the Makefile installs it: run `make venv`"
    assert client_that_works(service, OLDER_CLIENT).startswith("1.")


def test_a_failing_request_does_not_touch_its_peers(service: LocalService) -> None:
    [alone] = images(post(service, seed=3))
    with ThreadPoolExecutor(8) as pool:
        replies = list(
            pool.map(
                lambda index: (
                    post(service, prompt=f"a {POISONED_WORD}")
                    if index % 2
                    else post(service, seed=3)
                ),
                range(8),
            )
        )
    assert [reply.status_code for reply in replies] == [200, 500] * 4
    for reply in replies[::2]:
        assert pixels_differ(images(reply)[0], alone) <= 1
    for reply in replies[1::2]:
        assert reply.json()["error"]["type"] == "server_error"
        assert reply.headers["x-should-retry"] == "false"


def test_a_flooded_service_refuses_with_a_time_to_come_back(service: LocalService) -> None:
    def one(index: int) -> httpx.Response:
        return post(service, n=8, num_inference_steps=8, seed=index)

    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(one, range(12)))
    codes = [reply.status_code for reply in replies]
    assert set(codes) == {200, 429}
    for reply in replies:
        if reply.status_code == 429:
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"]
        else:
            assert len(images(reply)) == 8


def test_a_client_that_comes_back_when_told_is_served(service: LocalService) -> None:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=API_KEY, max_retries=10)

    def one(index: int) -> int:
        reply = client.images.generate(
            prompt="a red circle", n=8, extra_body={"seed": index, "num_inference_steps": 8}
        )
        return len(reply.data or [])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(6))) == [8] * 6
