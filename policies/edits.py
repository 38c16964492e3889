"""Edits: how many steps a strength leaves, and what part of an image the model works on.

A masked edit (InstGenIE) changes a part of a template. The model works on a *window* of the image,
at a size on its own grid; everything else is pixels that are put back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SizePx = tuple[int, int]

# around a mask, as a share of the longer side of its bounds: what the model sees of the rest
_MARGIN_SHARE = 0.25
_LEAST_MARGIN_PX = 8


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of an image, in pixels from its upper left corner."""

    left_px: int
    top_px: int
    width_px: int
    height_px: int

    @property
    def size_px(self) -> SizePx:
        """Width and height."""
        return (self.width_px, self.height_px)


@dataclass(frozen=True, slots=True)
class SizeBounds:
    """The sizes that a model makes: sides in multiples of ``multiple_px``, within bounds.

    Attributes:
        native_px: the size that it makes best.
    """

    multiple_px: int
    min_px: int
    max_px: int
    native_px: SizePx

    @property
    def lowest_px(self) -> int:
        """Shortest side that it makes."""
        return _up(self.min_px, self.multiple_px)

    @property
    def highest_px(self) -> int:
        """Longest side that it makes."""
        return self.max_px // self.multiple_px * self.multiple_px


@dataclass(frozen=True, slots=True)
class EditGeometry:
    """Where and how large an edit is made.

    Attributes:
        canvas_px: width and height of the image that is returned.
        window: what the model sees of it; None for all of it, where a crop changes nothing.
        work_px: size at which the model makes it, on its grid. A window that is not larger is
            filled up at its right and lower edge; a larger one is scaled down.
    """

    canvas_px: SizePx
    window: Box | None
    work_px: SizePx

    @property
    def is_plain(self) -> bool:
        """Whether the model makes exactly the image that is returned."""
        return self.window is None and self.work_px == self.canvas_px


def computed_steps(schedule_steps: int, strength: float, *, is_flow: bool) -> int:
    """Return how many steps of a schedule, its last ones, an edit of a strength takes.

    diffusers rounds down for noise schedules and up for flows; the same numbers come of it here.
    None are left where the strength is too small for the schedule.
    """
    if is_flow:
        return schedule_steps - int(max(schedule_steps - schedule_steps * strength, 0))
    return min(int(schedule_steps * strength), schedule_steps)


def steps_of_schedule(num_steps: int, strength: float, *, is_flow: bool) -> int:
    """Return the shortest schedule of which so many steps are left at a strength."""
    schedule_steps = num_steps
    while computed_steps(schedule_steps, strength, is_flow=is_flow) < num_steps:
        schedule_steps += 1
    return schedule_steps


def edit_geometry(
    image_px: SizePx,
    bounds: SizeBounds,
    *,
    size_px: SizePx | None = None,
    crop_to: Box | None = None,
) -> EditGeometry:
    """Return where an edit of an image is made.

    Args:
        image_px: width and height of the template.
        size_px: of the image that is returned, within the bounds, on the grid or not; None for the
            template's own, or the nearest that the model makes.
        crop_to: bounds of the mask on the canvas, of an edit that is to be made on a part of it;
            the canvas may have any size then.
    """
    canvas = size_px or image_px
    if crop_to is not None:
        window = _window(canvas, bounds, crop_to)
        # without the crop, an image beyond the bounds would be returned in another size
        is_idle = window.size_px == canvas == _within_bounds(canvas, bounds)
        return EditGeometry(canvas, None if is_idle else window, _work_px(window.size_px, bounds))
    if size_px is None:
        canvas = _within_bounds(image_px, bounds)
    return EditGeometry(canvas, None, _work_px(canvas, bounds))


def reference_size(
    image_px: SizePx,
    multiple_px: int,
    most_px: int,
    least_px: int = 0,
    *,
    least_side_px: int = 1,
    most_ratio: int | None = None,
) -> SizePx:
    """Return the size in which a model sees a picture: its own, scaled to ``least_px`` to
    ``most_px`` pixels, and up to the least side; sides are cut to the grid, and are at least one
    multiple. No side is longer than ``most_ratio`` times the other."""
    num_px = image_px[0] * image_px[1]
    wanted = max(math.sqrt(max(num_px, least_px) / num_px), least_side_px / min(image_px))
    scale = min(wanted, math.sqrt(most_px / num_px))
    least = _up(least_side_px, multiple_px)
    width, height = (max(least, _down(side * scale, multiple_px)) for side in image_px)
    # of a strip, the short side was raised
    short = min(width, height)
    most_long = _down(min(most_px / short, short * (most_ratio or math.inf)), multiple_px)
    return (min(width, most_long), min(height, most_long))


def _window(canvas: SizePx, bounds: SizeBounds, box: Box) -> Box:
    """Return the box with a margin, as large as the model makes images best, within the canvas."""
    margin = max(_LEAST_MARGIN_PX, math.ceil(max(box.size_px) * _MARGIN_SHARE))
    sides, starts = [], []
    for start, length, most, native in zip(
        (box.left_px, box.top_px), box.size_px, canvas, bounds.native_px, strict=True
    ):
        wanted = _up(max(length + 2 * margin, native), bounds.multiple_px)
        side = min(wanted, most)
        sides.append(side)
        starts.append(min(max(0, start + (length - side) // 2), most - side))
    return Box(starts[0], starts[1], sides[0], sides[1])


def _work_px(window_px: SizePx, bounds: SizeBounds) -> SizePx:
    """Return the size on the model's grid at which a window is worked on."""
    scale = min(1.0, *(bounds.highest_px / side for side in window_px))
    width, height = (
        min(
            bounds.highest_px,
            max(bounds.lowest_px, _up(math.ceil(side * scale - 1e-9), bounds.multiple_px)),
        )
        for side in window_px
    )
    return (width, height)


def _within_bounds(image_px: SizePx, bounds: SizeBounds) -> SizePx:
    """Return the size of an image brought within the bounds, in its proportions if they allow."""
    scale = 1.0
    if max(image_px) > bounds.highest_px:
        scale = bounds.highest_px / max(image_px)
    elif min(image_px) < bounds.lowest_px:
        scale = bounds.lowest_px / min(image_px)
    if scale == 1.0:
        return image_px
    width, height = (
        min(bounds.highest_px, max(bounds.lowest_px, round(side * scale))) for side in image_px
    )
    return (width, height)


def _down(side_px: float, multiple_px: int) -> int:
    return max(1, math.floor(side_px / multiple_px + 1e-9)) * multiple_px


def _up(side_px: int, multiple_px: int) -> int:
    return -(-side_px // multiple_px) * multiple_px
