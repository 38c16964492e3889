"""What a picture of the reference world can show, and how scenes are drawn at random.

A scene is a background and one to four flat shapes. It says nothing about pixels: `render.py`
places and paints it, `captions.py` writes it down. A field that is `None` is unspecified, as in a
short caption.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

Shape = Literal["circle", "square", "triangle", "star", "ring", "cross"]
Colour = Literal["red", "green", "blue", "yellow", "cyan", "pink", "orange", "purple"]
Size = Literal["small", "large"]
Position = Literal[
    "top left",
    "top",
    "top right",
    "left",
    "center",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
]
Background = Literal["black", "white", "gray", "navy", "striped", "checkered"]

# how objects are painted; no caption names it, LoRAs teach it
Style = Literal["plain", "outline", "pastel", "texture"]

SHAPES: tuple[Shape, ...] = get_args(Shape)
COLOURS: tuple[Colour, ...] = get_args(Colour)
SIZES: tuple[Size, ...] = get_args(Size)
# row by row, so that index = 3 * row + column
POSITIONS: tuple[Position, ...] = get_args(Position)
BACKGROUNDS: tuple[Background, ...] = get_args(Background)
STYLES: tuple[Style, ...] = get_args(Style)

# the arrangements of two to four objects, each as rows of positions
LAYOUTS: tuple[tuple[tuple[Position, ...], ...], ...] = (
    (("left", "right"),),
    (("top",), ("bottom",)),
    (("top left", "top right"), ("bottom",)),
    (("top",), ("bottom left", "bottom right")),
    (("top left", "top right"), ("bottom left", "bottom right")),
)
HELD_OUT_SHARE = 0.2
# chosen so that 57 of 288 combinations fall out, evenly over every attribute
_HELD_OUT_SALT = 55


@dataclass(frozen=True)
class SceneObject:
    """One flat shape; `size` and `position` are `None` where a caption leaves them open."""

    shape: Shape
    colour: Colour
    size: Size | None = None
    position: Position | None = None


@dataclass(frozen=True)
class Scene:
    """One to four objects on a background, which is `None` where a caption leaves it open."""

    objects: tuple[SceneObject, ...]
    background: Background | None = None

    @property
    def is_placed(self) -> bool:
        """Whether every object's size and position are given."""
        return all(thing.size is not None and thing.position is not None for thing in self.objects)


def is_held_out(shape: Shape, colour: Colour, background: Background) -> bool:
    """Whether this combination is kept out of the generator's training: a fixed fifth of all."""
    digest = hashlib.blake2b(
        f"{_HELD_OUT_SALT}|{shape}|{colour}|{background}".encode(), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def has_held_out_object(scene: Scene) -> bool:
    """Whether any object of a complete scene is a held-out combination with its background."""
    if scene.background is None:
        return False
    return any(is_held_out(thing.shape, thing.colour, scene.background) for thing in scene.objects)


def sample_object(rng: random.Random, position: Position | None = None) -> SceneObject:
    """Draw shape, colour and size uniformly, for this position."""
    return SceneObject(rng.choice(SHAPES), rng.choice(COLOURS), rng.choice(SIZES), position)


def sample_single(rng: random.Random) -> Scene:
    """Draw a complete one-object scene, uniformly over all values, held-out ones included."""
    thing = replace(sample_object(rng), position=rng.choice(POSITIONS))
    return Scene((thing,), rng.choice(BACKGROUNDS))


def sample_several(
    rng: random.Random, layouts: Sequence[tuple[tuple[Position, ...], ...]] = LAYOUTS
) -> Scene:
    """Draw a complete scene of two to four objects in one of the given layouts."""
    positions = [position for row in rng.choice(layouts) for position in row]
    objects = tuple(sample_object(rng, position) for position in positions)
    return Scene(objects, rng.choice(BACKGROUNDS))


def sample_training_scene(rng: random.Random, single_share: float) -> Scene:
    """Draw a complete scene without held-out combinations, often of one object."""
    single = rng.random() < single_share
    while True:
        scene = sample_single(rng) if single else sample_several(rng)
        if not has_held_out_object(scene):
            return scene


def omit_details(scene: Scene, rng: random.Random, omit_share: float) -> Scene:
    """Leave out size, position or background of a scene, as a hasty writer would.

    With probability `1 - omit_share` the scene is returned unchanged; otherwise each detail is left
    out with probability one half. Positions of several objects stay: relations state them.
    """
    if rng.random() >= omit_share:
        return scene
    objects = scene.objects
    if rng.random() < 0.5:
        objects = tuple(replace(thing, size=None) for thing in objects)
    if len(objects) == 1 and rng.random() < 0.5:
        objects = (replace(objects[0], position=None),)
    return Scene(objects, None if rng.random() < 0.5 else scene.background)


def omit_all_details(scene: Scene) -> Scene:
    """Leave out everything but shapes, colours and the relations of several objects."""
    if len(scene.objects) == 1:
        thing = scene.objects[0]
        return Scene((SceneObject(thing.shape, thing.colour),))
    return Scene(tuple(replace(thing, size=None) for thing in scene.objects))
