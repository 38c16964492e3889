"""Masks at other sizes, and images blended in under them; nothing outside a mask ever changes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ray_cluster.policies.edits import SizePx

Pixels = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

_WHOLE = 255
_STRIP_PIXELS = 1 << 20


def any_in(mask: Mask, size_px: SizePx) -> Mask:
    """Return a mask at another size, in which no thin part is lost.

    A pixel is set if any one is of those that it covers, in whole or in part.

    Args:
        mask: ``[h, w]``.
        size_px: width and height of the result.
    """
    for axis, side in enumerate(reversed(size_px)):
        length = mask.shape[axis]
        if length == side:
            continue
        index = np.arange(side)
        starts, stops = index * length // side, -(-(index + 1) * length // side)
        if side > length:
            # two at most
            mask = mask.take(starts, axis) | mask.take(stops - 1, axis)
            continue
        # reduceat takes pairs of bounds too; every second result is of what lies between pairs
        bounds = np.stack([starts, stops], axis=1).ravel()[:-1]
        mask = np.logical_or.reduceat(mask, bounds, axis).take(2 * index, axis)
    return mask


def blend_weights(mask: Mask, feather_px: int) -> Pixels:
    """Return how much of an edit is seen, 0 outside its mask and up to 255 within.

    The weights grow with the distance from the nearest pixel outside, over ``feather_px`` pixels;
    in a part of the mask that is narrower, up to its middle, which shows the edit whole. The border
    of the image is no border of the mask.
    """
    weights = mask.astype(np.uint8)
    weights *= _WHOLE
    if feather_px == 0 or mask.all() or not mask.any():
        return weights
    # with one pixel around, if there is one: it has the nearest pixel outside
    rows, columns = _extent(mask.max(axis=1)), _extent(mask.max(axis=0))
    # some rows at a time, with those around that are near enough to count: the distances of all
    # would take eight times the memory of the image
    height = _STRIP_PIXELS // (columns.stop - columns.start) + feather_px
    for top in range(rows.start, rows.stop, height):
        part = slice(top, min(rows.stop, top + height))
        around = slice(max(0, part.start - feather_px), part.stop + feather_px)
        near = _near(mask[around, columns], feather_px)
        weights[part, columns] = near[part.start - around.start :][: part.stop - part.start]
    _raise_narrow(weights[rows, columns])
    return weights


def _raise_narrow(weights: Pixels) -> None:
    """Have each connected part of a mask reach the whole weight somewhere, in place."""
    from scipy import ndimage

    labels = np.empty(weights.shape, np.uint16)
    try:
        num = ndimage.label(weights, np.ones((3, 3)), output=labels)
    except RuntimeError:
        # tens of thousands of specks: as one
        num = 1
        labels[:] = weights > 0
    is_narrow = np.ones(num + 1, np.bool_)
    is_narrow[labels[weights == _WHOLE]] = is_narrow[0] = False
    where = is_narrow[labels]
    own, narrow = labels[where], weights[where]
    largest = np.ones(num + 1, np.float32)
    np.maximum.at(largest, own, narrow)
    weights[where] = np.rint(narrow * (_WHOLE / largest[own]))


def _near(mask: Mask, feather_px: int) -> Pixels:
    """Return the weights of a mask of which at least one pixel is outside, or none is near."""
    if mask.all():
        return np.full(mask.shape, _WHOLE, np.uint8)
    # large, and needed here alone
    from scipy import ndimage

    distance_px = ndimage.distance_transform_edt(mask)
    share = np.minimum(distance_px / (feather_px + 1), 1.0)
    weights: Pixels = np.rint(share * _WHOLE).astype(np.uint8)
    return weights


def blend_in(below: Pixels, above: Pixels, weights: Pixels) -> None:
    """Blend an image into another of its size, in place.

    Args:
        below: ``[h, w, 3]``; not written where the weight is 0.
        weights: ``[h, w]``, as of :func:`blend_weights`.
    """
    is_whole = weights == _WHOLE
    np.copyto(below, above, where=is_whole[..., None])
    is_border = (weights > 0) & ~is_whole
    share = weights[is_border].astype(np.uint16)[:, None]
    # rounded; at most 255 * 255 + 127, which 16 bits hold
    mixed = above[is_border] * share + below[is_border] * (_WHOLE - share)
    below[is_border] = (mixed + _WHOLE // 2) // _WHOLE


def _extent(is_set: npt.NDArray[np.bool_]) -> slice:
    """Return where the first to the last set element are, and one more on both sides."""
    (indices,) = np.nonzero(is_set)
    return slice(max(0, int(indices[0]) - 1), int(indices[-1]) + 2)
