"""A small network that reads what a picture shows: up to nine objects and the background."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ray_cluster.quality.render import ANCHOR_OFFSET
from ray_cluster.quality.scenes import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    SHAPES,
    SIZES,
    STYLES,
    Background,
    Colour,
    Position,
    Shape,
    Size,
    Style,
)

READING_SIZE = 64
CONFIDENT = 0.5
CLASSIFIER_FOLDER = Path(__file__).parents[1] / "models" / "weights" / "attribute-classifier"
_FILE = "model.safetensors"
# points a side at which the features around a position are read, and how far the outer ones are
# from its middle, in shorter sides of the picture
_POINTS, _REACH = 4, 0.27
_Value = TypeVar("_Value", bound=str)


@dataclass(frozen=True)
class Logits:
    """Raw scores: of objects [B, 9, .] by position, of the whole [B, .]; index 0 is "none".

    `style` has no "none".
    """

    shape: Tensor
    colour: Tensor
    size: Tensor
    background: Tensor
    style: Tensor


@dataclass(frozen=True)
class ObjectReading:
    """What is seen at one position; `None` where no value reaches a probability of one half."""

    position: Position
    shape: Shape | None
    colour: Colour | None
    size: Size | None


@dataclass(frozen=True)
class Reading:
    """What one picture shows: the positions at which a shape or a colour is seen, in their order.

    `background` and `style` are `None` where no value reaches a probability of one half.
    """

    objects: tuple[ObjectReading, ...]
    background: Background | None
    style: Style | None


class _Residual(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * F.relu(self.conv(x))


class AttributeClassifier(nn.Module):
    """Reads shape, colour and size at each of the nine positions, and the background.

    One head reads all positions: it sees only the features around its own, so what it learns at one
    place holds for all.
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
        self.reduce = nn.Conv2d(channels, channels // 2, 1)
        seen = _POINTS * _POINTS * channels // 2
        self.look = nn.Sequential(nn.Linear(seen, 2 * channels), nn.ReLU())
        self.survey = nn.Sequential(nn.Linear(2 * channels, channels), nn.ReLU())
        self.heads = nn.ModuleDict(
            {
                "shape": nn.Linear(2 * channels, 1 + len(SHAPES)),
                "colour": nn.Linear(2 * channels, 1 + len(COLOURS)),
                "size": nn.Linear(2 * channels, 1 + len(SIZES)),
            }
        )
        self.background = nn.Linear(channels, 1 + len(BACKGROUNDS))
        self.style = nn.Linear(channels, len(STYLES))

    def feature_maps(self, pixels: Tensor) -> list[Tensor]:
        """Activations [B, C, h, w] after the stem and after each block of the body.

        `pixels`: [B, 3, H, W] in 0..1; their shorter side is brought to 64 pixels.
        """
        maps = [self.stem(_to_reading_size(pixels) * 2 - 1)]
        for block in self.body:
            maps.append(block(maps[-1]))
        return maps

    def describe(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """What is seen at each position, [B, 9, 2 C], and of the whole picture, [B, C]."""
        features = self.feature_maps(pixels)[-1]
        points = _sampling_points(features)
        around = F.grid_sample(self.reduce(features), points, align_corners=False)
        slots = around.permute(0, 2, 3, 1).flatten(2)  # [B, 9, points * C / 2]
        overall = torch.cat([features.mean((2, 3)), features.amax((2, 3))], 1)
        return self.look(slots), self.survey(overall)

    def forward(self, pixels: Tensor) -> Logits:
        """Read pictures [B, 3, H, W] in 0..1."""
        slots, overall = self.describe(pixels)
        scores = {name: head(slots) for name, head in self.heads.items()}
        return Logits(**scores, background=self.background(overall), style=self.style(overall))


def read_pictures(classifier: AttributeClassifier, pixels: Tensor) -> list[Reading]:
    """Read pictures [B, 3, H, W] in 0..1; only values of probability 0.5 or more are stated."""
    with torch.no_grad():
        logits = classifier(pixels)
    backgrounds = _name(logits.background, BACKGROUNDS)
    # its scores have no "none", so one that never wins is put before them
    never = torch.full_like(logits.style[:, :1], -torch.inf)
    styles = _name(torch.cat([never, logits.style], 1), STYLES)
    parts = [
        _name(scores.flatten(0, 1), names)
        for scores, names in (
            (logits.shape, SHAPES),
            (logits.colour, COLOURS),
            (logits.size, SIZES),
        )
    ]
    readings: list[Reading] = []
    for row, (background, style) in enumerate(zip(backgrounds, styles, strict=True)):
        first = row * len(POSITIONS)
        seen = [
            ObjectReading(position, *(part[first + slot] for part in parts))  # type: ignore[arg-type]
            for slot, position in enumerate(POSITIONS)
        ]
        there = tuple(one for one in seen if one.shape is not None or one.colour is not None)
        readings.append(Reading(there, background, style))
    return readings


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
    classifier = AttributeClassifier(tensors["reduce.weight"].shape[1])
    classifier.load_state_dict(tensors)
    return classifier.requires_grad_(False).eval()


def _name(scores: Tensor, names: Sequence[_Value]) -> list[_Value | None]:
    probability, index = scores.softmax(1).max(1)
    return [
        names[i - 1] if i > 0 and p >= CONFIDENT else None
        for p, i in zip(probability.tolist(), index.tolist(), strict=True)
    ]


def _sampling_points(features: Tensor) -> Tensor:
    """Points [B, 9, n * n, 2] around the nine positions, in -1..1 over a map [B, C, h, w]."""
    height, width = features.shape[-2:]
    half = torch.tensor([width, height], device=features.device) / min(width, height) / 2
    line = torch.linspace(-_REACH, _REACH, _POINTS, device=features.device)
    around = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).flatten(0, 1)  # [n * n, 2]
    steps = torch.arange(3, device=features.device) - 1
    # index = 3 * row + column; the outer positions are this share of a side from the middle
    cells = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1).flatten(0, 1)  # [9, 2]
    middles = cells * 2 * ANCHOR_OFFSET
    points = middles[:, None] + around / half
    return points.expand(len(features), -1, -1, -1)


def _to_reading_size(pixels: Tensor) -> Tensor:
    short = min(pixels.shape[-2:])
    if short == READING_SIZE:
        return pixels
    size = [round(side * READING_SIZE / short) for side in pixels.shape[-2:]]
    return F.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)
