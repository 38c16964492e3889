"""How tokens are cut for ranks, and what a set of ranks refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.batch.token_layout import composition_of, layout_of
from ray_cluster.engine.dit.executor import PreparedPrompt
from ray_cluster.engine.dit.packing import packing_of
from ray_cluster.engine.groups.loading import load_rank
from ray_cluster.engine.groups.rank_sets import RankSets
from ray_cluster.engine.groups.sharded import Shards, cuts
from ray_cluster.engine.step.executor import RowReuse, StepBatch
from ray_cluster.errors import ConfigError, ModelUnsupported
from ray_cluster.models.local import check_group, group_degrees
from tests.engine.conftest import Zoo
from tests.engine.groups.calls import calls_of
from tests.engine.harness import CALL_TOLERANCE, difference, pool

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [4, 5, 63, 64, 333])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_parts_are_all_of_a_sequence_and_as_alike_as_can_be(length: int, num_parts: int) -> None:
    parts = [range(length)[part] for part in cuts(length, num_parts)]
    assert [one for part in parts for one in part] == list(range(length))
    assert len(parts) == num_parts
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_rank_without_any_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 tokens .* 4 ranks; take a smaller degree"):
        cuts(3, 4)


def test_the_joint_tokens_of_all_ranks_are_those_of_the_whole() -> None:
    """Each once, and an image's before its prompt's."""
    layout = layout_of(composition_of([(18, 14, True)])[0], 2)
    whole, num_image, num_prompt = packing_of(layout.levels[-1], 29), 63, 29
    found = []
    for index in range(4):
        shards = Shards.of(whole, 4, index)
        places = shards.joint_places(CPU)
        own = shards.own.joint[0].length
        assert len(places) == shards.num_rows * own
        first = places[:own]
        num_own = shards.own.image[0].length
        assert (first[:num_own] < num_image).all()
        assert (first[num_own:] >= num_image).all()
        assert torch.equal(places[own:], first + num_image + num_prompt)
        assert torch.equal(shards.image(torch.arange(2 * num_image))[:num_own], first[:num_own])
        prompts = shards.prompt(torch.arange(2 * num_prompt))
        assert torch.equal(num_image + prompts[: own - num_own], first[num_own:])
        found += places.tolist()
    assert sorted(found) == list(range(2 * (num_image + num_prompt)))


@pytest.mark.parametrize(("heads", "expected"), [(24, (1, 2, 4, 8)), (38, (1, 2)), (15, (1,))])
def test_degrees_are_those_that_divide_the_heads(heads: int, expected: tuple[int, ...]) -> None:
    config = {"num_attention_heads": heads}
    assert group_degrees(PoolConfig(name="g", model="m", ranks=8), config) == expected
    wide = PoolConfig(name="g", model="m", ranks=16, degrees=(16,))
    assert group_degrees(wide, config) == ()
    with pytest.raises(ConfigError, match="degrees"):
        check_group(wide, config)
    with pytest.raises(ConfigError, match="fills masked images"):
        check_group(wide, config | {"in_channels": 384, "out_channels": 64})
    with pytest.raises(ConfigError, match="UNet"):
        check_group(wide, {"block_out_channels": [8]})


class OneRank:
    """A set of one rank, for which no process has to meet another."""

    def __init__(self, zoo: Zoo) -> None:
        self.executor = load_rank(pool(zoo.folder("sd3")), RankSets(0, {}), codes=False).executor
        self.whole, self.call = zoo.model("sd3"), calls_of(zoo, "sd3")

    @property
    def short(self) -> PreparedPrompt:
        """A prompt of two tokens."""
        [prepared] = self.batch(0).prepared
        return replace(prepared, tokens=prepared.tokens[:, :2])

    def batch(self, *indices: int, **changes: Any) -> StepBatch[Any]:
        """Return the batch of some images of the call."""
        call = self.call
        sizes = [(*call.latents[i].shape[1:], call.conditionings[i].is_guided) for i in indices]
        composition, order = composition_of(sizes)
        images = [indices[one] for one in order]
        batch = StepBatch(
            layout_of(composition, self.executor.num_levels),
            torch.cat([call.latents[one].permute(1, 2, 0).flatten(0, 1) for one in images]),
            call.timesteps[images],
            tuple(self.executor.prepare(call.conditionings[one]) for one in images),
            torch.tensor(call.scales)[images],
        )
        return replace(batch, **changes)


@pytest.fixture(scope="module")
def alone(zoo: Zoo) -> OneRank:
    with torch.inference_mode():
        return OneRank(zoo)


def test_one_rank_needs_no_other_process(alone: OneRank) -> None:
    with torch.inference_mode():
        found = alone.executor.predict(alone.batch(1), range(1))
    assert found is not None
    expected = alone.call.run(alone.whole)[1]
    found = found.unflatten(0, expected.shape[1:]).permute(2, 0, 1)
    assert difference(found, expected) <= CALL_TOLERANCE


def test_what_a_set_does_not_step_is_refused(alone: OneRank) -> None:
    """Before anything is exchanged, so that no rank waits for one that has refused."""
    one = range(1)
    with torch.inference_mode():
        with pytest.raises(ModelUnsupported, match="steps one request"):
            alone.executor.predict(alone.batch(0, 1), one)
        with pytest.raises(ModelUnsupported, match="nothing is reused"):
            alone.executor.predict(alone.batch(0, reuse=(RowReuse(1),)), one)
        with pytest.raises(ModelUnsupported, match="two ranks or more"):
            alone.executor.predict(alone.batch(1), one, "apart")
        with pytest.raises(ValueError, match="2 tokens cannot be on 4 ranks"):
            alone.executor.predict(alone.batch(0, prepared=(alone.short,)), range(4))
