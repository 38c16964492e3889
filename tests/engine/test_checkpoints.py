"""A checkpoint in one file is served as the folder that it was made from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.files.folders import check_local_files, is_called, resolve_folder
from ray_cluster.engine.models.loading import LoadedModel, inspect_model
from ray_cluster.engine.models.whole_models import load_models
from ray_cluster.engine.pipelines.loading import load_pipeline
from ray_cluster.errors import ConfigError, RayClusterError
from ray_cluster.models.local import local_model, model_digest
from tests.engine.checkpoints import KINDS, Kind, rewritten, save_kind
from tests.engine.harness import (
    RUN_TOLERANCE,
    difference,
    load,
    pixel_difference,
    pool,
    request,
    run_alone,
)

Change = Callable[[dict[str, Tensor]], None]
# the others are slow
_QUICK = {"sd15-fp8"}


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_kind(tmp_path_factory.mktemp("sd15"), KINDS["sd15"])


@pytest.mark.parametrize(
    "name",
    [one if one in _QUICK else pytest.param(one, marks=pytest.mark.slow) for one in KINDS],
)
def test_a_checkpoint_makes_the_images_of_its_folder(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    folder, file = save_kind(tmp_path, kind)
    made = resolve_folder(*pool(file, **kind.pool).files)
    for part, model in load_models(folder, torch.float32).items():
        [other] = load_models(made, torch.float32, only={part}).values()
        _check_equal(model, other)
    # nothing of the file's own size is left out, nor what it predicts
    settings = {"defaults": {"size": "64x64"}, **kind.pool}
    one, other = load(pool(folder, **settings)), load(pool(file, **settings))
    assert one.profile.default_sampler == other.profile.default_sampler
    assert one.profile.max_px == other.profile.max_px
    if kind.inpaints:
        assert one.profile.edits == other.profile.edits == "masked"
    else:
        _check_images(one, other)


def _check_equal(one: nn.Module, other: nn.Module) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert one.training == other.training


def _check_images(one: LoadedModel, other: LoadedModel) -> None:
    call = request(num_steps=3, sampler=one.profile.default_sampler, negative_prompt="a cat")
    left, right = run_alone(one, call), run_alone(other, call)
    # weights lie at other addresses, where kernels sum in another order
    assert difference(left, right) <= RUN_TOLERANCE
    with torch.inference_mode():
        pixels = [model.decoder.decode([left])[0] for model in (one, other)]
    assert pixel_difference(*pixels) == 0


@pytest.mark.slow
def test_a_checkpoint_is_called_as_its_folder_is(plain: tuple[Path, Path]) -> None:
    settings = {"engine": "diffusers", "defaults": {"size": "64x64"}}
    one, other = (load_pipeline(pool(path, **settings)) for path in plain)
    call = request(num_steps=3, sampler="pndm")
    images = [model.make(call, lambda: None) for model in (one, other)]
    assert pixel_difference(*images) == 0
    assert images[0].std() > 1


def test_the_usual_size_is_that_of_its_kind(tmp_path: Path, plain: tuple[Path, Path]) -> None:
    found = local_model(PoolConfig(name="m", model=str(plain[1])))
    assert found is not None
    assert (found.sizes.default_width_px, found.sizes.multiple_px) == (512, 8)


def test_the_digest_is_of_the_file_wherever_it_lies_and_of_every_byte(
    tmp_path: Path, plain: tuple[Path, Path]
) -> None:
    before = model_digest(resolve_folder(str(plain[1])))
    copy = Path(shutil.copy(plain[1], tmp_path / "other-name.safetensors"))
    assert model_digest(resolve_folder(str(copy))) == before
    data = copy.read_bytes()
    copy.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert model_digest(resolve_folder(str(copy))) != before


def _without(part: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(part)]:
            del tensors[name]

    return change


def _with(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without("first_stage_model."), "has no autoencoder"),
        (_without("cond_stage_model."), "has no text encoder"),
        (_without("model.diffusion_model."), "has no UNet"),
        (_without("model.diffusion_model.input_blocks.0"), "input_blocks.0.0.weight"),
        (_without("model.diffusion_model.middle_block.1.proj_in"), "middle_block.1.proj_in.weight"),
        (_without("model.diffusion_model.output_blocks.3.0.in_layers"), "resnets.0.conv1"),
        (_without("first_stage_model.decoder.up.1"), "would be filled with random numbers"),
        (_without("cond_stage_model.transformer.text_model.final"), "final_layer_norm"),
        (_with("model.diffusion_model.input_blocks.0.0.weight", 64, 8, 3, 3), "for 8 channels"),
        (_with("model.diffusion_model.time_embed.0.weight", 3, 3), "other shapes"),
        (_with("model.diffusion_model.double_blocks.0.x", 1), "FLUX: give a folder"),
        (_with("control_model.x", 1), "is a ControlNet"),
        (_with("lora_unet_x.alpha", 1), "is a LoRA"),
        (_with("scaled_fp8", 1), "ComfyUI's scaled fp8"),
        (_with("edm_mean", 1), "EDM schedule"),
        (
            _with(
                "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight", 9, 64
            ),
            "for 9 tokens, and CLIP's has 49408",
        ),
    ],
)
def test_what_is_no_whole_checkpoint_is_refused_by_its_header(
    plain: tuple[Path, Path], change: Change, said: str
) -> None:
    changed = rewritten(plain[1], change)
    with pytest.raises(ConfigError) as error:
        inspect_model(pool(changed, defaults={"size": "64x64"}))
    assert said in str(error.value)
    assert changed.name in str(error.value)


def test_a_refiner_and_half_an_sdxl_are_refused(tmp_path: Path) -> None:
    _, file = save_kind(tmp_path, KINDS["sdxl-fp16"])
    for part, said in {
        "conditioner.embedders.1.": "SDXL's refiner",
        "conditioner.embedders.0.": "only the second of SDXL's text encoders",
    }.items():
        with pytest.raises(ConfigError, match=said):
            resolve_folder(str(rewritten(file, _without(part))))


def test_an_sd2_that_does_not_say_what_it_predicts_is_refused(tmp_path: Path) -> None:
    _, file = save_kind(tmp_path, Kind("sd2"))
    with pytest.raises(ConfigError, match="set prediction: v_prediction"):
        inspect_model(pool(file))
    assert resolve_folder(str(file), "epsilon") != resolve_folder(str(file), "v_prediction")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("cut.safetensors", None, "but its header says"),
        ("page.safetensors", b"<!doctype html><html>", "is a web page"),
        ("pointer.safetensors", b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
        ("noise.safetensors", b"\xff" * 64, "is no safetensors file"),
        ("empty.safetensors", b"", "is empty"),
        ("old.ckpt", b"pickled", "older format that can run any code"),
        ("flux-Q4.gguf", b"GGUF", "give a folder of its kind as model"),
    ],
)
def test_broken_files_are_refused_before_a_service_starts(
    tmp_path: Path, plain: tuple[Path, Path], name: str, content: bytes | None, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(plain[1].read_bytes()[:-1] if content is None else content)
    config = ClusterConfig(pools=(PoolConfig(name="m", model=str(path)),))
    with pytest.raises(RayClusterError, match=f"pool m: .*{said}"):
        check_local_files(config)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        resolve_folder(str(tmp_path / "none.safetensors"))
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ConfigError, match="has no UNet"):
        resolve_folder(str(tmp_path / "x.safetensors"))


def test_a_folder_says_itself_what_its_model_predicts(plain: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="pool m: prediction cannot be set"):
        is_called(pool(plain[0], prediction="epsilon"))
    assert not is_called(pool(plain[1], prediction="epsilon"))
