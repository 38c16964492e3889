"""A small network that reads the attributes of a picture with one object."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ray_cluster.reference_models.render import ANCHOR_OFFSET
from ray_cluster.reference_models.scenes import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    SHAPES,
    SIZES,
    Background,
    Colour,
    Position,
    Shape,
    Size,
)

READING_SIZE = 64
CONFIDENT = 0.5
CLASSIFIER_FOLDER = (
    Path(__file__).parents[1] / "reference_models" / "weights" / "attribute-classifier"
)
_FILE = "model.safetensors"
_Value = TypeVar("_Value", bound=str)


@dataclass(frozen=True)
class Logits:
    """Raw scores [B, .]; index 0 is "none". `centre`: the place found, [B, 2], in -1..1."""

    shape: Tensor
    colour: Tensor
    size: Tensor
    background: Tensor
    centre: Tensor


@dataclass(frozen=True)
class Reading:
    """What one picture shows; `None` where no value reaches a probability of one half."""

    shape: Shape | None
    colour: Colour | None
    size: Size | None
    position: Position | None
    background: Background | None


class _Residual(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * F.relu(self.conv(x))


class AttributeClassifier(nn.Module):
    """Reads shape, colour, size and background, each with a "none" of its own, and finds the place.

    A map of attention finds the object: its mean place tells the position, and its mean features
    tell the rest.
    """

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels // 2, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(channels // 2, channels, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.body = nn.Sequential(*(_Residual(channels, dilation) for dilation in (1, 2, 1, 2)))
        self.attention = nn.Conv2d(channels, 1, 1)
        self.mix = nn.Sequential(nn.Linear(3 * channels + 2, 2 * channels), nn.ReLU())
        self.heads = nn.ModuleDict(
            {
                "shape": nn.Linear(2 * channels, 1 + len(SHAPES)),
                "colour": nn.Linear(2 * channels, 1 + len(COLOURS)),
                "size": nn.Linear(2 * channels, 1 + len(SIZES)),
                "background": nn.Linear(2 * channels, 1 + len(BACKGROUNDS)),
            }
        )

    def forward(self, pixels: Tensor) -> Logits:
        """Read pictures [B, 3, H, W] in 0..1; their shorter side is brought to 64 pixels."""
        features = self.body(self.stem(_to_reading_size(pixels) * 2 - 1))  # [B, C, h, w]
        height, width = features.shape[-2:]
        weights = self.attention(features).flatten(1).softmax(1)  # [B, hw]
        found = torch.einsum("bn,bcn->bc", weights, features.flatten(2))
        xs = torch.linspace(-1 + 1 / width, 1 - 1 / width, width, device=pixels.device)
        ys = torch.linspace(-1 + 1 / height, 1 - 1 / height, height, device=pixels.device)
        places = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), -1).flatten(0, 1)  # [hw, 2]
        centre = weights @ places
        summary = torch.cat([found, features.mean((2, 3)), features.amax((2, 3)), centre], 1)
        mixed = self.mix(summary)
        scores = {name: head(mixed) for name, head in self.heads.items()}
        return Logits(**scores, centre=centre)


def read_pictures(classifier: AttributeClassifier, pixels: Tensor) -> list[Reading]:
    """Read pictures [B, 3, H, W] in 0..1; only values of probability 0.5 or more are stated.

    The position is the nearest of the nine to the place found, and stated if a colour is.
    """
    with torch.no_grad():
        logits = classifier(pixels)
    return [
        Reading(shape, colour, size, None if colour is None else position, background)
        for shape, colour, size, position, background in zip(
            _name(logits.shape, SHAPES),
            _name(logits.colour, COLOURS),
            _name(logits.size, SIZES),
            _nearest_positions(logits.centre),
            _name(logits.background, BACKGROUNDS),
            strict=True,
        )
    ]


def save_classifier(classifier: AttributeClassifier, folder: Path = CLASSIFIER_FOLDER) -> Path:
    """Write the weights in float16 and return the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.half().contiguous() for name, value in classifier.state_dict().items()}
    save_file(tensors, folder / _FILE)
    (folder / _FILE).chmod(0o644)
    return folder / _FILE


def load_classifier(folder: Path = CLASSIFIER_FOLDER) -> AttributeClassifier:
    """Load the committed weights, ready to read in float32."""
    tensors = {name: value.float() for name, value in load_file(folder / _FILE).items()}
    classifier = AttributeClassifier(tensors["attention.weight"].shape[1])
    classifier.load_state_dict(tensors)
    return classifier.requires_grad_(False).eval()


def _name(scores: Tensor, names: Sequence[_Value]) -> list[_Value | None]:
    probability, index = scores.softmax(1).max(1)
    return [
        names[i - 1] if i > 0 and p >= CONFIDENT else None
        for p, i in zip(probability.tolist(), index.tolist(), strict=True)
    ]


def _nearest_positions(centre: Tensor) -> list[Position]:
    # the outer positions are this far from the middle, in halves of a side
    spacing = 2 * ANCHOR_OFFSET
    columns, rows = (centre / spacing).round().clamp(-1, 1).long().unbind(1)
    return [POSITIONS[index] for index in (3 * (rows + 1) + columns + 1).tolist()]


def _to_reading_size(pixels: Tensor) -> Tensor:
    short = min(pixels.shape[-2:])
    if short == READING_SIZE:
        return pixels
    size = [round(side * READING_SIZE / short) for side in pixels.shape[-2:]]
    return F.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)
