"""A model on the ranks of a group, as the engine that owns the states sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.grouping import Delta
from ray_cluster.engine.groups.ranks import RankDeltas, Ranks
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.errors import ModelUnsupported

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class GroupModel:
    """What is known of a group's model without its weights.

    Attributes:
        dtype: in which the ranks compute.
        channels: of its latents.
        patch: latent pixels along a side of a token.
        vae_scale_factor: image pixels per latent pixel.
    """

    dtype: torch.dtype
    channels: int
    patch: int
    vae_scale_factor: int


class GroupExecutor:
    """An :class:`~ray_cluster.engine.step.executor.Executor` that begins no step by itself.

    States are on the CPU: what crosses to the ranks, step by step, is the latents.

    Attributes:
        ranks: those of the group.
    """

    def __init__(self, model: GroupModel, ranks: Ranks) -> None:
        self._model = model
        self.ranks = ranks

    @property
    def device(self) -> torch.device:
        """Where latents must be."""
        return _CPU

    @property
    def dtype(self) -> torch.dtype:
        """In which the ranks compute."""
        return self._model.dtype

    @property
    def num_levels(self) -> int:
        """Resolutions that the layout of a batch must have."""
        return self._model.patch.bit_length()

    @property
    def num_conditions(self) -> int:
        """None: no transformer that is covered takes more than latents."""
        return 0

    @property
    def num_outer(self) -> range:
        """None: nothing of a step is kept for a later one, which may be on other ranks."""
        return range(0)

    @property
    def patch_multiple(self) -> int:
        """What the side of a patch must be a multiple of."""
        return self._model.patch

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return ``(C, H, W)`` of the latents of an image of that size."""
        factor = self._model.vae_scale_factor
        return (self._model.channels, height_px // factor, width_px // factor)

    @property
    def layers(self) -> Mapping[str, nn.Linear | nn.Conv2d]:
        """None are here."""
        return {}

    def bind(self, deltas: Mapping[str, Delta]) -> RankDeltas:
        """Have the ranks bind deltas to their model; see :meth:`Ranks.bind`."""
        return self.ranks.bind(deltas)

    def merged(self, _deltas: LayerDeltas) -> NoReturn:
        """Refuse: a group steps requests of several sets beside each other."""
        raise ModelUnsupported("LoRAs are not merged into the weights of a group's ranks")

    def prepare(self, conditioning: Conditioning, deltas: LayerDeltas | None = None) -> int:
        """Have the ranks keep what stays the same in all steps of a request; return its key."""
        return self.ranks.keep(conditioning, deltas)

    def encode_half(self, _batch: object) -> NoReturn:
        """Refuse: steps are begun on sets of ranks."""
        raise ModelUnsupported("a group's model is called by its engine alone")

    def cut(self, _encoded: object, _batch: object, _keeps: object) -> NoReturn:
        """Refuse likewise."""
        raise ModelUnsupported("a group's model is called by its engine alone")

    def decode_half(self, _encoded: object, _residuals: object = None) -> NoReturn:
        """Refuse likewise."""
        raise ModelUnsupported("a group's model is called by its engine alone")
