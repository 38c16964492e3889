"""The image of a request in the company of others, and in other precisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from ray_cluster.quality.distances import similarity
from ray_cluster.requests import SAMPLER_NAMES, ImageRequest
from tests.engine.conftest import Zoo
from tests.engine.exactness import check, variety
from tests.engine.harness import (
    CONTROL_FACTOR,
    PIXEL_TOLERANCE,
    RUN_TOLERANCE,
    difference,
    drive,
    engine_of,
    load,
    pixel_difference,
    pool,
    request,
    run_alone,
    run_together,
    start,
    start_all,
)

Record = Callable[[str, object], None]


# --- the same image in any company ---


def company(sampler: str) -> tuple[ImageRequest, list[ImageRequest]]:
    one = request("kept", sampler=sampler, num_steps=8)
    peers = [replace(peer, request_id=f"p{i}") for i, peer in enumerate(variety()[::2][:7])]
    return one, peers


@pytest.mark.parametrize(
    ("family", "sampler"), [*(("sdxl", one) for one in SAMPLER_NAMES), ("shapes", "dpmpp_2m")]
)
def test_seven_peers_that_come_and_go_leave_an_image_as_it_is(
    zoo: Zoo, family: str, sampler: str, record: Record
) -> None:
    model, reference = zoo.model(family), zoo.reference(family)
    one, peers = company(sampler)
    kept, states = start(model, one), start_all(model, peers)
    run = drive(
        engine_of(model),
        {0: [states[0]], 1: [kept, states[1]], 3: states[2:5], 5: states[5:]},
        leaving={4: ["p1", "p3"], 6: ["p5"]},
    )
    assert len(set(run.batch_sizes)) >= 4
    assert "p1" not in run.finished
    record("run", check(reference, one, run.latents("kept")))
    alone = run_alone(model, one)
    record("alone", difference(run.latents("kept"), alone))
    with torch.inference_mode():
        images = [model.decoder.decode([each])[0] for each in (run.latents("kept"), alone)]
    assert pixel_difference(*images) <= PIXEL_TOLERANCE


@pytest.mark.parametrize("sampler", SAMPLER_NAMES)
def test_what_is_in_the_peers_does_not_matter(zoo: Zoo, sampler: str, record: Record) -> None:
    """Peers with latents of 1e20, infinite ones, and a prompt that became NaN."""
    model, reference = zoo.model("sd"), zoo.reference("sd")
    one, peers = company(sampler)
    kept, states = start(model, one), start_all(model, peers)
    states[0].latents = states[0].latents * 1e20
    states[1].latents = states[1].latents + float("inf")
    embeds = states[2].conditioning.prompt_embeds
    states[2].conditioning = replace(states[2].conditioning, prompt_embeds=embeds * float("nan"))
    run = drive(engine_of(model), {0: [*states[:2], kept, *states[2:]]})
    assert {"p1", "p2"} <= run.failed.keys()
    assert all(row.error.stage == "denoise" for row in run.failed.values())
    record("run", check(reference, one, run.latents("kept")))


def test_a_row_with_its_neighbours_prompt_shows(zoo: Zoo) -> None:
    model, reference = zoo.model("shapes"), zoo.reference("shapes")
    one, peers = company("ddim")
    kept, states = start(model, one), start_all(model, peers)
    kept.conditioning, states[0].conditioning = states[0].conditioning, kept.conditioning
    states[0].conditioning = replace(
        states[0].conditioning, negative_embeds=kept.conditioning.prompt_embeds
    )
    kept.conditioning = replace(
        kept.conditioning, negative_embeds=states[0].conditioning.prompt_embeds
    )
    run = drive(engine_of(model), {0: [kept, *states]})
    error = difference(run.latents("kept"), reference.outcome(one).latents)
    assert error >= CONTROL_FACTOR * RUN_TOLERANCE


# --- other precisions and autoencoders ---


def test_half_width_numbers_give_a_finite_image_near_the_full_one(zoo: Zoo, record: Record) -> None:
    full = zoo.model("shapes")
    half = load(pool(zoo.folder("shapes"), dtype="bfloat16"))
    requests = [request(f"r{i}", sampler=name) for i, name in enumerate(SAMPLER_NAMES)]
    expected, found = run_together(full, requests), run_together(half, requests)
    with torch.inference_mode():
        for one in requests:
            latents = found[one.request_id]
            assert latents.dtype == torch.float32
            assert torch.isfinite(latents).all()
            images = [
                model.decoder.decode([of[one.request_id]])[0].astype(float)
                for model, of in ((full, expected), (half, found))
            ]
            gap = float(np.abs(images[0] - images[1]).mean())
            record(f"mean pixel {one.sampler}", gap)
            assert gap < 16


@pytest.mark.parametrize(
    ("count", "num_steps"), [(4, 8), pytest.param(8, 20, marks=pytest.mark.slow)]
)
def test_half_width_numbers_make_the_same_pictures(
    zoo: Zoo, record: Record, count: int, num_steps: int
) -> None:
    """The gate of bfloat16: structural similarity to float32 of the worst of all sizes."""
    full = zoo.model("shapes")
    half = load(pool(zoo.folder("shapes"), dtype="bfloat16"))
    sizes = ((64, 64), (96, 96), (128, 128), (64, 128))
    prompts = ("red circle", "blue square", "green triangle", "yellow ring")
    requests = [
        request(
            f"r{i}",
            prompt=f"a large {prompts[(i + i // 4) % 4]} in the center on a black background",
            width_px=sizes[i % 4][0],
            height_px=sizes[i % 4][1],
            num_steps=num_steps,
            guidance_scale=2.0,
            seed=i,
        )
        for i in range(count)
    ]
    expected, found = run_together(full, requests), run_together(half, requests)
    with torch.inference_mode():
        for one in requests:
            wanted, made = (
                torch.tensor(model.decoder.decode([latents[one.request_id]])[0]).permute(2, 0, 1)
                for model, latents in ((full, expected), (half, found))
            )
            likeness = float(similarity(made[None] / 255, wanted[None] / 255))
            record(f"likeness {one.width_px}x{one.height_px}", likeness)
            assert likeness >= 0.98
    other = torch.rand(made.shape)
    assert float(similarity(other[None], wanted[None] / 255)) < 0.5
