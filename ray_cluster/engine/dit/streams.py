"""The tokens of images and prompts between two blocks: in two matrices, or in a joint one."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ray_cluster.engine.dit.packing import Packing


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
