"""Pictures, strengths and masks for pipelines of every family that takes them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext, pipeline_flux_kontext_inpaint
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_inpaint
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21
from PIL import Image

from ray_cluster.engine.pipelines import loading
from ray_cluster.engine.pipelines.loading import inspect_pipeline, load_pipeline
from ray_cluster.engine.pipelines.measuring import check_largest
from ray_cluster.engine.stages.autoencoder import Pixels
from tests.engine.random_families import save_family
from tests.engine.random_pipelines import SAVE_EDITORS, save_klein
from tests.engine.test_called_families import as_pixels
from tests.engine.test_called_pictures import as_images, edited, looking
from tests.engine.test_called_pipelines import pool_of, wanted

ELSEWHERE: dict[str, Callable[[Path], Path]] = {
    "Flux2KleinPipeline": save_klein,
    "QwenImageEditPipeline": SAVE_EDITORS["qwen-edit"],
}
# that edit everything by a mask of everything
MASKING = {"Flux2KleinPipeline", "FluxKontextPipeline", "QwenImageEditPipeline"}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
# of a megapixel, to which editors scale all pictures
SEEN = 64
GUIDED: dict[str, dict[str, Any]] = {
    "QwenImage21Pipeline": {"true_cfg_scale": 3.0, "negative_prompt": " "},
    "QwenImageEditPipeline": {"true_cfg_scale": 3.0, "negative_prompt": " "},
    "ZImageOmniPipeline": {"guidance_scale": 2.0},
}


@pytest.fixture(autouse=True)
def _small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Editors look at pictures of 128x128 pixels instead of 1024x1024, ours and diffusers'."""
    monkeypatch.setattr(loading, "SEEN_PX", loading.SEEN_PX // SEEN)
    for module in (
        pipeline_qwenimage_edit,
        pipeline_qwenimage_edit_inpaint,
        pipeline_qwenimage21,
    ):
        whole: Any = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda area, ratio, of=whole: of(area // SEEN, ratio)
        )
    for module in (pipeline_flux_kontext, pipeline_flux_kontext_inpaint):
        monkeypatch.setattr(module, "PREFERRED_KONTEXT_RESOLUTIONS", [(96, 144), (128, 128)])


def saved(name: str, folder: Path) -> Any:
    """Write the folder of a pipeline class; return the pipeline, loaded by diffusers."""
    if (save := ELSEWHERE.get(name)) is None:
        return save_family(name, folder)
    save(folder)
    parts = loading._processors(
        folder, {"processor": ["transformers", "Qwen2VLProcessor"]} if "Edit" in name else {}
    )
    return diffusers.DiffusionPipeline.from_pretrained(folder, **parts)


def alone(whole: Any, kind: str, **call: Any) -> Pixels:
    """What a class of diffusers makes with the parts of a pipeline."""
    settings = {"is_distilled": False} if "Flux2Klein" in kind else {}
    parts = {
        name: copy.deepcopy(one) if name == "scheduler" else one
        for name, one in whole.components.items()
    }
    if "StableDiffusion" in kind and "XL" not in kind and "3" not in kind:
        settings["requires_safety_checker"] = False
    pipeline = getattr(diffusers, kind)(**parts, **settings)
    pipeline.set_progress_bar_config(disable=True)
    if hasattr(pipeline, "resolutions"):
        pipeline.resolutions = [(64, 64)]
    if "Chroma" in kind:
        # that class fails without
        pipeline.transformer.register_to_config(guidance_embeds=False)
    generator = torch.Generator("cpu").manual_seed(1)
    call = {"num_inference_steps": 4, "generator": generator, "output_type": "np"} | call
    return as_pixels(pipeline(prompt="a red circle", **call)[0][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "most", "count"),
    [
        ("Flux2Pipeline", 6, 2),
        ("FluxKontextPipeline", 1, 1),
        ("Kandinsky5I2IPipeline", 1, 1),
        ("QwenImage21Pipeline", 4, 2),
        # whose pictures become bfloat16 whatever the model is
        ("ZImageOmniPipeline", 4, 2),
    ],
)
def test_pictures_are_looked_at(name: str, most: int, count: int, tmp_path: Path) -> None:
    whole, dtype = saved(name, tmp_path), "bfloat16" if "Omni" in name else "float32"
    if dtype != "float32":
        # some of its modules stay in float32
        whole = type(whole).from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    model = load_pipeline(pool_of(tmp_path, engine="diffusers", max_px=64, dtype=dtype))
    assert model.profile.max_references == most
    check_largest(model)
    made = []
    for seen in {min(1, count), count}:
        request, sent = looking(seen)
        own: dict[str, Any] = {
            "width": 64,
            "height": 64,
            **GUIDED.get(name, {"guidance_scale": 3.0}),
        }
        own |= {"max_area": 64 * 64} if "Kontext" in name else {}
        pictures: Any = as_images(sent)
        expected = alone(whole, name, image=pictures if most > 1 else pictures[0], **own)
        made.append(model.make(request, lambda: None, sent))
        assert np.array_equal(made[-1], expected)
    assert count == 1 or not np.array_equal(*made)


@pytest.mark.slow
@pytest.mark.parametrize("is_masked", [False, True], ids=["strength", "mask"])
@pytest.mark.parametrize(
    "name",
    [
        *("AmusedPipeline", "ChromaPipeline", "FluxPipeline", "StableDiffusion3Pipeline"),
        *("StableDiffusionXLPipeline", "Flux2KleinPipeline", "FluxKontextPipeline"),
        "QwenImageEditPipeline",
    ],
)
def test_edits_are_those_of_the_sibling(name: str, is_masked: bool, tmp_path: Path) -> None:
    whole = saved(name, tmp_path)
    model = load_pipeline(pool_of(tmp_path, engine="diffusers"))
    assert model.profile.edits == "any"
    first = model.make(wanted("b"), lambda: None) if name not in ELSEWHERE else None
    request, sent = edited(0.75, is_masked)
    steps: list[int] = []
    made = model.make(request, lambda: steps.append(1), sent)
    assert sent.edit is not None
    call: dict[str, Any] = {"image": Image.fromarray(sent.edit.work), "strength": 0.75}
    call |= GUIDED.get(name, {"guidance_scale": 3.0})
    if name in MASKING or is_masked:
        mask = np.ones((64, 64), np.bool_) if sent.edit.mask is None else sent.edit.mask
        call["mask_image"] = Image.fromarray(mask).convert("L")
    kind = name.replace(
        "Pipeline", "InpaintPipeline" if "mask_image" in call else "Img2ImgPipeline"
    )
    taken = inspect.signature(getattr(diffusers, kind).__call__).parameters
    call |= {one: 64 for one in ("width", "height") if one in taken}
    expected = alone(whole, kind, **call)
    if expected.shape != made.shape:
        # they make about a megapixel, made small here
        assert name in {"FluxKontextPipeline", "QwenImageEditPipeline"}
        size = Image.Resampling.LANCZOS
        expected = np.asarray(Image.fromarray(expected).resize((64, 64), size))
    assert np.array_equal(made, expected)
    assert len(steps) == request.num_steps
    # what a sibling has set up for itself is not the pipeline's
    if first is not None:
        assert np.array_equal(model.make(wanted("b"), lambda: None), first)


@pytest.mark.slow
def test_another_picture_is_looked_at_beside_a_mask(tmp_path: Path) -> None:
    whole = saved("Flux2KleinPipeline", tmp_path)
    model = load_pipeline(pool_of(tmp_path))
    assert model.facts.most_beside_edit == 1
    request, sent = edited(0.75, is_masked=True)
    names, pictures = looking(2)
    request = replace(request, references=names.references)
    assert sent.edit is not None
    assert sent.edit.mask is not None
    both = replace(sent, references=pictures.references)
    call = {"image": Image.fromarray(sent.edit.work), "strength": 0.75, "guidance_scale": 3.0}
    call |= {"mask_image": Image.fromarray(sent.edit.mask).convert("L")}
    other = as_images(pictures)[1]
    expected = alone(whole, "Flux2KleinInpaintPipeline", image_reference=other, **call)
    made = model.make(request, lambda: None, both)
    assert np.array_equal(made, expected)
    one = replace(sent, references=pictures.references[:1])
    assert not np.array_equal(model.make(request, lambda: None, one), made)


@pytest.mark.parametrize(
    ("kind", "most"), [("Flux2KleinPipeline", 1), ("QwenImageEditPipeline", 0)]
)
def test_the_profile_says_how_many_pictures_are_seen_beside_a_mask(
    kind: str, most: int, tmp_path: Path
) -> None:
    ELSEWHERE[kind](tmp_path)
    assert inspect_pipeline(pool_of(tmp_path)).profile.max_masked_references == 1 + most
