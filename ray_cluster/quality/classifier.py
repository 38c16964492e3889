"""A small network that reads what a picture shows: up to nine objects and the background."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ray_cluster.models.picture_reader import PictureReader
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

CONFIDENT = 0.5
CLASSIFIER_FOLDER = Path(__file__).parents[1] / "models" / "weights" / "attribute-classifier"
_FILE = "model.safetensors"
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


class AttributeClassifier(PictureReader):
    """Reads shape, colour and size at each of the nine positions, and the background.

    One head reads all positions: what it learns at one place holds for all.
    """

    def __init__(self, channels: int = 64) -> None:
        super().__init__(channels)
        self.heads = nn.ModuleDict(
            {
                "shape": nn.Linear(2 * channels, 1 + len(SHAPES)),
                "colour": nn.Linear(2 * channels, 1 + len(COLOURS)),
                "size": nn.Linear(2 * channels, 1 + len(SIZES)),
            }
        )
        self.background = nn.Linear(channels, 1 + len(BACKGROUNDS))
        self.style = nn.Linear(channels, len(STYLES))

    def forward(self, pixels: Tensor) -> Logits:
        """Read pictures [B, 3, H, W] in 0..1."""
        return self.logits(*self.describe(pixels))

    def logits(self, slots: Tensor, overall: Tensor) -> Logits:
        """Read what `describe` has said."""
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
