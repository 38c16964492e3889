"""Pipelines that are called with pictures: to look at, to start from, and with a mask."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from ray_cluster.api.input.sent_images import CheckedImages, Picture
from ray_cluster.api.resolve.references import references_of
from ray_cluster.engine.batch.step_costs import StepCosts
from ray_cluster.engine.pipelines import loading
from ray_cluster.engine.pipelines.classes import pipeline_facts
from ray_cluster.engine.pipelines.loading import CalledPipeline, load_pipeline
from ray_cluster.engine.pipelines.measuring import check_largest
from ray_cluster.engine.pipelines.runner import CallRunner
from ray_cluster.engine.stages.autoencoder import Pixels
from ray_cluster.errors import ConfigError, InvalidRequest
from ray_cluster.imaging.edit_images import EditPixels, ImageFacts, SentPixels
from ray_cluster.requests import BlobRef, Edit, ImageRequest, ModelProfile, Reference
from tests.engine.random_models import save_sd
from tests.engine.random_pipelines import (
    SAVE_EDITORS,
    save_klein,
    save_pixart,
    save_qwen,
    save_z_image,
)
from tests.engine.test_called_pipelines import accepted, pool_of, wanted

REF = BlobRef("0" * 64, 1)
# of a megapixel, to which editors scale all pictures
SEEN = 64
EDITING = {
    "AmusedPipeline",
    "ChromaPipeline",
    "Flux2KleinPipeline",
    "FluxKontextPipeline",
    "FluxPipeline",
    "QwenImageEditPipeline",
    "QwenImagePipeline",
    "StableDiffusion3Pipeline",
    "StableDiffusionPipeline",
    "StableDiffusionXLPipeline",
    "ZImagePipeline",
}


@pytest.fixture
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Editors look at pictures of 128x128 pixels instead of 1024x1024, ours and diffusers'."""
    monkeypatch.setattr(loading, "SEEN_PX", loading.SEEN_PX // SEEN)
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        whole: Callable[..., Any] = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda area, ratio, of=whole: of(area // SEEN, ratio)
        )


def picture(seed: int, width: int = 64, height: int = 64) -> Pixels:
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    return np.asarray(Image.fromarray(pixels).resize((width, height)))


def looking(count: int, **fields: Any) -> tuple[ImageRequest, SentPixels]:
    """A request that comes with so many pictures, of several sizes."""
    pictures = tuple(picture(seed, 64 + 32 * (seed % 2), 64) for seed in range(count))
    names = tuple(Reference(REF, one.shape[1], one.shape[0]) for one in pictures)
    return wanted("a", references=names, **fields), SentPixels(references=pictures)


def alone(folder: Path, kind: str = "", parts: dict[str, Any] | None = None, **own: Any) -> Pixels:
    """What diffusers makes of the same."""
    whole = getattr(diffusers, kind) if kind else diffusers.DiffusionPipeline
    pipeline = whole.from_pretrained(folder, **(parts or {}))
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(1)
    call = {"prompt": "a red circle", "num_inference_steps": 4, "generator": generator}
    return np.asarray(pipeline(**call | own).images[0])


def as_seen(profile: ModelProfile, *sizes: tuple[int, int]) -> tuple[ImageRequest, SentPixels]:
    """A request with pictures of these sizes, as a gateway brings them to the model's."""
    files = [Picture(REF, ImageFacts(*one, has_alpha=False)) for one in sizes]
    checked = CheckedImages(*files[0], more=tuple(files[1:]))
    names = references_of(checked, profile)
    sent = tuple(np.full((one.height_px, one.width_px, 3), 99, np.uint8) for one in names)
    return wanted("a", references=names), SentPixels(references=sent)


def as_images(sent: SentPixels) -> list[Image.Image]:
    return [Image.fromarray(one) for one in sent.references]


def test_klein_looks_at_none_one_and_several(tmp_path: Path) -> None:
    model = load_pipeline(pool_of(save_klein(tmp_path / "model")))
    assert (model.profile.max_references, model.profile.min_references) == (4, 0)
    assert (model.profile.edits, model.profile.guidance) == ("any", "empty")
    made = []
    for count in (0, 1, 3):
        request, sent = looking(count)
        made.append(model.make(request, lambda: None, sent))
        own = {"width": 64, "height": 64, "guidance_scale": 3.0}
        expected = alone(tmp_path / "model", image=as_images(sent) or None, **own)
        assert np.array_equal(made[-1], expected)
    assert not np.array_equal(made[0], made[1])
    assert not np.array_equal(made[1], made[2])
    request, sent = as_seen(model.profile, (1, 1), (40, 40), (250, 2000), (63, 64))
    model.make(request, lambda: None, sent)
    with pytest.raises(InvalidRequest, match="8:1") as caught:
        as_seen(model.profile, (1, 1), (20, 161))
    assert caught.value.param == "image[1]"


@pytest.mark.parametrize("name", SAVE_EDITORS)
def test_editors_make_what_diffusers_makes(name: str, tmp_path: Path, small_pictures: None) -> None:
    folder = SAVE_EDITORS[name](tmp_path / "model")
    model = load_pipeline(pool_of(folder, max_px=128))
    profile = model.profile
    assert profile.min_references == 1
    assert profile.min_reference_px == profile.max_reference_px == 128 * 128
    check_largest(model)
    for size in ((1, 1), (4, 1)):
        request, sent = as_seen(profile, size)
        model.make(request, lambda: None, sent)
    for count in {1, profile.max_references}:
        request, sent = looking(count, negative_prompt="grey")
        images: Any = as_images(sent) if name == "qwen-edit-plus" else as_images(sent)[0]
        own = {"width": 64, "height": 64, "true_cfg_scale": 3.0, "negative_prompt": "grey"}
        parts = loading._processors(folder, {"processor": ["transformers", "Qwen2VLProcessor"]})
        expected = alone(folder, parts=parts, image=images, **own)
        assert np.array_equal(model.make(request, lambda: None, sent), expected)


def edited(strength: float, is_masked: bool, **fields: Any) -> tuple[ImageRequest, SentPixels]:
    work, mask = picture(7), np.zeros((64, 64), np.bool_)
    mask[16:48, 8:40] = True
    edit = Edit(REF, (64, 64), 4, REF if is_masked else None, strength=strength)
    pixels = EditPixels(work, mask if is_masked else None, work, None)
    request = wanted("a", edit=edit, num_steps=round(4 * strength), **fields)
    return request, SentPixels(pixels)


@pytest.mark.parametrize("is_masked", [False, True], ids=["strength", "mask"])
@pytest.mark.parametrize(
    ("save", "name", "own"),
    [
        (save_qwen, "QwenImage", {"true_cfg_scale": 3.0, "negative_prompt": " "}),
        (save_z_image, "ZImage", {"guidance_scale": 2.0}),
        (lambda folder: save_sd(folder, zero_snr=False), "StableDiffusion", {"guidance_scale": 3}),
    ],
    ids=["qwen", "z-image", "sd"],
)
def test_edits_are_those_of_the_sibling_pipelines(
    save: Callable[[Path], Path], name: str, own: dict[str, Any], is_masked: bool, tmp_path: Path
) -> None:
    folder = save(tmp_path / "model")
    model = load_pipeline(pool_of(folder, engine="diffusers"))
    assert model.profile.edits == "any"
    request, sent = edited(0.75, is_masked)
    steps: list[int] = []
    made = model.make(request, lambda: steps.append(1), sent)
    assert len(steps) == request.num_steps == 3
    assert sent.edit is not None
    call = {"image": Image.fromarray(sent.edit.work), "strength": 0.75, **own}
    if is_masked:
        assert sent.edit.mask is not None
        call["mask_image"] = Image.fromarray(sent.edit.mask).convert("L")
    kind = name + ("InpaintPipeline" if is_masked else "Img2ImgPipeline")
    if name != "StableDiffusion":
        call |= {"width": 64, "height": 64}
    parts = {"safety_checker": None} if name == "StableDiffusion" else {}
    assert np.array_equal(made, alone(folder, kind, parts, **call))
    # what a call has left behind is no other's
    again = wanted("b")
    assert not np.array_equal(model.make(again, lambda: None), made)
    assert np.array_equal(model.make(request, lambda: None, sent), made)


def test_edits_are_where_a_sibling_takes_masks() -> None:
    """A later diffusers that adds one fails here: its strength may mean something else."""
    found = accepted()
    assert {name for name, one in found.items() if one.edits} == EDITING


@pytest.mark.parametrize(
    ("name", "given", "most"),
    [("klein", None, 4), ("klein", 16, 16), ("klein", 0, 0), ("pixart", None, 0)],
)
def test_a_pool_says_how_many_pictures_it_takes(
    name: str, given: int | None, most: int, tmp_path: Path
) -> None:
    folder = {"klein": save_klein, "pixart": save_pixart}[name](tmp_path / "model")
    inspected = loading.inspect_pipeline(pool_of(folder, max_references=given))
    assert inspected.profile.max_references == most
    assert inspected.profile.max_reference_px == (96 * 96 if name == "klein" else 1 << 20)


def test_a_pool_says_no_number_that_its_pipeline_does_not_take(tmp_path: Path) -> None:
    for name, save, given in (
        ("pixart", save_pixart, 2),
        ("edit", SAVE_EDITORS["qwen-edit"], 2),
        ("plus", SAVE_EDITORS["qwen-edit-plus"], 0),
    ):
        with pytest.raises(ConfigError, match=f"max_references is {given}"):
            loading.inspect_pipeline(pool_of(save(tmp_path / name), max_references=given))


def test_a_runner_takes_the_images_that_its_model_takes(tmp_path: Path) -> None:
    model = load_pipeline(pool_of(save_pixart(tmp_path / "model")))
    runner = runner_of(model)
    for request, sent in (looking(1), edited(0.5, is_masked=False)):
        with pytest.raises(InvalidRequest, match="only the images"):
            runner.submit(request, deadline_s=1.0, pixels=sent)
    runner = runner_of(load_pipeline(pool_of(save_klein(tmp_path / "other"))))
    with pytest.raises(ValueError, match="comes without the pixels"):
        runner.submit(looking(2)[0], deadline_s=1.0)
    assert runner.steps_done_by_id == {}


def runner_of(model: CalledPipeline) -> CallRunner:
    return CallRunner(model, StepCosts(clock=time.monotonic), clock=time.monotonic)


def test_kontext_makes_the_size_that_is_asked_for() -> None:
    facts = pipeline_facts("FluxKontextPipeline", {})
    request, sent = looking(1)
    arguments = facts.arguments(request, sent)
    assert arguments["max_area"] == 64 * 64
    assert isinstance(arguments["image"], Image.Image)
