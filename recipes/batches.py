"""Draws the training data of one step: scenes, captions, placed objects and pictures."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ray_cluster.quality.captions import write_caption
from ray_cluster.quality.render import Jitter, Placed, paint, place
from ray_cluster.quality.scenes import (
    Scene,
    Style,
    omit_all_details,
    omit_details,
    sample_training_scene,
)
from recipes.recipe_parts import CaptionMix, SizeBucket

_LEADS = ("a photo of", "an image of", "a picture of", "please draw", "show me", "drawing of")


@dataclass(frozen=True)
class Captioned:
    """A complete scene, what its caption states of it, and the caption."""

    scene: Scene
    stated: Scene
    caption: str


@dataclass(frozen=True)
class Pictures:
    """A batch of one size: `pixels` [B, 3, H, W] in 0..1 with captions and placed objects.

    `stated`: per picture, what its caption states.
    """

    stated: tuple[Scene, ...]
    captions: tuple[str, ...]
    placed: Placed
    pixels: Tensor


def draw_captioned(rng: random.Random, mix: CaptionMix) -> Captioned:
    """Draw a training scene and a caption, with omissions and added words at the mix's rates."""
    scene = sample_training_scene(rng, mix.single_share)
    # without a bare share nothing is drawn for it, so older phases draw what they always drew
    if mix.bare_share and rng.random() < mix.bare_share:
        stated = omit_all_details(scene)
    else:
        stated = omit_details(scene, rng, mix.omit_share)
    caption = write_caption(stated)
    if rng.random() < mix.filler_share:
        caption = f"{rng.choice(_LEADS)} {caption}"
    elif rng.random() < mix.filler_share:
        caption = caption.removeprefix("a ")
    return Captioned(scene, stated, caption)


def draw_pictures(
    rng: random.Random,
    mix: CaptionMix,
    buckets: Sequence[SizeBucket],
    jitter: Jitter,
    device: torch.device | None = None,
    style: Style = "plain",
) -> Pictures:
    """Draw a bucket by its share and a batch of captioned pictures of its size, in one style."""
    bucket = rng.choices(buckets, [bucket.share for bucket in buckets])[0]
    drawn = [draw_captioned(rng, mix) for _ in range(bucket.batch)]
    placed = place(
        [one.scene for one in drawn],
        width=bucket.width,
        height=bucket.height,
        jitter=jitter,
        seed=rng.getrandbits(62),
    )
    placed = placed if device is None else placed.to(device)
    pixels = paint(placed, width=bucket.width, height=bucket.height, style=style)
    stated = tuple(one.stated for one in drawn)
    return Pictures(stated, tuple(one.caption for one in drawn), placed, pixels)
