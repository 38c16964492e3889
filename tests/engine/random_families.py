"""Folders of diffusers' pipeline classes, with small random weights: all but the commonest.

Shapes are those of diffusers' own tests where it has some; tokenizers are made here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from tests.engine.families_a import (
    bria,
    bria_fibo,
    bria_fibo2,
    chroma,
    cogview3,
    cogview4,
    deep_floyd,
    dreamlite,
    ernie,
    flux2,
    glm_image,
    hidream,
    hunyuan_dit,
)
from tests.engine.families_b import (
    amused,
    hunyuan_image,
    kandinsky3,
    kandinsky5,
    krea2,
    longcat,
    lumina,
    lumina2,
    nucleus,
    ovis,
    pixart_alpha,
    qwen21,
    sana_sprint,
    z_image_omni,
)
from tests.engine.family_parts import Parts, kl_vae
from tests.engine.random_dits import save_flux, save_sd3
from tests.engine.random_models import save_sd, save_sdxl
from tests.engine.random_pipelines import save_klein


def _saved(save: Callable[[Path], Path], **more: Any) -> Parts:
    """The parts of a folder that is made elsewhere."""
    with TemporaryDirectory() as folder:
        whole = diffusers.DiffusionPipeline.from_pretrained(save(Path(folder)), safety_checker=None)
    parts = {name: one for name, one in whole.components.items() if name != "image_encoder"}
    off = {"requires_safety_checker": False} if "safety_checker" in parts else {}
    return parts | off | more


_sd = partial(_saved, partial(save_sd, zero_snr=False))


def sd3() -> Parts:
    parts = _saved(save_sd3)
    config = dict(parts["transformer"].config) | {"in_channels": 16, "out_channels": 16}
    transformer = diffusers.SD3Transformer2DModel.from_config(config)
    return parts | {"transformer": transformer, "vae": kl_vae(16, num_blocks=3)}


def latent_consistency() -> Parts:
    parts = _sd(scheduler=diffusers.LCMScheduler())
    config = dict(parts["unet"].config) | {"time_cond_proj_dim": 8}
    return parts | {"unet": diffusers.UNet2DConditionModel.from_config(config)}


FAMILIES: Mapping[str, Callable[[], Parts]] = {
    "AmusedPipeline": amused,
    "BriaFibo2Pipeline": bria_fibo2,
    "BriaFiboPipeline": bria_fibo,
    "BriaPipeline": bria,
    "ChromaPipeline": chroma,
    "CogView3PlusPipeline": cogview3,
    "CogView4Pipeline": cogview4,
    "DreamLiteMobilePipeline": dreamlite,
    "DreamLitePipeline": dreamlite,
    "ErnieImagePipeline": ernie,
    "Flux2KleinKVPipeline": partial(_saved, save_klein),
    "Flux2Pipeline": flux2,
    "FluxKontextPipeline": partial(_saved, partial(save_flux, is_kontext=True)),
    "FluxPipeline": partial(_saved, save_flux),
    "GlmImagePipeline": glm_image,
    "HiDreamImagePipeline": hidream,
    "HunyuanDiTPipeline": hunyuan_dit,
    "HunyuanImagePipeline": hunyuan_image,
    "IFPipeline": deep_floyd,
    "Kandinsky3Pipeline": kandinsky3,
    "Kandinsky5I2IPipeline": partial(kandinsky5, looks=True),
    "Kandinsky5T2IPipeline": kandinsky5,
    "Krea2Pipeline": krea2,
    "LatentConsistencyModelPipeline": latent_consistency,
    "LongCatImagePipeline": longcat,
    "Lumina2Pipeline": lumina2,
    "LuminaPipeline": lumina,
    "NucleusMoEImagePipeline": nucleus,
    "OvisImagePipeline": ovis,
    "PixArtAlphaPipeline": pixart_alpha,
    "QwenImage21Pipeline": qwen21,
    "SanaSprintPipeline": sana_sprint,
    "StableDiffusion3Pipeline": sd3,
    "StableDiffusionPanoramaPipeline": _sd,
    "StableDiffusionPipeline": _sd,
    "StableDiffusionXLPipeline": partial(_saved, save_sdxl),
    "ZImageOmniPipeline": z_image_omni,
}


def save_family(name: str, folder: Path) -> Any:
    """Write the folder of a pipeline class of diffusers; return the pipeline."""
    torch.manual_seed(0)
    parts = FAMILIES[name]()
    content: Parts = {"_class_name": name, "_diffusers_version": diffusers.__version__}
    for key, part in parts.items():
        if not hasattr(part, "save_pretrained"):
            content[key] = [None, None] if part is None else part
            continue
        if isinstance(part, nn.Module):
            _fill(part)
        part.save_pretrained(folder / key)
        if isinstance(part, nn.Module):
            # as files are read: last bits differ by where weights lie in memory
            parts[key] = type(part).from_pretrained(folder / key)
        kind = type(part).__name__
        content[key] = ["transformers" if hasattr(transformers, kind) else "diffusers", kind]
    (folder / "model_index.json").write_text(json.dumps(content))
    pipeline = getattr(diffusers, name)(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _fill(model: nn.Module) -> None:
    """Give weights that are created empty, or of no effect, the same random numbers each time."""
    own = {
        id(weight)
        for module in model.modules()
        if type(module).__module__.startswith("torch")
        for weight in module.parameters(recurse=False)
    }
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if id(weight) not in own or not weight.any():
                weight.normal_(1.0 if "norm" in name and weight.ndim == 1 else 0.0, 0.1)
