"""The engine makes what the diffusers pipelines make, alone and in any company."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from ray_cluster.engine.schedules.samplers import SamplerTables
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.requests import SAMPLER_NAMES, SamplerName
from tests.engine.conftest import Zoo
from tests.engine.exactness import GUIDANCE, check, variety
from tests.engine.harness import (
    CALL_TOLERANCE,
    CONTROL_FACTOR,
    PIXEL_TOLERANCE,
    RUN_TOLERANCE,
    call_model,
    difference,
    drive,
    engine_of,
    pixel_difference,
    request,
    run_alone,
    run_together,
    start_all,
)
from tests.kernels.schedules import config

Record = Callable[[str, object], None]
SIZES_PX = ((64, 64), (96, 96), (128, 128), (64, 128), (128, 64))


# every sampler and kind of guidance with each family is in the batch of the test after it
ALONE = [
    ("sd", sampler, guidance)
    if number % len(GUIDANCE) == place
    else pytest.param("sd", sampler, guidance, marks=pytest.mark.slow)
    for number, sampler in enumerate(SAMPLER_NAMES)
    for place, guidance in enumerate(GUIDANCE)
]
ALONE += [(name, "dpmpp_2m", "guided, negative prompt") for name in ("sd15", "sdxl", "shapes")]
# SDXL takes zeros for a negative prompt that is not there
ALONE += [("sdxl", "euler", name) for name in ("guided", "guided, empty negative prompt")]
EMPTY = {"guided, empty negative prompt": {"guidance_scale": 3.0, "negative_prompt": ""}}


@pytest.mark.parametrize(("family", "sampler", "guidance"), ALONE)
def test_a_request_alone_gives_the_latents_and_the_image_of_the_pipeline(
    zoo: Zoo, family: str, sampler: str, guidance: str, record: Record
) -> None:
    model, reference = zoo.model(family), zoo.reference(family)
    one = request(sampler=sampler, **(GUIDANCE | EMPTY)[guidance])
    latents = run_alone(model, one)
    record("run", check(reference, one, latents))
    with torch.inference_mode():
        pixels = model.decoder.decode([latents])[0]
    expected = reference.outcome(one).pixels
    assert expected.std() > 1, "an empty image proves nothing"
    worst = pixel_difference(pixels, expected)
    record("pixel", worst)
    assert worst <= PIXEL_TOLERANCE


def test_requests_of_all_kinds_in_one_batch_give_what_each_gives_alone(
    zoo: Zoo, family: str, record: Record
) -> None:
    reference, requests = zoo.reference(family), variety()
    together = run_together(zoo.model(family), requests)
    record("run", max(check(reference, one, together[one.request_id]) for one in requests))


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
def test_a_schedule_for_which_diffusers_has_a_step_too_many_is_finished_in_time(
    zoo: Zoo, sampler: SamplerName
) -> None:
    """61 calls, as asked for; the method of ``pndm`` takes one more, and the policy gives it."""
    tables = SamplerTables(config(timestep_spacing="trailing") | {"original_inference_steps": 61})
    model = replace(zoo.model("sd"), tables=tables)
    engine = build_engine(model, max_batch=4, clock=time.monotonic)
    one = request(sampler=sampler, num_steps=61, guidance_scale=1.0)
    run = drive(engine, {0: start_all(model, [one])})
    assert len(run.batch_sizes) == 61 + (sampler == "pndm")
    assert torch.isfinite(run.latents(one.request_id)).all()


@pytest.mark.parametrize("family", ["sd15", "sdxl", "shapes"])
def test_requests_that_join_at_different_steps_give_what_each_gives_alone(
    zoo: Zoo, family: str, record: Record
) -> None:
    model, reference, requests = zoo.model(family), zoo.reference(family), variety()
    states = start_all(model, requests)
    joining = {2 * index: states[index::5] for index in range(5)}
    run = drive(engine_of(model), joining)
    assert len(set(run.batch_sizes)) > 3, "the batches should have changed all the time"
    errors = [check(reference, one, run.latents(one.request_id)) for one in requests]
    record("run", max(errors))


@pytest.mark.parametrize("family", ["sd", "sdxl", "shapes"])
@pytest.mark.parametrize(("width_px", "height_px"), [(96, 64), (72, 104)])
def test_other_sizes_give_what_the_pipeline_gives(
    zoo: Zoo, family: str, width_px: int, height_px: int, record: Record
) -> None:
    """72 x 104 is 18 x 26 latents, then 9 x 13 and 5 x 7: halves that are not whole."""
    model, reference = zoo.model(family), zoo.reference(family)
    size = {"width_px": width_px, "height_px": height_px}
    requests = [request(f"r{i}", sampler=s, seed=i, **size) for i, s in enumerate(SAMPLER_NAMES)]
    states = start_all(model, requests)
    run = drive(engine_of(model), {0: states})
    record("run", max(check(reference, one, run.latents(one.request_id)) for one in requests))
    with torch.inference_mode():
        images = model.decoder.decode([run.latents(one.request_id) for one in requests])
    for one, pixels in zip(requests, images, strict=True):
        assert pixels.shape == (height_px, width_px, 3)
        assert pixel_difference(pixels, reference.outcome(one).pixels) <= PIXEL_TOLERANCE


def test_images_of_all_sizes_step_together_without_changing(zoo: Zoo, family: str) -> None:
    """With every sampler, guided and not, each from its own step on, in one batch."""
    model, reference = zoo.model(family), zoo.reference(family)
    requests = [
        replace(one, width_px=SIZES_PX[i % 5][0], height_px=SIZES_PX[i % 5][1])
        for i, one in enumerate(variety()[::2])
    ]
    states = start_all(model, requests)
    run = drive(engine_of(model), {0: states[:4], 1: states[4:6], 3: states[6:]})
    assert max(run.batch_sizes) == 7
    for one in requests:
        latents = run.latents(one.request_id)
        check(reference, one, latents)
        with torch.inference_mode():
            pixels = model.decoder.decode([latents])[0]
        assert pixel_difference(pixels, reference.outcome(one).pixels) <= PIXEL_TOLERANCE


def test_images_decoded_together_are_those_decoded_alone(zoo: Zoo, family: str) -> None:
    model, reference = zoo.model(family), zoo.reference(family)
    requests = variety()[:8]
    latents = [reference.outcome(one).latents for one in requests]
    with torch.inference_mode():
        images = model.decoder.decode(latents)
    for one, pixels in zip(requests, images, strict=True):
        assert pixel_difference(pixels, reference.outcome(one).pixels) <= PIXEL_TOLERANCE
    assert pixel_difference(images[0], reference.outcome(requests[1]).pixels) > 5


def test_the_references_own_decoding_is_the_pipelines(zoo: Zoo, family: str) -> None:
    reference, one = zoo.reference(family), request()
    expected = reference.pixels_of_the_pipeline(one)
    assert pixel_difference(reference.outcome(one).pixels, expected) == 0


# --- one model call ---


def call(
    zoo: Zoo,
    family: str,
    *,
    swap: bool = False,
    late: float = 0.0,
    sizes: Sequence[tuple[int, int]] = SIZES_PX,
) -> tuple[float, float]:
    """One call over a mixed batch; the largest error against diffusers' UNet and its spread.

    A guided prediction is ``(1 - s) * u + s * c``, so that errors of its two rows count ``2 s - 1``
    times: its error is told as that of one row.
    """
    model, unet = zoo.model(family), zoo.reference(family).pipeline.unet
    requests = [
        request(
            f"r{i}",
            prompt="red " * (i + 1),
            guidance_scale=(1.0, 3.0, 7.5)[i % 3],
            seed=i,
            width_px=sizes[i % len(sizes)][0],
            height_px=sizes[i % len(sizes)][1],
        )
        for i in range(8)
    ]
    states = start_all(model, requests)
    # with latents drawn anew every time, guidance of 7.5 would be past the bound now and then
    generator = torch.Generator().manual_seed(0)
    latents = [torch.randn(state.latents.shape, generator=generator) for state in states]
    timesteps = torch.linspace(1, 999, 8).round()
    conditionings = [state.conditioning for state in states]
    order = [0, 2, 1, *range(3, 8)] if swap else range(8)
    found = call_model(
        model.executor,
        latents,
        timesteps + late,
        [conditionings[index] for index in order],
        [one.guidance_scale for one in requests],
    )
    errors = []
    with torch.inference_mode():
        for index, (one, owned) in enumerate(zip(requests, conditionings, strict=True)):
            added = {}
            if owned.pooled_embeds is not None:
                added = {"text_embeds": owned.pooled_embeds[None], "time_ids": owned.time_ids[None]}
            row = (latents[index][None], timesteps[index])
            expected = unet(*row, owned.prompt_embeds[None], added_cond_kwargs=added).sample
            if one.uses_guidance:
                if added:
                    added = added | {"text_embeds": owned.negative_pooled_embeds[None]}
                blank = unet(*row, owned.negative_embeds[None], added_cond_kwargs=added).sample
                expected = blank + one.guidance_scale * (expected - blank)
            times = 2 * one.guidance_scale - 1 if one.uses_guidance else 1.0
            errors.append(difference(found[index], expected[0]) / times)
    return max(errors), min(float(one.std()) for one in found)


@pytest.mark.parametrize("sizes", [SIZES_PX, SIZES_PX[:1]], ids=["all sizes", "one size"])
def test_one_call_over_a_mixed_batch_equals_the_unet_row_by_row(
    zoo: Zoo, family: str, sizes: Sequence[tuple[int, int]], record: Record
) -> None:
    error, spread = call(zoo, family, sizes=sizes)
    record("call", error)
    assert error <= CALL_TOLERANCE
    assert spread > 1e-2


def test_sizes_with_odd_latents_equal_the_unet_too(zoo: Zoo, family: str, record: Record) -> None:
    error, _ = call(zoo, family, sizes=((76, 64), (76, 76), (64, 64)))
    record("call", error)
    assert error <= CALL_TOLERANCE


@pytest.mark.parametrize("wrong", [{"late": 20.0}, {"swap": True}])
def test_a_wrong_timestep_or_prompt_shows_in_one_call(
    zoo: Zoo, wrong: dict[str, float], record: Record
) -> None:
    error, _ = call(zoo, "shapes", **wrong)
    record("control", error)
    assert error >= CONTROL_FACTOR * CALL_TOLERANCE


@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral"])
@pytest.mark.parametrize("name", ["sd", "shapes"])
def test_from_infinite_noise_a_run_is_nearer_to_the_truth_than_the_pipelines(
    zoo: Zoo, name: str, sampler: str, record: Record
) -> None:
    """The truth: the same UNet and the samplers' formulas in float64."""
    model, reference = zoo.model(name), zoo.reference(name)
    for index, guidance in enumerate(GUIDANCE.values()):
        one = request(sampler=sampler, seed=index, **guidance)
        truth, expected = reference.truth(one), reference.outcome(one).latents
        found = run_alone(model, one)
        ours, theirs = difference(found, truth), difference(expected, truth)
        record(f"ours {name}", ours)
        record(f"diffusers {name}", theirs)
        assert ours <= max(theirs, RUN_TOLERANCE)
        # what they have in common is far more than what they differ in
        assert theirs < 0.02 * float(truth.abs().max())


# --- whole runs that must differ ---


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m"])
def test_a_run_with_the_wrong_timesteps_or_sampler_is_far_from_the_pipelines(
    zoo: Zoo, sampler: str
) -> None:
    model, reference = zoo.model("shapes"), zoo.reference("shapes")
    one = request(sampler=sampler)
    expected = reference.outcome(one).latents
    other = SAMPLER_NAMES[(SAMPLER_NAMES.index(sampler) + 1) % len(SAMPLER_NAMES)]
    for wrong in (replace(one, num_steps=7), replace(one, sampler=other), replace(one, seed=2)):
        assert difference(run_alone(model, wrong), expected) >= CONTROL_FACTOR * RUN_TOLERANCE
    for wrong in (replace(one, guidance_scale=3.5), replace(one, negative_prompt="blue")):
        assert difference(run_alone(model, wrong), expected) >= CONTROL_FACTOR * RUN_TOLERANCE
