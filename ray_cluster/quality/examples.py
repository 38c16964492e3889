"""Training pictures of the attribute classifier: renders, and pictures of nothing readable."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_cluster.reference_models.recipe import ClassifierRecipe
from ray_cluster.reference_models.render import (
    COLOUR_RGB,
    Jitter,
    Placed,
    paint_backgrounds,
    pixel_grid,
    place,
    render,
)
from ray_cluster.reference_models.scenes import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    SHAPES,
    SIZES,
    Scene,
    sample_several,
    sample_single,
)

NONE, IGNORED = 0, -100


@dataclass(frozen=True)
class Labels:
    """Class indices [B] (0: none, -100: not counted); `centre` [B, 2] in -1..1, NaN if none."""

    shape: Tensor
    colour: Tensor
    size: Tensor
    position: Tensor
    background: Tensor
    centre: Tensor


@dataclass(frozen=True)
class Examples:
    """Pictures [B, 3, H, W] in 0..1 with their labels."""

    pixels: Tensor
    labels: Labels


def single_objects(
    rng: random.Random, count: int, *, width: int, height: int, jitter: Jitter | None
) -> Examples:
    """Draw renders of one object, uniformly over all attribute values."""
    scenes = [sample_single(rng) for _ in range(count)]
    options = {"width": width, "height": height, "jitter": jitter, "seed": rng.getrandbits(62)}
    placed = place(scenes, **options)  # type: ignore[arg-type]
    pixels = render(scenes, **options)  # type: ignore[arg-type]
    return Examples(pixels, _labels(scenes, placed, width=width, height=height))


def blobs(rng: random.Random, count: int, *, width: int, height: int) -> Examples:
    """Draw random smooth closed curves: of some colour, at some place, but of no shape."""
    scenes = [sample_single(rng) for _ in range(count)]
    placed = place(
        scenes, width=width, height=height, jitter=Jitter(0.04, 0.1), seed=rng.getrandbits(62)
    )
    local = pixel_grid(width, height) - placed.centre[:, 0, None, None, :]
    angle = torch.atan2(local[..., 1], local[..., 0])
    bulge = torch.zeros_like(angle)
    for order in (2, 3, 4, 5):
        size = torch.tensor([rng.uniform(0.08, 0.35) / math.sqrt(order - 1) for _ in scenes])
        phase = torch.tensor([rng.uniform(0, 2 * math.pi) for _ in scenes])
        bulge += size[:, None, None] * torch.cos(order * angle + phase[:, None, None])
    edge = placed.radius[:, :1, None] * 0.85 * (1 + bulge).clamp_min(0.15)
    outside = torch.linalg.vector_norm(local, dim=-1) - edge
    alpha = (0.5 - outside * min(width, height)).clamp(0, 1)[:, None]
    colours = torch.tensor([COLOUR_RGB[scene.objects[0].colour] for scene in scenes])[
        ..., None, None
    ]
    ground = paint_backgrounds(placed.background, width=width, height=height)
    labels = _labels(scenes, placed, width=width, height=height)
    nothing = torch.full_like(labels.shape, NONE)
    unknown = torch.full_like(labels.size, IGNORED)
    marked = Labels(
        nothing, labels.colour, unknown, labels.position, labels.background, labels.centre
    )
    return Examples(ground * (1 - alpha) + colours * alpha, marked)


def blends(rng: random.Random, count: int, *, width: int, height: int) -> Examples:
    """Draw even mixes of two one-object pictures: no shape, the rest doesn't count."""
    first = single_objects(rng, count, width=width, height=height, jitter=Jitter())
    second = single_objects(rng, count, width=width, height=height, jitter=Jitter())
    share = torch.tensor([rng.uniform(0.42, 0.58) for _ in range(count)])[:, None, None, None]
    return Examples(first.pixels * share + second.pixels * (1 - share), _all(count, IGNORED, NONE))


def several_objects(rng: random.Random, count: int, *, width: int, height: int) -> Examples:
    """Draw pictures of two to four objects: no single shape, colour, size or position."""
    scenes = [sample_several(rng) for _ in range(count)]
    pixels = render(
        scenes, width=width, height=height, jitter=Jitter(0.04, 0.05), seed=rng.getrandbits(62)
    )
    return Examples(pixels, _on_backgrounds(_grounds(scenes)))


def empty_backgrounds(rng: random.Random, count: int, *, width: int, height: int) -> Examples:
    """Draw backgrounds without an object."""
    chosen = torch.tensor([rng.randrange(len(BACKGROUNDS)) for _ in range(count)])
    return Examples(
        paint_backgrounds(chosen, width=width, height=height), _on_backgrounds(chosen + 1)
    )


def noises(rng: random.Random, count: int, *, width: int, height: int) -> Examples:
    """Draw coloured noise at several coarsenesses."""
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    coarse = rng.choice((1, 2, 4, 8, 16))
    grain = torch.randn(count, 3, height // coarse, width // coarse, generator=generator)
    smooth = F.interpolate(grain, (height, width), mode="bilinear") * rng.uniform(0.15, 0.6)
    base = torch.rand(count, 3, 1, 1, generator=generator)
    return Examples((base + smooth).clamp(0, 1), _all(count, NONE, NONE))


def gradients(rng: random.Random, count: int, *, width: int, height: int) -> Examples:
    """Draw linear colour gradients."""
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    ends = torch.rand(2, count, 3, 1, 1, generator=generator)
    angle = torch.rand(count, 1, 1, generator=generator) * 2 * math.pi
    grid = pixel_grid(width, height)
    along = grid[..., 0] * torch.cos(angle) + grid[..., 1] * torch.sin(angle)
    ramp = (along + 0.5).clamp(0, 1)[:, None]
    return Examples(ends[0] * (1 - ramp) + ends[1] * ramp, _all(count, NONE, NONE))


def spoil(pixels: Tensor, recipe: ClassifierRecipe, rng: random.Random) -> Tensor:
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
    names = ("shape", "colour", "size", "position", "background", "centre")
    labels = {name: torch.cat([getattr(part.labels, name) for part in parts]) for name in names}
    return Examples(torch.cat([part.pixels for part in parts]), Labels(**labels))


def _labels(scenes: Sequence[Scene], placed: Placed, *, width: int, height: int) -> Labels:
    things = [scene.objects[0] for scene in scenes]
    half = torch.tensor([width, height]) / min(width, height) / 2
    return Labels(
        torch.tensor([1 + SHAPES.index(thing.shape) for thing in things]),
        torch.tensor([1 + COLOURS.index(thing.colour) for thing in things]),
        torch.tensor([1 + SIZES.index(thing.size) for thing in things if thing.size]),
        torch.tensor([1 + POSITIONS.index(thing.position) for thing in things if thing.position]),
        _grounds(scenes),
        placed.centre[:, 0] / half,
    )


def _grounds(scenes: Sequence[Scene]) -> Tensor:
    names = [scene.background for scene in scenes]
    return torch.tensor([1 + BACKGROUNDS.index(name) for name in names if name])


def _all(count: int, value: int, shape: int) -> Labels:
    same = torch.full((count,), value)
    nowhere = torch.full((count, 2), math.nan)
    return Labels(torch.full((count,), shape), same, same, same, same, nowhere)


def _on_backgrounds(background: Tensor) -> Labels:
    empty = _all(len(background), NONE, NONE)
    return Labels(empty.shape, empty.colour, empty.size, empty.position, background, empty.centre)
