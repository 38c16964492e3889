"""How large a batch of each image size, and of images of several, may be at present."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from ray_cluster.policies.costs.memory import SizePx

logger = logging.getLogger(__name__)

# one try that fails costs about a batch: at most 1 % of them
_QUIET_BATCHES = 100
_ROUNDING = 1e-9


class BatchCaps(dict[SizePx, int]):
    """Most requests in one batch by image size; a size not planned for gets a larger one's cap.

    A cap that was lowered because memory ran out rises again by one after a quiet time: what took
    the memory may be gone.

    Args:
        planned: the caps of the memory plan; none ever rises above its own.
        quiet_batches: full batches that must run before a lowered cap rises.
    """

    def __init__(
        self, planned: Mapping[SizePx, int], *, quiet_batches: int = _QUIET_BATCHES
    ) -> None:
        super().__init__(planned)
        self._planned = dict(planned)
        self._quiet_batches = quiet_batches
        self._full_batches: dict[SizePx, int] = {}

    def __missing__(self, size: SizePx) -> int:
        """Return the cap of the smallest planned size that has at least as many pixels."""
        return self[_nearest(self, size)]

    def share(self, sizes: Iterable[SizePx]) -> float:
        """Return which part of the device's room a batch of these images takes; at most 1 fits."""
        return sum(1 / max(1, self[size]) for size in sizes)

    def lower(self, sizes: Sequence[SizePx]) -> None:
        """For now allow no more than a batch of these images, nor larger ones than it has."""
        share = self.share(sizes)
        lowered = {size: max(1, round(self[size] * share)) for size in sorted(set(sizes))}
        for size, most in lowered.items():
            self._set_apart(size)
            for other in self:
                if _pixels(other) >= _pixels(size):
                    self[other] = max(1, min(self[other], most))
                    self._full_batches.pop(other, None)
            logger.warning(
                "batches of %dx%d are capped at %d: a larger one ran out of memory",
                *(*size, self[size]),
            )

    def confirm(self, sizes: Sequence[SizePx]) -> None:
        """Note a batch that ran; enough full ones raise the lowered caps of its sizes."""
        lowered = [size for size in set(sizes) if self[size] < self._most(size)]
        if not lowered:
            return
        share = self.share(sizes)
        for size in lowered:
            if share + 1 / self[size] > 1 + _ROUNDING:
                self._confirm_full(size)

    def _confirm_full(self, size: SizePx) -> None:
        self._full_batches[size] = self._full_batches.get(size, 0) + 1
        if self._full_batches[size] >= self._quiet_batches:
            del self._full_batches[size]
            self._set_apart(size)
            self[size] += 1
            logger.info("batches of %dx%d may have %d images again", *size, self[size])

    def _most(self, size: SizePx) -> int:
        return self._planned[size if size in self._planned else _nearest(self._planned, size)]

    def _set_apart(self, size: SizePx) -> None:
        """Give a size that was not planned for a cap of its own."""
        self.setdefault(size, self[size])


class BatchLimit:
    """Most requests of a batch: read by the stages' threads, set when the settings change.

    Args:
        planned: what memory was planned for; the limit never rises above it.
    """

    def __init__(self, planned: int) -> None:
        self._planned = planned
        self._most = planned

    @property
    def most(self) -> int:
        """The present limit."""
        return self._most

    def set(self, wanted: int) -> int:
        """Set the limit as near to ``wanted`` as memory allows; return it."""
        self._most = max(1, min(wanted, self._planned))
        return self._most


def _nearest(sizes: Collection[SizePx], size: SizePx) -> SizePx:
    """The smallest of the sizes with at least as many pixels; without one, the largest."""
    larger = [one for one in sizes if _pixels(one) >= _pixels(size)]
    return min(larger, key=_pixels) if larger else max(sizes, key=_pixels)


def _pixels(size: SizePx) -> int:
    return size[0] * size[1]
