"""A call on any set of ranks is the call of one process, and of diffusers' transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.engine.conftest import WIDE_FLUX, Zoo
from tests.engine.dits import dit_request
from tests.engine.groups.calls import WAYS, OnRanks, RoamingExecutor, Way, calls_of
from tests.engine.groups.rank_processes import RankProcesses
from tests.engine.harness import (
    CALL_TOLERANCE,
    CONTROL_FACTOR,
    RUN_TOLERANCE,
    call_model,
    difference,
    drive,
    engine_of,
    run_alone,
    start_all,
)
from tests.engine.low_rank import Adapter

# the ranks are started once for all of them
pytestmark = pytest.mark.xdist_group("ranks")
Record = Callable[[str, object], None]

PAIR: Way = (range(2), "together")
WHOLE: Way = (range(4), "together")
HALVES: Way = (range(4), "apart")
# the last of them with stacked factors
NUM_STEPS = 5


def check_every_way(zoo: Zoo, name: str, ranks: RankProcesses, record: Record) -> None:
    """Hold calls on all sets against both references."""
    call = calls_of(zoo, name)
    ours, theirs = call.run(zoo.model(name)), call.expected(zoo.reference(name))
    assert min(float(one.std()) for one in theirs) > 1e-2
    there = OnRanks(ranks, zoo.folder(name), call)
    there.keep()
    errors = []
    for way in WAYS:
        found = there.run(way)
        errors += [*call.errors(found, ours), *call.errors(found, theirs)]
    record(f"ranks {name}", max(errors))
    assert max(errors) <= CALL_TOLERANCE


@pytest.mark.parametrize("name", ["sd3", WIDE_FLUX, "shapes-sd3"])
def test_a_call_on_any_set_is_that_of_one_process_and_of_the_transformer(
    zoo: Zoo, name: str, ranks: RankProcesses, record: Record
) -> None:
    check_every_way(zoo, name, ranks, record)


def test_so_is_one_of_a_model_with_a_second_attention(
    zoo: Zoo, ranks: RankProcesses, record: Record
) -> None:
    check_every_way(zoo, "sd35", ranks, record)


def test_so_is_one_that_looks_at_a_picture(zoo: Zoo, ranks: RankProcesses, record: Record) -> None:
    call, generator = calls_of(zoo, WIDE_FLUX), torch.Generator().manual_seed(1)
    plain, seen = call.run(zoo.model(WIDE_FLUX)), torch.randn(8, 10, 14, generator=generator)
    call.conditionings = [replace(one, references=(seen,)) for one in call.conditionings]
    ours = call.run(zoo.model(WIDE_FLUX))
    there = OnRanks(ranks, zoo.folder(WIDE_FLUX), call)
    there.keep()
    errors = [error for way in WAYS for error in call.errors(there.run(way), ours)]
    record("ranks, looking", max(errors))
    assert max(errors) <= CALL_TOLERANCE
    assert min(call.errors(plain, ours)) >= CONTROL_FACTOR * CALL_TOLERANCE


@pytest.mark.parametrize("name", ["sd3", WIDE_FLUX])
def test_a_call_with_deltas_is_that_of_the_transformer_with_them_in_its_weights(
    zoo: Zoo, name: str, ranks: RankProcesses, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all layers, at first one by one and then stacked; in one process, too."""
    call, executor = calls_of(zoo, name), zoo.model(name).executor
    pipeline = zoo.reference(name).pipeline
    adapters = [Adapter.random(pipeline.transformer, rank, seed=rank) for rank in (4, 3)]
    expected = []
    for index, one in enumerate(adapters):
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "transformer", one.merged(pipeline.transformer))
            expected.append(call.expected(zoo.reference(name))[index])
    owned = [executor.bind(one.factors) for one in adapters]
    rows = (call.latents, call.timesteps, call.conditionings, call.scales)
    ours = call_model(executor, *rows, owned)
    there = OnRanks(ranks, zoo.folder(name), call)
    there.keep([one.factors for one in adapters])
    errors = call.errors(ours, expected)
    for way in WAYS:
        for index in range(len(adapters)):
            for _ in range(NUM_STEPS):
                [found] = ranks.predict(there.call(index, way))
            errors += [there.error(index, found, one) for one in (ours, expected)]
    record(f"ranks {name}, deltas", max(errors))
    assert max(errors) <= CALL_TOLERANCE
    # one rank has the other's
    there.keep([adapters[1].factors, adapters[0].factors], on=[1])
    for index, way in ((0, PAIR), (1, WHOLE), (1, HALVES)):
        [found] = ranks.predict(there.call(index, way))
        error = there.error(index, found, expected)
        record(f"control, deltas of {way}", error)
        assert error >= CONTROL_FACTOR * CALL_TOLERANCE


@pytest.mark.parametrize("name", ["sd3", WIDE_FLUX])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_run_whose_steps_are_all_on_other_ranks_is_that_of_one_process(
    zoo: Zoo, name: str, scale: float, ranks: RankProcesses, record: Record
) -> None:
    model = zoo.model(name)
    one = dit_request(num_steps=len(WAYS), width_px=56, height_px=72, guidance_scale=scale)
    roaming = RoamingExecutor(model.executor, ranks, zoo.folder(name))
    run = drive(engine_of(model, executor=roaming), {0: start_all(model, [one])})
    assert not run.failed
    assert roaming.num_calls == len(WAYS)
    error = difference(run.latents(one.request_id), run_alone(model, one))
    record(f"roaming {name}", error)
    assert error <= RUN_TOLERANCE
    theirs = zoo.reference(name).outcome(one).latents
    assert difference(run.latents(one.request_id), theirs) <= RUN_TOLERANCE


def test_sets_that_share_no_rank_step_at_once(zoo: Zoo, ranks: RankProcesses) -> None:
    call = calls_of(zoo, "sd3")
    expected = call.expected(zoo.reference("sd3"))
    there = OnRanks(ranks, zoo.folder("sd3"), call)
    there.keep()
    upper: Way = (range(2, 4), "apart")
    for ways in ((PAIR, upper), ((range(1), "together"), upper)):
        found = ranks.predict(*(there.call(index, way) for index, way in enumerate(ways)))
        assert max(call.errors(found, expected)) <= CALL_TOLERANCE


@pytest.mark.parametrize("name", ["sd3", WIDE_FLUX])
@pytest.mark.parametrize("way", [PAIR, WHOLE, HALVES], ids=["pair", "whole", "halves"])
def test_a_rank_with_the_latents_of_another_step_shows(
    zoo: Zoo, name: str, way: Way, ranks: RankProcesses, record: Record
) -> None:
    call = calls_of(zoo, name)
    expected = call.expected(zoo.reference(name))
    there = OnRanks(ranks, zoo.folder(name), call)
    there.keep()
    right = there.call(1, way)
    stale = replace(right, latents=0.9 * right.latents)
    found = ranks.predict_unlike({rank: stale if rank == 1 else right for rank in way[0]})
    error = there.error(1, found, expected)
    record(f"control, stale {name}", error)
    assert error >= CONTROL_FACTOR * CALL_TOLERANCE


@pytest.mark.parametrize("name", ["sd3", WIDE_FLUX])
def test_tokens_of_two_ranks_that_change_places_show(
    zoo: Zoo, name: str, ranks: RankProcesses, record: Record
) -> None:
    """Of even numbers of tokens: ranks would not exchange others at all."""
    call = calls_of(zoo, name, sizes_px=[(64, 64), (64, 64)], num_prompt=32)
    expected = call.expected(zoo.reference(name))
    there = OnRanks(ranks, zoo.folder(name), call)
    there.keep()
    right = there.call(1, PAIR)
    [found] = ranks.predict(right)
    assert there.error(1, found, expected) <= CALL_TOLERANCE
    found = ranks.predict_unlike({rank: replace(right, acts_as=1 - rank) for rank in PAIR[0]})
    error = there.error(1, found, expected)
    record(f"control, places {name}", error)
    assert error >= CONTROL_FACTOR * CALL_TOLERANCE
