"""How the tokens of a batch lie: those of all images in one matrix, those of all prompts likewise.

Pictures that the model looks at (references) are part of their image there: their tokens follow
those of its latents, all layers treat both alike, and no prediction is made of them.

Attention is the only layer that asks which image a token belongs to. It runs over a third matrix,
in which each prompt's tokens follow those of its image: that is SD3's order in diffusers. In the
other one its sums, over many equal tokens where there is no T5, are rounded up to twice as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from ray_cluster.engine.batch.spans import Spans, divided, spans_of
from ray_cluster.engine.batch.token_layout import Level

Grids = tuple[tuple[int, int], ...]
"""Heights and widths in tokens."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The spans of a batch in its matrices; in each, one per size of image and of its references.

    Attributes:
        image: in the matrix of all images' tokens.
        prompt: in that of all prompts' tokens, which are equally many for every image.
        joint: in that of both, each image before its prompt.
        own: in the matrix of the tokens of images' latents alone.
        references: likewise of their references.
        grids: height and width in tokens, per span, of the latents and of each reference.
        keys: where the tokens that these attend to lie, span by span, if that is not here.
    """

    image: Spans
    prompt: Spans
    joint: Spans
    own: Spans
    references: Spans
    grids: tuple[Grids, ...]
    keys: Packing | None = None

    @property
    def attended(self) -> Packing:
        """Where the tokens that these attend to lie, span by span."""
        return self.keys or self

    @property
    def num_prompt(self) -> int:
        """Tokens of each prompt, where all are whole."""
        return self.prompt[0].length

    def merge(self, prompt: Tensor, image: Tensor) -> Tensor:
        """Return the joint matrix of two, ``[P, ...]`` and ``[N, ...]`` as ``[P + N, ...]``."""
        return _merged(image, self.image, prompt, self.prompt, self.joint)

    def merge_references(self, own: Tensor, references: Tensor) -> Tensor:
        """Return the images' matrix of two, of the latents' tokens and of the references'."""
        return _merged(own, self.own, references, self.references, self.image)

    def image_rows(self, joint: Tensor) -> Tensor:
        """Return the images' rows of a joint matrix."""
        return _firsts(joint, self.joint, self.image)

    def own_rows(self, image: Tensor) -> Tensor:
        """Return the rows of the latents' tokens of an images' matrix."""
        has_others = any(len(grids) > 1 for grids in self.grids)
        return _firsts(image, self.image, self.own) if has_others else image

    def prompt_rows(self, joint: Tensor) -> Tensor:
        """Return the prompts' rows of a joint matrix."""
        count = self.prompt[-1].rows.stop
        prompt = joint.new_empty(count, *joint.shape[1:])
        for of_prompt, both in zip(self.prompt, self.joint, strict=True):
            of_prompt.of(prompt)[:] = both.of(joint)[:, both.length - of_prompt.length :]
        return prompt


class Parted(NamedTuple):
    """Tokens of images ``[N, D]`` and of prompts ``[P, D]``."""

    image: Tensor
    prompt: Tensor

    def parted(self, _packing: Packing) -> Parted:
        """Return these."""
        return self

    def joined(self, packing: Packing) -> Tensor:
        """Return the joint matrix."""
        return packing.merge(self.prompt, self.image)


class Joined(NamedTuple):
    """Tokens of both, each image's before its prompt's, ``[N + P, D]``."""

    joint: Tensor

    def parted(self, packing: Packing) -> Parted:
        """Return both apart."""
        return Parted(packing.image_rows(self.joint), packing.prompt_rows(self.joint))

    def joined(self, _packing: Packing) -> Tensor:
        """Return this."""
        return self.joint


class Streams(Protocol):
    """Either of them."""

    def parted(self, packing: Packing, /) -> Parted:
        """Return images' and prompts' tokens apart."""

    def joined(self, packing: Packing, /) -> Tensor:
        """Return the joint matrix of both."""


def _merged(first: Tensor, spans: Spans, last: Tensor, others: Spans, both: Spans) -> Tensor:
    """Return the rows of two matrices in one, each sequence of the first before the other's."""
    merged = first.new_empty(len(first) + len(last), *first.shape[1:])
    for one, other, span in zip(spans, others, both, strict=True):
        rows = span.of(merged)
        rows[:, : one.length] = one.of(first)
        rows[:, one.length :] = other.of(last)
    return merged


def _firsts(merged: Tensor, both: Spans, spans: Spans) -> Tensor:
    """Return the first one of two merged matrices."""
    found = merged.new_empty(spans[-1].rows.stop, *merged.shape[1:])
    for one, span in zip(spans, both, strict=True):
        one.of(found)[:] = span.of(merged)[:, : one.length]
    return found


def num_tokens(grids: Grids) -> int:
    """Return how many tokens grids have."""
    return sum(height * width for height, width in grids)


def packing_of(level: Level, num_prompt: int, references: Sequence[Grids] = ()) -> Packing:
    """Return the packing of a batch.

    Args:
        level: where its images' tokens lie.
        num_prompt: tokens of each prompt.
        references: grids of each image's; none unless given.
    """
    images = [segment.images for segment in level.segments]
    grids: list[Grids] = [((segment.height, segment.width),) for segment in level.segments]
    if any(references):
        runs = list(divided(images, references))
        images = [run for _, run in runs]
        grids = [(*grids[index], *references[run.start]) for index, run in runs]
    return _packing(images, list(map(num_tokens, grids)), [num_prompt] * len(grids), grids)


def narrowed(whole: Packing, counts: Sequence[tuple[int, int]]) -> Packing:
    """Return the packing of some tokens of each image and prompt, which attend to all of them.

    Args:
        counts: per image, how many tokens of it and of its prompt.
    """
    runs = list(divided([span.images for span in whole.image], counts))
    images = [run for _, run in runs]
    lengths = [whole.image[index].length for index, _ in runs]
    grids = [whole.grids[index] for index, _ in runs]
    own = [counts[one.start] for one in images]
    keys = _packing(images, lengths, [whole.num_prompt] * len(images), grids)
    return _packing(images, [one for one, _ in own], [one for _, one in own], grids, keys)


def shard_of(whole: Packing, num_image: int, num_prompt: int) -> Packing:
    """Return the packing of so many tokens of each image and prompt, wherever the others are."""
    images = [span.images for span in whole.image]
    grids = list(whole.grids)
    return _packing(images, [num_image] * len(images), [num_prompt] * len(images), grids)


def _packing(
    images: list[slice],
    lengths: list[int],
    prompts: list[int],
    grids: list[Grids],
    keys: Packing | None = None,
) -> Packing:
    both = [length + prompt for length, prompt in zip(lengths, prompts, strict=True)]
    image, prompt, joint, own, others = (
        spans_of(images, one)
        for one in (
            lengths,
            prompts,
            both,
            [num_tokens(one[:1]) for one in grids],
            [num_tokens(one[1:]) for one in grids],
        )
    )
    return Packing(image, prompt, joint, own, others, tuple(grids), keys)
