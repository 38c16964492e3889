"""Measures the attribute classifier on fresh renders and on pictures of nothing."""

import random
from dataclasses import dataclass

import torch

from ray_cluster.quality.classifier import AttributeClassifier, Reading, read_pictures
from ray_cluster.quality.examples import Examples, single_objects
from ray_cluster.quality.training import NONE_KINDS
from ray_cluster.reference_models.render import Jitter
from ray_cluster.reference_models.scenes import BACKGROUNDS, COLOURS, POSITIONS, SHAPES, SIZES

ATTRIBUTES = ("shape", "colour", "size", "position", "background")
_NAMES: dict[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "colour": COLOURS,
    "size": SIZES,
    "position": POSITIONS,
    "background": BACKGROUNDS,
}


@dataclass(frozen=True)
class ClassifierFigures:
    """Shares: `right` per attribute on renders, `confident` per kind of picture of nothing."""

    right: dict[str, float]
    confident: dict[str, float]


def measure_classifier(
    classifier: AttributeClassifier,
    *,
    seed: int,
    count: int = 600,
    sizes: tuple[tuple[int, int], ...] = ((64, 64), (96, 96), (128, 128), (64, 128), (96, 64)),
) -> ClassifierFigures:
    """Measure on `count` renders and as many pictures of each kind of nothing.

    The pictures are spread evenly over `sizes`, given as (width, height).
    """
    rng, each = random.Random(seed), count // len(sizes)
    hits = dict.fromkeys(ATTRIBUTES, 0)
    stated = dict.fromkeys(NONE_KINDS, 0)
    for width, height in sizes:
        renders = single_objects(rng, each, width=width, height=height, jitter=Jitter())
        readings = read_pictures(classifier, renders.pixels)
        for name in ATTRIBUTES:
            hits[name] += _right(name, renders, readings)
        for kind, draw in NONE_KINDS.items():
            # one picture at a time, since some kinds draw a strength per batch
            nothing = torch.cat(
                [draw(rng, 1, width=width, height=height).pixels for _ in range(each)]
            )
            stated[kind] += sum(r.shape is not None for r in read_pictures(classifier, nothing))
    total = each * len(sizes)
    return ClassifierFigures(
        {name: hit / total for name, hit in hits.items()},
        {kind: number / total for kind, number in stated.items()},
    )


def _right(name: str, examples: Examples, readings: list[Reading]) -> int:
    wanted = [_NAMES[name][index - 1] for index in getattr(examples.labels, name).tolist()]
    return sum(getattr(r, name) == value for r, value in zip(readings, wanted, strict=True))
