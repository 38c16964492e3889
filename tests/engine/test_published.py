"""A call that says nothing but its prompt gives what diffusers makes of the same folder."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from ray_cluster.api.input.schemas import ImageGenerationRequest
from ray_cluster.api.resolve.generation import resolve
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.models.loading import LoadedModel, inspect_model
from ray_cluster.errors import ConfigError, InvalidRequest
from ray_cluster.requests import ImageRequest
from tests.engine.conftest import Zoo
from tests.engine.harness import PIXEL_TOLERANCE, load, pixel_difference, run_alone
from tests.engine.published import LAYOUTS, save_published

# sampler, steps and guidance scale of a call that says nothing, and whether they are diffusers' own
EXPECTED = {
    "sd-1.5": ("pndm", 50, 7.5, True),
    "sd-2.1-v": ("ddim", 50, 7.5, True),
    "sdxl-base": ("euler", 50, 5.0, True),
    "sdxl-turbo": ("euler_ancestral", 1, 1.0, False),
    "sdxl-lightning": ("euler", 4, 1.0, False),
    "lcm-sdxl": ("lcm", 4, 8.0, False),
    "ssd-1b": ("euler", 50, 5.0, True),
    "sd3-medium": ("flow_match_euler", 28, 7.0, True),
    "sd3-medium-without-t5": ("flow_match_euler", 28, 7.0, True),
    "sd-3.5": ("flow_match_euler", 28, 7.0, True),
    "flux-dev": ("flow_match_euler", 28, 3.5, True),
    "flux-schnell": ("flow_match_euler", 4, 1.0, False),
}
# made by `make test`; the others differ from one of these in their names and usual steps
QUICK = {"lcm-sdxl", "sd3-medium-without-t5"}
PROMPT = "a large red circle at the top left"
# FLUX's usual size is 4,096 tokens, whatever the folder says
SIZE = {"flux-dev": "64x64", "flux-schnell": "64x64"}
LONG = "a small red circle above a large blue square " * 6


def served(folder: Path, **fields: Any) -> tuple[LoadedModel, ImageRequest, Any]:
    """Load a folder as a pool that says nothing, and make the image of a call."""
    model = load(PoolConfig(name="p", model=str(folder)))
    (one,) = resolve(
        ImageGenerationRequest(**({"prompt": PROMPT, "seed": 5} | fields)),
        model.profile,
        LimitsConfig(),
    )
    latents = run_alone(model, one)
    with torch.inference_mode():
        return model, one, model.decoder.decode([latents])[0]


def pipeline_of(folder: Path) -> Any:
    absent = {
        name: None
        for name in ("safety_checker", "text_encoder_3", "tokenizer_3")
        if json.loads((folder / "model_index.json").read_text()).get(name) == [None, None]
    }
    pipeline = DiffusionPipeline.from_pretrained(folder, **absent)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def by_diffusers(folder: Path, **options: Any) -> Any:
    options = {"prompt": PROMPT, "generator": torch.Generator().manual_seed(5)} | options
    return np.asarray(pipeline_of(folder)(**options).images[0])


@pytest.mark.parametrize(
    "layout",
    [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS],
)
def test_a_published_layout_is_served_as_diffusers_runs_it(tmp_path: Path, layout: str) -> None:
    folder = save_published(tmp_path / layout, layout)
    size = SIZE.get(layout)
    _, one, pixels = served(folder, **({"size": size} if size else {}))
    sampler, steps, scale, is_diffusers_own = EXPECTED[layout]
    assert (one.sampler, one.num_steps, one.guidance_scale) == (sampler, steps, scale)
    options: dict[str, Any] = {} if size is None else {"height": 64, "width": 64}
    if is_diffusers_own:
        usual = inspect.signature(pipeline_of(folder).__call__).parameters
        assert usual["num_inference_steps"].default == steps
        assert usual["guidance_scale"].default == scale
    else:
        options |= {"num_inference_steps": steps, "guidance_scale": scale}
    expected = by_diffusers(folder, **options)
    assert expected.std() > 1, "an empty image proves nothing"
    assert pixel_difference(pixels, expected) <= PIXEL_TOLERANCE
    other = by_diffusers(folder, **(options | {"num_inference_steps": steps // 10 + 2}))
    assert pixel_difference(pixels, other) > PIXEL_TOLERANCE


@pytest.mark.parametrize("layout", ["sd3-medium", "flux-schnell"])
def test_what_t5_reads_counts_and_what_clip_reads_is_cut(tmp_path: Path, layout: str) -> None:
    folder = save_published(tmp_path / layout, layout)
    few = {"size": "64x64", "num_inference_steps": 2}
    model, _, pixels = served(folder, prompt=LONG, **few)
    options = {"height": 64, "width": 64, "num_inference_steps": 2}
    options |= {"guidance_scale": model.profile.default_guidance_scale}
    expected = by_diffusers(folder, prompt=LONG, **options)
    assert pixel_difference(pixels, expected) <= PIXEL_TOLERANCE
    cut = by_diffusers(folder, prompt=" ".join(LONG.split()[:40]), **options)
    assert pixel_difference(pixels, cut) > PIXEL_TOLERANCE, "the end of the prompt counts"
    most = model.profile.max_prompt_tokens
    assert (
        most
        == model.encoder.max_prompt_tokens
        == {"sd3-medium": 256, "flux-schnell": 512}[layout] - 2
    )
    with pytest.raises(InvalidRequest, match=f"{most + 1} tokens; this model reads at most {most}"):
        served(folder, prompt="red " * (most + 1), **few)


def test_the_schedulers_class_is_that_of_the_index(tmp_path: Path) -> None:
    folder = save_published(tmp_path / "sd", "sd-1.5")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "EulerAncestralDiscreteScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    _, one, pixels = served(folder, num_inference_steps=4)
    assert one.sampler == "euler_ancestral"
    expected = by_diffusers(folder, num_inference_steps=4)
    assert pixel_difference(pixels, expected) <= PIXEL_TOLERANCE


def test_a_tokenizer_whose_encoder_is_left_out_does_nothing(tmp_path: Path) -> None:
    folder = save_published(tmp_path / "sd3", "sd3-medium")
    index = json.loads((folder / "model_index.json").read_text())
    index["text_encoder_3"] = [None, None]
    (folder / "model_index.json").write_text(json.dumps(index))
    shutil.rmtree(folder / "text_encoder_3")
    model, _, pixels = served(folder, num_inference_steps=2)
    assert model.profile.max_prompt_tokens == model.encoder.max_prompt_tokens == 30
    assert pixel_difference(pixels, by_diffusers(folder, num_inference_steps=2)) <= PIXEL_TOLERANCE


def test_without_t5_what_clip_reads_counts(tmp_path: Path) -> None:
    folder = save_published(tmp_path / "sd3", "sd3-medium-without-t5")
    assert inspect_model(PoolConfig(name="p", model=str(folder))).profile.max_prompt_tokens == 30


@pytest.mark.parametrize("value", [None, 1e30])
def test_a_tokenizer_without_a_length_takes_its_text_encoders(
    zoo: Zoo, tmp_path: Path, value: float | None
) -> None:
    folder = Path(shutil.copytree(zoo.folder("sd15"), tmp_path / "sd"))
    path = folder / "tokenizer" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["model_max_length"]
    path.write_text(json.dumps(settings | ({} if value is None else {"model_max_length": value})))
    model, _, pixels = served(folder, num_inference_steps=2)
    assert model.profile.max_prompt_tokens == model.encoder.max_prompt_tokens == 30
    assert pixel_difference(pixels, by_diffusers(zoo.folder("sd15"), num_inference_steps=2)) <= 1


def test_a_model_without_a_size_takes_that_of_the_pool(zoo: Zoo, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(zoo.folder("sd15"), tmp_path / "sd"))
    path = folder / "unet" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sample_size": None}))
    pool = PoolConfig(name="p", model=str(folder))
    with pytest.raises(ConfigError, match=r"no size of its own; give defaults\.size"):
        inspect_model(pool)
    given = pool.model_validate(pool.model_dump() | {"defaults": {"size": "96x72"}})
    profile = inspect_model(given).profile
    assert (profile.default_width_px, profile.default_height_px) == (96, 72)
