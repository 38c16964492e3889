"""One request fails, and its peers do not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.kernels.sampler_update.reference import sampler_update
from ray_cluster.requests import SAMPLER_NAMES
from tests.engine.conftest import Zoo
from tests.engine.failing import (
    BAD,
    ERRORS,
    STAGES,
    FailsWith,
    check_peers,
    raises_for,
    requests_with_a_bad_one,
)
from tests.engine.harness import (
    CONTROL_FACTOR,
    RUN_TOLERANCE,
    TAKES_NOISE,
    difference,
    drive,
    engine_of,
    request,
    run_alone,
    start_all,
)
from tests.engine.staged import Running, StagedModel, StageName

Record = Callable[[str, object], None]

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
        num_conditions = 0
        num_levels, prepare = inner.num_levels, staticmethod(inner.prepare)
        encode_half = staticmethod(inner.encode_half)

        def decode_half(self, encoded: Any, residuals: Any = None) -> Any:
            if len(encoded.batch.prepared) > 2:
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


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
def test_a_step_taken_again_draws_no_noise_twice(zoo: Zoo, sampler: str, record: Record) -> None:
    """The batch fails in its third step; its rows repeat it in parts and go on together."""
    model = zoo.model("sd")
    requests = [request(f"r{i}", sampler=sampler, seed=i) for i in range(4)]
    states = start_all(model, requests)
    executor = FailsWith(model.executor, RuntimeError("once"), states[1].conditioning, [3])
    run = drive(engine_of(model, executor=executor), {0: states})
    assert not run.failed
    # the method of pndm takes one call more
    assert executor.sizes == [4, 4, 4, 2, 2, 4, 4, 4, *[4] * (sampler == "pndm")]
    errors = [difference(run.latents(one.request_id), run_alone(model, one)) for one in requests]
    record("repeated step", max(errors))
    assert max(errors) <= RUN_TOLERANCE


@pytest.mark.parametrize("sampler", TAKES_NOISE)
def test_an_update_that_fails_after_the_noise_is_drawn_gives_it_back(
    zoo: Zoo, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_calls = 0

    def fails_once(*tensors: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return sampler_update(*tensors)

    model = zoo.model("sd")
    requests = [request(f"r{i}", sampler=sampler, seed=i) for i in range(3)]
    expected = {one.request_id: run_alone(model, one) for one in requests}
    monkeypatch.setattr("ray_cluster.engine.step.mixed_step.sampler_update", fails_once)
    run = drive(engine_of(model), {0: start_all(model, requests)})
    assert num_calls == 3 + 2 + 3
    for key, latents in expected.items():
        assert difference(run.latents(key), latents) <= RUN_TOLERANCE


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
