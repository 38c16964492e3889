"""Previews show what diffusers takes the image for, and cost the image nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from ray_cluster.engine.batch.batch_caps import BatchLimit
from ray_cluster.engine.stages.batch_stage import BatchStage
from ray_cluster.requests import OutputSpec, SamplerName
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    PIXEL_TOLERANCE,
    RUN_TOLERANCE,
    difference,
    engine_of,
    pixel_difference,
    request,
    run_alone,
    start,
    start_all,
    taken,
)
from tests.engine.staged import Running, StagedModel, until

SHOWN = OutputSpec(num_previews=3)


@pytest.mark.parametrize("sampler", ["ddim", "euler", "euler_ancestral"])
def test_a_preview_is_the_estimate_of_diffusers(zoo: Zoo, sampler: SamplerName) -> None:
    model, reference = zoo.model("shapes"), zoo.reference("shapes")
    one = request("a", sampler=sampler, num_steps=8, seed=3, output=SHOWN)
    peers = [request(f"p{i}", sampler=sampler, num_steps=8, seed=i) for i in range(3)]
    estimates = reference.estimates(one)
    engine = engine_of(model)
    with torch.inference_mode():
        for state in start_all(model, [one, *peers]):
            engine.add(state)
        reports = [engine.step() for _ in range(8)]
    previews = [preview for report in reports for preview in report.previews]
    assert [preview.steps_done for preview in previews] == [2, 4, 6]
    tolerance = max(RUN_TOLERANCE, reference.run_tolerance(one))
    for preview in previews:
        assert difference(preview.latents, estimates[preview.steps_done - 1]) <= tolerance
        # the control: another step's estimate is another image
        assert difference(preview.latents, estimates[preview.steps_done]) > 10 * tolerance


def test_previews_come_in_order_and_leave_the_image_as_it_is(zoo: Zoo) -> None:
    model = zoo.model("sd")
    plain = request("a", num_steps=9)
    with torch.inference_mode():
        expected = model.decoder.decode([run_alone(model, plain)])[0]
    with Running(model) as running:
        running.submit(request("a", num_steps=9, output=SHOWN), request("b", num_steps=9, seed=5))
        image = running.events.pixels_of("a")
        running.events.pixels_of("b")
        previews = running.events.previews_of("a")
        assert running.events.previews_of("b") == []
    assert pixel_difference(image, expected) <= PIXEL_TOLERANCE
    steps = [preview.steps_done for preview in previews]
    # the last may come too late, and is not shown then
    assert steps == sorted(steps)
    assert set(steps) <= {2, 4, 7}
    assert steps
    assert all(preview.pixels.shape == image.shape for preview in previews)


def test_a_preview_that_cannot_be_decoded_costs_only_itself(zoo: Zoo) -> None:
    one = request("a", num_steps=9, output=SHOWN)
    staged = StagedModel(zoo.model("sd"), [one])

    def spoil(stage: str, ids: Sequence[str]) -> None:
        if stage == "decode" and "?" in ids:
            raise ArithmeticError("a spoiled preview")

    staged.before.append(spoil)
    with Running(staged.loaded) as running:
        running.submit(one)
        image = running.events.pixels_of("a")
        assert running.events.previews_of("a") == []
    assert pixel_difference(image, staged.pixels()["a"]) <= PIXEL_TOLERANCE


def test_an_aborted_request_is_shown_no_more(zoo: Zoo) -> None:
    one = request("a", num_steps=60, output=SHOWN)
    staged = StagedModel(zoo.model("sd"))
    gate = staged.gate("decode", "?")
    with Running(staged.loaded) as running:
        running.submit(one)
        gate.await_reached()
        running.runner.abort("a")
        gate.open()
        until(lambda: running.runner.num_in_flight == 0)
        running.submit(request("b", num_steps=3))
        running.events.end_of("b")
        assert running.events.previews_of("a") == []


def test_a_row_goes_on_elsewhere_with_the_previews_that_it_still_has(zoo: Zoo) -> None:
    model = zoo.model("sd")
    first, second = engine_of(model), engine_of(model)
    with torch.inference_mode():
        first.add(start(model, request("a", num_steps=8, output=SHOWN)))
        shown = [preview.steps_done for _ in range(3) for preview in first.step().previews]
        second.add(taken(first, "a"))
        shown += [preview.steps_done for _ in range(5) for preview in second.step().previews]
    assert shown == [2, 4, 6]


def test_what_is_urgent_goes_first_and_too_much_of_the_rest_is_dropped() -> None:
    worked: list[list[str]] = []
    first_is_there, go_on = threading.Event(), threading.Event()

    def work(items: Sequence[str]) -> Sequence[str]:
        worked.append(list(items))
        first_is_there.set()
        assert go_on.wait(60)
        return items

    stage = BatchStage[str, str](
        is_wanted=lambda _item: True,
        work=work,
        group_of=lambda _item: None,
        on_done=lambda _item, _result: None,
        on_error=lambda _item, _error: None,
        max_batch=BatchLimit(4),
        clock=lambda: 0.0,
    )
    thread = threading.Thread(target=stage.run)
    thread.start()
    stage.put("first")
    assert first_is_there.wait(60)
    for index in range(6):
        stage.put(f"preview {index}", is_urgent=False)
    for index in range(5):
        stage.put(f"image {index}")
    go_on.set()
    until(lambda: len(worked) == 7, "all of it")
    stage.close()
    thread.join()
    assert worked[1:3] == [[f"image {i}" for i in range(4)], ["image 4"]]
    # a quarter of a batch at a time, of the newest four
    assert worked[3:] == [[f"preview {i}"] for i in range(2, 6)]
