"""Measures the attribute classifier on fresh renders and on pictures of nothing."""

import random
from dataclasses import dataclass

import torch

from ray_cluster.quality.classifier import AttributeClassifier, Reading, read_pictures
from ray_cluster.quality.render import Jitter
from ray_cluster.quality.scenes import BACKGROUNDS, COLOURS, POSITIONS, SHAPES, SIZES, STYLES
from recipes.discriminators.classifier_examples import (
    Canvas,
    Labels,
    several_objects,
    single_objects,
    styled_objects,
)
from recipes.discriminators.classifier_training import NONE_KINDS
from recipes.figures.scoring import Figures, Rows

ATTRIBUTES = ("shape", "colour", "size", "background", "style", "everything")
_SIZES = ((64, 64), (96, 96), (128, 128), (64, 128), (96, 64))


@dataclass(frozen=True)
class ClassifierFigures(Figures):
    """Shares of pictures.

    `single`, `several`, `styled`: on renders of one, of two to four, and in other styles than the
    plain one, with every object's value of the attribute right and no object seen where there is
    none; `confident`: per kind of picture of nothing, with a shape stated somewhere.
    """

    single: dict[str, float]
    several: dict[str, float]
    styled: dict[str, float]
    confident: dict[str, float]

    def all_rows(self) -> list[Rows]:
        """See :class:`Figures`."""
        return [self._right(), self._nothing()]

    def _right(self) -> Rows:
        kinds = (self.single, self.several, self.styled)
        rows = [[name, *(f"{kind[name]:.2%}" for kind in kinds)] for name in self.single]
        return Rows(["read right", "one object", "two to four", "other styles"], rows)

    def _nothing(self) -> Rows:
        rows = [[name, f"{share:.2%}"] for name, share in self.confident.items()]
        return Rows(["pictures of", "a shape is stated"], rows)


def measure_classifier(
    classifier: AttributeClassifier,
    *,
    seed: int,
    count: int = 600,
    sizes: tuple[tuple[int, int], ...] = _SIZES,
) -> ClassifierFigures:
    """Measure on `count` renders of each kind and as many pictures of each kind of nothing.

    The pictures are spread evenly over `sizes`, given as (width, height).
    """
    rng, each = random.Random(seed), count // len(sizes)
    renderers = (single_objects, several_objects, styled_objects)
    right = [dict.fromkeys(ATTRIBUTES, 0) for _ in renderers]
    stated = dict.fromkeys(NONE_KINDS, 0)
    for width, height in sizes:
        canvas = Canvas(width, height, Jitter())
        for draw, hits in zip(renderers, right, strict=True):
            renders = draw(rng, each, canvas)
            readings = read_pictures(classifier, renders.pixels)
            for name in ATTRIBUTES:
                hits[name] += sum(
                    _is_right(name, reading, renders.labels, row)
                    for row, reading in enumerate(readings)
                )
        for kind, draw_nothing in NONE_KINDS.items():
            # one picture at a time, since some kinds draw a strength per batch
            nothing = torch.cat([draw_nothing(rng, 1, canvas).pixels for _ in range(each)])
            stated[kind] += sum(
                any(thing.shape is not None for thing in reading.objects)
                for reading in read_pictures(classifier, nothing)
            )
    total = each * len(sizes)
    return ClassifierFigures(
        *({name: hit / total for name, hit in hits.items()} for hits in (*right, stated))
    )


def _is_right(name: str, reading: Reading, labels: Labels, row: int) -> bool:
    if name == "everything":
        return all(_is_right(part, reading, labels, row) for part in ATTRIBUTES[:-1])
    if name == "background":
        return reading.background == BACKGROUNDS[int(labels.background[row]) - 1]
    if name == "style":
        return reading.style == STYLES[int(labels.style[row])]
    values = {"shape": SHAPES, "colour": COLOURS, "size": SIZES}[name]
    wanted = {
        position: values[index - 1]
        for position, index in zip(POSITIONS, getattr(labels, name)[row].tolist(), strict=True)
        if index > 0
    }
    return wanted == {thing.position: getattr(thing, name) for thing in reading.objects}
