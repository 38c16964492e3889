"""Small discriminators of transformers' classes with random weights, and images to score."""

from pathlib import Path

import torch
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    SiglipConfig,
    SiglipModel,
    ViTConfig,
    ViTForImageClassification,
)

from ray_cluster.imaging.small_images import small_image
from ray_cluster.quality.render import render
from ray_cluster.quality.suite import suite_prompts
from ray_cluster.requests import SmallImage
from recipes.networks.tokenizer import build_tokenizer
from tests.engine.random_models import text_config

VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
KINDS = ("CLIPModel", "SiglipModel", "ViTForImageClassification")


def save_scorer(folder: Path, kind: str) -> Path:
    """Write a small model of one of `KINDS`, as its library does."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    text = text_config(16, tokenizer).to_dict()
    match kind:
        case "CLIPModel":
            model = CLIPModel(CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8))
        case "SiglipModel":
            siglip = {**text, "pad_token_id": 0, "projection_size": 16}
            model = SiglipModel(SiglipConfig(text_config=siglip, vision_config=VISION))
        case _:
            labels = {0: "generated", 1: "real"}
            config = ViTConfig(**VISION, id2label=labels, label2id={"generated": 0, "real": 1})
            model = ViTForImageClassification(config)
    model.save_pretrained(folder)
    if kind != "ViTForImageClassification":
        tokenizer.save_pretrained(folder)
    size, crop = {"shortest_edge": 32}, {"height": 32, "width": 32}
    CLIPImageProcessor(size=size, crop_size=crop).save_pretrained(folder)
    return folder


def rendered_images(count: int) -> list[SmallImage]:
    """Return images of scenes, of three sizes in turn."""
    sizes = ((64, 64), (128, 128), (96, 64))
    found = []
    for index, prompt in enumerate(suite_prompts("easy", count)):
        width, height = sizes[index % 3]
        [pixels] = render([prompt.scene], width=width, height=height)
        found.append(small_image((pixels * 255).byte().permute(1, 2, 0).contiguous().numpy()))
    return found
