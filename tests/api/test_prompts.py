"""A prompt with too many tokens is a 400 however it is sent, before anything is made of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.models.prompt_tokens import digest_of, packed
from ray_cluster.requests import ModelProfile, PromptTokenizer
from tests.api.checks import URL, error_of
from tests.api.conftest import app_of, http_of, shapes_profile
from tests.fakes import FakeDispatcherClient, registration
from tests.jobs.jobs_cell import JobsCell


def tokenizers(max_tokens: int) -> tuple[PromptTokenizer, ...]:
    """One token a word, and one at each end."""
    words = Tokenizer(models.WordLevel(vocab={"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return (packed(words.to_str(), max_tokens),)


FIVE = tokenizers(5)
SHORT, LONG = "one two three four five", "one two three four five six"


def profile(known: tuple[PromptTokenizer, ...] = FIVE) -> ModelProfile:
    return replace(shapes_profile(), prompt_digest=digest_of(known))


@pytest.fixture
def fake() -> FakeDispatcherClient:
    one = FakeDispatcherClient(profile())
    one.tokenizers = FIVE
    return one


def check_too_long(reply: httpx.Response, param: str = "prompt") -> None:
    assert reply.status_code == 400
    assert reply.headers["content-type"] == "application/json"
    error = error_of(reply)
    assert (error["code"], error["param"]) == ("string_above_max_length", param)
    assert "has 6 tokens; this model reads at most 5" in error["message"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (URL, {}),
        (URL, {"n": 3}),
        (URL, {"stream": True}),
        (URL, {"stream": True, "partial_images": 3}),
        (URL, {"response_format": "url"}),
        ("/v1/jobs", {}),
    ],
)
@pytest.mark.parametrize("key", [None, "a key"])
async def test_it_is_refused_at_once(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    path: str,
    more: dict[str, Any],
    key: str | None,
) -> None:
    headers = {} if key is None else {"Idempotency-Key": key}
    check_too_long(await http.post(path, json={"prompt": LONG, **more}, headers=headers))
    negative = {"prompt": SHORT, "negative_prompt": LONG, **more}
    check_too_long(await http.post(path, json=negative, headers=headers), "negative_prompt")
    assert fake.offered == []


async def test_the_longest_one_is_made(http: httpx.AsyncClient, fake: FakeDispatcherClient) -> None:
    for more in ({}, {"stream": True}, {"negative_prompt": SHORT}):
        assert (await http.post(URL, json={"prompt": SHORT, **more})).status_code == 200
    assert len(fake.offered) == 3


async def test_tokenizers_are_fetched_once_and_again_when_they_change(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    calls = [http.post(URL, json={"prompt": LONG}) for _ in range(5)]
    for reply in await asyncio.gather(*calls):
        check_too_long(reply)
    assert fake.num_tokenizer_calls == 1
    fake.tokenizers = tokenizers(6)
    fake.profiles["shapes"] = profile(fake.tokenizers)
    await http.get("/v1/models")
    assert (await http.post(URL, json={"prompt": LONG})).status_code == 200
    assert fake.num_tokenizer_calls == 2


async def test_where_only_replicas_can_count_nothing_is_refused_here(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.profiles["shapes"] = shapes_profile()
    assert (await http.post(URL, json={"prompt": LONG})).status_code == 200
    assert fake.num_tokenizer_calls == 0


async def test_without_a_dispatcher_the_same_call_may_succeed_later(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    await http.get("/v1/models")
    fake.down = True
    assert (await http.post(URL, json={"prompt": LONG})).status_code == 503
    fake.down = False
    check_too_long(await http.post(URL, json={"prompt": LONG}))


async def test_a_new_dispatcher_knows_before_any_replica_is_back(
    tmp_path: Path, config: ClusterConfig
) -> None:
    config = config.model_copy(update={"pools": config.pools[:1]})
    one = replace(
        registration("r", "m"),
        profile=replace(profile(), model="m"),
        pool="m",
        prompt_tokenizers=FIVE,
    )
    async with JobsCell(tmp_path) as cell:
        await cell.dispatch.register(one)
        # the copy of one replica is kept, not that of each
        assert [each.registration.prompt_tokenizers for each in cell.core.replicas] == [()]
        cell.jobs_service.save_worker(one)
    async with JobsCell(tmp_path, epoch=2) as cell:
        app = app_of(cell, config, results=cell.results)
        async with http_of(app) as http:
            for path, more in ((URL, {"stream": True}), ("/v1/jobs", {})):
                body = {"model": "m", "prompt": LONG, **more}
                check_too_long(await http.post(path, json=body))
