"""What a folder of a diffusion transformer is served as, and which are refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_cluster.engine.dit.config import check_dit_layers
from ray_cluster.engine.dit.executor import DiTExecutor
from ray_cluster.engine.models.loading import inspect_model, load_model
from ray_cluster.errors import ConfigError, InvalidRequest, ModelUnsupported
from ray_cluster.requests import ModelProfile
from tests.engine.conftest import Zoo
from tests.engine.dits import dit_request
from tests.engine.harness import load, pool, request, start


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def sd3_copy(zoo: Zoo, tmp_path: Path) -> Path:
    return Path(shutil.copytree(zoo.folder("sd3"), tmp_path / "sd3"))


@pytest.fixture
def flux_copy(zoo: Zoo, tmp_path: Path) -> Path:
    return Path(shutil.copytree(zoo.folder("flux"), tmp_path / "flux"))


def profile(zoo: Zoo, name: str) -> ModelProfile:
    return zoo.model(name).profile


@pytest.mark.parametrize(
    ("name", "family", "guidance", "steps", "scale"),
    [
        ("sd3", "stable-diffusion-3", "rows", 28, 7.0),
        ("flux", "flux", "embedded", 28, 3.5),
        ("schnell", "flux", "none", 4, 1.0),
        ("kontext", "flux", "embedded", 28, 3.5),
    ],
)
def test_a_profile_says_how_a_model_is_sampled_and_guided(
    zoo: Zoo, name: str, family: str, guidance: str, steps: int, scale: float
) -> None:
    found = profile(zoo, name)
    assert (found.family, found.guidance) == (family, guidance)
    assert (found.default_num_steps, found.default_guidance_scale) == (steps, scale)
    assert found.default_sampler == "flow_match_euler"
    assert list(found.max_steps_by_sampler) == ["flow_match_euler"]
    assert found.size_multiple_px == 4 * 2
    # as diffusers' pipeline takes, and no larger than the largest image
    assert found.max_references == (1 if name == "kontext" else 0)
    assert found.max_reference_px == 128 * 128


def test_the_built_in_transformer_is_served_by_its_name(zoo: Zoo) -> None:
    found = inspect_model(pool("shapes-sd3", max_px=None)).profile
    assert (found.default_width_px, found.max_px) == (64, 128)
    assert (found.default_num_steps, found.default_guidance_scale) == (20, 2.0)


def test_a_flux_model_makes_512_px_at_first_with_this_autoencoder(zoo: Zoo) -> None:
    """128 latent pixels, as its pipeline says, times 4."""
    found = inspect_model(pool(zoo.folder("flux"), max_px=None)).profile
    assert (found.default_width_px, found.max_px) == (512, 1024)


def test_sizes_end_where_the_models_positions_do(zoo: Zoo) -> None:
    folder = zoo.folder("sd3")
    assert inspect_model(pool(folder, max_px=24 * 8)).profile.max_px == 192
    with pytest.raises(ConfigError, match=r"max_px is 200.* at most 192 px; lower max_px"):
        inspect_model(pool(folder, max_px=200))


@pytest.mark.parametrize("sampler", ["ddim", "dpmpp_2m"])
def test_samplers_for_noise_are_not_offered_for_flows_nor_the_reverse(
    zoo: Zoo, sampler: Any
) -> None:
    with pytest.raises(InvalidRequest, match=r"allowed: \['flow_match_euler'\]"):
        start(zoo.model("sd3"), request(sampler=sampler))
    with pytest.raises(InvalidRequest, match=r"'flow_match_euler' is not defined.*'ddim'"):
        start(zoo.model("sd"), dit_request())
    with pytest.raises(ConfigError, match=f"{sampler}, which this model does not offer; allowed"):
        inspect_model(pool(zoo.folder("sd3"), defaults={"sampler": sampler}))


def test_guidance_is_refused_for_a_pool_of_a_model_without(zoo: Zoo) -> None:
    defaults = {"size": "64x64", "guidance_scale": 3.5}
    with pytest.raises(ConfigError, match="made to do without guidance"):
        inspect_model(pool(zoo.folder("schnell"), defaults=defaults))


def test_stable_diffusion_3_may_do_without_t5(zoo: Zoo, sd3_copy: Path) -> None:
    shutil.rmtree(sd3_copy / "text_encoder_3")
    shutil.rmtree(sd3_copy / "tokenizer_3")
    nothing = {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
    change(sd3_copy / "model_index.json", **nothing)
    conditioning = start(load(pool(sd3_copy)), dit_request()).conditioning
    assert conditioning.prompt_embeds.shape == (32 + 256, 64)
    assert not conditioning.prompt_embeds[32:].any()
    assert start(zoo.model("sd3"), dit_request()).conditioning.prompt_embeds[32:].any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"patch_size": 3}, "patch_size=3 is not covered; allowed"),
        ({"qk_norm": "layer_norm"}, "qk_norm='layer_norm' is not covered; allowed"),
        ({"pos_embed_max_size": None}, "pos_embed_max_size=None is not covered"),
        ({"out_channels": 4}, "takes 8 channels and gives 4"),
    ],
)
def test_what_a_transformer_is_configured_to_be_is_refused_by_its_key(
    sd3_copy: Path, values: dict[str, Any], message: str
) -> None:
    change(sd3_copy / "transformer" / "config.json", **values)
    with pytest.raises(ModelUnsupported, match=message):
        load_model(pool(sd3_copy))


@pytest.mark.parametrize(
    ("component", "name"),
    [("transformer", "AuraFlowTransformer2DModel"), ("scheduler", "DDIMScheduler")],
)
def test_a_component_of_another_class_is_refused_by_its_name(
    sd3_copy: Path, component: str, name: str
) -> None:
    """The index says which it is, as in diffusers, whatever the component's own file says."""
    change(sd3_copy / "model_index.json", **{component: ["diffusers", name]})
    with pytest.raises(ModelUnsupported, match=f"{name}.* is not covered; allowed"):
        load_model(pool(sd3_copy))


def test_an_editing_flux_is_refused_by_its_channels(flux_copy: Path) -> None:
    change(flux_copy / "transformer" / "config.json", in_channels=64, out_channels=32)
    with pytest.raises(ModelUnsupported, match="takes 64 channels and gives 32"):
        load_model(pool(flux_copy))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stochastic_sampling": True}, "stochastic_sampling=True"),
        ({"invert_sigmas": True}, "invert_sigmas=True"),
    ],
)
def test_schedules_that_are_not_covered_are_refused(
    sd3_copy: Path, values: dict[str, Any], message: str
) -> None:
    change(sd3_copy / "scheduler" / "scheduler_config.json", **values)
    with pytest.raises(ModelUnsupported, match=f"scheduler .*{message}"):
        load_model(pool(sd3_copy))


def test_layers_that_compute_something_else_are_refused_by_name(zoo: Zoo) -> None:
    transformer = zoo.reference("sd35").pipeline.transformer
    attention = transformer.transformer_blocks[1].attn
    processor, attention.processor = attention.processor, object()
    try:
        with pytest.raises(ModelUnsupported, match=r"transformer_blocks\.1\.attn has processor="):
            DiTExecutor(transformer, vae_scale_factor=4, device=torch.device("cpu"))
    finally:
        attention.processor = processor
    check_dit_layers(transformer)
