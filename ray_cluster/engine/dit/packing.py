"""How the tokens of a batch lie: those of all images in one matrix, those of all prompts likewise.

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


@dataclass(frozen=True, slots=True)
class Packing:
    """The spans of a batch in its three matrices; in each, one per size of image.

    Attributes:
        image: in the matrix of all images' tokens.
        prompt: in that of all prompts' tokens, which are equally many for every image.
        joint: in that of both, each image before its prompt.
        sizes: height and width in tokens, per span.
        keys: where the tokens that these attend to lie, span by span, if that is not here.
    """

    image: Spans
    prompt: Spans
    joint: Spans
    sizes: tuple[tuple[int, int], ...]
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
        joint = image.new_empty(len(prompt) + len(image), *image.shape[1:])
        for of_prompt, of_image, both in zip(self.prompt, self.image, self.joint, strict=True):
            rows = both.of(joint)
            rows[:, : of_image.length] = of_image.of(image)
            rows[:, of_image.length :] = of_prompt.of(prompt)
        return joint

    def image_rows(self, joint: Tensor) -> Tensor:
        """Return the images' rows of a joint matrix."""
        count = self.image[-1].rows.stop
        image = joint.new_empty(count, *joint.shape[1:])
        for of_image, both in zip(self.image, self.joint, strict=True):
            of_image.of(image)[:] = both.of(joint)[:, : of_image.length]
        return image

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


def packing_of(level: Level, num_prompt: int) -> Packing:
    """Return the packing of a batch.

    Args:
        level: where its images' tokens lie.
        num_prompt: tokens of each prompt.
    """
    images = [segment.images for segment in level.segments]
    sizes = [(segment.height, segment.width) for segment in level.segments]
    lengths = [height * width for height, width in sizes]
    return _packing(images, lengths, [num_prompt] * len(lengths), sizes)


def narrowed(whole: Packing, counts: Sequence[tuple[int, int]]) -> Packing:
    """Return the packing of some tokens of each image and prompt, which attend to all of them.

    Args:
        counts: per image, how many tokens of it and of its prompt.
    """
    runs = list(divided([span.images for span in whole.image], counts))
    images = [run for _, run in runs]
    lengths = [whole.image[index].length for index, _ in runs]
    sizes = [whole.sizes[index] for index, _ in runs]
    own = [counts[one.start] for one in images]
    keys = _packing(images, lengths, [whole.num_prompt] * len(images), sizes)
    return _packing(images, [one for one, _ in own], [one for _, one in own], sizes, keys)


def shard_of(whole: Packing, num_image: int, num_prompt: int) -> Packing:
    """Return the packing of so many tokens of each image and prompt, wherever the others are."""
    images = [span.images for span in whole.image]
    sizes = list(whole.sizes)
    return _packing(images, [num_image] * len(images), [num_prompt] * len(images), sizes)


def _packing(
    images: list[slice],
    lengths: list[int],
    prompts: list[int],
    sizes: list[tuple[int, int]],
    keys: Packing | None = None,
) -> Packing:
    both = [length + prompt for length, prompt in zip(lengths, prompts, strict=True)]
    image, prompt, joint = (spans_of(images, one) for one in (lengths, prompts, both))
    return Packing(image, prompt, joint, tuple(sizes), keys)
