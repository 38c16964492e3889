"""The engine makes what the SD3 and FLUX pipelines make, alone and in any company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ray_cluster.engine.step.state import RequestState
from ray_cluster.requests import ImageRequest
from tests.engine.conftest import Zoo
from tests.engine.dits import PROMPT, SIZES_PX, dit_request
from tests.engine.exactness import GUIDANCE, check
from tests.engine.harness import (
    CONTROL_FACTOR,
    PIXEL_TOLERANCE,
    RUN_TOLERANCE,
    EngineRun,
    difference,
    drive,
    engine_of,
    pixel_difference,
    run_alone,
    start_all,
    taken,
)

Record = Callable[[str, object], None]


def requests_of_all_kinds() -> list[ImageRequest]:
    """One per size and kind of guidance in turn, all of different steps, prompts and seeds."""
    # twice the guidance that the trained model is made for, at most: more multiplies its rounding
    guidance = [{"guidance_scale": scale} for scale in (1.0, 2.0, 4.0)]
    guidance[2]["negative_prompt"] = "blue square"
    return [
        dit_request(
            f"r{index}",
            prompt=f"{'large ' * index}{PROMPT}",
            num_steps=2 + index % 3,
            seed=100 + index,
            width_px=SIZES_PX[index % 5][0],
            height_px=SIZES_PX[index % 5][1],
            **guidance[index % 3],
        )
        for index in range(8)
    ]


def check_all(zoo: Zoo, name: str, requests: list[ImageRequest], run: EngineRun) -> float:
    """Hold the latents and the image of each against the pipeline's; return the worst error."""
    model, reference, errors = zoo.model(name), zoo.reference(name), []
    for one in requests:
        latents = run.latents(one.request_id)
        errors.append(check(reference, one, latents))
        with torch.inference_mode():
            pixels = model.decoder.decode([latents])[0]
        expected = reference.outcome(one).pixels
        assert expected.std() > 1, "an empty image proves nothing"
        assert pixel_difference(pixels, expected) <= PIXEL_TOLERANCE
    return max(errors)


@pytest.mark.parametrize("guidance", GUIDANCE)
def test_a_request_alone_gives_the_latents_and_the_image_of_the_pipeline(
    zoo: Zoo, dit: str, guidance: str, record: Record
) -> None:
    one = dit_request(**GUIDANCE[guidance])
    run = drive(engine_of(zoo.model(dit)), {0: start_all(zoo.model(dit), [one])})
    record("run", check_all(zoo, dit, [one], run))


def test_images_of_all_sizes_step_together_while_others_join_and_leave(
    zoo: Zoo, dit: str, record: Record
) -> None:
    model, requests = zoo.model(dit), requests_of_all_kinds()
    states = start_all(model, requests)
    guest = start_all(model, [dit_request("guest", width_px=96, seed=5)])
    joining = {0: states[:5], 1: [*states[5:], *guest]}
    run = drive(engine_of(model), joining, leaving={2: ["guest"]})
    assert max(run.batch_sizes) == 9
    assert "guest" not in run.finished
    record("run", check_all(zoo, dit, requests, run))


def test_an_image_goes_on_from_its_bytes(zoo: Zoo, dit: str) -> None:
    model, one = zoo.model(dit), dit_request()
    first = engine_of(model)
    drive(first, {0: start_all(model, [one])}, until=lambda _: first.steps_done_by_id["a"] == 2)
    data = taken(first, "a").to_bytes()
    state = RequestState.from_bytes(data, device="cpu", arrival_s=0.0, deadline_s=1e9)
    found = drive(engine_of(model), {0: [state]}).latents("a")
    assert difference(found, run_alone(model, one)) <= RUN_TOLERANCE


def test_a_run_with_other_steps_seed_or_size_of_schedule_is_far_from_the_pipelines(
    zoo: Zoo, dit: str, record: Record
) -> None:
    model, reference, one = zoo.model(dit), zoo.reference(dit), dit_request()
    expected = reference.outcome(one).latents
    wrongs: list[dict[str, Any]] = [{"num_steps": 5}, {"seed": 2}, {"prompt": "blue"}]
    if model.profile.guidance != "none":
        wrongs.append({"guidance_scale": 4.5})
    errors = [difference(run_alone(model, replace(one, **wrong)), expected) for wrong in wrongs]
    record("control", min(errors))
    assert min(errors) >= CONTROL_FACTOR * RUN_TOLERANCE


def test_the_schedule_of_another_size_shows(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    model, one = zoo.model("flux"), dit_request()
    monkeypatch.setattr(type(model.tables), "_num_tokens", lambda _self, _size_px: 1024)
    error = difference(run_alone(model, one), zoo.reference("flux").outcome(one).latents)
    record("control", error)
    assert error >= CONTROL_FACTOR * RUN_TOLERANCE


def test_the_references_own_decoding_is_the_pipelines(zoo: Zoo, dit: str) -> None:
    reference, one = zoo.reference(dit), dit_request()
    expected = reference.pixels_of_the_pipeline(one)
    assert pixel_difference(reference.outcome(one).pixels, expected) == 0
