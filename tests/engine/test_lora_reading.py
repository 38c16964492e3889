"""What is read of LoRA files is what diffusers makes of them, with alphas; the rest is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from ray_cluster.engine.adapters.factors import open_factors, write_factors
from ray_cluster.engine.adapters.lora_files import LoraFactors, LoraReader
from ray_cluster.errors import ModelUnsupported
from tests.engine.conftest import Zoo
from tests.engine.harness import CONTROL_FACTOR
from tests.engine.random_loras import ATTENTION, OF_ENCODER, kohya_keys, pairs, peft_keys

_TOLERANCE = 1e-6
Tensors = dict[str, Tensor]


class Subject:
    """A base, its diffusers pipeline, and files for it."""

    def __init__(self, zoo: Zoo, name: str, folder: Path) -> None:
        self.base = zoo.folder(name)
        self.pipeline = zoo.reference(name).pipeline
        self.reader = LoraReader()
        self._folder = folder

    def save(self, tensors: Tensors, metadata: dict[str, Any] | None = None) -> Path:
        path = self._folder / "one.safetensors"
        said = {"lora_adapter_metadata": json.dumps(metadata)} if metadata else None
        save_file({key: one.contiguous() for key, one in tensors.items()}, path, metadata=said)
        return path

    def read(self, path: Path) -> LoraFactors:
        return self.reader.read(path, self.base)

    def expected(self, path: Path) -> dict[str, Tensor]:
        """What diffusers adds to weights, by component and path."""
        self.pipeline.load_lora_weights(path, adapter_name="one")
        try:
            return dict(self._deltas())
        finally:
            self.pipeline.unload_lora_weights()

    def _deltas(self) -> Iterator[tuple[str, Tensor]]:
        for name, part in self.pipeline.components.items():
            for path, layer in part.named_modules() if isinstance(part, nn.Module) else ():
                if isinstance(layer, LoraLayer):
                    yield f"{name}.{path}", layer.get_delta_weight("one").detach()

    def error(self, factors: LoraFactors, expected: Mapping[str, Tensor]) -> float:
        found = {
            f"{name}.{path}": torch.einsum("dr,r...->d...", one.expand, one.shrink)
            for name, layers in factors.by_component.items()
            for path, one in layers.items()
        }
        assert found.keys() == expected.keys()
        return max(float((found[key] - expected[key]).abs().max()) for key in found)


@pytest.fixture
def sd(zoo: Zoo, tmp_path: Path) -> Subject:
    return Subject(zoo, "sd", tmp_path)


def test_alphas_in_the_header_count(sd: Subject) -> None:
    """As diffusers writes them: tensors alone would say a scale of 1."""
    tensors = peft_keys("unet", pairs(sd.pipeline.unet, ("to_q", "conv1")))
    said = {
        "unet.r": 3,
        "unet.lora_alpha": 12,
        "unet.target_modules": ["to_q", "conv1"],
        "unet.lora_dropout": 0.5,
        "unet.base_model_name_or_path": "some/model",
    }
    path = sd.save(tensors, said)
    expected = sd.expected(path)
    assert sd.error(sd.read(path), expected) <= _TOLERANCE
    without = sd.save(tensors)
    assert sd.error(sd.read(without), expected) > CONTROL_FACTOR * _TOLERANCE


def test_kohya_files_with_convolutions_and_text_encoders(sd: Subject) -> None:
    unet, encoder = sd.pipeline.unet, sd.pipeline.text_encoder
    tensors = kohya_keys("lora_unet", pairs(unet, (*ATTENTION, "conv2", "proj_in")), 1.5)
    tensors |= kohya_keys("lora_te_text_model", pairs(encoder, OF_ENCODER, rank=2), 0.5)
    path = sd.save(tensors)
    factors, expected = sd.read(path), sd.expected(path)
    assert sd.error(factors, expected) <= _TOLERANCE
    assert factors.ranks == (2, 3)
    assert factors.changes_prompts
    assert factors.num_layers == len(tensors) // 3
    assert {name.partition(".")[0] for name in expected} == {"unet", "text_encoder"}


def test_both_text_encoders_of_sdxl(zoo: Zoo, tmp_path: Path) -> None:
    sdxl = Subject(zoo, "sdxl", tmp_path)
    pipeline = sdxl.pipeline
    tensors = kohya_keys("lora_unet", pairs(pipeline.unet, ATTENTION), 2.0)
    for prefix, encoder in (
        ("lora_te1_text_model", pipeline.text_encoder),
        ("lora_te2", pipeline.text_encoder_2),
    ):
        tensors |= kohya_keys(prefix, pairs(encoder, OF_ENCODER), 1.0)
    path = sdxl.save(tensors)
    factors = sdxl.read(path)
    assert sdxl.error(factors, sdxl.expected(path)) <= _TOLERANCE
    assert set(factors.by_component) == {"unet", "text_encoder", "text_encoder_2"}


def test_joined_products_of_fluxs_kohya_files(zoo: Zoo, tmp_path: Path) -> None:
    """One pair of theirs is three layers here."""
    flux = Subject(zoo, "flux", tmp_path)
    width = flux.pipeline.transformer.inner_dim
    layers = {"double_blocks.0.img_attn.qkv": (torch.randn(3, width), torch.randn(3 * width, 3))}
    path = flux.save(kohya_keys("lora_unet", layers, 1.0))
    factors = flux.read(path)
    assert flux.error(factors, flux.expected(path)) <= _TOLERANCE
    assert factors.num_layers == 3


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_transformers(zoo: Zoo, tmp_path: Path, name: str) -> None:
    one = Subject(zoo, name, tmp_path)
    tensors = peft_keys("transformer", pairs(one.pipeline.transformer, (*ATTENTION, "proj")))
    tensors |= peft_keys("text_encoder", pairs(one.pipeline.text_encoder, ("k_proj",)))
    if name == "flux":
        tensors |= {
            key.replace("lora_A.weight", "alpha"): torch.tensor(6.0)
            for key in tensors
            if key.startswith("transformer.") and "lora_A" in key
        }
    path = one.save(tensors)
    assert one.error(one.read(path), one.expected(path)) <= _TOLERANCE


def test_a_reader_forgets_what_it_has_read(sd: Subject) -> None:
    unet = sd.pipeline.unet
    for ending in (("to_q",), ("to_k", "conv1"), ("to_q", "to_v")):
        path = sd.save(peft_keys("unet", pairs(unet, ending)))
        assert sd.error(sd.read(path), sd.expected(path)) <= _TOLERANCE
        wrong = peft_keys("unet", pairs(unet, ("conv2",))) | {"unet.x.lora_A.weight": torch.ones(1)}
        with pytest.raises(ModelUnsupported):
            sd.read(sd.save(wrong))


def test_written_factors_are_read_bit_by_bit(sd: Subject, tmp_path: Path) -> None:
    tensors = peft_keys("unet", pairs(sd.pipeline.unet, ("to_q", "conv1", "conv")))
    tensors |= peft_keys("text_encoder", pairs(sd.pipeline.text_encoder, ("q_proj", "fc1")))
    factors = sd.read(sd.save(tensors))
    write_factors(factors, tmp_path / "written.safetensors")
    again = open_factors(tmp_path / "written.safetensors")
    assert {name: list(layers) for name, layers in again.by_component.items()} == {
        name: sorted(layers) for name, layers in factors.by_component.items()
    }
    for name, layers in factors.by_component.items():
        for path, one in layers.items():
            other = again.by_component[name][path]
            assert torch.equal(one.shrink, other.shrink)
            assert torch.equal(one.expand, other.expand)
            assert (one.stride, one.padding) == (other.stride, other.padding)
    assert (2, 2) in {one.stride for one in again.layers}


def test_damaged_factors_are_refused(sd: Subject, tmp_path: Path) -> None:
    path = tmp_path / "written.safetensors"
    write_factors(sd.read(sd.save(peft_keys("unet", pairs(sd.pipeline.unet, ("conv1",))))), path)
    whole = path.read_bytes()
    for damaged in (
        whole[:-1],
        whole[:100],
        b"",
        whole.replace(b'"version":"1"', b'"version":"9"'),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ModelUnsupported, match=r"written\.safetensors"):
            open_factors(path)
    assert [one.name for one in tmp_path.iterdir() if "part" in one.name] == []


def _plain(sd: Subject) -> Tensors:
    return peft_keys("unet", pairs(sd.pipeline.unet, ("to_q",)))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"unet.conv_in.lora_B.bias": torch.zeros(16)}, "biases.*conv_in"),
        ({"text_encoder.x.lora_embedding_A": torch.zeros(2, 2)}, "embeddings"),
        # diffusers leaves these out in silence
        ({"unet.conv_in.alpha": torch.tensor(4.0)}, "conv_in.alpha"),
        ({"text_encoder_2.x.lora_A.weight": torch.zeros(2, 2)}, "text_encoder_2.x"),
        ({"unet.nothing.lora_A.weight": torch.zeros(2, 2)}, "unet.nothing.lora_A"),
        ({"unet.conv_in.lora_A.weight": torch.zeros(3, 4, 3, 3)}, "conv_in.lora"),
        ({"unet.conv_in.lora_A.weight": torch.full((3, 4, 3, 3), torch.nan)}, "NaN.*conv_in"),
    ],
)
def test_a_file_of_which_something_is_not_used_is_refused(
    sd: Subject, more: Tensors, said: str
) -> None:
    sd.read(sd.save(_plain(sd)))
    with pytest.raises(ModelUnsupported, match=said):
        sd.read(sd.save(_plain(sd) | more))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "megatron"),
        ({"lora_bias": True}, "lora_bias"),
        ({"lora_alpha": float("nan")}, "NaN"),
        ({"lora_alpha": float("inf")}, "infinite"),
        ({"rank_pattern": 5}, "one.safetensors"),
        # peft would match paths with it, which may take for ever
        ({"alpha_pattern": {"(a+)+$": 3}}, "regular expression"),
    ],
)
def test_headers_of_other_adapters_are_refused(
    sd: Subject, more: dict[str, Any], said: str
) -> None:
    plain = {"r": 3, "lora_alpha": 3, "target_modules": ["to_q"]}
    sd.read(sd.save(_plain(sd), {f"unet.{key}": value for key, value in plain.items()}))
    metadata = {f"unet.{key}": value for key, value in (plain | more).items()}
    with pytest.raises(ModelUnsupported, match=said):
        sd.read(sd.save(_plain(sd), metadata))
