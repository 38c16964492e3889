"""Where sequences lie in a matrix of tokens: those of one length beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Sequences of one length: consecutive rows of a matrix.

    Attributes:
        images: which of the batch's images, in the layout's order.
        rows: which rows of the matrix.
        length: tokens of each.
    """

    images: slice
    rows: slice
    length: int

    @property
    def num_images(self) -> int:
        """Sequences of the span."""
        return int(self.images.stop - self.images.start)

    def of(self, flat: Tensor) -> Tensor:
        """Return this span of ``[N, ...]`` as ``[n, length, ...]``, a view."""
        return flat[self.rows].view(self.num_images, self.length, *flat.shape[1:])


Spans = tuple[Span, ...]


def spans_of(images: Sequence[slice], lengths: Sequence[int]) -> Spans:
    """Return spans one after the other: which images each has, and how long these are."""
    counts = [one.stop - one.start for one in images]
    ends = accumulate((n * length for n, length in zip(counts, lengths, strict=True)), initial=0)
    rows = (slice(*pair) for pair in pairwise(ends))
    return tuple(Span(*span) for span in zip(images, rows, lengths, strict=True))


def image_lengths(spans: Spans) -> list[int]:
    """Return the length of every image's sequence."""
    return [span.length for span in spans for _ in range(span.num_images)]


def divided(images: Sequence[slice], counts: Sequence[object]) -> Iterator[tuple[int, slice]]:
    """Divide runs of images into such as have equal counts.

    Args:
        counts: of every image.

    Returns:
        For each smaller run the index of the one that it is of, and its images.
    """
    for index, run in enumerate(images):
        first = run.start
        for _, alike in groupby(counts[run]):
            last = first + len(list(alike))
            yield index, slice(first, last)
            first = last
