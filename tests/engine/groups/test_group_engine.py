"""The engine of a group on virtual time: what it makes, when, and on how many ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.engine.groups.group_engine import GroupEngine
from ray_cluster.engine.step.state import RequestState
from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.steps.reuse import ReuseSchedule
from tests.engine.conftest import Zoo
from tests.engine.dits import dit_request
from tests.engine.groups.virtual_ranks import COSTS, VirtualRanks, group_of, run
from tests.engine.harness import RUN_TOLERANCE, difference, engine_of, start, start_all

SIZES = ((64, 64), (128, 128), (96, 64), (64, 64), (128, 64))


def _states(zoo: Zoo, name: str, count: int = 5, slo_s: float = 1e3) -> list[RequestState]:
    requests = [
        dit_request(
            f"r{i}",
            width_px=SIZES[i % 5][0],
            height_px=SIZES[i % 5][1],
            guidance_scale=(1.0, 3.0)[i % 2],
            seed=i,
        )
        for i in range(count)
    ]
    states = start_all(zoo.model(name), requests, deadline_s=slo_s)
    return [replace(one, generator=one.generator.clone_state()) for one in states]


def _alone(zoo: Zoo, name: str, state: RequestState) -> torch.Tensor:
    engine = engine_of(zoo.model(name))
    engine.add(state.copy())
    while len(engine):
        report = engine.step()
    return report.finished[0].latents


@pytest.mark.parametrize("name", ["sd3", "flux"])
@torch.inference_mode()
def test_images_are_those_of_one_rank_whatever_ranks_they_step_on(zoo: Zoo, name: str) -> None:
    engine, ranks = group_of(zoo.model(name))
    states = _states(zoo, name)
    expected = {one.request.request_id: _alone(zoo, name, one) for one in states}
    for state in states:
        engine.add(state)
    reports = run(engine, ranks)
    found = {one.request.request_id: one for report in reports for one in report.finished}
    assert max(difference(found[key].latents, expected[key]) for key in expected) <= RUN_TOLERANCE
    assert {len(step.ranks) for _, step in ranks.begun} > {1}
    for state in found.values():
        assert sum(state.steps_by_degree.values()) == state.request.num_steps
    assert sum(engine.tally.steps.values()) == len(ranks.begun)
    assert not ranks.kept


def _end_s(
    engine: GroupEngine, ranks: VirtualRanks, states: list[RequestState]
) -> dict[str, float]:
    for state in states:
        engine.add(state)
    ends: dict[str, float] = {}
    while len(engine):
        if engine.can_step:
            for one in engine.step().finished:
                ends[one.request.request_id] = ranks.now_s
        if ranks.running:
            ranks.pass_time()
    return ends


@torch.inference_mode()
def test_one_alone_has_all_ranks_and_an_urgent_one_takes_some(zoo: Zoo) -> None:
    engine, ranks = group_of(zoo.model("sd3"))
    (state,) = _states(zoo, "sd3", 1)
    view = state.request.view(arrival_s=0.0, deadline_s=1e3, steps_done=0)
    ends = _end_s(engine, ranks, [state])
    num_steps = state.request.num_steps
    assert ends["r0"] == pytest.approx(num_steps * step_s(COSTS[4], work_of([view])))
    assert {len(step.ranks) for _, step in ranks.begun} == {4}


@torch.inference_mode()
def test_a_flood_of_small_ones_does_not_starve_a_large_one(zoo: Zoo) -> None:
    """All deadlines can be met: the large one is in time though small ones keep coming."""
    engine, ranks = group_of(zoo.model("sd3"))
    large = dit_request("large", width_px=128, height_px=128, guidance_scale=1.0)
    state = start(zoo.model("sd3"), large)
    view = large.view(arrival_s=0.0, deadline_s=0.0, steps_done=0)
    due_s = 2 * large.num_steps * step_s(COSTS[4], work_of([view]))
    engine.add(replace(state, deadline_s=due_s))
    number, ends = 0, dict[str, float]()
    while "large" not in ends:
        if number < 60 and number * due_s / 20 <= ranks.now_s:
            small = dit_request(f"s{number}", guidance_scale=1.0, num_steps=2)
            engine.add(
                start(
                    zoo.model("sd3"),
                    small,
                    arrival_s=ranks.now_s,
                    deadline_s=ranks.now_s + due_s,
                )
            )
            number += 1
        if engine.can_step:
            ends |= {one.request.request_id: ranks.now_s for one in engine.step().finished}
        if ranks.running:
            ranks.pass_time()
    assert ends["large"] <= due_s + 1e-9
    assert number > 10


@torch.inference_mode()
def test_what_cannot_be_in_time_is_made_all_the_same(zoo: Zoo) -> None:
    engine, ranks = group_of(zoo.model("sd3"))
    states = _states(zoo, "sd3", 4, slo_s=1e-3)
    assert set(_end_s(engine, ranks, states)) == {"r0", "r1", "r2", "r3"}


@torch.inference_mode()
def test_lost_ranks_cost_the_step_in_flight_alone(zoo: Zoo) -> None:
    engine, ranks = group_of(zoo.model("sd3"))
    states = _states(zoo, "sd3", 3)
    expected = {one.request.request_id: _alone(zoo, "sd3", one) for one in states}
    for state in states:
        engine.add(state)
    found: dict[str, RequestState] = {}
    for turn in range(200):
        if turn % 7 == 3 and ranks.running and turn < 40:
            ranks.lose()
            engine.step()
            assert not engine.can_step
            ranks.come_back()
        if engine.can_step:
            found |= {one.request.request_id: one for one in engine.step().finished}
        if ranks.running:
            ranks.pass_time()
    assert engine.tally.num_lost > 0
    assert max(difference(found[key].latents, expected[key]) for key in expected) <= RUN_TOLERANCE
    for key, state in found.items():
        assert state.step_index == state.request.num_steps, key


@torch.inference_mode()
def test_a_step_that_takes_the_ranks_with_it_again_and_again_has_failed(zoo: Zoo) -> None:
    engine, ranks = group_of(zoo.model("sd3"))
    engine.add(_states(zoo, "sd3", 1)[0])
    failed = []
    for _ in range(5):
        failed += engine.step().failed
        if not ranks.running:
            break
        ranks.lose()
        ranks.come_back()
    assert [one.error.stage for one in failed] == ["denoise"]
    assert len(engine) == 0


@torch.inference_mode()
def test_an_abort_within_a_step_frees_its_ranks_at_its_end(zoo: Zoo) -> None:
    engine, ranks = group_of(zoo.model("sd3"))
    first, second = _states(zoo, "sd3", 2)
    engine.add(first)
    engine.step()
    assert engine.seats == {"r0": (0, 1, 2, 3)}
    assert engine.abort("r0")
    engine.add(second)
    engine.step()
    assert len(ranks.begun) == 1, "its ranks are at a step yet"
    ranks.pass_time()
    report = engine.step()
    assert report.stepped == ()
    assert [len(step.ranks) for _, step in ranks.begun] == [4, 4]
    assert [one.request.request_id for r in run(engine, ranks) for one in r.finished] == ["r1"]


def _lora(zoo: Zoo, seed: int) -> dict[str, LowRank]:
    generator = torch.Generator().manual_seed(seed)
    return {
        path: LowRank(
            torch.randn(2, layer.in_features, generator=generator),
            torch.randn(layer.out_features, 2, generator=generator) / 4,
        )
        for path, layer in zoo.model("sd3").executor.layers.items()
        if path.endswith("attn.to_q") and isinstance(layer, torch.nn.Linear)
    }


@torch.inference_mode()
def test_loras_of_one_are_not_those_of_another(zoo: Zoo) -> None:
    model = zoo.model("sd3")
    loras = [_lora(zoo, seed) for seed in range(2)]
    engine, ranks = group_of(model)
    states = _states(zoo, "sd3", 3)
    alone = engine_of(model)
    expected = []
    for state, lora in zip(states, [*loras, None], strict=True):
        alone.add(state.copy(), None if lora is None else model.executor.bind(lora))
        while len(alone):
            report = alone.step()
        expected.append(report.finished[0].latents)
        engine.add(state, None if lora is None else ranks.bind(lora))
    found = {one.request.request_id: one for r in run(engine, ranks) for one in r.finished}
    for number, latents in enumerate(expected):
        assert difference(found[f"r{number}"].latents, latents) <= RUN_TOLERANCE


def test_reuse_schedules_and_controlnets_are_refused(zoo: Zoo) -> None:
    engine, _ = group_of(zoo.model("sd3"))
    (state,) = _states(zoo, "sd3", 1)
    with pytest.raises(ValueError, match="reuse schedule"):
        engine.add(replace(state, reuse=ReuseSchedule.parse("outer1-every2")))


@torch.inference_mode()
def test_requests_on_other_ranks_than_the_lost_one_are_not_blamed(zoo: Zoo) -> None:
    engine, ranks = group_of(zoo.model("sd3"))
    for state in _states(zoo, "sd3", 4, slo_s=1e-3):
        engine.add(state)
    failed: list[str] = []
    for _ in range(20):
        failed += [one.state.request.request_id for one in engine.step().failed]
        if failed:
            break
        (first,) = {step.ranks.start for _, _, step, _ in ranks.running.values()} & {0}
        ranks.lose(first)
        ranks.come_back()
    assert len(failed) == 1
    assert len(run(engine, ranks)) > 0
