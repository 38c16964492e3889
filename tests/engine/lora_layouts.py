"""LoRA files as public tools write them, with what each adds to the weights by its tool's own rule.

Names are those of kohya-ss/sd-scripts (``networks/lora*.py``), Nerogar/OneTrainer
(``modules/util/convert/lora``), ComfyUI (``comfy/utils.py``), XLabs-AI/x-flux and diffusers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.loaders import single_file_utils
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.engine.conftest import Zoo
from tests.engine.random_loras import pairs

Stem = Callable[[str], str]
"""From the path of a layer to what its keys begin with."""

FULL_FLUX = "full-flux"
CONVOLUTIONS = ("conv1", "conv2", "conv_shortcut", "conv_in", "conv_out", "samplers.0.conv")
KOHYA, PEFT = ("lora_down.weight", "lora_up.weight"), ("lora_A.weight", "lora_B.weight")
OLD = ("lora.down.weight", "lora.up.weight")
_FULL = {
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "axes_dims_rope": [16, 56, 56],
}


class Bases:
    """Folders of models, and what is in them; of one as large as FLUX, without weights."""

    def __init__(self, zoo: Zoo, root: Path) -> None:
        self.zoo, self._root = zoo, root

    def folder(self, name: str) -> Path:
        if name != FULL_FLUX:
            return self.zoo.folder(name)
        folder = self._root / FULL_FLUX
        if not folder.exists():
            weights = shutil.ignore_patterns("*.safetensors")
            shutil.copytree(self.zoo.folder("flux"), folder, ignore=weights)
            path = folder / "transformer" / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | _FULL))
        return folder

    def file(self, base: str) -> LoraFile:
        return LoraFile(self, base)

    def component(self, base: str, name: str) -> Any:
        if base != FULL_FLUX or name != "transformer":
            base = "flux" if base == FULL_FLUX else base
            return getattr(self.zoo.reference(base).pipeline, name)
        return _hollow(str(self.folder(base) / "transformer"))


@cache
def _hollow(folder: str) -> Any:
    with torch.device("meta"):
        return FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(folder))


def under(prefix: str) -> Stem:
    return lambda path: prefix + path.replace(".", "_")


def dotted(prefix: str) -> Stem:
    return lambda path: prefix + path


def of_clip(prefix: str) -> Stem:
    """Name layers of a CLIP text encoder, whose path has lost its first part in transformers."""
    return lambda path: under(prefix)(with_model(path))


def of_processor(prefix: str) -> Stem:
    """Name layers of attention as diffusers did when each had a processor."""
    return lambda path: (
        prefix
        + path.replace(".attn1.", ".attn1.processor.").replace(".attn2.", ".attn2.processor.")
    ).removesuffix(".0")


def with_model(path: str) -> str:
    is_inner = path.startswith(("encoder.", "embeddings."))
    return f"text_model.{path}" if is_inner else path


@dataclass
class LoraFile:
    """A file that is being written, and what it comes to.

    Attributes:
        truth: what it adds to weights, by component and path.
        header: of the file.
        beside: content of ``adapter_config.json``.
        says: of the refusal that it gets; nothing where it is read.
    """

    bases: Bases
    base: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    truth: dict[str, Tensor] = field(default_factory=dict)
    header: dict[str, str] = field(default_factory=dict)
    beside: dict[str, Any] | None = None
    says: str = ""

    def add(
        self,
        component: str,
        endings: tuple[str, ...],
        stem: Stem,
        *,
        parts: tuple[str, str] = KOHYA,
        alpha: float | None = 2.0,
        step: float = 1.0,
        rank: int = 3,
        kind: torch.dtype = torch.float32,
        alpha_of: Callable[[float], Tensor] = torch.tensor,
        scale: Callable[[str, int], float] = lambda _, __: 1.0,
    ) -> LoraFile:
        """Add factors of layers.

        Args:
            alpha: of the first layer; the next two have ``step`` and twice that more, and so on.
            alpha_of: makes the tensor of it.
            scale: of a path and a rank, where alphas are no tensors.
        """
        some = pairs(self.bases.component(self.base, component), endings, rank, len(self.tensors))
        for index, (path, pair) in enumerate(some.items()):
            self._write(stem(path), pair, parts, kind)
            factor = scale(path, rank)
            if alpha is not None:
                one = alpha_of(alpha + step * (index % 3))
                self.tensors[f"{stem(path)}.alpha"] = one
                factor = float(one) / rank
            self._expect(f"{component}.{path}", pair, factor, kind)
        return self

    def fuse(
        self,
        paths: Sequence[str],
        stem: str,
        *,
        parts: tuple[str, str] = KOHYA,
        alpha: float | None = 2.0,
        rank: int = 4,
        kind: torch.dtype = torch.float32,
        is_swapped: bool = False,
        is_sparse: bool = False,
        component: str = "transformer",
    ) -> LoraFile:
        """Add factors of one layer of the original model, which is several here.

        Args:
            is_swapped: whether scale and shift stand the other way round there.
            is_sparse: whether each part has a share of the rank alone.
        """
        model = self.bases.component(self.base, component)
        layers = [model.get_submodule(path).weight for path in paths]
        generator = torch.Generator().manual_seed(len(self.tensors))
        down = torch.randn((rank, *layers[0].shape[1:]), generator=generator)
        ups = [torch.randn(one.shape[0], rank, generator=generator) for one in layers]
        if is_sparse:
            share = rank // len(ups)
            for index, up in enumerate(ups):
                up[:, : index * share] = up[:, (index + 1) * share :] = 0
        up = torch.cat(ups)
        there = torch.cat(up.chunk(2)[::-1]) if is_swapped else up
        there = there[..., *[None] * (down.ndim - 2)]
        self._write(stem, (down, there), parts, kind)
        if alpha is not None:
            self.tensors[f"{stem}.alpha"] = torch.tensor(alpha)
        for path, own in zip(paths, ups, strict=True):
            factor = 1.0 if alpha is None else alpha / rank
            self._expect(f"{component}.{path}", (down, own), factor, kind)
        return self

    def refused(self, says: str, **tensors: Tensor) -> LoraFile:
        """Have it be one that is refused, for what else is in it if anything is."""
        self.says = says
        self.tensors |= tensors
        return self

    def said(self, **header: Any) -> LoraFile:
        self.header = {key.replace("__", "."): str(value) for key, value in header.items()}
        return self

    def save(self, folder: Path) -> Path:
        path = folder / "adapter_model.safetensors"
        tensors = {key: one.clone().contiguous() for key, one in self.tensors.items()}
        save_file(tensors, path, metadata=self.header or None)
        if self.beside is not None:
            path.with_name("adapter_config.json").write_text(json.dumps(self.beside))
        return path

    def _write(
        self, stem: str, pair: tuple[Tensor, Tensor], parts: tuple[str, str], kind: torch.dtype
    ) -> None:
        for part, one in zip(parts, pair, strict=True):
            self.tensors[f"{stem}.{part}" if part[0] != "_" else stem + part] = one.to(kind)

    def _expect(
        self, name: str, pair: tuple[Tensor, Tensor], scale: float, kind: torch.dtype
    ) -> None:
        down, up = (one.to(kind).double() for one in pair)
        self.truth[name] = scale * torch.tensordot(up.flatten(1), down, 1)


def sgm(path: str) -> str:
    """Return what Stability's own UNet of SDXL calls a layer of diffusers' UNet."""
    whole = {
        "conv_in": "input_blocks.0.0",
        "conv_out": "out.2",
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
    }
    if path in whole:
        return whole[path]
    block, *rest = path.split(".")
    number = 0 if block == "mid_block" else int(rest.pop(0))
    kind, index, inner = rest[0], int(rest[1]), ".".join(rest[2:])
    inner = {
        "conv1": "in_layers.2",
        "conv2": "out_layers.3",
        "time_emb_proj": "emb_layers.1",
        "conv_shortcut": "skip_connection",
    }.get(inner, inner)
    match block, kind:
        case "mid_block", _:
            return f"middle_block.{1 if kind == 'attentions' else 2 * index}.{inner}"
        case "down_blocks", "downsamplers":
            return f"input_blocks.{3 * number + 3}.0.op"
        case "up_blocks", "upsamplers":
            return f"output_blocks.{3 * number + 2}.2.conv"
    place = 3 * number + index + (block == "down_blocks")
    side = "input" if block == "down_blocks" else "output"
    return f"{side}_blocks.{place}.{int(kind == 'attentions')}.{inner}"


def as_diffusers(bases: Bases, file: LoraFile, path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield what diffusers adds to weights, by component and path."""
    if file.base == FULL_FLUX:
        factors = FluxPipeline.lora_state_dict(load_file(path))
        for key in [key for key in factors if "lora_A" in key]:
            up = factors[key.replace("lora_A", "lora_B")]
            yield key.removesuffix(".lora_A.weight"), up @ factors[key]
        return
    pipeline = bases.zoo.reference(file.base).pipeline
    pipeline.load_lora_weights(path, adapter_name="one")
    try:
        for name, part in pipeline.components.items():
            for layer, one in part.named_modules() if isinstance(part, nn.Module) else ():
                if isinstance(one, LoraLayer):
                    yield f"{name}.{layer}", one.get_delta_weight("one").detach()
    finally:
        pipeline.unload_lora_weights()


class Checkpoint(dict[str, Tensor]):
    """A maker's weights; those that are not looked at are zeros of any size."""

    def pop(self, key: str, default: Any = None) -> Tensor:  # type: ignore[override]
        return super().pop(key) if key in self else torch.zeros(21504, 1)


def merged(file: LoraFile, without: str) -> Checkpoint:
    """Return what a file of kohya's adds to a maker's weights, but for one layer."""
    whole = Checkpoint()
    for key, down in file.tensors.items():
        stem = key.removesuffix(".lora_down.weight")
        if stem not in (key, without):
            scale = file.tensors[f"{stem}.alpha"].double() / len(down)
            up = file.tensors[f"{stem}.lora_up.weight"].double().flatten(1)
            whole[f"{stem}.weight"] = scale * torch.tensordot(up, down.double(), 1)
    return whole


def diffusers_names(base: str, whole: Checkpoint) -> dict[str, Tensor]:
    """Return a maker's weights by diffusers' names, by its conversion of published files."""
    convert: Callable[[Any], dict[str, Tensor]] = (
        single_file_utils.convert_flux_transformer_checkpoint_to_diffusers
        if base == "flux"
        else single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers
    )
    return convert(whole)
