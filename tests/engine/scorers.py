"""Small discriminators of transformers' classes with random weights, and images to score."""

from pathlib import Path

import numpy as np
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
from ray_cluster.requests import SmallImage
from ray_cluster.training.tokenizer import build_tokenizer
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


def random_images(count: int) -> list[SmallImage]:
    """Return images of three sizes in turn."""
    rng = np.random.default_rng(5)
    sizes = ((64, 64), (128, 128), (64, 96))
    return [
        small_image(rng.integers(0, 256, (*sizes[index % 3], 3), dtype=np.uint8))
        for index in range(count)
    ]
