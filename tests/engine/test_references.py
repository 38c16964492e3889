"""FLUX.1 Kontext: images made by looking at a picture, alone and in any company."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_cluster.engine.device.cuda_graphs import GraphedExecutor
from ray_cluster.engine.stages.building import build_runner
from ray_cluster.engine.stages.events import Decoded
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_call import LateLoras
from ray_cluster.errors import InvalidRequest
from ray_cluster.policies.steps.reuse import ReuseSchedule
from ray_cluster.requests import AddOns
from tests.engine.conftest import Zoo
from tests.engine.edits import edit_pixels, edit_request, template
from tests.engine.exactness import check
from tests.engine.harness import (
    CALL_TOLERANCE,
    CONTROL_FACTOR,
    PIXEL_TOLERANCE,
    RUN_TOLERANCE,
    difference,
    drive,
    engine_of,
    pixel_difference,
    pool,
    taken,
)
from tests.engine.low_rank import Adapter
from tests.engine.references import SEEN_PX, company, looking, pictures, start_looking
from tests.engine.reusing import Company
from tests.engine.test_cuda_graphs import record as captured
from tests.engine.test_merged_weights import made as merged
from tests.engine.test_patches import patches_of
from tests.engine.two_steps import StepRow, batch_of, call, predict_batch, timestep_of

Record = Callable[[str, object], None]
LOOKING = looking((64, 96))


def made(zoo: Zoo, states: Sequence[RequestState], deltas: Sequence[Any] = ()) -> list[Tensor]:
    """The final latents of states that step together, each with its LoRAs."""
    engine = engine_of(zoo.model("kontext"))
    for state, own in zip(states, deltas or [None] * len(states), strict=True):
        engine.add(state, own)
    run = drive(engine, {0: []})
    assert not run.failed
    return [run.latents(state.request.request_id) for state in states]


@pytest.mark.parametrize("size_px", SEEN_PX)
def test_alone_it_is_the_pipelines(zoo: Zoo, size_px: Any, record: Record) -> None:
    model, reference, one = zoo.model("kontext"), zoo.reference("kontext"), looking(size_px)
    [found] = made(zoo, start_looking(model, [one]))
    record("run", check(reference, one, found))
    with torch.inference_mode():
        pixels = model.decoder.decode([found])[0]
    expected = reference.outcome(one).pixels
    assert expected.std() > 1, "an empty image proves nothing"
    assert pixel_difference(pixels, expected) <= PIXEL_TOLERANCE


def test_beside_others_that_look_at_other_pictures_or_at_none_it_is_too(
    zoo: Zoo, record: Record
) -> None:
    model, requests = zoo.model("kontext"), company()
    states = start_looking(model, requests)
    run = drive(engine_of(model), {0: states[:5], 1: states[5:]})
    reference = zoo.reference("kontext")
    record("run", max(check(reference, one, run.latents(one.request_id)) for one in requests))


def test_so_it_is_with_loras_of_each_ones_own(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    """Of all layers: the one that embeds pictures and the image too."""
    model, reference, requests = zoo.model("kontext"), zoo.reference("kontext"), company()
    pipeline = reference.pipeline
    adapters = [Adapter.random(pipeline.transformer, 4 - seed, seed=seed) for seed in range(2)]
    bound = [None, *(model.executor.bind(one.factors) for one in adapters)]
    owned = [bound[index % 3] for index in range(len(requests))]
    found = made(zoo, start_looking(model, requests), owned)
    errors = []
    for place, one in enumerate(adapters, start=1):
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "transformer", one.merged(pipeline.transformer))
            errors += [
                difference(found[index], reference._latents([requests[index]])[0])
                for index in range(place, len(requests), 3)
            ]
    record("run", max(errors))
    assert max(errors) <= RUN_TOLERANCE
    plain = difference(found[2], reference.outcome(requests[2]).latents)
    assert plain >= CONTROL_FACTOR * RUN_TOLERANCE


def test_a_run_that_is_merged_on_its_way_is_the_unmerged_run(zoo: Zoo, record: Record) -> None:
    """Pictures are embedded by a layer whose weights change between two steps."""
    model, engine = zoo.model("kontext"), engine_of(zoo.model("kontext"))
    transformer = zoo.reference("kontext").pipeline.transformer
    own = model.executor.bind(Adapter.random(transformer, 3, seed=0).factors)
    requests = [LOOKING, looking((32, 32), "b", seed=2)]
    expected = made(zoo, start_looking(model, requests), [own, own])
    states = start_looking(model, requests)
    for state in states:
        engine.add(state, own)
    weights = merged(model.executor.merged(own))
    for number in range(4):
        if number == 2:
            engine.weights.merge(weights)
        with torch.inference_mode():
            assert not engine.step().failed
    engine.weights.unmerge()
    error = max(difference(state.latents, one) for state, one in zip(states, expected, strict=True))
    record("merged", error)
    assert error <= RUN_TOLERANCE


def test_rows_that_reuse_are_as_if_alone(zoo: Zoo, record: Record) -> None:
    """What is kept of blocks has a row for every token of the picture, too."""
    model = zoo.model("kontext")
    cuts = list(model.executor.num_outer)
    reuses = [ReuseSchedule(cuts[i % len(cuts)], 2) if i % 4 != 3 else None for i in range(8)]
    requests = [replace(one, num_steps=4) for one in company()]

    def states(*places: int) -> list[RequestState]:
        chosen = start_looking(model, [requests[place] for place in places])
        return [replace(one, reuse=reuses[at]) for one, at in zip(chosen, places, strict=True)]

    together = made(zoo, states(*range(8)))
    errors = [difference(one, made(zoo, states(at))[0]) for at, one in enumerate(together)]
    record("reuse", max(errors))
    assert max(errors) <= RUN_TOLERANCE


def test_a_step_of_some_patches_has_the_picture_as_it_was_kept(zoo: Zoo) -> None:
    """Of the same latents a partial step of all patches is the full one; of others, as if alone."""
    company_of = Company(zoo.model("kontext"))
    executor: Any = company_of.model.executor
    states = start_looking(company_of.model, [looking(one, f"{one}") for one in SEEN_PX])
    rows = [
        StepRow(executor.prepare(one.conditioning), False, 1, [one.latents, one.latents.flip(2)])
        for one in states
    ]
    for row in rows:
        row.active = patches_of(row.latents[0], 1, has_prompt=True)
    full = call(company_of, rows, 0)
    again = replace(batch_of(executor, rows, 1), timesteps=torch.full((4,), timestep_of(0)))
    again = replace(again, latents=batch_of(executor, rows, 0).latents)
    assert max(map(difference, predict_batch(executor, rows, again), full)) <= CALL_TOLERANCE
    for row in rows:
        row.active = patches_of(row.latents[0], 2, has_prompt=False)
    for row, found in zip(rows, call(company_of, rows, 1), strict=True):
        assert difference(call(company_of, [row], 1)[0], found) <= CALL_TOLERANCE


def test_loras_that_start_later_leave_the_picture(zoo: Zoo) -> None:
    """Their prompts are encoded anew, and the picture is not."""
    model = zoo.model("kontext")
    [state] = start_looking(model, [replace(LOOKING, add_ons=AddOns(lora_start_step=1))])
    assert state.lacks_loras
    [prompts] = start_looking(model, [looking(None)])
    engine = engine_of(model)
    engine.add(state)
    with torch.inference_mode():
        engine.step()
    engine.add_loras(state, LateLoras(None, prompts.conditioning))
    found = drive(engine, {0: []}).latents("a")
    [expected] = made(zoo, start_looking(model, [LOOKING]))
    assert difference(found, expected) == 0


def test_it_goes_on_from_its_bytes_as_it_would_have(zoo: Zoo) -> None:
    model, first = zoo.model("kontext"), engine_of(zoo.model("kontext"))
    [expected] = made(zoo, start_looking(model, [LOOKING]))
    states = start_looking(model, [LOOKING])
    drive(first, {0: states}, until=lambda _: first.steps_done_by_id["a"] == 2)
    data = taken(first, "a").to_bytes()
    state = RequestState.from_bytes(data, device="cpu", arrival_s=0.0, deadline_s=1e9)
    assert len(state.conditioning.references) == 1
    assert difference(made(zoo, [state])[0], expected) == 0


# --- what is done wrongly shows ---


def _moved_on(ids: Tensor) -> Tensor:
    """Positions of a picture one row further down."""
    return ids + (ids[:, :1] > 0) * torch.tensor([0, 1, 0])


def _as_the_image(ids: Tensor) -> Tensor:
    """Positions of a picture as if it were the image itself."""
    return ids * torch.tensor([0, 1, 1])


@pytest.mark.parametrize("wrong", [_moved_on, _as_the_image])
def test_pictures_at_other_positions_show(
    zoo: Zoo, wrong: Any, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    model, expected = zoo.model("kontext"), zoo.reference("kontext").outcome(LOOKING).latents
    positions: Any = model.executor._lean._positions  # type: ignore[attr-defined]
    embed = positions._embed
    monkeypatch.setattr(positions, "_embed", lambda ids: embed(wrong(ids)))
    positions._table.cache_clear()
    positions._kept.clear()
    error = difference(made(zoo, start_looking(model, [LOOKING]))[0], expected)
    positions._table.cache_clear()
    positions._kept.clear()
    record("control", error)
    assert error >= CONTROL_FACTOR * RUN_TOLERANCE


def test_another_picture_or_another_size_of_it_shows(zoo: Zoo, record: Record) -> None:
    """Of a neighbour of the same size; with a border of black; at the size of the image."""
    model, expected = zoo.model("kontext"), zoo.reference("kontext").outcome(LOOKING).latents
    [right] = start_looking(model, [LOOKING])
    [others] = start_looking(model, [replace(LOOKING, seed=2)])
    [latents] = right.conditioning.references
    wrongs = {
        "another's": others.conditioning.references[0],
        "padding": torch.nn.functional.pad(latents, (0, 4, 0, 4)),
        "size": latents[:, :16, :16],
    }
    errors = {}
    for name, wrong in wrongs.items():
        conditioning = replace(right.conditioning, references=(wrong,))
        state = replace(right.copy(), conditioning=conditioning)
        errors[name] = difference(made(zoo, [state])[0], expected)
    record("control", errors)
    assert min(errors.values()) >= CONTROL_FACTOR * RUN_TOLERANCE


# --- around the engine ---


def test_a_graph_takes_other_pictures_in(zoo: Zoo) -> None:
    model = zoo.model("kontext")
    graphed = GraphedExecutor(model.executor, capture=captured)
    for seed in (0, 50):
        requests = [replace(one, seed=one.seed + seed, num_steps=2) for one in company()[:4]]
        found = drive(engine_of(model, executor=graphed), {0: start_looking(model, requests)})
        expected = made(zoo, start_looking(model, requests))
        for one, latents in zip(requests, expected, strict=True):
            assert difference(found.latents(one.request_id), latents) <= RUN_TOLERANCE
    assert graphed.num_graphs == 1


def test_a_runner_encodes_pictures_beside_those_of_edits(zoo: Zoo) -> None:
    model = zoo.model("kontext")
    size = {"width_px": 96, "height_px": 64, "sampler": "flow_match_euler", "num_steps": 4}
    edit = replace(
        edit_request("edit", masked=False, strength=0.6, **size), references=LOOKING.references
    )
    requests = [LOOKING, looking(None, "plain"), edit]
    sent = [
        pictures(LOOKING),
        None,
        replace(pictures(edit), edit=edit_pixels(template((96, 64)), None)),
    ]
    runner, events = (
        build_runner(model, pool(zoo.folder("kontext")), clock=time.monotonic),
        queue.SimpleQueue[Any](),
    )
    runner.start(events.put)
    try:
        for one, pixels in zip(requests, sent, strict=True):
            runner.submit(one, deadline_s=time.monotonic() + 600, pixels=pixels)
        found: dict[str, Any] = {}
        while len(found) < len(requests):
            event = events.get(timeout=120)
            if isinstance(event, Decoded):
                found[event.request.request_id] = event.pixels
    finally:
        runner.stop()
    for one, pixels in zip(requests, sent, strict=True):
        [latents] = made(zoo, start_looking(model, [one], [pixels and pixels.edit]))
        with torch.inference_mode():
            expected = model.decoder.decode([latents])[0]
        assert pixel_difference(found[one.request_id], expected) <= PIXEL_TOLERANCE


def test_models_that_look_at_none_or_at_fewer_refuse(zoo: Zoo) -> None:
    two = replace(LOOKING, references=LOOKING.references * 2)
    with pytest.raises(InvalidRequest, match="1 pictures at most, given 2"):
        start_looking(zoo.model("kontext"), [two])
    with pytest.raises(InvalidRequest, match="0 pictures at most"):
        start_looking(zoo.model("flux"), [LOOKING])
