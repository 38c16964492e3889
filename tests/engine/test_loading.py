"""What cannot be served is refused when it is loaded, by a message that says what to change."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_cluster.config.sections.pools import DefaultsConfig, PoolConfig
from ray_cluster.engine.models.loading import inspect_model, load_model
from ray_cluster.engine.unet.config import check_unet_config
from ray_cluster.errors import ConfigError, ModelUnsupported
from ray_cluster.models.local import model_sizes, vae_scale_factor
from ray_cluster.requests import SAMPLER_NAMES
from tests.engine.conftest import Zoo
from tests.engine.harness import load, pixel_difference, pool, request, run_alone, start


@pytest.fixture
def copy(zoo: Zoo, tmp_path: Path) -> Path:
    """A folder of the random Stable Diffusion model to spoil."""
    return Path(shutil.copytree(zoo.folder("sd"), tmp_path / "copy"))


def change(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


@pytest.mark.parametrize("model", ["no/such/folder", "/nowhere", "./gone", "nothing", "~/nothing"])
def test_a_missing_folder_is_refused_with_what_is_possible(model: str) -> None:
    with pytest.raises(
        ConfigError, match="neither a built-in name, nor a diffusers folder"
    ) as error:
        load_model(pool(model))
    assert repr(model) in str(error.value)


def test_a_hub_id_without_the_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="'some-owner/some-model' cannot be downloaded"):
        load_model(pool("some-owner/some-model"))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no diffusers folder: it has no model_index"):
        load_model(pool(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["PixArtSigmaPipeline", "FluxControlPipeline", "StableDiffusionImg2ImgPipeline"],
)
def test_a_pipeline_of_another_family_is_refused_by_name(copy: Path, name: str) -> None:
    change(copy / "model_index.json", _class_name=name)
    with pytest.raises(ModelUnsupported, match=name) as error:
        load_model(pool(copy))
    assert "StableDiffusionPipeline" in str(error.value)
    assert "StableDiffusionXLPipeline" in str(error.value)


@pytest.mark.parametrize(
    "lost",
    [
        "unet",
        "scheduler",
        "vae/config.json",
        "tokenizer",
        "text_encoder",
        "unet/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "tokenizer/tokenizer.json",
    ],
)
def test_an_incomplete_folder_is_refused(copy: Path, lost: str) -> None:
    path = copy / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ConfigError, match="incomplete"):
        load_model(pool(copy))


@pytest.mark.parametrize(
    "spoilt", ["model_index.json", "unet/config.json", "scheduler/scheduler_config.json"]
)
def test_a_spoilt_configuration_is_refused_by_its_path(copy: Path, spoilt: str) -> None:
    (copy / spoilt).write_text("{")
    with pytest.raises(ConfigError, match=f"{spoilt} is not JSON"):
        load_model(pool(copy))


def test_a_truncated_weights_file_is_refused(copy: Path) -> None:
    path = copy / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="incomplete"):
        load_model(pool(copy))


def test_an_editing_model_is_refused_by_its_channels(copy: Path) -> None:
    """Those of instruct-pix2pix."""
    change(copy / "unet" / "config.json", in_channels=8)
    with pytest.raises(ModelUnsupported, match="takes 8 channels and gives 4") as error:
        load_model(pool(copy))
    assert "9" in str(error.value)


def test_an_inpainting_model_says_that_it_needs_masks(zoo: Zoo) -> None:
    kinds = {name: zoo.model(name).profile.edits for name in ("inpaint", "fill", "sd", "flux")}
    assert kinds == {"inpaint": "masked", "fill": "masked", "sd": "any", "flux": "any"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("addition_embed_type", "image"),
        ("addition_embed_type", "text_image"),
        ("class_embed_type", "timestep"),
        ("num_class_embeds", 1000),
        ("encoder_hid_dim_type", "ip_image_proj"),
        ("time_embedding_act_fn", "silu"),
        ("center_input_sample", True),
        ("attention_type", "gated"),
    ],
)
def test_an_input_that_the_engine_does_not_give_is_refused_by_its_key(
    zoo: Zoo, copy: Path, key: str, value: Any
) -> None:
    change(copy / "unet" / "config.json", **{key: value})
    with pytest.raises(
        ModelUnsupported, match=f"{key}={value!r} is not covered; allowed: "
    ) as error:
        load_model(pool(copy))
    assert "unet" in str(error.value)
    check_unet_config(zoo.model("sd").executor._model.config)


def test_a_schedule_of_another_kind_is_refused(copy: Path) -> None:
    change(copy / "model_index.json", scheduler=["diffusers", "EDMEulerScheduler"])
    with pytest.raises(ModelUnsupported, match="_class_name='EDMEulerScheduler'"):
        load_model(pool(copy))


@pytest.mark.parametrize(
    "changes", [{"max_px": 100}, {"min_px": 20}, {"defaults": {"size": "60x64"}}]
)
def test_sizes_that_do_not_suit_the_model_are_refused(zoo: Zoo, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="multiples of 8") as error:
        load_model(pool(zoo.folder("sd"), **changes))
    assert "change defaults.size, min_px or max_px" in str(error.value)


@pytest.mark.parametrize(
    ("sample_size", "size", "max_px"),
    [
        (16, None, 128),
        # a default is no bound of what the model can make, but is allowed
        (16, "32x32", 128),
        (16, "256x64", 256),
        ([8, 24], None, 192),
        # of no size of its own
        (None, "96x64", 192),
    ],
)
def test_the_largest_side_follows_from_the_models_own_size(
    zoo: Zoo, sample_size: Any, size: str | None, max_px: int
) -> None:
    folder = zoo.folder("sd")
    unet, vae = (
        json.loads((folder / part / "config.json").read_text()) for part in ("unet", "vae")
    )
    unet["sample_size"] = sample_size
    given = pool(folder, max_px=None, defaults={"size": size})
    # of image pixels for a latent one
    assert vae_scale_factor(vae) == 4
    assert model_sizes(given, unet, vae).max_px == max_px


def test_the_profile_says_what_the_model_takes(zoo: Zoo) -> None:
    profile = zoo.model("sd").profile
    assert profile.max_prompt_tokens == zoo.model("sd").encoder.max_prompt_tokens == 30
    assert (profile.default_width_px, profile.size_multiple_px) == (64, 8)
    assert profile.max_steps_by_sampler == dict.fromkeys(SAMPLER_NAMES, 100) | {"lcm": 50}
    assert zoo.model("sdxl").profile.family == "stable-diffusion-xl"


@pytest.mark.parametrize(
    ("name", "steps", "scale"), [("shapes-sd", 20, 2.0), ("shapes-sd-light", 2, 1.0)]
)
def test_built_in_models_are_sampled_as_their_cards_were_where_nobody_says_otherwise(
    name: str, steps: int, scale: float
) -> None:
    profile = inspect_model(PoolConfig(name="p", model=name)).profile
    assert (profile.default_num_steps, profile.default_guidance_scale) == (steps, scale)
    assert profile.default_sampler == "ddim"
    defaults = DefaultsConfig(num_inference_steps=7, guidance_scale=0.0, sampler="euler")
    chosen = inspect_model(PoolConfig(name="p", model=name, defaults=defaults)).profile
    assert (chosen.default_num_steps, chosen.default_guidance_scale) == (7, 0.0)
    assert chosen.default_sampler == "euler"


def test_a_sampler_that_the_model_has_no_formula_for_is_not_offered(copy: Path) -> None:
    change(copy / "scheduler" / "scheduler_config.json", prediction_type="sample")
    assert "euler_ancestral" not in load(pool(copy)).profile.max_steps_by_sampler


def test_a_models_own_mean_and_deviation_of_the_latents_are_used(zoo: Zoo, tmp_path: Path) -> None:
    from tests.engine.reference import Reference

    folder = Path(shutil.copytree(zoo.folder("sdxl"), tmp_path / "sdxl"))
    change(
        folder / "vae" / "config.json",
        latents_mean=[0.5, -0.3, 0.2, 0.1],
        latents_std=[2.0, 1.5, 0.7, 1.1],
    )
    model, reference, one = load(pool(folder)), Reference(folder), request(num_steps=2)
    with torch.inference_mode():
        pixels = model.decoder.decode([run_alone(model, one)])[0]
        without = zoo.model("sdxl").decoder.decode([run_alone(model, one)])[0]
    # the pipeline's own image, through its `__call__`
    expected = reference.pixels_of_the_pipeline(one)
    assert pixel_difference(pixels, expected) <= 1
    assert pixel_difference(without, expected) > 10


@pytest.mark.parametrize("name", ["sdxl", "sd3", "flux"])
def test_a_model_computes_out_of_inference_mode_though_loaded_in_it(zoo: Zoo, name: str) -> None:
    one = request(sampler=zoo.model(name).profile.default_sampler)
    with torch.inference_mode():
        model = load(pool(zoo.folder(name), defaults={"size": "64x64"}))
        state = start(model, one)
    prepared = model.executor.prepare(state.conditioning)
    values = (getattr(prepared, field.name) for field in fields(prepared))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    assert tensors
    assert not any(tensor.requires_grad for tensor in tensors)
