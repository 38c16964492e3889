"""What goes wrong with one request stays with it: errors, NaN, exhausted memory, aborts."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from ray_cluster.engine.building import build_engine
from ray_cluster.engine.memory import BatchCaps
from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.requests import SAMPLER_NAMES, ImageRequest
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    CONTROL_FACTOR,
    PIXEL_TOLERANCE,
    RUN_TOLERANCE,
    TAKES_NOISE,
    difference,
    drive,
    engine_of,
    pixel_difference,
    request,
    run_alone,
    start_all,
)
from tests.engine.staged import Running, StagedModel, StageName, until

Record = Callable[[str, object], None]

BAD = "bad"
STAGES: tuple[StageName, ...] = ("encode", "denoise", "decode")
ERRORS = (
    RuntimeError("no kernel for this"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    MemoryError(),
    ValueError("bad shape"),
    KeyError("attn2"),
    AssertionError(),
    ZeroDivisionError("division by zero"),
    OSError(5, "input/output error"),
    NotImplementedError("no such thing"),
)


def requests_with_a_bad_one() -> list[ImageRequest]:
    good = [request(f"r{i}", sampler=name, seed=i) for i, name in enumerate(SAMPLER_NAMES)]
    bad = request(BAD, seed=77, prompt="a large blue square", sampler="euler_ancestral")
    return [*good[:2], bad, *good[2:]]


@pytest.fixture(scope="module")
def staged(zoo: Zoo) -> StagedModel:
    return StagedModel(zoo.model("sd"), requests_with_a_bad_one())


@pytest.fixture(scope="module")
def pixels(staged: StagedModel) -> dict[str, Any]:
    return dict(staged.pixels())


@pytest.fixture
def model(staged: StagedModel) -> Iterator[StagedModel]:
    """The staged model as if nothing had been done to it."""
    staged.calls.clear()
    staged.before.clear()
    staged.nan_in.clear()
    yield staged
    staged.before.clear()
    staged.nan_in.clear()


def raises_for(stage: StageName, request_id: str, error: Exception) -> Callable[..., None]:
    def hook(at: StageName, ids: Sequence[str]) -> None:
        if at == stage and request_id in ids:
            raise error

    return hook


def check_peers(running: Running, pixels: dict[str, Any]) -> None:
    for key in pixels.keys() - {BAD}:
        assert pixel_difference(running.events.pixels_of(key), pixels[key]) <= PIXEL_TOLERANCE


# --- one request fails, in every stage, with every kind of error ---


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_of_one_request_fails_it_alone_and_names_the_stage(
    model: StagedModel, pixels: dict[str, Any], stage: StageName
) -> None:
    """With each kind of error in turn, on one runner that lives through all of them."""
    with Running(model.loaded) as running:
        for error in ERRORS:
            model.before[:] = [raises_for(stage, BAD, error)]
            running.events.all.clear()
            running.submit(*requests_with_a_bad_one())
            failure = running.events.failure_of(BAD)
            assert isinstance(failure, RequestFailed)
            assert failure.stage == stage
            assert type(error).__name__ in failure.message
            assert str(error) in failure.message
            check_peers(running, pixels)
            assert len(running.events.ends) == len(pixels)
            running.runner.check_alive(60.0)
            assert running.runner.num_in_flight == 0


@pytest.mark.parametrize("stage", STAGES)
def test_nan_in_one_request_fails_it_alone(
    model: StagedModel, pixels: dict[str, Any], stage: StageName
) -> None:
    model.nan_in[stage] = BAD
    with Running(model.loaded) as running:
        running.submit(*requests_with_a_bad_one())
        failure = running.events.failure_of(BAD)
        # the encoder's NaN shows in the first step
        assert failure.stage == ("decode" if stage == "decode" else "denoise")
        assert "NaN" in failure.message
        check_peers(running, pixels)
        assert model.steps_of(BAD) == (6 if stage == "decode" else 1)


def test_infinite_pixels_fail_as_nan_does(zoo: Zoo) -> None:
    model = zoo.model("sd")
    latents = run_alone(model, request())
    vae = model.decoder._vae
    decode = vae.decode
    try:
        vae.decode = lambda batch, return_dict: (decode(batch).sample + float("inf"),)
        with pytest.raises(ArithmeticError, match="infinite"), torch.inference_mode():
            model.decoder.decode([latents])
    finally:
        vae.decode = decode


@pytest.mark.parametrize("param", ["prompt", "negative_prompt"])
def test_a_prompt_that_is_too_long_is_refused_by_name(
    model: StagedModel, pixels: dict[str, Any], param: str
) -> None:
    good = [one for one in requests_with_a_bad_one() if one.request_id != BAD]
    with Running(model.loaded) as running:
        running.submit(good[0], request(BAD, **{param: "red " * 31}), *good[1:])
        refusal = running.events.failure_of(BAD)
        assert isinstance(refusal, InvalidRequest)
        assert refusal.param == param
        assert "31 tokens" in refusal.message
        assert "at most 30" in refusal.message
        check_peers(running, pixels)
        running.submit(request("longest", **{param: "red " * 30}))
        assert running.events.pixels_of("longest").any()


def test_the_second_half_of_the_model_may_fail_too(zoo: Zoo, model: StagedModel) -> None:
    """After `encode_half` has run, with everything in flight in one batch."""
    inner = zoo.model("sd").executor

    class FailsInSecondHalf:
        device, latent_shape = inner.device, inner.latent_shape
        encode_half = staticmethod(inner.encode_half)

        def decode_half(self, encoded: Any, residuals: Any = None) -> Any:
            if len(encoded.layout.latents) > 2:
                raise RuntimeError("lost the link")
            return inner.decode_half(encoded, residuals)

    good = [one for one in requests_with_a_bad_one() if one.request_id != BAD]
    states = start_all(zoo.model("sd"), good)
    run = drive(engine_of(zoo.model("sd"), executor=FailsInSecondHalf()), {0: states})
    assert not run.failed
    for one in good:
        error = difference(run.latents(one.request_id), model.final[one.request_id])
        assert error <= RUN_TOLERANCE


# --- peers are exactly where they would have been ---


class FailsWith:
    """Fails a step, once or always, when it has a certain row in it."""

    def __init__(self, inner: Any, error: Exception, marked: Any, at_calls: Sequence[int]) -> None:
        self.device, self.latent_shape = inner.device, inner.latent_shape
        self.decode_half = inner.decode_half
        self._inner, self._error, self._marked, self._at = inner, error, marked, at_calls
        self.num_calls = 0
        self.sizes: list[int] = []

    def encode_half(self, batch: Any) -> Any:
        self.num_calls += 1
        self.sizes.append(len(batch.conditionings))
        has_it = any(one is self._marked for one in batch.conditionings)
        if has_it and (not self._at or self.num_calls in self._at):
            raise self._error
        return self._inner.encode_half(batch)


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
def test_a_step_taken_again_draws_no_noise_twice(zoo: Zoo, sampler: str, record: Record) -> None:
    """The batch fails in its third step; its rows repeat it in parts and go on together."""
    model = zoo.model("sd")
    requests = [request(f"r{i}", sampler=sampler, seed=i) for i in range(4)]
    states = start_all(model, requests)
    executor = FailsWith(model.executor, RuntimeError("once"), states[1].conditioning, [3])
    run = drive(engine_of(model, executor=executor), {0: states})
    assert not run.failed
    assert executor.sizes == [4, 4, 4, 2, 2, 4, 4, 4]
    errors = [difference(run.latents(one.request_id), run_alone(model, one)) for one in requests]
    record("repeated step", max(errors))
    assert max(errors) <= RUN_TOLERANCE


@pytest.mark.parametrize("sampler", TAKES_NOISE)
def test_noise_drawn_twice_would_show(zoo: Zoo, sampler: str) -> None:
    model, one = zoo.model("sd"), request(sampler=sampler)
    (state,) = start_all(model, [one])
    torch.randn(1, 4, 16, 16, generator=state.generator)
    found = drive(engine_of(model), {0: [state]}).latents("a")
    assert difference(found, run_alone(model, one)) >= CONTROL_FACTOR * RUN_TOLERANCE


def test_a_row_that_always_fails_is_found_among_seven_peers_in_one_step(zoo: Zoo) -> None:
    model = zoo.model("sd")
    requests = [request(f"r{i}", sampler=SAMPLER_NAMES[i % 5], seed=i) for i in range(8)]
    states = start_all(model, requests)
    executor = FailsWith(model.executor, ValueError("it"), states[5].conditioning, [])
    engine = engine_of(model, executor=executor)
    for state in states:
        engine.add(state)
    with torch.inference_mode():
        report = engine.step()
    assert [row.state.request.request_id for row in report.failed] == ["r5"]
    assert executor.sizes == [8, 4, 4, 2, 1, 1, 2]
    assert len(engine) == 7
    assert set(engine.steps_done_by_id.values()) == {1}
    with torch.inference_mode():
        engine.step()
    assert executor.sizes[7:] == [7]


# --- memory that runs out ---


class RoomFor(FailsWith):
    """Runs out of memory with more than so many rows, or with a certain row."""

    def __init__(self, inner: Any, room: int, marked: Any = None) -> None:
        super().__init__(inner, torch.OutOfMemoryError("CUDA out of memory"), marked, [])
        self.room = room

    def encode_half(self, batch: Any) -> Any:
        if len(batch.conditionings) > self.room:
            self.sizes.append(len(batch.conditionings))
            raise self._error
        return super().encode_half(batch)


def engine_with_caps(zoo: Zoo, executor: Any, caps: BatchCaps) -> Any:
    from dataclasses import replace

    model = replace(zoo.model("sd"), executor=executor, max_batch_by_size=caps)
    return build_engine(model, clock=lambda: 0.0)


def test_a_batch_that_runs_out_of_memory_is_not_tried_again_at_that_size(
    zoo: Zoo, caplog: pytest.LogCaptureFixture, record: Record
) -> None:
    model = zoo.model("sd")
    requests = [request(f"r{i}", sampler=SAMPLER_NAMES[i % 5], seed=i) for i in range(8)]
    executor, caps = RoomFor(model.executor, 3), BatchCaps({(64, 64): 8, (128, 128): 4})
    with caplog.at_level(logging.WARNING):
        run = drive(engine_with_caps(zoo, executor, caps), {0: start_all(model, requests)})
    assert not run.failed
    # the first step finds out; nothing larger than what ran then is tried again
    assert executor.sizes[:7] == [8, 4, 2, 2, 4, 2, 2]
    assert set(executor.sizes[7:]) == {2}
    assert caps == {(64, 64): 2, (128, 128): 2}
    assert "batches of 64x64 are capped at 2" in caplog.text
    errors = [difference(run.latents(one.request_id), run_alone(model, one)) for one in requests]
    record("after running out of memory", max(errors))
    assert max(errors) <= RUN_TOLERANCE


def test_one_request_that_needs_too_much_fails_alone_and_lowers_no_cap(zoo: Zoo) -> None:
    model = zoo.model("sd")
    states = start_all(model, [request(f"r{i}", seed=i) for i in range(4)])
    caps = BatchCaps({(64, 64): 8})
    executor = RoomFor(model.executor, 8, states[2].conditioning)
    run = drive(engine_with_caps(zoo, executor, caps), {0: states})
    assert run.failed.keys() == {"r2"}
    assert run.finished.keys() == {"r0", "r1", "r3"}
    assert caps == {(64, 64): 8}
    assert executor.sizes[5:] == [3] * 5


def test_any_other_error_of_a_batch_lowers_no_cap(zoo: Zoo) -> None:
    model = zoo.model("sd")
    states = start_all(model, [request(f"r{i}", seed=i) for i in range(4)])
    caps = BatchCaps({(64, 64): 8})
    executor = FailsWith(model.executor, RuntimeError("once"), states[0].conditioning, [1])
    assert not drive(engine_with_caps(zoo, executor, caps), {0: states}).failed
    assert caps == {(64, 64): 8}


def test_a_lowered_cap_holds_for_larger_sizes_and_not_for_planned_smaller_ones() -> None:
    caps = BatchCaps({(64, 64): 8, (96, 96): 6, (128, 128): 4})
    caps.lower((80, 80), 5)
    assert [caps[size] for size in ((64, 64), (80, 80), (96, 96), (128, 128))] == [8, 5, 5, 4]
    caps.lower((96, 96), 0)
    assert [caps[size] for size in ((64, 64), (80, 80), (96, 96), (128, 128))] == [8, 5, 1, 1]
    caps.lower((96, 96), 7)
    assert caps[96, 96] == 1


def test_memory_of_a_failed_call_is_free_before_the_next_try(zoo: Zoo) -> None:
    """An exception's traceback keeps the call's tensors: the retry must come after it is gone."""
    import weakref

    inner = zoo.model("sd").executor
    alive: list[weakref.ref[Any]] = []
    seen: list[int] = []

    class Hungry(FailsWith):
        def encode_half(self, batch: Any) -> Any:
            seen.append(sum(one() is not None for one in alive))
            activations = torch.zeros(1000)
            alive.append(weakref.ref(activations))
            if len(batch.conditionings) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return inner.encode_half(batch)

    model = zoo.model("sd")
    states = start_all(model, [request(f"r{i}", num_steps=1) for i in range(4)])
    engine = engine_of(model, executor=Hungry(inner, ValueError(), None, []))
    assert not drive(engine, {0: states}).failed
    assert seen == [0] * 7


# --- aborts ---


@pytest.mark.parametrize("at", ["waiting to encode", *STAGES, "waiting to decode"])
def test_an_abort_is_effective_at_once_wherever_the_request_is(
    model: StagedModel, pixels: dict[str, Any], at: str
) -> None:
    bad, other = request(BAD, **_fields(requests_with_a_bad_one()[2])), requests_with_a_bad_one()[0]
    stage: StageName = "encode" if "encode" in at else "decode" if "decode" in at else "denoise"
    held = other if at.startswith("waiting") else bad
    gate = model.gate(stage, held.request_id, call=2 if stage == "denoise" else 0)
    with Running(model.loaded) as running:
        running.submit(held)
        if at.startswith("waiting"):
            gate.await_reached()
            running.submit(bad)
            if stage == "decode":
                until(lambda: running.runner.steps_done_by_id.get(BAD) == 6, "all steps")
        else:
            running.submit(other)
            gate.await_reached()
        num_calls = len(model.calls)
        assert running.runner.abort(BAD)
        assert not running.runner.abort(BAD)
        assert BAD not in running.runner.steps_done_by_id
        gate.open()
        assert pixel_difference(running.events.pixels_of("r0"), pixels["r0"]) <= PIXEL_TOLERANCE
        until(lambda: running.runner.num_in_flight == 0)
        assert BAD not in running.events.ended_ids
        assert all(BAD not in ids for _, ids in model.calls[num_calls:])
        if at != "waiting to encode":
            until(lambda: gc.collect() >= 0 and model.embeds[BAD]() is None, "the row's memory")


def _fields(one: ImageRequest) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__slots__ if name != "request_id"}


@pytest.mark.parametrize("at", STAGES)
def test_a_request_can_come_back_under_its_id_right_after_its_abort(
    model: StagedModel, pixels: dict[str, Any], at: StageName
) -> None:
    bad = requests_with_a_bad_one()[2]
    gate = model.gate(at, BAD, call=1 if at == "denoise" else 0)
    with Running(model.loaded) as running:
        running.submit(bad)
        gate.await_reached()
        with pytest.raises(ValueError, match="in flight already"):
            running.submit(bad)
        assert running.runner.abort(BAD)
        running.submit(bad)
        gate.open()
        assert pixel_difference(running.events.pixels_of(BAD), pixels[BAD]) <= PIXEL_TOLERANCE
        until(lambda: running.runner.num_in_flight == 0)
        assert running.events.ended_ids == [BAD]
        running.runner.check_alive(60.0)


def test_nothing_of_a_finished_request_is_kept_by_an_idle_runner(model: StagedModel) -> None:
    with Running(model.loaded) as running:
        running.submit(*requests_with_a_bad_one())
        for one in requests_with_a_bad_one():
            running.events.end_of(one.request_id)
        running.events.all.clear()
        until(
            lambda: (
                gc.collect() >= 0 and not any(ref() is not None for ref in model.embeds.values())
            ),
            "the rows' memory",
        )
