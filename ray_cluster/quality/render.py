"""Paints scenes by signed distance fields, at any resolution and aspect ratio.

Lengths are in units of the picture's shorter side, with the origin at the picture's centre, x to
the right and y downwards. So shapes are never stretched, and a larger picture is the same picture.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ray_cluster.models.picture_reader import ANCHOR_OFFSET
from ray_cluster.quality.scenes import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    SHAPES,
    Background,
    Colour,
    Scene,
    Shape,
    Size,
    Style,
)

RADIUS: dict[Size, float] = {"small": 0.15, "large": 0.22}
CELLS_PER_SIDE = 8
# of styles: share of white in pastel colours; lengths in shorter sides of the picture
PASTEL_WHITE = 0.45
OUTLINE_HALF_WIDTH = 0.016
HATCHING_PERIOD = 0.15
HATCHING_DARK = 0.55

COLOUR_RGB: dict[Colour, tuple[float, float, float]] = {
    "red": (0.90, 0.08, 0.08),
    "green": (0.08, 0.68, 0.15),
    "blue": (0.12, 0.32, 1.00),
    "yellow": (1.00, 0.90, 0.08),
    "cyan": (0.05, 0.85, 0.92),
    "pink": (1.00, 0.45, 0.75),
    "orange": (1.00, 0.52, 0.04),
    "purple": (0.55, 0.12, 0.80),
}
# two grey levels or tints per background; equal ones are plain
BACKGROUND_RGB: dict[Background, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "black": ((0.03, 0.03, 0.03), (0.03, 0.03, 0.03)),
    "white": ((0.97, 0.97, 0.97), (0.97, 0.97, 0.97)),
    "gray": ((0.52, 0.52, 0.52), (0.52, 0.52, 0.52)),
    "navy": ((0.04, 0.05, 0.26), (0.04, 0.05, 0.26)),
    "striped": ((0.22, 0.22, 0.22), (0.38, 0.38, 0.38)),
    "checkered": ((0.64, 0.64, 0.64), (0.82, 0.82, 0.82)),
}


@dataclass(frozen=True)
class Placed:
    """Objects of a batch, placed; N is the largest number of objects, missing ones have radius 0.

    `shape`, `colour`: [B, N] indices; `centre`: [B, N, 2] as (x, y); `radius`: [B, N];
    `background`: [B] indices.
    """

    shape: Tensor
    colour: Tensor
    centre: Tensor
    radius: Tensor
    background: Tensor

    def to(self, device: torch.device) -> "Placed":
        """Return the same objects on a device, where they are painted then."""
        return Placed(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True)
class Jitter:
    """Half-widths of uniform noise: `offset` in shorter sides, `scale` relative to the radius."""

    offset: float = 0.02
    scale: float = 0.04


# variation of place and size where a hint shows them
HINT_JITTER = Jitter(offset=0.07, scale=0.2)


def place(
    scenes: Sequence[Scene], *, width: int, height: int, jitter: Jitter | None = None, seed: int = 0
) -> Placed:
    """Turn complete scenes into centres and radii for a picture of `width` by `height` pixels.

    Scenes of several objects get half of the jitter, so that neighbours never touch; `None`
    places exactly.
    """
    count = max(len(scene.objects) for scene in scenes)
    short = min(width, height)
    spread = (ANCHOR_OFFSET * width / short, ANCHOR_OFFSET * height / short)
    shape, colour = (torch.zeros(len(scenes), count, dtype=torch.long) for _ in range(2))
    centre, radius = torch.zeros(len(scenes), count, 2), torch.zeros(len(scenes), count)
    for row, scene in enumerate(scenes):
        for column, thing in enumerate(scene.objects):
            if thing.size is None or thing.position is None:
                raise ValueError(f"only complete scenes can be placed; got {scene}")
            vertical, horizontal = divmod(POSITIONS.index(thing.position), 3)
            shape[row, column] = SHAPES.index(thing.shape)
            colour[row, column] = COLOURS.index(thing.colour)
            centre[row, column] = torch.tensor(
                ((horizontal - 1) * spread[0], (vertical - 1) * spread[1])
            )
            radius[row, column] = RADIUS[thing.size]
    if jitter is not None:
        generator = torch.Generator().manual_seed(seed)
        calm = torch.tensor([1.0 if len(scene.objects) == 1 else 0.5 for scene in scenes])[:, None]
        offsets = torch.rand(centre.shape, generator=generator) * 2 - 1
        scales = torch.rand(radius.shape, generator=generator) * 2 - 1
        centre = centre + offsets * jitter.offset * calm[..., None]
        radius = radius * (1 + scales * jitter.scale * calm)
    names = [scene.background for scene in scenes]
    background = torch.tensor([BACKGROUNDS.index(name) for name in names if name is not None])
    if len(background) != len(scenes):
        raise ValueError("only complete scenes can be placed; a background is missing")
    return Placed(shape, colour, centre, radius, background)


def pixel_grid(width: int, height: int, device: torch.device | None = None) -> Tensor:
    """Coordinates of pixel centres, [H, W, 2] as (x, y)."""
    short = min(width, height)
    xs = (torch.arange(width, device=device) + 0.5 - width / 2) / short
    ys = (torch.arange(height, device=device) + 0.5 - height / 2) / short
    return torch.stack(torch.meshgrid(xs, ys, indexing="xy"), dim=-1)


def signed_distance(shape: Shape, points: Tensor) -> Tensor:
    """Distance of points to the outline of the shape of radius 1 at the origin, negative inside.

    Args:
        points: [..., 2] as (x, y), in units of the radius.

    Returns:
        [...]; exact near edges, a lower bound of the distance beyond sharp corners.
    """
    x, y = points[..., 0], points[..., 1]
    length: Tensor = torch.linalg.vector_norm(points, dim=-1)
    match shape:
        case "circle":
            return length - 0.95
        case "ring":
            return (length - 0.74).abs() - 0.24
        case "square":
            return torch.maximum(x.abs(), y.abs()) - 0.84
        case "cross":
            long, thick = 0.98, 0.34
            across = torch.maximum(x.abs() - long, y.abs() - thick)
            down = torch.maximum(x.abs() - thick, y.abs() - long)
            return torch.minimum(across, down)
        case "triangle":
            # an equilateral triangle, point up, its middle moved to the origin of its bounding box
            slanted = (x.abs() * math.sqrt(3) - (y + 0.95)) / 2
            return torch.maximum(slanted, y - 0.70)
        case "star":
            return _star_distance(x, y, points=5, inner=0.44)


def object_distance(placed: Placed, *, width: int, height: int) -> Tensor:
    """Signed distance of pixels to objects, [B, N, H, W]; missing objects are far away."""
    device = placed.radius.device
    grid = pixel_grid(width, height, device)
    count = placed.radius.shape
    distance = torch.full((*count, height, width), 10.0, device=device)
    for index, shape in enumerate(SHAPES):
        chosen = (placed.shape == index) & (placed.radius > 0)
        if chosen.any():
            radius = placed.radius[chosen][:, None, None]
            local = (grid - placed.centre[chosen][:, None, None, :]) / radius[..., None]
            distance[chosen] = signed_distance(shape, local) * radius
    return distance


def paint_backgrounds(background: Tensor, *, width: int, height: int) -> Tensor:
    """Backgrounds [B] as pictures [B, 3, H, W] in 0..1."""
    device = background.device
    cells = torch.floor(pixel_grid(width, height, device) * CELLS_PER_SIDE).long()
    column, row = cells[..., 0] % 2, cells[..., 1] % 2
    pattern = torch.stack(
        [(column + row) % 2 if name == "checkered" else column for name in BACKGROUNDS]
    )
    tints = torch.tensor([BACKGROUND_RGB[name] for name in BACKGROUNDS], device=device)  # [6, 2, 3]
    mask = pattern[background][:, None].to(torch.float32)  # [B, 1, H, W]
    first, second = tints[background][:, 0, :, None, None], tints[background][:, 1, :, None, None]
    return first * (1 - mask) + second * mask


def coverage(distance: Tensor) -> Tensor:
    """Share of each pixel inside an outline, [..., H, W] in 0..1, by its distance to it."""
    return (0.5 - distance * min(distance.shape[-2:])).clamp(0, 1)


def paint(
    placed: Placed,
    *,
    width: int,
    height: int,
    style: Style = "plain",
    distance: Tensor | None = None,
) -> Tensor:
    """Paint placed objects, anti-aliased over one pixel, as [B, 3, H, W] in 0..1.

    Args:
        placed: where and what.
        width: in pixels.
        height: in pixels.
        style: of the objects; the background is the same in all.
        distance: [B, N, H, W], of objects to paint instead of the placed shapes.
    """
    picture = paint_backgrounds(placed.background, width=width, height=height)
    if distance is None:
        distance = object_distance(placed, width=width, height=height)
    palette = torch.tensor([COLOUR_RGB[name] for name in COLOURS], device=picture.device)
    colours = palette[placed.colour]  # [B, N, 3]
    if style == "pastel":
        colours = colours + PASTEL_WHITE * (1 - colours)
    for index in range(placed.radius.shape[1]):
        away = distance[:, index, None]
        fill = colours[:, index, :, None, None]
        if style == "texture":
            fill = fill * _hatching(width, height, picture.device)
        alpha = coverage(away)
        picture = picture * (1 - alpha) + fill * alpha
        if style == "outline":
            # around the object, so that even a small one keeps its colour
            line = coverage((away - OUTLINE_HALF_WIDTH).abs() - OUTLINE_HALF_WIDTH)
            picture = picture * (1 - line) + _contrast(placed.background, picture.device) * line
    return picture


def _hatching(width: int, height: int, device: torch.device) -> Tensor:
    """Brightness [H, W] of diagonal stripes, smooth over one pixel."""
    grid = pixel_grid(width, height, device)
    phase = (grid[..., 0] + grid[..., 1]) / math.sqrt(2) / HATCHING_PERIOD
    # a triangle wave from -0.5 to 0.5 stripes' widths, then its sign with a soft edge
    wave = (torch.remainder(phase, 1.0) - 0.5).abs() - 0.25
    light = (0.5 + wave * HATCHING_PERIOD * min(width, height)).clamp(0, 1)
    return HATCHING_DARK + (1 - HATCHING_DARK) * light


def _contrast(background: Tensor, device: torch.device) -> Tensor:
    """White [B, 1, 1, 1] on dark backgrounds, black on bright ones."""
    tints = torch.tensor([BACKGROUND_RGB[name] for name in BACKGROUNDS], device=device)
    is_dark = tints.mean((1, 2))[background] < 0.45
    return torch.where(is_dark, 0.97, 0.03)[:, None, None, None]


def render(
    scenes: Sequence[Scene], *, width: int, height: int, jitter: Jitter | None = None, seed: int = 0
) -> Tensor:
    """Render complete scenes as pictures [B, 3, H, W] in 0..1."""
    return paint(
        place(scenes, width=width, height=height, jitter=jitter, seed=seed),
        width=width,
        height=height,
    )


def _star_distance(x: Tensor, y: Tensor, *, points: int, inner: float) -> Tensor:
    """Distance to a star with one point up, by folding every direction onto half of one point."""
    half = math.pi / points
    length = torch.sqrt(x * x + y * y)
    angle = torch.atan2(x, -y)
    folded = (torch.remainder(angle + half, 2 * half) - half).abs()
    along, aside = length * torch.cos(folded), length * torch.sin(folded)
    # the edge from the tip (1, 0) to the notch, whose outward normal is (edge_y, -edge_x)
    edge_x, edge_y = inner * math.cos(half) - 1.0, inner * math.sin(half)
    norm = math.hypot(edge_x, edge_y)
    return ((along - 1.0) * edge_y - aside * edge_x) / norm
