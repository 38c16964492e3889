"""The head's side of a group's ranks, with four real ones: what they keep outlives them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.engine.groups.ranks import RankStep
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.stages.prompt_encoder import PromptDeltas
from ray_cluster.errors import InvalidRequest, ModelUnsupported
from ray_cluster.replica.group.coder import RemoteDecoder, RemoteEncoder, RemoteImages
from ray_cluster.replica.group.processes import start_child
from ray_cluster.replica.group.ranks import GroupRanks
from tests.engine.dits import dit_request
from tests.engine.harness import CALL_TOLERANCE, CONTROL_FACTOR, call_model, difference, load, pool
from tests.engine.random_dits import save_sd3

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.xdist_group("ranks")]

HW, TIMESTEP = (8, 8), 500.0
_QUERIES = "text_model.encoder.layers.0.self_attn.q_proj"


class Group:
    """Ranks, and the same model in this process."""

    def __init__(self, ranks: GroupRanks, model: LoadedModel) -> None:
        self.ranks, self.model = ranks, model
        self.encoder = RemoteEncoder(ranks, (), 100)
        self._news = threading.Event()
        self._calls = iter(range(1, 1000))
        ranks.call_when_news(self._news.set)

    def predict(self, key: int, latents: torch.Tensor, ranks: range) -> torch.Tensor:
        rows = latents.permute(1, 2, 0).flatten(0, 1)
        call = next(self._calls)
        self.ranks.begin(RankStep(call, key, ranks, "together", HW, rows, TIMESTEP, 3.0))
        ends = list(self.ranks.ends())
        while not ends:
            assert self._news.wait(60)
            self._news.clear()
            ends += self.ranks.ends()
        [end] = ends
        assert end.call == call
        assert end.prediction is not None, "the ranks were lost"
        return end.prediction.unflatten(0, HW).permute(2, 0, 1)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    given = pool(save_sd3(tmp_path_factory.mktemp("sd3")), ranks=4, defaults={"size": "64x64"})
    ranks = GroupRanks(given.model_dump_json(), 4, start_child)
    try:
        ranks.wait_up()
        yield Group(ranks, load(given.model_copy(update={"ranks": 1})))
    finally:
        ranks.close()


def products(layers: dict[str, torch.nn.Linear], seed: int) -> dict[str, LowRank]:
    generator = torch.Generator().manual_seed(seed)
    return {
        path: LowRank(
            torch.randn(2, one.in_features, generator=generator),
            torch.randn(one.out_features, 2, generator=generator) / 4,
        )
        for path, one in layers.items()
    }


@torch.inference_mode()
def test_what_is_encoded_and_decoded_there_is_what_would_be_here(group: Group) -> None:
    requests = [dit_request("a", prompt="a red circle"), dit_request("b", guidance_scale=1.0)]
    for found, one in zip(
        group.encoder.encode(requests), group.model.encoder.encode(requests), strict=True
    ):
        there, here = found.tensors(), one.tensors()
        assert there.keys() == here.keys()
        assert max(difference(there[key], here[key]) for key in here) <= CALL_TOLERANCE
    latents = [torch.randn(8, 16, 16), torch.randn(8, 16, 16)]
    there, here = RemoteDecoder(group.ranks).decode(latents), group.model.decoder.decode(latents)
    assert np.abs(np.array(there, int) - np.array(here, int)).max() <= 1
    images = [np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)]
    [encoded] = RemoteImages(group.ranks, 4).encode(images)
    assert difference(encoded, group.model.images.encode(images)[0]) <= 10 * CALL_TOLERANCE
    with pytest.raises(InvalidRequest) as raised:
        group.encoder.encode([dit_request("long", prompt="red " * 2000)])
    assert raised.value.param == "prompt"
    assert raised.value.code != ""


@torch.inference_mode()
def test_bound_products_and_prompts_outlive_the_ranks(group: Group) -> None:
    executor = group.model.executor
    linear = {
        path: one for path, one in executor.layers.items() if isinstance(one, torch.nn.Linear)
    }
    own = products({path: one for path, one in linear.items() if "to_q" in path}, 0)
    bound = group.ranks.bind(own)
    with pytest.raises(ModelUnsupported, match="nowhere"):
        group.ranks.bind({"nowhere": next(iter(own.values()))})
    of_text = {"text_encoder": products({_QUERIES: torch.nn.Linear(32, 32)}, 1)}
    both = (group.encoder, group.model.encoder)
    prompts: list[PromptDeltas] = [one.bind(of_text) for one in both]
    request = dit_request("a")
    [there] = group.encoder.encode([request], [prompts[0]])
    [here] = group.model.encoder.encode([request], [prompts[1]])
    assert difference(there.prompt_embeds, here.prompt_embeds) <= CALL_TOLERANCE
    plain = group.encoder.encode([request])[0].prompt_embeds
    assert difference(there.prompt_embeds, plain) >= CONTROL_FACTOR * CALL_TOLERANCE
    latents = torch.randn(8, *HW)
    key, other = (group.ranks.keep(here, one) for one in (bound, None))
    rows = ([latents], torch.tensor([TIMESTEP]), [here], [3.0])
    [expected] = call_model(executor, *rows, [executor.bind(own)])

    def check() -> None:
        for ranks in (range(4), range(2, 4), range(1)):
            found = group.predict(key, latents, ranks)
            # guided rows are told as one
            assert difference(found, expected) <= 5 * CALL_TOLERANCE
            other_found = group.predict(other, latents, ranks)
            assert difference(other_found, expected) >= CONTROL_FACTOR * CALL_TOLERANCE

    check()
    for victim in (0, 3):
        before = group.ranks.num_recoveries
        # the first start is none
        assert (group.ranks.recovery_s > 0) == (before > 0)
        os.kill(group.ranks.pids()[victim], signal.SIGKILL)
        until_s = time.monotonic() + 120
        while group.ranks.num_recoveries == before or not group.ranks.is_up:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        check()
        [again] = group.encoder.encode([request], [prompts[0]])
        assert difference(again.prompt_embeds, here.prompt_embeds) <= CALL_TOLERANCE


def test_ranks_that_cannot_load_say_why(tmp_path: Path) -> None:
    folder = save_sd3(tmp_path)
    next(iter((folder / "transformer").glob("*.safetensors"))).unlink()
    ranks = GroupRanks(pool(folder, ranks=2).model_dump_json(), 2, start_child)
    try:
        with pytest.raises(RuntimeError, match="transformer"):
            ranks.wait_up()
    finally:
        ranks.close()
