"""Edits are those of diffusers' image-to-image and inpainting pipelines, alone and in company."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import PNDMScheduler

from ray_cluster.engine.edits.template import latent_mask
from ray_cluster.engine.schedules.sampler_schedules import add_past
from ray_cluster.engine.schedules.samplers import SamplerTables
from ray_cluster.engine.stages.building import build_runner
from ray_cluster.engine.stages.events import Broken, Decoded, Died
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.imaging.edit_images import SentPixels
from ray_cluster.kernels.sampler_update.reference import sampler_update
from ray_cluster.requests import ImageRequest, OutputSpec
from tests.engine.conftest import Zoo
from tests.engine.edits import (
    EditReference,
    aligned_mask,
    edit_pixels,
    edit_request,
    start_edits,
    template,
)
from tests.engine.harness import (
    CONTROL_FACTOR,
    PIXEL_TOLERANCE,
    RUN_TOLERANCE,
    difference,
    drive,
    engine_of,
    pixel_difference,
    pool,
    request,
    run_alone,
    taken,
)
from tests.kernels.schedules import config

Record = Callable[[str, object], None]
SIZE_PX = (96, 64)
SIZE = {"width_px": 96, "height_px": 64}
FACTOR = {"sd": 4, "sd15": 4, "sdxl": 4, "sd3": 4, "flux": 4, "inpaint": 4, "fill": 4}
KINDS = {"image": (0.6, False), "masked": (1.0, True), "masked, weaker": (0.5, True)}
SAMPLERS = ("ddim", "euler", "euler_ancestral", "dpmpp_2m", "lcm")


def made(zoo: Zoo, family: str, one: ImageRequest, pixels: Any) -> torch.Tensor:
    model = zoo.model(family)
    run = drive(engine_of(model), {0: start_edits(model, [one], [pixels])})
    assert not run.failed
    return run.latents(one.request_id)


def sampler_of(family: str, sampler: str = "euler") -> str:
    return "flow_match_euler" if family in {"sd3", "flux", "fill"} else sampler


CASES = [(family, "euler", kind) for family in ("sd3", "flux", "sdxl", "sd15") for kind in KINDS]
CASES += [("sd15", sampler, kind) for sampler in SAMPLERS[2:] for kind in KINDS]
CASES += [("sd", "ddim", kind) for kind in KINDS]
CASES += [
    ("inpaint", sampler, kind) for sampler in ("ddim", "dpmpp_2m") for kind in list(KINDS)[1:]
]
CASES += [("fill", "euler", kind) for kind in list(KINDS)[1:]]


@pytest.mark.parametrize(("family", "sampler", "kind"), CASES)
def test_an_edit_alone_gives_what_the_pipeline_gives(
    zoo: Zoo, family: str, sampler: str, kind: str, record: Record
) -> None:
    strength, masked = KINDS[kind]
    one = edit_request(
        sampler=sampler_of(family, sampler),
        strength=strength,
        masked=masked,
        num_steps=8,
        # far above lcm's usual scale rounding grows without a bound, in diffusers too
        guidance_scale=1.0 if sampler == "lcm" else 3.0,
        **SIZE,
    )
    mask = aligned_mask(SIZE_PX, FACTOR[family]) if masked else None
    pixels = edit_pixels(template(SIZE_PX), mask)
    expected = EditReference(zoo.reference(family)).latents(one, pixels)
    found = made(zoo, family, one, pixels)
    error = difference(found, expected)
    record("run", error)
    assert error <= RUN_TOLERANCE
    decoder = zoo.model(family).decoder
    with torch.inference_mode():
        ours, theirs = decoder.decode([found, expected])
    assert theirs.std() > 1, "an empty image proves nothing"
    assert pixel_difference(ours, theirs) <= PIXEL_TOLERANCE


def test_fill_sees_every_pixel_of_a_mask(zoo: Zoo, record: Record) -> None:
    """FLUX.1 Fill has as many channels for a mask as a latent pixel has pixels."""
    one = edit_request(sampler="flow_match_euler", num_steps=4, **SIZE)
    coarse = aligned_mask(SIZE_PX, FACTOR["fill"])
    fine = coarse & (np.random.default_rng(0).random(coarse.shape) > 0.5)
    # whatever is said of whole latent pixels is the same
    fine[::4, ::4] = coarse[::4, ::4]
    pixels = [edit_pixels(template(SIZE_PX), mask) for mask in (fine, coarse)]
    expected = EditReference(zoo.reference("fill")).latents(one, pixels[0])
    error, control = (difference(made(zoo, "fill", one, each), expected) for each in pixels)
    record("run", error)
    record("control", control)
    assert error <= RUN_TOLERANCE
    assert control >= CONTROL_FACTOR * RUN_TOLERANCE


def company(family: str) -> tuple[list[ImageRequest], list[Any]]:
    """Edits of every kind, sizes, samplers and guidance, and plain requests between them."""
    requests: list[ImageRequest] = []
    pixels: list[Any] = []
    for index, (kind, (strength, masked)) in enumerate([*KINDS.items()] * 2):
        width, height = ((96, 64), (64, 64), (64, 128))[index % 3]
        one = edit_request(
            f"{kind} {index}",
            sampler=sampler_of(family, SAMPLERS[index % len(SAMPLERS)]),
            strength=strength,
            masked=masked,
            num_steps=6 + index,
            width_px=width,
            height_px=height,
            seed=index,
            guidance_scale=(1.0, 3.0)[index % 2],
        )
        mask = aligned_mask(one.size_px, FACTOR[family]) if masked else None
        requests.append(one)
        pixels.append(edit_pixels(template(one.size_px, index), mask))
        plain = request(f"plain {index}", sampler=sampler_of(family, "ddim"), seed=index)
        requests.append(plain)
        pixels.append(None)
    return requests, pixels


@pytest.mark.parametrize("family", ["sd15", "sdxl", "sd3", "flux"])
def test_edits_of_all_kinds_and_plain_requests_in_one_batch_are_what_each_is_alone(
    zoo: Zoo, family: str, record: Record
) -> None:
    model, reference = zoo.model(family), EditReference(zoo.reference(family))
    requests, pixels = company(family)
    states = start_edits(model, requests, pixels)
    joining = {0: states[:7], 1: states[7:9], 3: states[9:]}
    run = drive(engine_of(model), joining)
    assert not run.failed
    assert max(run.batch_sizes) > 8
    errors = []
    for one, image in zip(requests, pixels, strict=True):
        found = run.latents(one.request_id)
        expected = run_alone(model, one) if image is None else reference.latents(one, image)
        errors.append(difference(found, expected))
    record("run", max(errors))
    assert max(errors) <= RUN_TOLERANCE


@pytest.mark.parametrize("wrong", ["mask", "interpolated mask", "noise", "template", "start"])
def test_a_wrong_edit_is_told_from_the_right_one(zoo: Zoo, wrong: str, record: Record) -> None:
    """The comparison itself: whatever is wrong shows a hundred times above what is allowed."""
    one = edit_request(strength=0.5, num_steps=8, sampler="euler", **SIZE)
    mask = aligned_mask(SIZE_PX, FACTOR["sd15"])
    right = edit_pixels(template(SIZE_PX), mask)
    expected = EditReference(zoo.reference("sd15")).latents(one, right)
    model = zoo.model("sd15")
    [state] = start_edits(model, [one], [right])
    assert state.template is not None
    assert state.template.mask is not None
    match wrong:
        case "mask":
            state.template = replace(state.template, mask=~state.template.mask)
        case "interpolated mask":
            # every second row and column of the mask, as a thin one would be lost
            thin = state.template.mask.clone()
            thin[:, ::2] = False
            state.template = replace(state.template, mask=thin)
        case "noise":
            state.template = replace(state.template, noise=state.template.noise.roll(1, 1))
        case "template":
            state.template = replace(state.template, latents=state.template.latents.roll(1, 1))
        case _:
            state.latents = state.template.noise
    found = drive(engine_of(model), {0: [state]}).latents(one.request_id)
    error = difference(found, expected)
    record("control", error)
    assert error > CONTROL_FACTOR * RUN_TOLERANCE


@pytest.mark.parametrize("first_step", [0, 1, 3, 6])
def test_pndm_from_a_later_step_is_its_method_on_the_steps_that_are_left(first_step: int) -> None:
    """Diffusers' scheduler, given the timesteps with the second of them twice."""
    num_steps = 8
    scheduler = PNDMScheduler.from_config(config(), skip_prk_steps=True)
    scheduler.set_timesteps(num_steps)
    whole = scheduler.timesteps.tolist()
    left = [whole[0], *whole[2:]][first_step:]
    scheduler.timesteps = torch.tensor([*left[:2], *left[1:]])
    numbers = torch.Generator().manual_seed(1)
    start = torch.randn((4, 8, 8), generator=numbers, dtype=torch.float64)
    expected = start
    for timestep in scheduler.timesteps:
        expected = scheduler.step(torch.sin(expected * 3), timestep, expected).prev_sample
    table = SamplerTables(config()).table("pndm", num_steps, first_step=first_step)
    found, outputs = start, None
    for index in range(table.num_calls):
        output = torch.sin(found * 3)
        found, _ = sampler_update(
            found[None],
            output[None],
            torch.zeros_like(found)[None],
            None,
            table.coefficients[index][None],
        )
        found = found[0].clone()
        outputs = add_past(table, index, found, output, outputs)
    assert table.num_calls == len(left) + 1
    assert difference(found, expected) <= RUN_TOLERANCE


@pytest.mark.parametrize("sampler", ["ddim", "pndm", "dpmpp_2m", "euler_ancestral"])
@pytest.mark.parametrize("family", ["sd15", "inpaint"])
def test_an_edit_goes_on_from_its_bytes_as_if_nothing_had_been(
    zoo: Zoo, family: str, sampler: str
) -> None:
    model = zoo.model(family)
    one = edit_request(strength=0.8, num_steps=10, sampler=sampler, **SIZE)
    pixels = edit_pixels(template(SIZE_PX), aligned_mask(SIZE_PX, FACTOR[family]))
    expected = made(zoo, family, one, pixels)
    engine = engine_of(model)
    drive(engine, {0: start_edits(model, [one], [pixels])}, until=lambda e: steps_of(e, one) == 3)
    data = taken(engine, one.request_id).to_bytes()
    again = RequestState.from_bytes(data, device="cpu", arrival_s=0.0, deadline_s=0.0)
    assert again.request == one
    found = drive(engine_of(model), {0: [again]}).latents(one.request_id)
    assert torch.equal(found, expected)


def steps_of(engine: StepEngine, one: ImageRequest) -> int:
    return engine.steps_done_by_id[one.request_id]


def test_what_a_mask_spares_is_the_template_and_its_noise_the_templates_own(zoo: Zoo) -> None:
    """So that two edits of an image spare the same latents, whatever their seeds."""
    model, mask = zoo.model("sd15"), aligned_mask(SIZE_PX, FACTOR["sd15"])
    pixels = edit_pixels(template(SIZE_PX), mask)
    requests = [edit_request(f"r{seed}", seed=seed, **SIZE) for seed in (1, 2)]
    first, second = (one.template for one in start_edits(model, requests, [pixels] * 2))
    assert first is not None
    assert second is not None
    assert first.mask is not None
    inside = first.mask.expand_as(first.noise)
    assert torch.equal(first.noise[~inside], second.noise[~inside])
    assert not torch.isclose(first.noise[inside], second.noise[inside]).any()
    for one in requests:
        final = made(zoo, "sd15", one, pixels)
        assert torch.equal(final[~inside], first.latents[~inside])


def test_a_mask_of_everything_at_full_strength_is_text_to_image(zoo: Zoo) -> None:
    whole = edit_pixels(template(SIZE_PX), np.ones((64, 96), np.bool_))
    one = edit_request(sampler="euler_ancestral", **SIZE)
    assert torch.equal(
        made(zoo, "sd15", one, whole), run_alone(zoo.model("sd15"), replace(one, edit=None))
    )


def test_a_latent_pixel_is_edited_if_any_image_pixel_of_it_is() -> None:
    mask = np.zeros((16, 24), np.bool_)
    mask[3, 5] = mask[8, 23] = True
    pooled = latent_mask(mask, 8)
    assert pooled.tolist() == [[[True, False, False], [False, False, True]]]


def test_a_preview_shows_the_template_where_the_mask_spares_it(zoo: Zoo) -> None:
    model = zoo.model("sd15")
    mask = aligned_mask(SIZE_PX, FACTOR["sd15"])
    one = edit_request(num_steps=6, output=OutputSpec(num_previews=1), **SIZE)
    engine = engine_of(model)
    [state] = start_edits(model, [one], [edit_pixels(template(SIZE_PX), mask)])
    engine.add(state)
    previews = []
    with torch.inference_mode():
        while len(engine):
            previews += engine.step().previews
    [preview] = previews
    assert state.template is not None
    assert state.template.mask is not None
    spared = ~state.template.mask.expand_as(preview.latents)
    assert torch.equal(preview.latents[spared], state.template.latents[spared])
    assert not torch.isclose(preview.latents[~spared], state.template.latents[~spared]).all()


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_a_runner_makes_edits_beside_images_from_text(zoo: Zoo, name: str) -> None:
    model = zoo.model(name)
    requests, pixels = company(name)
    expected = drive(engine_of(model), {0: start_edits(model, requests, pixels)})
    runner = build_runner(model, pool(zoo.folder(name)), clock=time.monotonic)
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    runner.start(events.put)
    try:
        for one, image in zip(requests, pixels, strict=True):
            runner.submit(one, deadline_s=time.monotonic() + 600, pixels=SentPixels(image))
        found: dict[str, Any] = {}
        while len(found) < len(requests):
            event = events.get(timeout=120)
            assert not isinstance(event, (Broken, Died)), event
            if isinstance(event, Decoded):
                found[event.request.request_id] = event
    finally:
        runner.stop()
    with torch.inference_mode():
        for one in requests:
            [pixels_expected] = model.decoder.decode([expected.latents(one.request_id)])
            worst = pixel_difference(found[one.request_id].pixels, pixels_expected)
            assert worst <= PIXEL_TOLERANCE


def test_an_edit_without_its_pixels_is_refused_by_the_runner(zoo: Zoo) -> None:
    runner = build_runner(zoo.model("sdxl"), pool(zoo.folder("sdxl")), clock=time.monotonic)
    with pytest.raises(ValueError, match="comes without the pixels"):
        runner.submit(edit_request(**SIZE), deadline_s=1.0)
    assert runner.num_in_flight == 0
