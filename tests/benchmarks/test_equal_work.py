"""Both sides of a comparison make the same images, and would tell if they did not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionInpaintPipeline

from benchmarks.controlnets import subject as controlled
from benchmarks.controlnets.services import MODELS, arguments_of
from benchmarks.edits.subject import FACTOR, by_inpainting, edit_requests, mask, pixels_of
from benchmarks.engine.subject import BASELINE, Subject, by_engine, load_subject, make_requests
from benchmarks.harness import largest_difference
from benchmarks.loras.images import KEPT, LOADED, ways_of
from benchmarks.loras.subject import chosen, different, read_styles
from ray_cluster.engine.adapters.factors import write_factors
from ray_cluster.engine.controlnets.loading import load_bank
from ray_cluster.engine.controlnets.local import LocalControlNets
from ray_cluster.requests import AddOns

PX = 64


@pytest.fixture(scope="module")
def subject() -> Subject:
    return load_subject()


@pytest.mark.slow
def test_images_with_controlnets(subject: Subject) -> None:
    device = torch.device("cpu")
    local = LocalControlNets({name: load_bank(arguments_of(name), device) for name in MODELS})
    requests = controlled.controlled_requests(2, 3, px=PX, num_steps=4)
    expected = controlled.by_diffusers(subject, requests, {one.request_id: {} for one in requests})
    bare = [replace(one, add_ons=AddOns()) for one in requests]
    for asked, is_same in ((requests, True), (bare, False)):
        made = by_engine(
            subject,
            asked,
            2,
            controls=local,
            maps_of=lambda one: tuple(map(torch.from_numpy, controlled.maps_of(one))),
        )
        assert (largest_difference(expected, made) <= 1) == is_same


@pytest.mark.slow
def test_images_with_loras(subject: Subject, tmp_path: Path) -> None:
    for style, factors in read_styles().items():
        write_factors(factors, tmp_path / style)
    ways = ways_of(subject, tmp_path, 4, per_request=2, in_flight=3)
    made = {name: way() for name, way in ways.items()}
    assert made.keys() == {BASELINE, KEPT, LOADED}
    for images in made.values():
        assert largest_difference(made[BASELINE], images) <= 1
    bare = make_requests(3, px=PX, num_steps=4, guidance_scale=1)
    assert largest_difference(made[BASELINE], by_engine(subject, bare, 3)) > 20


def test_loras_differ_and_have_the_ranks_that_they_are_named_for() -> None:
    styles = read_styles()
    assert [one.ranks for one in styles.values()] == [(4,), (8,), (16,)]
    several = different(styles["texture"], 3)
    assert several[0] is styles["texture"]
    assert {one.ranks for one in several} == {(16,)}
    paths = [one.by_component["unet"] for one in several]
    name = next(iter(paths[0]))
    assert len({float(one[name].shrink.sum()) for one in paths}) == 3
    assert [len(one) for one in chosen(2, 4)] == [2] * 4
    assert chosen(0, 1) == [{}]


@pytest.mark.slow
@pytest.mark.parametrize("strength", [1.0, 0.6])
def test_edits(subject: Subject, strength: float) -> None:
    pipeline = StableDiffusionInpaintPipeline(
        **subject.pipeline.components, requires_safety_checker=False
    )
    requests = edit_requests(4, px=PX, num_steps=5, guidance_scale=2.0, strength=strength)
    pixels = pixels_of(requests)
    theirs = by_inpainting(pipeline, requests, pixels)
    assert largest_difference(theirs, by_engine(subject, requests, 4, pixels=pixels)) <= 1
    other = dict(zip(pixels, [*pixels.values()][1:] + [*pixels.values()][:1], strict=True))
    assert largest_difference(theirs, by_engine(subject, requests, 4, pixels=other)) > 20


def test_masks_are_of_whole_latent_pixels_and_differ() -> None:
    masks = [mask(PX, index) for index in range(4)]
    for one in masks:
        assert 0 < one.mean() < 1
        coarse = one[::FACTOR, ::FACTOR].repeat(FACTOR, 0).repeat(FACTOR, 1)
        assert np.array_equal(one, coarse)
    assert len({one.tobytes() for one in masks}) == 4
