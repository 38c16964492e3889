"""Prompts that training pictures are shown with: their own, changed ones, others, and what is seen.

Whether a picture is right for a prompt is what the attribute classifier says, whatever the prompt
was drawn for.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ray_cluster.quality.captions import CaptionError, write_caption
from ray_cluster.quality.classifier import Reading
from ray_cluster.quality.scenes import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    SHAPES,
    SIZES,
    Scene,
    SceneObject,
    has_held_out_object,
    omit_details,
)
from recipes.discriminators.pictures import Example
from recipes.discriminators.recipe import DiscriminatorRecipe
from recipes.figures.scoring import Drawn

# parts of a picture: its positions, and the whole
NUM_PARTS = len(POSITIONS) + 1
_OMITTED = 0.25
_VALUES: dict[str, Sequence[Any]] = {
    "shape": SHAPES,
    "colour": COLOURS,
    "size": SIZES,
    "position": POSITIONS,
}


@dataclass(frozen=True)
class Shown:
    """A picture with a prompt: what the prompt states, in words, and whether they agree."""

    example: Example
    stated: Scene
    caption: str

    @property
    def _drawn(self) -> Drawn:
        return Drawn(self.stated, self.example.pixels, self.example.reading)

    @property
    def is_right(self) -> bool:
        """Whether all is as the prompt says."""
        return self._drawn.all_right

    def part_marks(self) -> list[bool] | None:
        """Whether each part is right; None where the prompt does not say where its object is."""
        drawn = self._drawn
        if any(thing.position is None for thing in self.stated.objects):
            return None
        seen = {thing.position for thing in self.example.reading.objects}
        right = [position not in seen for position in POSITIONS]
        for thing, marks in zip(self.stated.objects, drawn.object_marks, strict=True):
            if thing.position is not None:
                right[POSITIONS.index(thing.position)] = all(marks.values())
        return [*right, drawn.background_is_right]


def show(
    examples: Sequence[Example], rng: random.Random, recipe: DiscriminatorRecipe
) -> list[Shown]:
    """Give each picture a prompt, of kinds by the recipe's shares."""
    return [_show(example, examples, rng, recipe) for example in examples]


def part_targets(shown: Sequence[Shown]) -> tuple[Tensor, Tensor]:
    """Return whether parts are right, [B, 10] in {0, 1}, and which of them count, likewise."""
    marks = [one.part_marks() for one in shown]
    right = torch.tensor([[False] * NUM_PARTS if one is None else one for one in marks])
    counts = torch.tensor([[one is not None] * NUM_PARTS for one in marks])
    return right.float(), counts.float()


def _show(
    example: Example, others: Sequence[Example], rng: random.Random, recipe: DiscriminatorRecipe
) -> Shown:
    own = Shown(example, example.captioned.stated, example.captioned.caption)
    kind, read = rng.random(), seen_scene(example.reading)
    stated = own.stated
    if kind < recipe.other_share:
        other = rng.choice(others).captioned
        return Shown(example, other.stated, other.caption)
    kind -= recipe.other_share
    if kind < recipe.changed_share:
        # what is seen is changed as well as what was asked for: else wrong pictures would never
        # be almost right
        base = read if read is not None and rng.random() < 0.5 else stated
        stated = change_detail(omit_details(base, rng, _OMITTED), rng)
    elif kind - recipe.changed_share < recipe.read_share and read is not None:
        stated = omit_details(read, rng, _OMITTED)
    if stated == own.stated or has_held_out_object(stated):
        return own
    try:
        return Shown(example, stated, write_caption(stated))
    # what is seen stands in no layout
    except CaptionError:
        return own


def change_detail(scene: Scene, rng: random.Random) -> Scene:
    """Change one stated value, or exchange two objects' shapes or colours."""
    objects = list(scene.objects)
    index = rng.randrange(len(objects))
    if len(objects) > 1 and rng.random() < 0.3:
        other = rng.choice([one for one in range(len(objects)) if one != index])
        name = rng.choice(("shape", "colour"))
        first, second = getattr(objects[index], name), getattr(objects[other], name)
        objects[index] = replace(objects[index], **{name: second})
        objects[other] = replace(objects[other], **{name: first})
        return replace(scene, objects=tuple(objects))
    thing = objects[index]
    names = ["shape", "shape", "colour"]
    names += ["size"] if thing.size is not None else []
    names += ["position"] if thing.position is not None and len(objects) == 1 else []
    names += ["background"] if scene.background is not None else []
    name = rng.choice(names)
    if name == "background":
        rest = [one for one in BACKGROUNDS if one != scene.background]
        return replace(scene, background=rng.choice(rest))
    values = [one for one in _VALUES[name] if one != getattr(thing, name)]
    objects[index] = replace(thing, **{name: rng.choice(values)})
    return replace(scene, objects=tuple(objects))


def seen_scene(reading: Reading) -> Scene | None:
    """Return what is seen as a scene; None if a value of an object could not be read."""
    objects = []
    for thing in reading.objects:
        if thing.shape is None or thing.colour is None or thing.size is None:
            return None
        objects.append(SceneObject(thing.shape, thing.colour, thing.size, thing.position))
    return Scene(tuple(objects), reading.background) if objects else None
