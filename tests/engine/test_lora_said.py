"""A LoRA has the strength that its file says, wherever that stands; or it is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor

from ray_cluster.engine.adapters.lora_files import LoraReader
from ray_cluster.errors import ModelUnsupported
from ray_cluster.models.sources.lora_sources import only_file
from tests.engine.conftest import Zoo
from tests.engine.random_loras import kohya_keys, pairs, peft_keys

ALPHA, RANK = 12, 3
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["to_q"]}


class Files:
    """LoRAs of a base's attention, and by how much they are scaled when they are read."""

    def __init__(self, zoo: Zoo, folder: Path, name: str = "sd") -> None:
        self.base, self._folder = zoo.folder(name), folder
        self.unet = zoo.reference(name).pipeline.unet
        self.layers = pairs(self.unet, ("to_q",))

    def scale(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        header: dict[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> float:
        path = self._folder / "adapter_model.safetensors"
        whole = peft_keys("unet", self.layers) if tensors is None else tensors
        save_file({key: one.contiguous() for key, one in whole.items()}, path, metadata=header)
        if config is not None:
            path.with_name("adapter_config.json").write_text(json.dumps(config))
        found = LoraReader().read(path, self.base).by_component["unet"]
        assert found.keys() == self.layers.keys()
        scales = [
            float((found[name].expand @ found[name].shrink).norm() / (up @ down).norm())
            for name, (down, up) in self.layers.items()
        ]
        assert max(scales) == pytest.approx(min(scales), rel=1e-4)
        return scales[0]

    @property
    def as_peft(self) -> dict[str, Tensor]:
        named = peft_keys("unet", self.layers).items()
        return {f"base_model.model.{key.removeprefix('unet.')}": one for key, one in named}


@pytest.fixture
def files(zoo: Zoo, tmp_path: Path) -> Files:
    return Files(zoo, tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        {"lora_adapter_metadata": json.dumps({"unet.r": RANK, "unet.lora_alpha": ALPHA})},
        {"unet.r": str(RANK), "unet.lora_alpha": str(ALPHA)},
        {"r": str(RANK), "lora_alpha": str(float(ALPHA))},
        {"rank": str(RANK), "alpha": str(ALPHA), "format": "pt"},
        # the factors say the rank
        {"network_alpha": str(ALPHA), "ss_network_module": "x"},
        {"lora_adapter_metadata": json.dumps({"r": RANK, "lora_alpha": ALPHA}), "alpha": "12"},
    ],
)
def test_alphas_of_the_header_count_however_they_are_named(
    files: Files, header: dict[str, str]
) -> None:
    assert files.scale(header=header) == pytest.approx(ALPHA / RANK)
    assert files.scale() == pytest.approx(1)


def test_rslora_divides_by_the_root_of_the_rank(files: Files) -> None:
    header = {"r": str(RANK), "lora_alpha": str(ALPHA), "use_rslora": "true"}
    assert files.scale(header=header) == pytest.approx(ALPHA / RANK**0.5)


def test_pefts_own_files_are_read_with_what_stands_beside_them(files: Files) -> None:
    assert files.scale(config=CONFIG) == pytest.approx(ALPHA / RANK)
    assert files.scale(files.as_peft, config=CONFIG) == pytest.approx(ALPHA / RANK)
    with pytest.raises(ModelUnsupported, match=r"r = 3 .*adapter_config.json|r = 4 \(header\)"):
        files.scale(files.as_peft, header={"r": "4"}, config=CONFIG)


def test_without_what_stands_beside_them_they_are_refused(files: Files) -> None:
    with pytest.raises(ModelUnsupported, match=r"no adapter_config\.json beside it"):
        files.scale(files.as_peft)
    said = {"lora_alpha": str(ALPHA), "r": str(RANK)}
    assert files.scale(files.as_peft, header=said) == pytest.approx(ALPHA / RANK)


@pytest.mark.parametrize("is_rslora", [False, True])
def test_what_peft_saves_is_what_peft_adds(zoo: Zoo, tmp_path: Path, is_rslora: bool) -> None:
    """The truth is PEFT's own: patterns by layer, too."""
    unet = type(zoo.reference("sd").pipeline.unet).from_config(
        zoo.reference("sd").pipeline.unet.config
    )
    first = next(name for name, _ in unet.named_modules() if name.endswith("attn1.to_q"))
    config = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=["to_q"],
        use_rslora=is_rslora,
        rank_pattern={first: 2},
        alpha_pattern={first: 5},
    )
    adapted = get_peft_model(unet, config)
    torch.manual_seed(0)
    deltas = {}
    for name, layer in adapted.named_modules():
        if isinstance(layer, LoraLayer):
            torch.nn.init.normal_(layer.lora_B["default"].weight)
            deltas[name.removeprefix("base_model.model.")] = layer.get_delta_weight("default")
    adapted.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    assert all(key.startswith("base_model.model.") for key in load_file(path))
    found = LoraReader().read(path, zoo.folder("sd")).by_component["unet"]
    assert found.keys() == deltas.keys()
    for name, one in found.items():
        assert torch.allclose(one.expand @ one.shrink, deltas[name], atol=1e-5)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"r": "three", "alpha": "1"}, "r = 'three'"),
        ({"rank": "2.5", "alpha": "1"}, "rank = '2.5'"),
        ({"alpha": "much"}, "alpha = 'much'"),
        ({"alpha": "1", "use_rslora": "perhaps"}, "use_rslora"),
        ({"alpha": "1", "unet.lora_alpha": "2"}, r"unet.lora_alpha = 2.0 and lora_alpha = 1.0"),
        ({"lora_adapter_metadata": "{", "alpha": "1"}, "no JSON"),
        ({"lora_adapter_metadata": "[]"}, "no object"),
        ({"lora_adapter_metadata": '{"r": 3, "lora_alpha": 5}', "alpha": "6"}, "lora_alpha = 5"),
    ],
)
def test_what_contradicts_itself_or_is_none_is_refused(
    files: Files, header: dict[str, str], says: str
) -> None:
    with pytest.raises(ModelUnsupported, match=says):
        files.scale(header=header)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float16, torch.bfloat16])
def test_narrow_factors_are_widened_before_they_are_converted(
    zoo: Zoo, tmp_path: Path, kind: torch.dtype
) -> None:
    pipeline = zoo.reference("flux").pipeline
    name, rank = "transformer_blocks.0.attn.to_out.0", 2
    width = pipeline.transformer.get_submodule(name).in_features
    down, up = torch.randn(rank, width), torch.randn(width, rank)
    stem = "lora_unet_double_blocks_0_img_attn_proj"
    tensors = {
        f"{stem}.lora_down.weight": down.to(kind),
        f"{stem}.lora_up.weight": up.to(kind),
        f"{stem}.alpha": torch.tensor(1.0).to(kind),
    }
    path = tmp_path / "one.SAFETENSORS"
    save_file(tensors, path)
    [found] = LoraReader().read(path, zoo.folder("flux")).by_component["transformer"].values()
    wanted = up.to(kind).float() @ down.to(kind).float() / rank
    assert torch.allclose(found.expand @ found.shrink, wanted, atol=1e-4)


def test_kohyas_alphas_are_tensors_and_its_header_is_of_training(files: Files) -> None:
    tensors = kohya_keys("lora_unet", files.layers, alpha=6.0)
    header = {"ss_network_alpha": "1.0", "ss_network_dim": "64"}
    assert files.scale(tensors, header=header) == pytest.approx(6 / RANK)
    assert files.scale(tensors, header={"alpha": "6"}) == pytest.approx(6 / RANK)
    for other in ({"alpha": "5"}, {"alpha": "6", "use_rslora": "true"}):
        with pytest.raises(ModelUnsupported, match="other alphas in its header"):
            files.scale(tensors, header=other)


def test_what_macos_writes_beside_files_is_no_lora() -> None:
    assert only_file(["._a.safetensors", "a.SAFETENSORS", "b.txt"], "x") == "a.SAFETENSORS"


@pytest.mark.parametrize(
    "key", ["clip_l", "text_encoders_0", "bundle_emb.me.string_to_param.clip_g", "emb_params"]
)
def test_embeddings_of_new_words_are_refused_as_such(files: Files, key: str) -> None:
    alone = {key: torch.ones(2, 8)}
    for tensors in (alone, alone | peft_keys("unet", files.layers)):
        with pytest.raises(ModelUnsupported, match=f"new words for prompts .{key}; pivotal"):
            files.scale(tensors)
