"""Every pipeline class of the installed diffusers: run as it is, or refused by name."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from ray_cluster.engine.pipelines.classes import pipeline_facts
from ray_cluster.engine.pipelines.loading import inspect_pipeline, load_pipeline
from ray_cluster.engine.pipelines.measuring import check_largest
from ray_cluster.engine.stages.autoencoder import Pixels
from ray_cluster.errors import ModelUnsupported
from tests.engine.random_families import FAMILIES, save_family
from tests.engine.test_called_pipelines import pool_of, wanted

# what the guidance scale 3 is for them, where it is no guidance_scale of 3
GUIDED: dict[str, dict[str, Any]] = {
    "DreamLiteMobilePipeline": {},
    "Flux2KleinKVPipeline": {},
    "HunyuanImagePipeline": {},
    "Krea2Pipeline": {"guidance_scale": 2.0},
    "QwenImage21Pipeline": {"true_cfg_scale": 3.0, "negative_prompt": " "},
    "ZImageOmniPipeline": {"guidance_scale": 2.0},
}
AS_ASKED = {
    "clean_caption": False,
    "enable_prompt_rewrite": False,
    "intermediate_timesteps": None,
    "use_pe": False,
    "use_resolution_binning": False,
}
MULTIPLES = {
    "GlmImagePipeline": 32,
    "Kandinsky3Pipeline": 64,
    "QwenImage21Pipeline": 32,
    # its own autoencoder has that factor, the small one has less
    "SanaSprintPipeline": 32,
}
FAST = {
    *("FluxPipeline", "HunyuanDiTPipeline", "Kandinsky5T2IPipeline", "Lumina2Pipeline"),
    *("LuminaPipeline", "PixArtAlphaPipeline"),
}
# that make nothing from text alone; pictures are in another file
LOOKING = {"Kandinsky5I2IPipeline"}
SILENT = {"DreamLiteMobilePipeline", "DreamLitePipeline", "LongCatImagePipeline"}


class Enough(BaseException):
    """Breaks a call off."""


def alone(pipeline: Any, size: tuple[int, int], own: dict[str, Any]) -> Pixels:
    """What diffusers makes of the same."""
    taken = inspect.signature(pipeline.__call__).parameters
    asked = AS_ASKED | {"max_area": size[0] * size[1]}
    call = {name: value for name, value in asked.items() if name in taken}
    image = pipeline(
        prompt="a red circle",
        width=size[0],
        height=size[1],
        num_inference_steps=4,
        generator=torch.Generator("cpu").manual_seed(1),
        output_type="np",
        **call | own,
    )[0][0]
    return as_pixels(image)


def as_pixels(image: Any) -> Pixels:
    """A picture of numbers from 0 to 1, laid on white where it is transparent."""
    if image.shape[-1] == 4:
        image = image[..., :3] * image[..., 3:] + (1 - image[..., 3:])
    return np.asarray((image * 255).round(), np.uint8)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=[] if one in FAST else pytest.mark.slow)
        for one in FAMILIES
        if one not in LOOKING
    ],
)
def test_images_are_those_of_diffusers(name: str, tmp_path: Path) -> None:
    pipeline, multiple = save_family(name, tmp_path), MULTIPLES.get(name, 16)
    size = (64 + multiple, 64)
    own = {"max_px": size[0], "max_references": 0}
    model = load_pipeline(pool_of(tmp_path, engine="diffusers", **own))
    check_largest(model)
    profile, steps = model.profile, []
    assert profile.size_multiple_px == (16 if "Sana" in name else multiple)
    model.facts.set_size(pipeline, wanted("a", width_px=size[0], height_px=size[1]))
    expected = alone(pipeline, size, GUIDED.get(name, {"guidance_scale": 3.0}))
    request = wanted("a", width_px=size[0], height_px=size[1])
    assert np.array_equal(model.make(request, lambda: steps.append(1)), expected)
    assert len(steps) == (0 if name in SILENT else 4)

    def stop() -> None:
        raise Enough

    if steps:
        with pytest.raises(Enough):
            model.make(request, stop)
    assert np.array_equal(model.make(request, lambda: None), expected)
    others: dict[str, Any] = {"prompt": 'a blue "star"'}
    others |= {"guidance_scale": 1.0} if profile.guidance != "none" else {}
    others |= {"negative_prompt": "grey"} if profile.guidance == "rows" else {}
    for field, value in others.items():
        other = wanted("a", width_px=size[0], height_px=size[1], **{field: value})
        assert not np.array_equal(model.make(other, lambda: None), expected), field


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("KolorsPipeline", "install sentencepiece"),
        ("LattePipeline", "no single picture"),
        ("WanPipeline", "makes videos"),
        ("LongCatImageEditPipeline", "takes no width, height"),
        ("StableDiffusionXLInstructPix2PixPipeline", "picture of another kind"),
        ("KandinskyV22Pipeline", "needs image_embeds"),
        ("StableCascadeCombinedPipeline", "several pipelines"),
        ("Ideogram4Pipeline", "more than one kind of guidance"),
        ("Cosmos2TextToImagePipeline", "checker"),
        ("StableUnCLIPPipeline", "classes of its own"),
        ("JoyImageEditPipeline", "in a way of its own"),
        ("SanaSprintImg2ImgPipeline", "folder of its text-to-image pipeline"),
    ],
)
def test_what_is_not_run_is_refused_with_a_reason(name: str, why: str) -> None:
    with pytest.raises(ModelUnsupported, match=f"{name} of diffusers .* is not run: .*{why}"):
        pipeline_facts(name, {})


@pytest.mark.parametrize(
    ("name", "package"),
    [("PRXPipeline", "ftfy"), ("PRXPixelPipeline", "ftfy"), ("OmniGenPipeline", "torchvision")],
)
def test_what_lacks_its_package_says_so(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelUnsupported, match=f"install {package}"):
        pipeline_facts(name, {})
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    assert pipeline_facts(name, {}).kind is getattr(diffusers, name)


def test_no_more_is_offered_than_there_are_positions(tmp_path: Path) -> None:
    save_family("HiDreamImagePipeline", tmp_path)
    pool = pool_of(tmp_path, max_px=None, defaults={"size": "96x96"})
    # twice the size, or 64 latent pixels of two pixels each
    assert inspect_pipeline(pool).profile.max_px == 128
