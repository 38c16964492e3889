"""How the images of one denoising step lie in memory: pixels of all sizes as rows of one matrix.

Every pixel of every image is a row of one ``[N, C]`` matrix, images of one size beside each other.
What looks at pixels alone (linear layers, norms over channels, activations) runs once over all
rows; what looks at neighbours or at a whole image (convolution, group normalisation, attention)
gets one view per size, which costs no copy. (PatchedServe, section 4, cuts images into patches for
the same end, and is not exact; see ``docs/engine.md``.)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

MOST_LAYOUT_BYTES = 64 << 20
"""Of the tables of all layouts that are kept; 8 images of 1024 x 1024 pixels have 1.5 MiB."""
_TABLE_BYTES = torch.int32.itemsize


@dataclass(frozen=True, slots=True, order=True)
class SizeGroup:
    """The requests of one latent size in a batch.

    Attributes:
        height: of the latents.
        width: of the latents.
        num_guided: requests that take two model rows each, first in the group.
        num_plain: requests that take one model row each, after the guided ones.
    """

    height: int
    width: int
    num_guided: int
    num_plain: int

    @property
    def num_requests(self) -> int:
        """Requests of this size."""
        return self.num_guided + self.num_plain

    @property
    def num_images(self) -> int:
        """Model rows of this size."""
        return 2 * self.num_guided + self.num_plain


Composition = tuple[SizeGroup, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Images of one size at one level of the model: consecutive rows of the matrix.

    Attributes:
        images: which of the batch's images, in the layout's order.
        tokens: which rows of the level's matrix.
    """

    height: int
    width: int
    images: slice
    tokens: slice
    _bounds: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_images(self) -> int:
        """Images of the segment."""
        return int(self.images.stop - self.images.start)

    def as_images(self, flat: Tensor) -> Tensor:
        """Return this segment of ``[N, C]`` as ``[n, C, h, w]`` in channels-last order, a view."""
        rows = flat[self.tokens]
        return rows.view(self.num_images, self.height, self.width, -1).permute(0, 3, 1, 2)

    def bounds(self, device: torch.device) -> Tensor:
        """Return where each image begins among the segment's rows, and their number, ``[n + 1]``.

        Made once and kept: in a CUDA graph nothing may come from the host.
        """
        if device not in self._bounds:
            size = self.height * self.width
            starts = torch.arange(self.num_images + 1, dtype=torch.int32, device=device)
            self._bounds[device] = starts * size
        return self._bounds[device]


@dataclass(frozen=True, slots=True)
class Level:
    """All images at one resolution level of the model.

    Attributes:
        segments: one per size.
        num_tokens: rows of the level's matrix.
    """

    segments: tuple[Segment, ...]
    num_tokens: int
    _bounds: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def bounds(self, device: torch.device) -> Tensor:
        """Return where each image begins in the matrix, and its number of rows, ``[R + 1]``.

        Made once and kept: in a CUDA graph nothing may come from the host.
        """
        if device not in self._bounds:
            starts = [
                segment.tokens.start + segment.bounds(device)[:-1] for segment in self.segments
            ]
            end = torch.full((1,), self.num_tokens, dtype=torch.int32, device=device)
            self._bounds[device] = torch.cat([*starts, end])
        return self._bounds[device]

    @property
    def image_tokens(self) -> tuple[int, ...]:
        """Rows of the level's matrix that each image has."""
        return tuple(
            segment.height * segment.width
            for segment in self.segments
            for _ in range(segment.num_images)
        )


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Where the requests of a batch, and the model rows made of them, lie.

    Requests come by group; within a group the guided ones first. A group's model rows are the
    unconditional ones of its guided requests, then the conditional ones of all its requests.

    Attributes:
        composition: what it is the layout of.
        levels: of the model rows, from the latents' own size downwards, each half of the former.
        request_tokens: pixels of each request's latents.
        row_request: for every model row the request that it is made of.
        num_guided: requests with guidance.
    """

    composition: Composition
    levels: tuple[Level, ...]
    request_tokens: tuple[int, ...]
    row_request: tuple[int, ...]
    is_conditional: tuple[bool, ...]
    num_guided: int
    _tables: dict[tuple[str, torch.device], Tensor] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def num_requests(self) -> int:
        """Requests in the batch."""
        return len(self.request_tokens)

    def request_of_token(self, device: torch.device) -> Tensor:
        """Return for every pixel of the requests' latents which request it belongs to, ``[M]``.

        This and the others are int32.
        """
        return self._table("request_of_token", device)

    def request_of_row(self, device: torch.device) -> Tensor:
        """Return for every model row which request it is made of, ``[R]``."""
        return self._table("request_of_row", device)

    def conditional_tokens(self, device: torch.device) -> Tensor:
        """Return for every pixel of the requests' latents its row in the conditional output."""
        return self._table("conditional", device)

    def unconditional_tokens(self, device: torch.device) -> Tensor:
        """Return likewise for the unconditional output; without guidance the same row."""
        return self._table("unconditional", device)

    def _table(self, name: str, device: torch.device) -> Tensor:
        key = (name, device)
        if key not in self._tables:
            self._tables[key] = self._indices(name).to(device)
        return self._tables[key]

    def _indices(self, name: str) -> Tensor:
        if name == "request_of_row":
            return torch.tensor(self.row_request, dtype=torch.int32)
        counts = torch.tensor(self.request_tokens)
        if name == "request_of_token":
            requests = torch.arange(self.num_requests, dtype=torch.int32)
            return requests.repeat_interleave(counts)
        starts = self._first_tokens(is_conditional=True)
        if name == "unconditional":
            starts |= self._first_tokens(is_conditional=False)
        firsts = accumulate(self.request_tokens[:-1], initial=0)
        shifts = [starts[request] - first for request, first in enumerate(firsts)]
        pixels = torch.arange(sum(self.request_tokens), dtype=torch.int32)
        return pixels + torch.tensor(shifts, dtype=torch.int32).repeat_interleave(counts)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables of one device, once all have been asked for."""
        return _TABLE_BYTES * (3 * sum(self.request_tokens) + len(self.row_request))

    def _first_tokens(self, *, is_conditional: bool) -> dict[int, int]:
        """Return where each request's model row of one kind begins in the matrix."""
        sizes = [self.request_tokens[request] for request in self.row_request]
        firsts = accumulate(sizes, initial=0)
        rows = zip(self.row_request, self.is_conditional, firsts, strict=False)
        return {request: first for request, kind, first in rows if kind is is_conditional}


def composition_of(
    sizes: Sequence[tuple[int, int, bool]], beside: Sequence[tuple[tuple[int, ...], ...]] = ()
) -> tuple[Composition, tuple[int, ...]]:
    """Return the composition of a batch, and the order in which its layout takes the requests.

    Args:
        sizes: per request height and width of its latents, and whether it uses guidance.
        beside: shapes of what it looks at: of one size, those with the same lie beside each other.
    """
    shapes = beside or [()] * len(sizes)
    order = sorted(range(len(sizes)), key=lambda one: (_rank(sizes[one]), shapes[one]))
    counts: dict[tuple[int, int], list[int]] = {}
    for one in order:
        height, width, is_guided = sizes[one]
        counts.setdefault((height, width), [0, 0])[0 if is_guided else 1] += 1
    groups = (SizeGroup(*size, *numbers) for size, numbers in counts.items())
    return tuple(groups), tuple(order)


def _rank(size: tuple[int, int, bool]) -> tuple[int, int, bool]:
    height, width, is_guided = size
    return (height * width, height, not is_guided)


class KeptLayouts:
    """The layouts of the latest compositions, whose tables stay within a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._layouts: OrderedDict[tuple[Composition, int], TokenLayout] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, composition: Composition, num_levels: int) -> TokenLayout:
        """Return a layout, built unless it is kept; from any thread."""
        key = (composition, num_levels)
        with self._lock:
            if (kept := self._layouts.get(key)) is not None:
                self._layouts.move_to_end(key)
                return kept
            layout = _build(composition, num_levels)
            self._layouts[key] = layout
            self._num_bytes += layout.table_bytes
            while self._num_bytes > self._most_bytes and len(self._layouts) > 1:
                _, oldest = self._layouts.popitem(last=False)
                self._num_bytes -= oldest.table_bytes
            return layout


_kept_layouts = KeptLayouts(MOST_LAYOUT_BYTES)


def layout_of(composition: Composition, num_levels: int) -> TokenLayout:
    """Return the layout of a composition; the latest are kept.

    Args:
        num_levels: resolutions that the model works at, each half of the former, rounded up.
    """
    return _kept_layouts.of(composition, num_levels)


def _build(composition: Composition, num_levels: int) -> TokenLayout:
    request_tokens: list[int] = []
    row_request: list[int] = []
    is_conditional: list[bool] = []
    for group in composition:
        first = len(request_tokens)
        request_tokens += [group.height * group.width] * group.num_requests
        row_request += range(first, first + group.num_guided)
        row_request += range(first, first + group.num_requests)
        is_conditional += [False] * group.num_guided + [True] * group.num_requests
    return TokenLayout(
        composition=composition,
        levels=tuple(_level(composition, 2**level) for level in range(num_levels)),
        request_tokens=tuple(request_tokens),
        row_request=tuple(row_request),
        is_conditional=tuple(is_conditional),
        num_guided=sum(group.num_guided for group in composition),
    )


def _level(composition: Composition, shrink: int) -> Level:
    segments: list[Segment] = []
    image = token = 0
    for group in composition:
        height, width = -(-group.height // shrink), -(-group.width // shrink)
        next_image, next_token = image + group.num_images, token + group.num_images * height * width
        segments.append(Segment(height, width, slice(image, next_image), slice(token, next_token)))
        image, token = next_image, next_token
    return Level(tuple(segments), token)
