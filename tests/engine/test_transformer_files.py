"""A transformer from a file of its own beside a folder, quantised or not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from diffusers import (
    FluxTransformer2DModel,
    GGUFQuantizationConfig,
    QwenImageTransformer2DModel,
)
from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES, dequantize_gguf_tensor
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from torch import Tensor

from ray_cluster.engine.adapters.merged_weights import MergedWeights
from ray_cluster.engine.files.folders import resolve_folder
from ray_cluster.engine.files.weights import component_weights
from ray_cluster.engine.models.checkpoint_weights import renamed
from ray_cluster.engine.models.loading import inspect_model
from ray_cluster.engine.models.whole_models import load_models
from ray_cluster.engine.pipelines.loading import inspect_pipeline
from ray_cluster.errors import ConfigError, ModelUnsupported, RayClusterError
from ray_cluster.models.checkpoints.gguf_files import PLAIN_TYPES, QUANTISED_TYPES, gguf_tensors
from ray_cluster.models.local import model_digest
from ray_cluster.models.weight_files import WeightFiles
from tests.engine.conftest import Zoo
from tests.engine.dits import DiTReference, dit_request
from tests.engine.harness import (
    RUN_TOLERANCE,
    call_model,
    difference,
    load,
    pool,
    run_alone,
    run_together,
    start_all,
)
from tests.engine.lora_sets import random_set
from tests.engine.random_pipelines import save_qwen

SETTINGS: dict[str, Any] = {"defaults": {"size": "64x64"}}


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))


def weights_of(folder: Path) -> dict[str, Tensor]:
    model = FluxTransformer2DModel.from_pretrained(folder / "transformer")
    return dict(model.state_dict())


def write(path: Path, tensors: dict[str, Tensor], kind: Kind, *, filled: bool = False) -> Path:
    """Write a GGUF file whose matrices are of a type where their rows are whole blocks.

    Args:
        filled: whether blocks are random ones, of types that the package does not quantise to.
    """
    writer = gguf.GGUFWriter(path, "flux")
    width, size = gguf.GGML_QUANT_SIZES[kind]
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if values.ndim != 2 or values.shape[1] % width:
            writer.add_tensor(name, values)
        elif filled:
            blocks = _random_blocks(kind, values.size // width, size)
            writer.add_tensor(name, blocks.reshape(len(values), -1), raw_dtype=kind)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_blocks(kind: Kind, count: int, size: int) -> Any:
    """Return random blocks that come to finite numbers, none beyond 1000."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (2_000, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        rows = gguf.quants.dequantize(blocks, kind).reshape(len(blocks), -1)
    # diffusers has them in float16 on the way
    good = blocks[(abs(rows) < 1e3).all(axis=1)]
    return good[random.integers(0, len(good), count)]


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0], ids=lambda one: one.name)
def test_a_quantised_flux_makes_what_diffusers_makes_with_it(
    zoo: Zoo, tmp_path: Path, kind: Kind
) -> None:
    folder = zoo.folder("flux")
    file = write(tmp_path / "flux.gguf", weights_of(folder), kind)
    model = load(pool(folder, transformer=str(file), **SETTINGS))
    reference = DiTReference(folder)
    reference.pipeline.transformer = FluxTransformer2DModel.from_single_file(
        str(file),
        config=str(folder),
        subfolder="transformer",
        quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
        dtype=torch.float32,
    )
    one, other = dit_request(), dit_request("b", width_px=96, prompt="green", seed=5)
    expected = reference.outcome(one).latents
    together = run_together(model, [one, other])
    assert difference(run_alone(model, one), expected) <= RUN_TOLERANCE
    assert difference(together["a"], expected) <= RUN_TOLERANCE
    # it is the quantised one that was run
    assert difference(zoo.reference("flux").outcome(one).latents, expected) > 10 * RUN_TOLERANCE


def test_loras_are_added_to_quantised_layers_and_not_merged(zoo: Zoo, tmp_path: Path) -> None:
    folder, stored = zoo.folder("flux"), weights_of(zoo.folder("flux"))
    file = write(tmp_path / "flux.gguf", stored, Kind.Q4_0)
    reference = DiTReference(folder)
    tensors = {
        one.name: torch.tensor(gguf.quants.dequantize(one.data, one.tensor_type)).reshape(
            stored[one.name].shape
        )
        for one in gguf.GGUFReader(file).tensors
    }
    # diffusers multiplies in float16, the package in float32
    save_file(tensors, tmp_path / "plain.safetensors")
    found = []
    for name in ("flux.gguf", "plain.safetensors"):
        model = load(pool(folder, transformer=str(tmp_path / name), **SETTINGS))
        deltas = random_set(model, reference.pipeline).denoiser
        [state] = start_all(model, [dit_request()])
        found.append(
            [
                call_model(
                    model.executor,
                    [state.latents],
                    torch.tensor([500.0]),
                    [state.conditioning],
                    [3.0],
                    given,
                )[0]
                for given in ([], [deltas])
            ]
        )
        if name.endswith(".gguf"):
            with pytest.raises(ModelUnsupported, match="quantised"):
                MergedWeights(deltas)
    (plain, added), (expected, expected_added) = found
    assert difference(plain, expected) <= 5e-3
    assert difference(added, expected_added) <= 5e-3
    assert difference(added, plain) > 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_a_plain_file_makes_what_its_weights_make_in_the_folder(
    zoo: Zoo, tmp_path: Path, dtype: torch.dtype
) -> None:
    folder, file = zoo.folder("flux"), tmp_path / "flux.safetensors"
    tensors = {name: one.to(dtype) for name, one in weights_of(folder).items()}
    save_file(tensors, file)
    model, reference = load(pool(folder, transformer=str(file), **SETTINGS)), DiTReference(folder)
    wide = {name: one.float() for name, one in tensors.items()}
    reference.pipeline.transformer.load_state_dict(wide)
    one = dit_request()
    assert difference(run_alone(model, one), reference.outcome(one).latents) <= RUN_TOLERANCE


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, zoo: Zoo) -> Path:
    """FLUX with rows of whole blocks of 256."""
    folder = tmp_path_factory.mktemp("wide") / "transformer"
    FluxTransformer2DModel(
        in_channels=32,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=128,
        num_attention_heads=2,
        joint_attention_dim=256,
        pooled_projection_dim=256,
        axes_dims_rope=(16, 56, 56),
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        one if one in {"Q4_K", "IQ4_XS"} else pytest.param(one, marks=pytest.mark.slow)
        for one in sorted(QUANTISED_TYPES)
    ],
)
def test_every_type_comes_to_the_numbers_of_the_package(
    wide: Path, tmp_path: Path, name: str
) -> None:
    kind, file = Kind[name], tmp_path / "checkpoint.gguf"
    weights = dict(FluxTransformer2DModel.from_pretrained(wide).state_dict())
    write(file, weights, kind, filled=True)
    part = tmp_path / "transformer"
    part.mkdir()
    (part / "config.json").write_bytes((wide / "config.json").read_bytes())
    (part / "checkpoint.gguf").symlink_to(file)
    (tmp_path / "model_index.json").write_text(
        '{"transformer": ["diffusers", "FluxTransformer2DModel"]}'
    )
    [model] = load_models(tmp_path, torch.float32).values()
    stored = {one.name: one for one in gguf.GGUFReader(file).tensors}
    quantised = [one for one in model.state_dict() if stored[one].tensor_type == kind]
    assert len(quantised) > 20
    for path in quantised:
        expected = gguf.quants.dequantize(stored[path].data, kind)
        found = dequantize_gguf_tensor(model.get_parameter(path)).float().numpy()
        blocks, exact = (
            one.reshape(-1, gguf.GGML_QUANT_SIZES[kind][0]) for one in (found, expected)
        )
        assert (abs(blocks - exact).max(1) <= 2e-3 * abs(exact).max(1)).all()
    [weight] = component_weights(tmp_path, torch.float32).values()
    assert file.stat().st_size < weight.num_bytes < 2 * file.stat().st_size + 16 * 2**20


def test_the_covered_types_are_those_of_diffusers() -> None:
    names = {one.name for one in SUPPORTED_GGUF_QUANT_TYPES}
    assert names - PLAIN_TYPES == QUANTISED_TYPES


def test_names_of_the_authors_are_converted_at_the_published_size(tmp_path: Path) -> None:
    config = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}
    with torch.device("meta"):
        model = FluxTransformer2DModel(**config)
    part = tmp_path / "transformer"
    model.save_config(part)
    files = WeightFiles((part / "checkpoint.safetensors",), None, is_sharded=False, part=part)
    found = renamed(files, dict(_authors_names(model)))
    assert {name: one.shape for name, one in found.items()} == {
        name: one.shape for name, one in model.state_dict().items()
    }
    own = renamed(files, dict(model.state_dict()))
    assert own.keys() == found.keys()


def _authors_names(model: Any) -> Any:
    """Yield tensors under the names of FLUX's authors, with one block of each kind."""
    mlp = {"net.0.proj": "0", "net.2": "2"}
    simple = {
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "proj_out": "final_layer.linear",
        "transformer_blocks.0.norm1.linear": "double_blocks.0.img_mod.lin",
        "transformer_blocks.0.norm1_context.linear": "double_blocks.0.txt_mod.lin",
        "transformer_blocks.0.attn.to_out.0": "double_blocks.0.img_attn.proj",
        "transformer_blocks.0.attn.to_add_out": "double_blocks.0.txt_attn.proj",
        "single_transformer_blocks.0.norm.linear": "single_blocks.0.modulation.lin",
        "single_transformer_blocks.0.proj_out": "single_blocks.0.linear2",
    }
    for ours, theirs in {"timestep": "time", "text": "vector", "guidance": "guidance"}.items():
        for index, layer in enumerate(("in_layer", "out_layer"), 1):
            name = f"time_text_embed.{ours}_embedder.linear_{index}"
            simple[name] = f"{theirs}_in.{layer}"
    for ours, theirs in mlp.items():
        simple[f"transformer_blocks.0.ff.{ours}"] = f"double_blocks.0.img_mlp.{theirs}"
        simple[f"transformer_blocks.0.ff_context.{ours}"] = f"double_blocks.0.txt_mlp.{theirs}"
    state = model.state_dict()
    for ours, theirs in simple.items():
        for end in ("weight", "bias"):
            yield f"{theirs}.{end}", state[f"{ours}.{end}"]
    for ours, theirs in {"norm_q": "query", "norm_k": "key"}.items():
        attn = "transformer_blocks.0.attn"
        yield f"double_blocks.0.img_attn.norm.{theirs}_norm.scale", state[f"{attn}.{ours}.weight"]
        added = state[f"{attn}.{ours.replace('_', '_added_')}.weight"]
        yield f"double_blocks.0.txt_attn.norm.{theirs}_norm.scale", added
        yield f"single_blocks.0.norm.{theirs}_norm.scale", state[f"single_{attn}.{ours}.weight"]
    for end in ("weight", "bias"):
        attn = "transformer_blocks.0.attn"
        image = [state[f"{attn}.to_{one}.{end}"] for one in "qkv"]
        text = [state[f"{attn}.add_{one}_proj.{end}"] for one in "qkv"]
        single = [state[f"single_{attn}.to_{one}.{end}"] for one in "qkv"]
        single.append(state[f"single_transformer_blocks.0.proj_mlp.{end}"])
        yield f"double_blocks.0.img_attn.qkv.{end}", torch.cat(image)
        yield f"double_blocks.0.txt_attn.qkv.{end}", torch.cat(text)
        yield f"single_blocks.0.linear1.{end}", torch.cat(single)


def test_the_digest_is_of_the_file_and_of_the_folder_beside_it(zoo: Zoo, tmp_path: Path) -> None:
    folder = zoo.folder("flux")
    file = write(tmp_path / "one.gguf", weights_of(folder), Kind.Q8_0)
    before = model_digest(resolve_folder(str(folder), transformer=str(file)))
    assert before != model_digest(folder)
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    assert model_digest(resolve_folder(str(folder), transformer=str(file))) != before


def _said(folder: Path, file: Path | str) -> str:
    with pytest.raises(RayClusterError) as error:
        inspect_model(pool(folder, transformer=str(file), **SETTINGS))
    return str(error.value)


def test_what_does_not_go_with_its_folder_is_refused_by_its_header(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, whole = zoo.folder("flux"), weights_of(zoo.folder("flux"))
    file = write(tmp_path / "good.gguf", whole, Kind.Q8_0)
    assert "other shapes" in _said(zoo.folder("wide-flux"), file)
    name = "transformer_blocks.0.attn.to_q.weight"
    rest = {key: one for key, one in whole.items() if key != name}
    assert f"lacks {name}" in _said(folder, write(tmp_path / "less.gguf", rest, Kind.Q8_0))
    save_file(rest, tmp_path / "less.safetensors")
    assert f"lacks {name}" in _said(folder, tmp_path / "less.safetensors")
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-1000])
    assert "cannot be read" in _said(folder, tmp_path / "cut.gguf")
    (tmp_path / "page.gguf").write_bytes(b"<html>")
    assert "is a web page" in _said(folder, tmp_path / "page.gguf")
    (tmp_path / "noise.gguf").write_bytes(b"noise")
    assert "is no GGUF file" in _said(folder, tmp_path / "noise.gguf")
    assert "there is no such file" in _said(folder, tmp_path / "none.gguf")
    assert "is no .safetensors and no .gguf file" in _said(folder, tmp_path / "old.ckpt")
    assert "has no transformer" in _said(zoo.folder("shapes"), file)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert "pip install 'ray-cluster[gguf]'" in _said(folder, file)


def test_a_file_of_another_model_is_refused_before_a_replica_calls_it(
    zoo: Zoo, tmp_path: Path
) -> None:
    flux, qwen = zoo.folder("flux"), save_qwen(tmp_path / "qwen")
    file = write(tmp_path / "flux.gguf", weights_of(flux), Kind.Q8_0)
    with pytest.raises(ConfigError, match=r"flux.gguf lacks .* is a QwenImageTransformer2DModel"):
        inspect_pipeline(pool(qwen, transformer=str(file), **SETTINGS))
    of_qwen = dict(QwenImageTransformer2DModel.from_pretrained(qwen / "transformer").state_dict())
    file = write(tmp_path / "qwen.gguf", of_qwen, Kind.Q8_0)
    assert inspect_pipeline(pool(qwen, transformer=str(file), **SETTINGS)).weight_bytes > 0
    assert "qwen.gguf has img_in.bias, which no FluxTransformer2DModel" in _said(flux, file)


def test_types_that_diffusers_does_not_read_are_refused(wide: Path, tmp_path: Path) -> None:
    weights = {"x.weight": torch.zeros(4, 256)}
    with pytest.raises(ModelUnsupported, match="of type IQ2_XXS; covered: "):
        gguf_tensors(write(tmp_path / "x.gguf", weights, Kind.IQ2_XXS, filled=True))
