"""A request that moves between engines, or processes, makes the image it would have made."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.step.state import RequestState
from ray_cluster.policies.fidelity import FewerSteps, Terms
from ray_cluster.requests import SAMPLER_NAMES, ImageRequest, OutputSpec
from ray_cluster.storage.state_format import StateHeader, header_text
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    CONTROL_FACTOR,
    RUN_TOLERANCE,
    TAKES_NOISE,
    difference,
    drive,
    engine_of,
    request,
    run_alone,
    start,
    start_all,
    taken,
)

Record = Callable[[str, object], None]


def after(model: LoadedModel, one: ImageRequest, num_steps: int) -> RequestState:
    """The state of a request exported after so many steps."""
    engine = engine_of(model)
    engine.add(start(model, one))
    with torch.inference_mode():
        for _ in range(num_steps):
            engine.step()
    return taken(engine, one.request_id)


def moved(data: bytes) -> RequestState:
    return RequestState.from_bytes(data, device="cpu", arrival_s=0.0, deadline_s=1e9)


@pytest.fixture(scope="module")
def exported(zoo: Zoo) -> bytes:
    return after(zoo.model("sd"), request(sampler="dpmpp_2m"), 3).to_bytes()


@pytest.mark.parametrize(
    ("name", "sampler"), [*(("sd", one) for one in SAMPLER_NAMES), ("sdxl", "dpmpp_2m")]
)
def test_a_request_goes_on_in_another_engine_after_any_step(
    zoo: Zoo, name: str, sampler: str, record: Record
) -> None:
    model = zoo.model(name)
    one = request(sampler=sampler, num_steps=5, negative_prompt="blue")
    expected = run_alone(model, one)
    errors = []
    for num_steps in range(5):
        state = moved(after(model, one, num_steps).to_bytes())
        assert state.request == one
        assert state.step_index == num_steps
        run = drive(engine_of(model), {0: [state]})
        errors.append(difference(run.latents(one.request_id), expected))
    record("moved", max(errors))
    # the same arithmetic on the same numbers
    assert errors == [0.0] * 5


def test_a_request_moves_into_an_engine_that_is_busy(zoo: Zoo, record: Record) -> None:
    model = zoo.model("shapes")
    requests = [request(f"r{i}", sampler=name, seed=i) for i, name in enumerate(SAMPLER_NAMES)]
    expected = {one.request_id: run_alone(model, one) for one in requests}
    states = [moved(after(model, one, 2).to_bytes()) for one in requests]
    peers = start_all(model, [request(f"p{i}", num_steps=4 + i, seed=50 + i) for i in range(3)])
    run = drive(engine_of(model), {0: peers, 1: states})
    errors = [difference(run.latents(key), latents) for key, latents in expected.items()]
    record("moved into company", max(errors))
    assert max(errors) <= RUN_TOLERANCE


_OTHER_PROCESS = """
import sys, time
from pathlib import Path
import torch
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.models.loading import load_model
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.engine.stages.warmup import prepare_threads

prepare_threads(1)
model = load_model(PoolConfig(name="m", model=sys.argv[1], max_px=128))
for path in map(Path, sys.argv[2:]):
    engine = StepEngine(
        model.executor,
        lambda rows, now_s: [row.request.request_id for row in rows],
        model.tables,
        time.monotonic,
    )
    engine.add(
        RequestState.from_bytes(path.read_bytes(), device="cpu", arrival_s=0.0, deadline_s=1.0)
    )
    with torch.inference_mode():
        while len(engine):
            report = engine.step()
    torch.save(report.finished[0].latents.clone(), path.with_suffix(".pt"))
"""


@pytest.mark.slow
def test_every_sampler_goes_on_in_another_process(zoo: Zoo, tmp_path: Path, record: Record) -> None:
    model, paths = zoo.model("sd"), []
    for sampler in SAMPLER_NAMES:
        path = tmp_path / f"{sampler}.state"
        path.write_bytes(after(model, request(sampler=sampler), 3).to_bytes())
        paths.append(path)
    arguments = [str(zoo.folder("sd")), *map(str, paths)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _OTHER_PROCESS, *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    errors = []
    for sampler, path in zip(SAMPLER_NAMES, paths, strict=True):
        found = torch.load(path.with_suffix(".pt"), weights_only=True)
        errors.append(difference(found, run_alone(model, request(sampler=sampler))))
    record("other process", max(errors))
    assert max(errors) <= RUN_TOLERANCE


def test_all_of_a_request_survives_the_way(zoo: Zoo) -> None:
    one = request(
        "späť/1",
        prompt="赤い円 \N{LARGE RED CIRCLE} ' \"\n",
        negative_prompt="\x00é",
        guidance_scale=0.1 + 0.2,
        seed=2**63 - 1,
        slo_s=1.5,
        priority=-3,
        output=OutputSpec("webp", 80, metadata=False),
    )
    state = start(zoo.model("sdxl"), one)
    state.queued_s, state.encode_s, state.denoise_s = 1.0, 2.0, 3.0
    found = moved(state.to_bytes())
    assert found.request == one
    assert (found.queued_s, found.encode_s, found.denoise_s) == (1.0, 2.0, 3.0)
    assert found.conditioning.tensors().keys() == state.conditioning.tensors().keys()
    for name, tensor in state.conditioning.tensors().items():
        assert torch.equal(tensor, found.conditioning.tensors()[name])


# --- what must not work ---


@pytest.mark.parametrize("sampler", TAKES_NOISE)
def test_noise_that_starts_over_shows(zoo: Zoo, sampler: str) -> None:
    model, one = zoo.model("shapes"), request(sampler=sampler)
    state = after(model, one, 3)
    state.generator.manual_seed(one.seed)
    wrong = drive(engine_of(model), {0: [moved(state.to_bytes())]}).latents("a")
    assert difference(wrong, run_alone(model, one)) >= CONTROL_FACTOR * RUN_TOLERANCE


def test_a_lost_history_of_the_two_step_sampler_shows(zoo: Zoo) -> None:
    model, one = zoo.model("shapes"), request(sampler="dpmpp_2m")
    state = after(model, one, 3)
    state.denoised = torch.zeros_like(state.denoised)
    wrong = drive(engine_of(model), {0: [moved(state.to_bytes())]}).latents("a")
    assert difference(wrong, run_alone(model, one)) >= CONTROL_FACTOR * RUN_TOLERANCE


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
def test_a_step_too_few_shows(zoo: Zoo, sampler: str) -> None:
    model, one = zoo.model("shapes"), request(sampler=sampler)
    state = after(model, one, 3)
    state.step_index += 1
    run = drive(engine_of(model), {0: [moved(state.to_bytes())]})
    if sampler == "pndm":
        # it has no output for the step that is left out
        assert list(run.failed) == ["a"]
        return
    error = difference(run.latents("a"), run_alone(model, one))
    assert error >= CONTROL_FACTOR * RUN_TOLERANCE


def test_truncated_bytes_are_refused_wherever_they_end(exported: bytes) -> None:
    lengths = {*range(64), *range(64, len(exported), 97), len(exported) - 1}
    for length in lengths:
        with pytest.raises(ValueError, match="request state"):
            moved(exported[:length])


def test_a_changed_byte_is_noticed_wherever_it_is(exported: bytes) -> None:
    for position in {*range(400), *range(400, len(exported), 211), len(exported) - 1}:
        damaged = bytearray(exported)
        damaged[position] ^= 0x10
        with pytest.raises(ValueError, match="request state"):
            moved(bytes(damaged))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 200,
        b"\xff" * 200,
        b"not a state",
        b"[]" * 50,
        b"ray-cluster request state 4\n",
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="request state"):
        moved(data)


def test_a_state_of_another_version_is_refused(
    exported: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="not a request state"):
        moved(exported.replace(b"state 4", b"state 9", 1))
    state = moved(exported)

    def newer(header: StateHeader) -> str:
        # a newer replica added a field; the checksum holds
        text = json.loads(header_text(header))
        text["value"]["colour_space"] = "p3"
        return json.dumps(text)

    monkeypatch.setattr("ray_cluster.engine.step.state.header_text", newer)
    with pytest.raises(ValueError, match=r"no value of StateHeader: unknown fields: colour_space"):
        moved(state.to_bytes())


def test_all_of_a_request_that_was_degraded_comes_back(zoo: Zoo) -> None:
    terms = Terms("balanced", 20, 5, FewerSteps(20, 7, 5, 0.96, 0.9))
    one = replace(request(), terms=terms, call_id="call", job_id="job")
    found = moved(after(zoo.model("sd"), one, 2).to_bytes()).request
    assert found == one
    assert found.terms == terms
    assert (found.call_id, found.job_id, found.fidelity) == ("call", "job", one.fidelity)


def test_a_copy_of_the_state_is_not_tied_to_the_original(zoo: Zoo) -> None:
    model, one = zoo.model("sd"), request(sampler="euler_ancestral")
    state = after(model, one, 2)
    data = state.to_bytes()
    first = drive(engine_of(model), {0: [state]}).latents("a")
    second = drive(engine_of(model), {0: [moved(data)]}).latents("a")
    assert difference(first, second) == 0.0
    assert replace(one) == moved(data).request
