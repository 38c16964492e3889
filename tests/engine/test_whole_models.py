"""A model is served whole or not at all: its files are compared with it before a weight is read."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, UNet2DConditionModel
from safetensors.torch import load_file, save_file

from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.files.folders import component_names
from ray_cluster.engine.files.weights import component_weights
from ray_cluster.engine.models.loading import inspect_model
from ray_cluster.engine.models.whole_models import load_models
from ray_cluster.engine.pipelines.loading import inspect_pipeline
from ray_cluster.errors import ConfigError, ModelUnsupported
from ray_cluster.models.weight_files import components
from tests.engine.conftest import Zoo
from tests.engine.harness import pool

FAMILIES = ("sd", "sdxl", "sd3", "flux")
PARTS = ("unet", "transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
Copy = Callable[[str], Path]


@pytest.fixture
def copy(zoo: Zoo, tmp_path: Path) -> Copy:
    return lambda name: Path(shutil.copytree(zoo.folder(name), tmp_path / name))


def pool_of(folder: Path) -> PoolConfig:
    # FLUX's own default size is not the folder's to say
    return pool(folder, defaults={"size": "64x64"})


def weights_of(folder: Path, component: str) -> Path:
    [path] = (folder / component).glob("*.safetensors")
    return path


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def models_of(zoo: Zoo) -> Iterator[tuple[str, str]]:
    for family in FAMILIES:
        yield from ((family, one.name) for one in components(zoo.folder(family)) if one.has_weights)


def refused(folder: Path) -> str:
    """Return why a folder is refused before a weight is read."""
    with pytest.raises(ConfigError) as before:
        inspect_model(pool_of(folder))
    return str(before.value)


def lose_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[max(name for name in tensors if name.endswith(".weight"))]


def rename_all(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[f"other.{name}"] = tensors.pop(name)


def widen_one(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in sorted(tensors) if tensors[name].ndim == 1)
    tensors[name] = torch.zeros(len(tensors[name]) + 1)


@pytest.mark.parametrize(
    "change", [lose_a_layer, pytest.param(rename_all, marks=pytest.mark.slow), widen_one]
)
def test_a_component_without_all_weights_is_refused_before_and_while_it_is_loaded(
    zoo: Zoo, copy: Copy, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    folders = {family: copy(family) for family in FAMILIES}
    for family, part in models_of(zoo):
        path = weights_of(folders[family], part)
        whole = path.read_bytes()
        before = load_file(path)
        rewrite(path, change)
        said = refused(folders[family])
        assert f"{part}: {path.name} " in said, said
        assert ("other shapes" if change is widen_one else "lacks") in said
        wrong = set(before) - set(load_file(path)) or {
            name for name, one in load_file(path).items() if one.shape != before[name].shape
        }
        assert any(name in said or name.removeprefix("text_model.") in said for name in wrong), said
        # the same at the load itself, should the files change in between
        with pytest.raises((ConfigError, ValueError, RuntimeError)):
            load_models(folders[family], torch.float32)
        path.write_bytes(whole)
    for family, folder in folders.items():
        assert inspect_model(pool_of(folder)).profile, family


def test_weights_that_no_model_has_and_older_names_are_no_mistake(zoo: Zoo, copy: Copy) -> None:
    folder = copy("sdxl")

    def as_older_files(tensors: dict[str, torch.Tensor]) -> None:
        names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
        for name in [one for one in tensors if ".attentions.0.to_" in one]:
            new = next(name.replace(a, b) for a, b in names.items() if a in name)
            tensors[new] = tensors.pop(name)
        tensors["something.else"] = torch.zeros(3)

    rewrite(weights_of(folder, "vae"), as_older_files)
    for part in ("text_encoder", "text_encoder_2"):
        rewrite(
            weights_of(folder, part),
            lambda tensors: tensors.update(
                {"text_model.embeddings.position_ids": torch.arange(32)[None]}
            ),
        )
    loaded = load_models(folder, torch.float32)
    expected = DiffusionPipeline.from_pretrained(zoo.folder("sdxl"))
    for name, model in loaded.items():
        wanted = getattr(expected, name).state_dict()
        assert all(torch.equal(wanted[key], one) for key, one in model.state_dict().items())
    assert inspect_model(pool_of(folder)).profile


def test_an_embedding_that_t5_shares_may_be_stored_under_either_name(copy: Copy) -> None:
    folder = copy("flux")
    path = weights_of(folder, "text_encoder_2")
    rewrite(
        path,
        lambda tensors: tensors.update(
            {"encoder.embed_tokens.weight": tensors.pop("shared.weight")}
        ),
    )
    reference = DiffusionPipeline.from_pretrained(folder).text_encoder_2.shared.weight
    loaded = load_models(folder, torch.float32)["text_encoder_2"].shared.weight
    stored = load_file(path)["encoder.embed_tokens.weight"]
    is_whole = torch.equal(reference, stored)
    assert torch.equal(loaded, stored) is is_whole


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 3438167536\n"
PAGE = b"<!DOCTYPE html>\n<html><body>Access to this model is restricted</body></html>"
HUGE = (2**62).to_bytes(8, "little") + b"{}"
NOT_WEIGHTS = {
    "lfs": (lambda _: LFS, "is a Git LFS pointer.*git lfs pull"),
    "empty": (lambda _: b"", "is empty.*download it again"),
    "page": (lambda _: PAGE, "is a web page.*download it again"),
    "short": (lambda data: data[:-100], "bytes, but its header says .*download it again"),
    "header": (lambda data: data[:40], "ends in its header.*download it again"),
    "huge": (lambda _: HUGE, "ends in its header.*download it again"),
    "json": (lambda _: (6).to_bytes(8, "little") + b"[1, 2]", "its header is not the JSON of one"),
    "zeros": (lambda data: bytes(len(data)), "its header is not the JSON of one"),
}


@pytest.mark.parametrize("kind", NOT_WEIGHTS)
def test_what_is_no_weights_file_is_named_as_what_it_is(copy: Copy, kind: str) -> None:
    make, sentence = NOT_WEIGHTS[kind]
    folder = copy("sd")
    for part in ("unet", "text_encoder"):
        path = weights_of(folder, part)
        whole = path.read_bytes()
        path.write_bytes(make(whole))
        with pytest.raises(ConfigError, match=rf"{part}/{path.name} .*{sentence}"):
            inspect_model(pool_of(folder))
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (LFS, "is a Git LFS pointer"),
        (b"", "is empty"),
        (PAGE, "is a web page"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "holds a JSON list, not an object"),
        (20_000 * b"[", "is not JSON"),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "model_index.json",
        "unet/config.json",
        "vae/config.json",
        "text_encoder/config.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer_config.json",
    ],
)
def test_a_configuration_that_is_none_is_named(
    copy: Copy, name: str, content: bytes, sentence: str
) -> None:
    folder = copy("sd")
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} {sentence}"):
        inspect_model(pool_of(folder))


@pytest.mark.parametrize("content", [LFS, b"{}", b"[", b'{"model": 3}'])
def test_a_damaged_tokenizer_is_refused_before_the_load(copy: Copy, content: bytes) -> None:
    folder = copy("sdxl")
    (folder / "tokenizer_2" / "tokenizer.json").write_bytes(content)
    assert "tokenizer_2" in refused(folder)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ({}, "has no _class_name"),
        ({"unet": ["diffusers"]}, r"unet is \['diffusers'\], not \[library, class\]"),
        ({"vae": ["diffusers", "AutoencoderXL"]}, "vae is a AutoencoderXL, which the installed"),
        ({"vae": ["somebody", "Autoencoder"]}, "vae is made by somebody; covered: diffusers"),
        ({"vae": [None, None]}, "names no vae"),
    ],
)
def test_an_index_of_a_pipeline_that_is_none_is_named(
    copy: Copy, index: dict[str, Any], sentence: str
) -> None:
    folder = copy("sd")
    whole = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(whole | index if index else index))
    with pytest.raises((ConfigError, ModelUnsupported), match=sentence):
        inspect_model(pool_of(folder))


def quantised_by(copy: Copy, method: str) -> Path:
    folder = copy("flux")
    path = folder / "text_encoder_2" / "config.json"
    content = json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}
    path.write_text(json.dumps(content))
    return folder


def test_a_quantised_component_is_left_to_diffusers(copy: Copy) -> None:
    folder = quantised_by(copy, "torchao")
    with pytest.raises(ModelUnsupported, match=r"text_encoder_2 has quantised weights.*diffusers"):
        inspect_model(pool_of(folder))


@pytest.mark.parametrize(
    ("method", "is_there", "said"),
    [
        ("torchao", False, "torchao is not installed: pip install torchao"),
        ("quanto", False, "optimum-quanto is not installed"),
        ("bitsandbytes", False, "bitsandbytes is not installed"),
        ("bitsandbytes", True, "runs on GPUs alone: set device: cuda"),
        ("gptq", True, "quantised by gptq, which is not covered: auto-round, bitsandbytes, "),
        ("nunchaku_lite", True, "quantised by nunchaku_lite, which is not covered"),
    ],
)
def test_quantised_components_that_cannot_be_loaded_here_are_refused_by_their_package(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, method: str, is_there: bool, said: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: is_there or None)
    with pytest.raises(ModelUnsupported, match=f"text_encoder_2 has weights.*{said}"):
        inspect_pipeline(pool(quantised_by(copy, method), engine="diffusers"))


def test_quantised_components_take_what_their_files_do(
    zoo: Zoo, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: True)
    folder = quantised_by(copy, "torchao")
    rewrite(weights_of(folder, "text_encoder_2"), _halve)
    settings = {"engine": "diffusers", "dtype": "float32", "defaults": {"size": "64x64"}}
    whole = inspect_pipeline(pool(zoo.folder("flux"), **settings)).weight_bytes
    found = inspect_pipeline(pool(folder, **settings)).weight_bytes
    assert 0 < found < whole


def test_weights_on_a_gpu_that_is_not_known_are_of_half_precision(zoo: Zoo) -> None:
    settings = {"engine": "diffusers", "defaults": {"size": "64x64"}}
    on_gpu = settings | {"device": "cuda", "num_gpus": 1}
    whole, half = (inspect_pipeline(pool(zoo.folder("flux"), **one)) for one in (settings, on_gpu))
    assert whole.weight_bytes == 2 * half.weight_bytes > 0


def _halve(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {name: one.half() for name, one in tensors.items()}


def save(zoo: Zoo, name: str, folder: Path, **options: Any) -> Path:
    extra = {} if name != "sd" else {"safety_checker": None}
    pipeline = DiffusionPipeline.from_pretrained(zoo.folder(name), **extra)
    pipeline.save_pretrained(folder, **options)
    return folder


def use_older_names(folder: Path) -> None:
    """Give shards and index of the denoiser the names of older versions of diffusers."""
    part = folder / ("unet" if (folder / "unet").exists() else "transformer")
    index = part / "diffusion_pytorch_model.safetensors.index.fp16.json"
    content = json.loads(index.read_text())
    for name in set(content["weight_map"].values()):
        stem, _, rest = name.partition(".fp16-")
        (part / name).rename(part / f"{stem}-{rest.replace('.safe', '.fp16.safe')}")
    content["weight_map"] = {
        key: name.replace(".fp16-", "-").replace(".safetensors", ".fp16.safetensors")
        for key, name in content["weight_map"].items()
    }
    index.unlink()
    older = part / "diffusion_pytorch_model.safetensors.fp16.index.json"
    older.write_text(json.dumps(content))


@pytest.mark.filterwarnings("ignore:This serialization format is now deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["sd", "flux"])
@pytest.mark.parametrize("form", ["variant", "sharded variant", "older shards", "sharded", "bin"])
def test_files_of_every_form_are_found_and_loaded_as_by_diffusers(
    zoo: Zoo, tmp_path: Path, name: str, form: str
) -> None:
    is_variant = form not in {"sharded", "bin"}
    options: dict[str, Any] = {"variant": "fp16"} if is_variant else {}
    if form not in {"variant", "bin"}:
        options["max_shard_size"] = "60KB"
    folder = save(zoo, name, tmp_path / "model", safe_serialization=form != "bin", **options)
    if form == "older shards":
        use_older_names(folder)
    if form == "bin":
        # which transformers does not write any more
        for path in list(folder.glob("*/model.safetensors")):
            torch.save(load_file(path), path.with_name("pytorch_model.bin"))
            path.unlink()
    expected = DiffusionPipeline.from_pretrained(folder, variant="fp16" if is_variant else None)
    loaded = load_models(folder, torch.float32)
    assert set(loaded) == {one for one in component_names(folder) if one in PARTS}
    num_bytes = {}
    for part, one in loaded.items():
        wanted = getattr(expected, part).state_dict()
        assert all(torch.equal(wanted[key], value) for key, value in one.state_dict().items())
        # by place: T5 has its embedding under two names
        num_bytes |= {tensor.data_ptr(): tensor.nbytes for tensor in one.state_dict().values()}
    planned = component_weights(folder, torch.float32).values()
    assert sum(one.num_bytes for one in planned) == sum(num_bytes.values())
    inspect_model(pool_of(folder))
    # a shard, or the only file, of each component that is lost is missed before the load
    for part in loaded:
        path = max((folder / part).glob("*.bin" if form == "bin" else "*.safetensors"))
        moved = path.rename(tmp_path / "moved")
        assert part in refused(folder)
        moved.rename(path)


def test_plain_files_are_taken_before_those_of_a_variant(zoo: Zoo, tmp_path: Path) -> None:
    """A folder with both, of which one component has the variant alone."""
    folder = save(zoo, "sd", tmp_path / "model")
    half = DiffusionPipeline.from_pretrained(folder, safety_checker=None, dtype=torch.float16)
    half.save_pretrained(folder, variant="fp16")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    loaded = load_models(folder, torch.float32)
    whole = DiffusionPipeline.from_pretrained(zoo.folder("sd"), safety_checker=None)
    for part, expected in (
        ("unet", whole.unet),
        ("text_encoder", whole.text_encoder),
        ("vae", half.vae),
    ):
        wanted = expected.state_dict()
        found = loaded[part].state_dict()
        assert all(torch.equal(wanted[key].float(), found[key]) for key in wanted), part


def set_keys(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        # of a class that the libraries have for this alone
        ("text_encoder/config.json", {"hidden_size": None}, "does not suit a CLIPTextModel"),
        ("scheduler/scheduler_config.json", {"beta_start": None}, "makes no schedule of"),
        ("unet/config.json", {"class_embeddings_concat": True}, "class_embeddings_concat=True"),
        ("model_index.json", {"tokenizer": [None, None]}, "names no tokenizer"),
    ],
)
def test_a_wrong_value_of_a_configuration_is_named_with_its_file(
    copy: Copy, file: str, changes: dict[str, Any], words: str
) -> None:
    folder = copy("sd15")
    set_keys(folder / file, **changes)
    with pytest.raises((ConfigError, ModelUnsupported), match=words):
        inspect_model(pool_of(folder))


def test_an_encoder_without_its_tokenizer_is_refused(copy: Copy) -> None:
    folder = copy("sd3")
    set_keys(folder / "model_index.json", tokenizer_3=[None, None])
    assert "has text_encoder_3, but no tokenizer_3" in refused(folder)


def test_components_of_different_models_are_refused(copy: Copy) -> None:
    folder = copy("sd")
    for width, channels, words in (
        (48, 4, "prompts of width 48, and text_encoder make 32"),
        (32, 8, "takes latents of 8 channels, and vae makes 4"),
    ):
        unet = UNet2DConditionModel(
            sample_size=16,
            in_channels=channels,
            out_channels=channels,
            block_out_channels=(16,),
            down_block_types=("CrossAttnDownBlock2D",),
            up_block_types=("CrossAttnUpBlock2D",),
            cross_attention_dim=width,
            norm_num_groups=8,
        )
        unet.save_pretrained(folder / "unet")
        assert words in refused(folder)
