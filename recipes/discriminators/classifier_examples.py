"""Training pictures of the attribute classifier: renders, and pictures of nothing readable."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_cluster.quality.classifier import Reading
from ray_cluster.quality.render import (
    Jitter,
    Placed,
    object_distance,
    paint,
    paint_backgrounds,
    pixel_grid,
    place,
)
from ray_cluster.quality.scenes import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    SHAPES,
    SIZES,
    STYLES,
    Position,
    Scene,
    SceneObject,
    Style,
    sample_object,
    sample_single,
)
from recipes.recipe import ClassifierRecipe

NONE, IGNORED = 0, -100


@dataclass(frozen=True)
class Labels:
    """Class indices (0: none, -100: not counted): objects [B, 9] by position, the others [B].

    `style` has no "none": its index is that of the style.
    """

    shape: Tensor
    colour: Tensor
    size: Tensor
    background: Tensor
    style: Tensor


@dataclass(frozen=True)
class Examples:
    """Pictures [B, 3, H, W] in 0..1 with their labels."""

    pixels: Tensor
    labels: Labels


class Canvas(NamedTuple):
    """How pictures of scenes are rendered: size in pixels, variation of the objects, style."""

    width: int
    height: int
    jitter: Jitter
    style: Style = "plain"


def single_objects(rng: random.Random, count: int, canvas: Canvas) -> Examples:
    """Draw renders of one object, uniformly over all attribute values."""
    return _rendered(rng, [sample_single(rng) for _ in range(count)], canvas)


def several_objects(rng: random.Random, count: int, canvas: Canvas) -> Examples:
    """Draw renders of two to four objects, at any positions that are not neighbours."""
    return _rendered(rng, [_sample_scattered(rng) for _ in range(count)], canvas)


def styled_objects(rng: random.Random, count: int, canvas: Canvas) -> Examples:
    """Draw renders of one or several objects in each of the styles but the plain one."""
    parts: list[Examples] = []
    for index, style in enumerate(STYLES[1:]):
        share = len(range(index, count, len(STYLES) - 1))
        draw = single_objects if rng.random() < 0.5 else several_objects
        if share:
            parts.append(draw(rng, share, canvas._replace(style=style)))
    return joined(parts)


def blobs(rng: random.Random, count: int, canvas: Canvas, *, alone: bool = True) -> Examples:
    """Draw random smooth closed curves: of some colour, at some place, but of no shape.

    Unless `alone`, there are objects beside them.
    """
    scenes = [sample_single(rng) if alone else _sample_scattered(rng) for _ in range(count)]
    seed, (width, height) = rng.getrandbits(62), canvas[:2]
    placed = place(scenes, width=width, height=height, jitter=Jitter(0.04, 0.1), seed=seed)
    distance = object_distance(placed, width=width, height=height)
    distance[:, 0] = _blob_distance(placed, rng, width=width, height=height)
    labels = label_scenes(scenes, "plain")
    labels.style[:] = IGNORED
    rows = torch.arange(count)
    first = torch.tensor([_slot(scene.objects[0]) for scene in scenes])
    labels.shape[rows, first] = NONE
    labels.size[rows, first] = IGNORED
    return Examples(paint(placed, width=width, height=height, distance=distance), labels)


def blends(rng: random.Random, count: int, canvas: Canvas) -> Examples:
    """Draw even mixes of two pictures: no shape where either has one, the rest doesn't count."""
    canvas = Canvas(canvas.width, canvas.height, Jitter())
    first, second = (single_objects(rng, count, canvas) for _ in range(2))
    share = torch.tensor([rng.uniform(0.42, 0.58) for _ in range(count)])[:, None, None, None]
    touched = (first.labels.shape != NONE) | (second.labels.shape != NONE)
    shape = torch.zeros_like(first.labels.shape)
    # two equal shapes at one place may well look like one
    shape[(first.labels.shape == second.labels.shape) & touched] = IGNORED
    other = torch.where(touched, IGNORED, NONE)
    unknown = torch.full((count,), IGNORED)
    labels = Labels(shape, other, other, unknown, unknown)
    return Examples(first.pixels * share + second.pixels * (1 - share), labels)


def empty_backgrounds(rng: random.Random, count: int, canvas: Canvas) -> Examples:
    """Draw backgrounds without an object."""
    chosen = torch.tensor([rng.randrange(len(BACKGROUNDS)) for _ in range(count)])
    pixels = paint_backgrounds(chosen, width=canvas.width, height=canvas.height)
    return Examples(pixels, _nothing(count, chosen + 1))


def noises(rng: random.Random, count: int, canvas: Canvas) -> Examples:
    """Draw coloured noise at several coarsenesses."""
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    width, height = canvas[:2]
    coarse = rng.choice((1, 2, 4, 8, 16))
    grain = torch.randn(count, 3, height // coarse, width // coarse, generator=generator)
    smooth = F.interpolate(grain, (height, width), mode="bilinear") * rng.uniform(0.15, 0.6)
    base = torch.rand(count, 3, 1, 1, generator=generator)
    return Examples((base + smooth).clamp(0, 1), _nothing(count))


def gradients(rng: random.Random, count: int, canvas: Canvas) -> Examples:
    """Draw linear colour gradients."""
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    ends = torch.rand(2, count, 3, 1, 1, generator=generator)
    angle = torch.rand(count, 1, 1, generator=generator) * 2 * math.pi
    grid = pixel_grid(canvas.width, canvas.height)
    along = grid[..., 0] * torch.cos(angle) + grid[..., 1] * torch.sin(angle)
    ramp = (along + 0.5).clamp(0, 1)[:, None]
    return Examples(ends[0] * (1 - ramp) + ends[1] * ramp, _nothing(count))


def degrade(pixels: Tensor, recipe: ClassifierRecipe, rng: random.Random) -> Tensor:
    """Shift colours, blur, resample and add noise, all a little and at random."""
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    count, _, height, width = pixels.shape
    shift = (torch.rand(count, 3, 1, 1, generator=generator) * 2 - 1) * recipe.colour_shift
    pixels = pixels + shift
    if rng.random() < 0.5:
        pixels = blur(pixels, rng.uniform(0.3, recipe.blur) * min(height, width) / 64)
    if rng.random() < 0.3:
        scale = rng.uniform(0.6, 1.5)
        small = F.interpolate(pixels, scale_factor=scale, mode="bilinear", antialias=True)
        pixels = F.interpolate(small, (height, width), mode="bilinear", antialias=True)
    strength = torch.rand(count, 1, 1, 1, generator=generator) * recipe.noise
    pixels = pixels + strength * torch.randn(pixels.shape, generator=generator)
    return pixels.clamp(0, 1)


def blur(pixels: Tensor, sigma: float) -> Tensor:
    """Blur by a Gaussian of `sigma` pixels."""
    reach = max(1, math.ceil(2.5 * sigma))
    line = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / sigma) ** 2)
    kernel = (line / line.sum()).expand(3, 1, 1, -1)
    padded = F.pad(pixels, (reach,) * 4, mode="replicate")
    return F.conv2d(F.conv2d(padded, kernel, groups=3), kernel.transpose(2, 3), groups=3)


def joined(parts: Sequence[Examples]) -> Examples:
    """Join examples of one picture size."""
    names = [field.name for field in fields(Labels)]
    labels = {name: torch.cat([getattr(part.labels, name) for part in parts]) for name in names}
    return Examples(torch.cat([part.pixels for part in parts]), Labels(**labels))


def label_scenes(scenes: Sequence[Scene], style: Style) -> Labels:
    """The labels of complete scenes, painted in one style."""
    labels = _nothing(len(scenes))
    labels.style[:] = STYLES.index(style)
    for row, scene in enumerate(scenes):
        if scene.background is None:
            raise ValueError(f"only complete scenes can be labelled; got {scene}")
        labels.background[row] = 1 + BACKGROUNDS.index(scene.background)
        for thing in scene.objects:
            slot = _slot(thing)
            labels.shape[row, slot] = 1 + SHAPES.index(thing.shape)
            labels.colour[row, slot] = 1 + COLOURS.index(thing.colour)
            labels.size[row, slot] = IGNORED if thing.size is None else 1 + SIZES.index(thing.size)
    return labels


def label_readings(readings: Sequence[Reading]) -> Labels:
    """The labels of what was read; what could not be read of an object does not count."""
    labels = _nothing(len(readings))
    for row, reading in enumerate(readings):
        ground = reading.background
        labels.background[row] = NONE if ground is None else 1 + BACKGROUNDS.index(ground)
        for thing in reading.objects:
            slot = POSITIONS.index(thing.position)
            for name, values in (("shape", SHAPES), ("colour", COLOURS), ("size", SIZES)):
                value = getattr(thing, name)
                index = IGNORED if value is None else 1 + values.index(value)
                getattr(labels, name)[row, slot] = index
    return labels


def _slot(thing: SceneObject) -> int:
    if thing.position is None:
        raise ValueError(f"only placed objects can be labelled; got {thing}")
    return POSITIONS.index(thing.position)


def _rendered(rng: random.Random, scenes: Sequence[Scene], canvas: Canvas) -> Examples:
    width, height, jitter, style = canvas
    seed = rng.getrandbits(62)
    placed = place(scenes, width=width, height=height, jitter=jitter, seed=seed)
    pixels = paint(placed, width=width, height=height, style=style)
    return Examples(pixels, label_scenes(scenes, style))


def _sample_scattered(rng: random.Random) -> Scene:
    """Draw two to four objects so that no two positions are neighbours, not even diagonally."""
    wanted, positions = rng.choice((2, 3, 4)), list[Position]()
    for position in rng.sample(POSITIONS, len(POSITIONS)):
        if len(positions) < wanted and all(_apart(position, other) for other in positions):
            positions.append(position)
    objects = tuple(sample_object(rng, position) for position in positions)
    return Scene(objects, rng.choice(BACKGROUNDS))


def _apart(one: Position, other: Position) -> bool:
    (row, column), (other_row, other_column) = (
        divmod(POSITIONS.index(name), 3) for name in (one, other)
    )
    return max(abs(row - other_row), abs(column - other_column)) > 1


def _blob_distance(placed: Placed, rng: random.Random, *, width: int, height: int) -> Tensor:
    """Distance [B, H, W] to the outline of one blob at each picture's first object."""
    count = len(placed.radius)
    local = pixel_grid(width, height) - placed.centre[:, 0, None, None, :]
    angle = torch.atan2(local[..., 1], local[..., 0])
    bulge = torch.zeros_like(angle)
    for order in (2, 3, 4, 5):
        size = torch.tensor([rng.uniform(0.08, 0.35) / math.sqrt(order - 1) for _ in range(count)])
        phase = torch.tensor([rng.uniform(0, 2 * math.pi) for _ in range(count)])
        bulge += size[:, None, None] * torch.cos(order * angle + phase[:, None, None])
    edge = placed.radius[:, :1, None] * 0.85 * (1 + bulge).clamp_min(0.15)
    outside: Tensor = torch.linalg.vector_norm(local, dim=-1) - edge
    return outside


def _nothing(count: int, background: Tensor | None = None) -> Labels:
    shape, colour, size = (torch.full((count, len(POSITIONS)), NONE) for _ in range(3))
    ground = torch.full((count,), NONE) if background is None else background
    return Labels(shape, colour, size, ground, torch.full((count,), IGNORED))
