"""Files in the layouts of public tools have the strength of their own rule, or a named refusal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_cluster.engine.adapters.lora_files import LoraReader
from ray_cluster.errors import ModelUnsupported
from tests.engine.conftest import Zoo
from tests.engine.lora_layouts import (
    CONVOLUTIONS,
    FULL_FLUX,
    OLD,
    PEFT,
    Bases,
    LoraFile,
    as_diffusers,
    diffusers_names,
    dotted,
    merged,
    of_clip,
    of_processor,
    sgm,
    under,
    with_model,
)
from tests.engine.random_loras import ATTENTION, OF_ENCODER

_TOLERANCE = 1e-5
Make = Callable[[Bases], LoraFile]
ONE = torch.ones(2, 2)
QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
TEXT_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
ONE_ALPHA: dict[str, Any] = {"alpha": 6.0, "step": 0.0}
BARE: dict[str, Any] = {"alpha": None, "parts": PEFT}


def kohya(base: str, bases: Bases, **options: Any) -> LoraFile:
    """Attention of the denoiser, as sd-scripts names it where the base has diffusers' names."""
    return bases.file(base).add("unet", ATTENTION, under("lora_unet_"), **options)


def stanza(base: str, bases: Bases, **options: Any) -> LoraFile:
    """Attention of a UNet or transformer, as diffusers saves it."""
    name = "unet" if base in ("sd15", "sdxl") else "transformer"
    return bases.file(base).add(name, ATTENTION, dotted(f"{name}."), **(BARE | options))


def of_peft(base: str, bases: Bases, component: str = "unet", **config: Any) -> LoraFile:
    """A folder of PEFT's own, of rank 3 and alpha 12, or as the configuration says."""
    alpha, root = config.get("lora_alpha", 12), config.get("use_rslora", False)
    ending = "q_proj" if component.startswith("text") else "to_q"
    patterns = config.get("alpha_pattern", {})
    file = bases.file(base).add(
        component,
        (ending,),
        lambda path: f"base_model.model.{with_model(path)}",
        scale=lambda path, rank: patterns.get(path, alpha) / (rank**0.5 if root else rank),
        **BARE,
    )
    file.beside = {"peft_type": "LORA", "r": 3, "lora_alpha": 12, "target_modules": [ending]}
    file.beside |= config
    return file


SD15: dict[str, Make] = {
    "kohya": lambda bases: kohya("sd15", bases, **ONE_ALPHA).add(
        "text_encoder", OF_ENCODER, of_clip("lora_te_"), **ONE_ALPHA
    ),
    "kohya, an alpha of each layer's own": partial(kohya, "sd15"),
    "kohya, alphas as vectors": partial(kohya, "sd15", alpha_of=lambda one: torch.tensor([one])),
    "kohya, alphas as matrices": partial(
        kohya, "sd15", alpha_of=lambda one: torch.full((1, 1), one)
    ),
    "kohya, whole alphas": partial(kohya, "sd15", alpha_of=lambda one: torch.tensor(int(one))),
    "kohya, alphas of 16 bits": partial(
        kohya, "sd15", alpha_of=lambda a: torch.tensor(a).bfloat16()
    ),
    "kohya without alphas": lambda bases: kohya("sd15", bases, alpha=None, scale=lambda *_: 1.0),
    "kohya, half": partial(
        kohya, "sd15", kind=torch.float16, alpha_of=lambda a: torch.tensor(a).half()
    ),
    "kohya, bfloat16": partial(kohya, "sd15", kind=torch.bfloat16),
    "kohya, double": partial(kohya, "sd15", kind=torch.float64),
    "kohya, e4m3": partial(kohya, "sd15", kind=torch.float8_e4m3fn),
    "kohya, e5m2": partial(
        kohya,
        "sd15",
        kind=torch.float8_e5m2,
        alpha_of=lambda a: torch.tensor(a).to(torch.float8_e5m2),
    ),
    "kohya, some layers without alphas": lambda bases: (
        kohya("sd15", bases)
        .add("unet", ("conv1",), under("lora_unet_"), alpha=None)
        .refused("have no alpha")
    ),
    "LoCon": lambda bases: kohya("sd15", bases, rank=8).add(
        "unet", (*CONVOLUTIONS, "proj_in", "proj_out"), under("lora_unet_"), rank=2, alpha=1.0
    ),
    "LoCon of all layers": lambda bases: kohya("sd15", bases).add(
        "unet",
        ("ff.net.0.proj", "net.2", "time_emb_proj", "linear_1", "linear_2"),
        under("lora_unet_"),
    ),
    "LyCORIS' own prefix": lambda bases: bases.file("sd15").add(
        "unet", ATTENTION, under("lycoris_")
    ),
    "PEFT": partial(of_peft, "sd15"),
    "PEFT, rslora": partial(of_peft, "sd15", use_rslora=True),
    "PEFT, alphas by layer": partial(
        of_peft, "sd15", alpha_pattern={"mid_block.attentions.0.transformer_blocks.0.attn1.to_q": 5}
    ),
    "PEFT, alphas of no layers": lambda bases: of_peft(
        "sd15", bases, alpha_pattern={"to_x": 5}
    ).refused("layers that it has not: to_x"),
    "PEFT, another rank": lambda bases: of_peft("sd15", bases, r=4).refused(
        "has rank 3, and it says 4"
    ),
    "PEFT, LoHa by its configuration": lambda bases: of_peft(
        "sd15", bases, peft_type="LOHA"
    ).refused("peft_type = 'LOHA'"),
    "kohya, whole factors": lambda bases: kohya("sd15", bases, kind=torch.int8).refused(
        "factors of torch.int8"
    ),
    "PEFT of a text encoder": partial(of_peft, "sd15", component="text_encoder"),
    "diffusers": lambda bases: (
        stanza("sd15", bases, scale=lambda *_: 4.0)
        .add("text_encoder", ("q_proj",), lambda path: f"text_encoder.{with_model(path)}", **BARE)
        .said(
            lora_adapter_metadata=json.dumps(
                {
                    "unet.r": 3,
                    "unet.lora_alpha": 12,
                    "unet.target_modules": ["to_q", "to_k", "to_v", "to_out.0"],
                    "text_encoder.r": 3,
                    "text_encoder.lora_alpha": 3,
                    "text_encoder.target_modules": ["q_proj"],
                }
            )
        )
    ),
    "diffusers without a header": lambda bases: stanza("sd15", bases),
    "diffusers, a header with the rank alone": lambda bases: stanza("sd15", bases).said(rank=3),
    "diffusers, processors": lambda bases: bases.file("sd15").add(
        "unet",
        ATTENTION,
        of_processor("unet."),
        parts=("_lora.down.weight", "_lora.up.weight"),
        alpha=None,
    ),
    "diffusers, processors alone": lambda bases: bases.file("sd15").add(
        "unet",
        ATTENTION,
        of_processor(""),
        parts=("_lora.down.weight", "_lora.up.weight"),
        alpha=None,
    ),
    "diffusers, down and up": lambda bases: stanza("sd15", bases, parts=OLD).add(
        "text_encoder",
        ("q_proj", "fc1"),
        lambda path: f"text_encoder.{with_model(path)}",
        parts=("lora_linear_layer.down.weight", "lora_linear_layer.up.weight"),
        alpha=None,
    ),
    "dots and alphas": lambda bases: stanza(
        "sd15", bases, parts=("lora_down.weight", "lora_up.weight"), alpha=2.0
    ),
}


def of_sgm(bases: Bases, stem: Callable[[str], str], *endings: str) -> LoraFile:
    file = bases.file("sdxl")
    return file.add("unet", endings or ATTENTION, lambda path: stem(sgm(path)), **ONE_ALPHA)


def both_encoders(file: LoraFile, first: str, second: str) -> LoraFile:
    file.add("text_encoder", OF_ENCODER, of_clip(first))
    return file.add("text_encoder_2", (*OF_ENCODER, "text_projection"), of_clip(second))


SDXL: dict[str, Make] = {
    "kohya": lambda bases: of_sgm(
        bases, under("lora_unet_"), *ATTENTION, "net.2", "proj", "proj_in"
    ),
    "kohya, LoCon": lambda bases: of_sgm(
        bases, under("lora_unet_"), *CONVOLUTIONS, "time_emb_proj", "linear_1", "linear_2"
    ),
    "kohya, both encoders": lambda bases: both_encoders(
        of_sgm(bases, under("lora_unet_")), "lora_te1_", "lora_te2_"
    ),
    "kohya, half": lambda bases: bases.file("sdxl").add(
        "unet",
        ATTENTION,
        lambda path: under("lora_unet_")(sgm(path)),
        kind=torch.float16,
        alpha=1.0,
    ),
    "kohya, e4m3": lambda bases: bases.file("sdxl").add(
        "unet", ATTENTION, lambda path: under("lora_unet_")(sgm(path)), kind=torch.float8_e4m3fn
    ),
    "OneTrainer, legacy": lambda bases: both_encoders(
        bases.file("sdxl").add("unet", (*ATTENTION, "conv1"), under("lora_unet_")),
        "lora_te1_",
        "lora_te2_",
    ),
    "OneTrainer, omi": lambda bases: (
        of_sgm(bases, dotted("unet."))
        .add("text_encoder", ("q_proj",), lambda path: f"clip_l.{with_model(path)}")
        .add("text_encoder_2", ("fc1",), lambda path: f"clip_g.{with_model(path)}")
    ),
    "ComfyUI": lambda bases: of_sgm(bases, dotted("diffusion_model.")),
    "diffusers, both encoders": lambda bases: (
        stanza("sdxl", bases)
        .add("text_encoder", ("q_proj",), lambda path: f"text_encoder.{with_model(path)}", **BARE)
        .add(
            "text_encoder_2", ("k_proj",), lambda path: f"text_encoder_2.{with_model(path)}", **BARE
        )
    ),
    "PEFT, of either encoder": lambda bases: of_peft(
        "sdxl", bases, component="text_encoder"
    ).refused("may be of any of"),
    "names of both kinds": lambda bases: of_sgm(bases, under("lora_unet_")).add(
        "unet", ("conv1",), under("lora_unet_")
    ),
}


MMDIT = {
    "x_block.attn.qkv": QKV,
    "context_block.attn.qkv": TEXT_QKV,
    "x_block.attn.proj": ("attn.to_out.0",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "x_block.adaLN_modulation.1": ("norm1.linear",),
    "context_block.adaLN_modulation.1": ("norm1_context.linear",),
    "context_block.attn.proj": ("attn.to_add_out",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "x_block.attn2.proj": ("attn2.to_out.0",),
}


def mmdit(base: str, bases: Bases, stem: Callable[[str], str], **options: Any) -> LoraFile:
    """Layers of SD3, as Stability's own model names them: of the first block and the last."""
    file = bases.file(base)
    layers = dict(bases.component(base, "transformer").named_modules())
    for index, is_last in ((0, False), (2, True)):
        for name, paths in MMDIT.items():
            here = [f"transformer_blocks.{index}.{path}" for path in paths]
            if layers.keys() >= set(here):
                is_swapped = is_last and name == "context_block.adaLN_modulation.1"
                there = stem(f"joint_blocks.{index}.{name}")
                file.fuse(here, there, is_swapped=is_swapped, **options)
    return file


def around(file: LoraFile, stem: Callable[[str], str], names: dict[str, str]) -> LoraFile:
    """Add the layers before and after the blocks, of a transformer's original names."""
    for there, path in names.items():
        file.fuse([path], stem(there), is_swapped="final_layer.adaLN" in there)
    return file


AROUND_SD3 = {
    "x_embedder.proj": "pos_embed.proj",
    "context_embedder": "context_embedder",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
}
SD3: dict[str, Make] = {
    "kohya": lambda bases: both_encoders(
        mmdit("sd3", bases, under("lora_unet_")), "lora_te1_", "lora_te2_"
    ),
    "kohya, 3.5": lambda bases: mmdit("sd35", bases, under("lora_unet_")),
    "kohya, embedders": lambda bases: around(bases.file("sd3"), under("lora_unet_"), AROUND_SD3),
    "kohya, half": lambda bases: mmdit("sd3", bases, under("lora_unet_"), kind=torch.float16),
    "kohya, e5m2": lambda bases: mmdit("sd3", bases, under("lora_unet_"), kind=torch.float8_e5m2),
    "kohya with T5": lambda bases: mmdit("sd3", bases, under("lora_unet_")).refused(
        "T5", **{"lora_te3_encoder_block_0_layer_0_SelfAttention_q.lora_down.weight": ONE}
    ),
    "ComfyUI": lambda bases: mmdit(
        "sd3", bases, dotted("diffusion_model."), parts=PEFT, alpha=None
    ),
    "diffusers": lambda bases: stanza("sd3", bases, scale=lambda *_: 5 / 3).said(
        transformer__r=3, transformer__lora_alpha=5
    ),
    "diffusers, both encoders": lambda bases: (
        stanza("sd3", bases)
        .add("text_encoder", ("q_proj",), lambda path: f"text_encoder.{with_model(path)}", **BARE)
        .add(
            "text_encoder_2",
            ("q_proj", "fc1"),
            lambda path: f"text_encoder_2.{with_model(path)}",
            **BARE,
        )
    ),
    "diffusers with T5": lambda bases: stanza("sd3", bases).refused(
        "text_encoder_3",
        **{"text_encoder_3.encoder.block.0.layer.0.SelfAttention.q.lora_A.weight": ONE},
    ),
    "ai-toolkit, alphas": partial(stanza, "sd3", alpha=2.0),
    "OneTrainer, legacy": lambda bases: both_encoders(
        bases.file("sd3").add("transformer", (*ATTENTION, "net.2"), under("lora_transformer_")),
        "lora_te1_",
        "lora_te2_",
    ),
    "OneTrainer, omi": lambda bases: one_by_one(bases, "sd3", "joint_blocks.0.x_block.attn.qkv"),
    "PEFT": lambda bases: of_peft("sd3", bases, component="transformer"),
    "SimpleTuner, rslora": lambda bases: stanza("sd3", bases, scale=lambda *_: 6 / 3**0.5).said(
        r=3, lora_alpha=6, use_rslora="true"
    ),
}


def one_by_one(bases: Bases, base: str, fused: str) -> LoraFile:
    """The parts of a fused layer by their numbers, as OneTrainer's newer files have them."""
    file = bases.file(base)
    for index, path in enumerate(QKV):
        file.fuse([f"transformer_blocks.0.{path}"], f"transformer.{fused}.{index}")
    return file.fuse(
        ["norm_out.linear"], "transformer.final_layer.adaLN_modulation.1", is_swapped=True
    )


def bfl(base: str, bases: Bases, stem: Callable[[str], str], **options: Any) -> LoraFile:
    """Layers of FLUX, as Black Forest Labs' own model names them."""
    file = bases.file(base)
    own = partial(file.fuse, **options)
    for there, text, paths in (("img", "", QKV), ("txt", "_context", TEXT_QKV)):
        block, name = "transformer_blocks.0.", f"double_blocks.0.{there}_"
        out = "attn.to_add_out" if text else "attn.to_out.0"
        own([block + path for path in paths], stem(f"{name}attn.qkv"))
        own([block + out], stem(f"{name}attn.proj"))
        own([f"{block}ff{text}.net.0.proj"], stem(f"{name}mlp.0"))
        own([f"{block}ff{text}.net.2"], stem(f"{name}mlp.2"))
        own([f"{block}norm1{text}.linear"], stem(f"{name}mod.lin"))
    block = "single_transformer_blocks.0."
    own([block + path for path in (*QKV, "proj_mlp")], stem("single_blocks.0.linear1"))
    own([f"{block}proj_out"], stem("single_blocks.0.linear2"))
    own([f"{block}norm.linear"], stem("single_blocks.0.modulation.lin"))
    return file


AROUND_FLUX = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
}


def xlabs(base: str, bases: Bases) -> LoraFile:
    file = bases.file(base)
    old: dict[str, Any] = {"parts": ("down.weight", "up.weight"), "alpha": None}
    block, there = "transformer_blocks.0.", "double_blocks.0.processor."
    file.fuse([block + path for path in QKV], f"{there}qkv_lora1", **old)
    file.fuse([block + path for path in TEXT_QKV], f"{there}qkv_lora2", **old)
    file.fuse([f"{block}attn.to_out.0"], f"{there}proj_lora1", **old)
    return file.fuse([f"{block}attn.to_add_out"], f"{there}proj_lora2", **old)


FLUX: dict[str, Make] = {
    "kohya": lambda bases: bfl("flux", bases, under("lora_unet_")).add(
        "text_encoder", OF_ENCODER, of_clip("lora_te1_")
    ),
    "kohya, full size": lambda bases: bases.file(FULL_FLUX).fuse(
        [f"single_transformer_blocks.0.{path}" for path in (*QKV, "proj_mlp")],
        "lora_unet_single_blocks_0_linear1",
    ),
    "kohya, embedders": lambda bases: around(bases.file("flux"), under("lora_unet_"), AROUND_FLUX),
    "kohya, split": lambda bases: bases.file("flux").fuse(
        [f"transformer_blocks.0.{path}" for path in QKV],
        "lora_unet_double_blocks_0_img_attn_qkv",
        rank=6,
        is_sparse=True,
    ),
    "kohya, e4m3": lambda bases: bfl("flux", bases, under("lora_unet_"), kind=torch.float8_e4m3fn),
    "kohya, e5m2": lambda bases: bfl("flux", bases, under("lora_unet_"), kind=torch.float8_e5m2),
    "kohya, double": lambda bases: bfl("flux", bases, under("lora_unet_"), kind=torch.float64),
    "kohya with T5": lambda bases: bfl("flux", bases, under("lora_unet_")).refused(
        "T5", **{"lora_te3_encoder_block_0_layer_0_SelfAttention_q.lora_down.weight": ONE}
    ),
    "kohya, diffusers' names": lambda bases: bases.file("flux").add(
        "transformer", ATTENTION, under("lora_unet_")
    ),
    "ComfyUI": lambda bases: bfl("flux", bases, dotted("diffusion_model.")).add(
        "text_encoder",
        ("q_proj",),
        lambda path: f"text_encoders.clip_l.transformer.{with_model(path)}",
    ),
    "ComfyUI, A and B": lambda bases: bfl(
        "flux", bases, dotted("diffusion_model."), parts=PEFT, alpha=None
    ),
    "diffusers": lambda bases: stanza("flux", bases),
    "diffusers, header": lambda bases: stanza("flux", bases, scale=lambda *_: 5 / 3).said(
        transformer__r=3, transformer__lora_alpha=5
    ),
    "ai-toolkit, alphas": partial(stanza, "flux", alpha=2.0),
    "SimpleTuner": lambda bases: stanza("flux", bases, scale=lambda *_: 4.0).said(
        lora_adapter_metadata='{"transformer.r": 3, "transformer.lora_alpha": 12, '
        '"transformer.target_modules": ["to_q", "to_k", "to_v", "to_out.0"]}'
    ),
    "dots, down and up": partial(
        stanza, "flux", parts=("lora_down.weight", "lora_up.weight"), alpha=2.0
    ),
    "XLabs": lambda bases: xlabs("flux", bases),
    "XLabs, single blocks": lambda bases: (
        bases.file(FULL_FLUX)
        .fuse(
            [f"single_transformer_blocks.0.{path}" for path in QKV],
            "single_blocks.0.processor.qkv_lora",
            parts=("down.weight", "up.weight"),
            alpha=None,
        )
        .fuse(
            ["single_transformer_blocks.0.proj_out"],
            "single_blocks.0.processor.proj_lora",
            parts=("down.weight", "up.weight"),
            alpha=None,
        )
    ),
    "OneTrainer, legacy": lambda bases: (
        bases.file("flux")
        .add(
            "transformer",
            (*ATTENTION, "net.2", "proj_mlp", "norm1.linear"),
            under("lora_transformer_"),
        )
        .add("text_encoder", OF_ENCODER, of_clip("lora_te1_"))
    ),
    "OneTrainer, omi": lambda bases: one_by_one(bases, "flux", "double_blocks.0.img_attn.qkv").add(
        "text_encoder", ("q_proj",), lambda path: f"clip_l.{with_model(path)}"
    ),
    "PEFT": lambda bases: of_peft("flux", bases, component="transformer"),
    "fal": lambda bases: beside(
        bfl("flux", bases, dotted("base_model.model."), parts=PEFT, alpha=None), 4
    ),
    "fal, nothing beside": lambda bases: bfl(
        "flux", bases, dotted("base_model.model."), parts=PEFT, alpha=None
    ).refused("adapter_config"),
    "BFL, control": lambda bases: bfl("flux", bases, dotted(""), parts=PEFT, alpha=None).refused(
        "control", **{"double_blocks.0.img_attn.norm.query_norm.scale": ONE}
    ),
}


def beside(file: LoraFile, rank: int) -> LoraFile:
    file.beside = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    return file


def other(says: str, *keys: str) -> Make:
    """A file of another kind of adapter."""
    return lambda bases: kohya("sd15", bases).refused(says, **dict.fromkeys(keys, ONE))


_LAYER = "lora_unet_down_blocks_1_attentions_0_proj_in"
OTHERS: dict[str, Make] = {
    "DoRA": other("DoRA", f"{_LAYER}.dora_scale"),
    "LoHa": other("LoHa", f"{_LAYER}.hada_w1_a", f"{_LAYER}.hada_w1_b"),
    "LoKr": other("LoKr", "lycoris_conv_in.lokr_w1", "lycoris_conv_in.lokr_w2"),
    "Tucker": other("Tucker", f"{_LAYER}.lora_mid.weight"),
    "OFT": other("OFT", f"{_LAYER}.oft_blocks"),
    "diag-OFT": other("OFT", f"{_LAYER}.oft_diag"),
    "BOFT": other("BOFT", f"{_LAYER}.boft_R"),
    "IA3": other("IA3", f"{_LAYER}.on_input", f"{_LAYER}.weight"),
    "GLoRA": other("GLoRA", f"{_LAYER}.a1.weight", f"{_LAYER}.b1.weight"),
    "norms": other("norm", f"{_LAYER}.w_norm", f"{_LAYER}.b_norm"),
    "full": other("full differences", f"{_LAYER}.diff", f"{_LAYER}.diff_b"),
    "scalar": other("scalar", f"{_LAYER}.scalar"),
    "AdaLoRA": other("AdaLoRA", "base_model.model.mid_block.x.lora_E"),
    "VeRA": other("VeRA", "base_model.model.mid_block.x.vera_lambda_b"),
    "LoRA-FA's biases": other("biases", f"{_LAYER}.lora_up.bias"),
    "words": other("new words", "bundle_emb.me.clip_l"),
}
_FAMILIES = {"SD1.5": SD15, "SDXL": SDXL, "SD3": SD3, "FLUX": FLUX, "other": OTHERS}
ALL = {
    f"{family}: {name}": make for family, cases in _FAMILIES.items() for name, make in cases.items()
}


_OF_DIFFUSERS = (
    "SD1.5: kohya",
    "SD1.5: kohya without alphas",
    "SD1.5: diffusers",
    "SD1.5: diffusers without a header",
    "SD1.5: diffusers, down and up",
    "SD1.5: diffusers, processors",
    "SDXL: kohya",
    "SDXL: kohya, LoCon",
    "SDXL: diffusers, both encoders",
    "SD3: diffusers, both encoders",
    "FLUX: kohya, full size",
    "FLUX: kohya, split",
    "FLUX: diffusers",
    "FLUX: SimpleTuner",
    "FLUX: XLabs",
    "FLUX: XLabs, single blocks",
)
_FAST = {
    "SD1.5: kohya, an alpha of each layer's own",
    "SD1.5: kohya, e4m3",
    "SD1.5: PEFT, rslora",
    "SD1.5: diffusers, down and up",
    "FLUX: kohya",
    "FLUX: OneTrainer, omi",
    "FLUX: BFL, control",
    "other: LoKr",
    "other: GLoRA",
}


@pytest.fixture(scope="module")
def bases(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(zoo, tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def reader() -> LoraReader:
    return LoraReader()


def marked(names: Iterable[str]) -> list[Any]:
    """Have all but some of each family be slow."""
    slow = pytest.mark.slow
    return [one if one in _FAST else pytest.param(one, marks=slow) for one in names]


@pytest.mark.parametrize("name", marked(ALL))
def test_the_strength_is_that_of_the_files_own_rule(
    bases: Bases, reader: LoraReader, tmp_path: Path, name: str
) -> None:
    file = ALL[name](bases)
    path = file.save(tmp_path)
    if file.says:
        with pytest.raises(ModelUnsupported, match=file.says):
            reader.read(path, bases.folder(file.base))
        return
    found = {
        f"{component}.{layer}": torch.tensordot(one.expand, one.shrink, 1)
        for component, layers in reader.read(path, bases.folder(file.base)).by_component.items()
        for layer, one in layers.items()
    }
    assert found.keys() == file.truth.keys()
    gaps = [far(found[key], wanted) for key, wanted in file.truth.items()]
    assert max(gaps) <= _TOLERANCE


@pytest.mark.parametrize("name", marked(_OF_DIFFUSERS))
def test_diffusers_reads_the_same_where_it_reads_rightly(
    bases: Bases, tmp_path: Path, name: str
) -> None:
    file = ALL[name](bases)
    path = file.save(tmp_path)
    found = dict(as_diffusers(bases, file, path))
    assert found.keys() == file.truth.keys()
    assert max(far(found[key], wanted) for key, wanted in file.truth.items()) <= _TOLERANCE


@pytest.mark.parametrize("base", ["sd3", "sd35", "flux"])
def test_makers_names_are_those_of_diffusers_conversion_of_their_models(
    bases: Bases, base: str
) -> None:
    """The truth of this file's names: what a LoRA merged into the maker's model becomes."""
    make, names = (bfl, AROUND_FLUX) if base == "flux" else (mmdit, AROUND_SD3)
    file = around(make(base, bases, dotted("")), dotted(""), names)
    # its size is that of the published model there
    converted = diffusers_names(base, merged(file, without="single_blocks.0.linear1"))
    compared = {
        name.removeprefix("transformer."): wanted
        for name, wanted in file.truth.items()
        if "single" not in name or name.endswith(("proj_out", "norm.linear"))
    }
    assert len(compared) > 20
    for name, wanted in compared.items():
        assert far(converted[f"{name}.weight"], wanted) <= _TOLERANCE


def far(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found.double() - wanted).abs().max() / wanted.abs().max())
