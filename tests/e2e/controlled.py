"""A service with ControlNets in processes of their own, the maps it follows, and what diffusers
makes of them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline
from PIL import Image

from ray_cluster.models.builtin import weights_folder
from ray_cluster.quality.render import paint
from ray_cluster.quality.suite import bare, place_hinted, suite_prompts
from recipes.networks.controlnet import hint_pictures
from tests.e2e.edit_templates import png

NETS: Mapping[str, str] = {"edges": "shapes-sd-edges", "layout": "shapes-sd-layout"}
NUM_STEPS = 20
GUIDANCE = 2.0
_SIDE_PX = 64


def sections(*, num_edges: int = 1, num_bases: int = 2) -> dict[str, Any]:
    """Return sections of the configuration that replace the tests' usual ones."""
    return {
        "pools": [
            {
                "name": "shapes-sd",
                "model": "shapes-sd",
                "replicas": num_bases,
                "num_cpus": 0.25,
                "max_batch": 8,
                "max_in_flight": 8,
                "min_px": 32,
                "max_px": 128,
                "max_num_inference_steps": 400,
                "defaults": {
                    "size": "64x64",
                    "num_inference_steps": NUM_STEPS,
                    "guidance_scale": GUIDANCE,
                    "sampler": "ddim",
                },
            }
        ],
        "controlnets": [
            {
                "name": name,
                "model": model,
                "bases": ["shapes-sd"],
                "num_cpus": 0.25,
                "replicas": num_edges if name == "edges" else 1,
            }
            for name, model in NETS.items()
        ],
        "discriminators": [],
        "cascades": [],
    }


@cache
def hinted(count: int) -> tuple[list[str], dict[str, Any]]:
    """Return prompts of the ControlNets' cards, and their maps ``[N, H, W, 3]`` by ControlNet."""
    prompts = suite_prompts("hinted", count)
    placed = place_hinted(prompts, width=_SIDE_PX, height=_SIDE_PX)
    painted = paint(placed, width=_SIDE_PX, height=_SIDE_PX)
    texts = [bare(prompt).caption for prompt in prompts]
    maps = {
        name: (hint_pictures(name, painted, placed) * 255)
        .round()
        .to(torch.uint8)
        .permute(0, 2, 3, 1)
        .numpy()
        for name in NETS
    }
    return texts, maps


def base64_of(array: Any) -> str:
    return base64.b64encode(png(array)).decode()


@cache
def _net(name: str) -> ControlNetModel:
    return ControlNetModel.from_pretrained(weights_folder() / NETS[name])


def truth(prompt: str, seed: int, maps: Mapping[str, Any], **options: Any) -> Any:
    """Return the image of diffusers, ``[H, W, 3]``.

    Args:
        maps: by ControlNet; one at least.
        options: of the pipeline.
    """
    pipeline = _pipeline(tuple(maps))
    return np.asarray(
        pipeline(
            prompt,
            image=[Image.fromarray(one) for one in maps.values()],
            width=_SIDE_PX,
            height=_SIDE_PX,
            num_inference_steps=NUM_STEPS,
            guidance_scale=GUIDANCE,
            generator=torch.Generator().manual_seed(seed),
            **options,
        ).images[0]
    ).astype(int)


@cache
def _pipeline(names: tuple[str, ...]) -> Any:
    pipeline = StableDiffusionControlNetPipeline.from_pretrained(
        _model(), controlnet=[_net(name) for name in names], safety_checker=None
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _model() -> Path:
    return weights_folder() / "shapes-sd"
