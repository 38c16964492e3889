"""Positions that queries and keys are turned by (RoPE), of all tokens of a batch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.dit.packing import Grids, Packing

# batches whose positions are kept: the latest, and those of its rows that go on inwards
_KEPT = 3
# sizes whose tables are kept: 4.7 MB for 1024 x 1024 pixels
_KEPT_TABLES = 32


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosines and sines of every row's angles, ``[J, 1, d]`` float32."""

    cosines: Tensor
    sines: Tensor

    def at(self, index: Tensor) -> Rotary:
        """Return those of some rows."""
        return Rotary(self.cosines[index], self.sines[index])

    def __call__(self, rows: Tensor) -> Tensor:
        """Turn each pair of neighbouring channels of ``[J, heads, d]`` by its angle."""
        real, imaginary = rows.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-imaginary, real], dim=-1).flatten(-2)
        whole = rows.float() * self.cosines
        return torch.addcmul(whole, turned.float(), self.sines).to(rows.dtype)


class RotaryTables:
    """Makes the positions of a batch: a prompt's are all zero, a pixel's are its row and column.

    Those of references have their number before that, from 1.

    Args:
        embed: diffusers' ``FluxPosEmbed``, from ids ``[L, 3]`` to cosines and sines ``[L, d]``.
    """

    def __init__(self, embed: Any) -> None:
        self._embed = embed
        # on the device, so that a batch's are joined there
        self._table = lru_cache(_KEPT_TABLES)(self._built)
        self._kept: deque[tuple[Packing, torch.device, Rotary]] = deque(maxlen=_KEPT)

    def of(self, packing: Packing, device: torch.device) -> Rotary:
        """Return the positions of a batch's joint rows."""
        for known, place, rotary in self._kept:
            if (known, place) == (packing, device):
                return rotary
        rotary = self._joined(packing, device)
        self._kept.append((packing, device, rotary))
        return rotary

    def _joined(self, packing: Packing, device: torch.device) -> Rotary:
        tables = [self._table(packing.num_prompt, grids, device) for grids in packing.grids]
        joined = (
            torch.cat(
                [
                    table[part].expand(span.num_images, -1, -1).flatten(0, 1)
                    for table, span in zip(tables, packing.joint, strict=True)
                ]
            )
            for part in (0, 1)
        )
        return Rotary(*(one.unsqueeze(1) for one in joined))

    def _built(self, num_prompt: int, grids: Grids, device: torch.device) -> tuple[Tensor, Tensor]:
        ids = [
            torch.cartesian_prod(torch.tensor([number]), torch.arange(height), torch.arange(width))
            for number, (height, width) in enumerate(grids)
        ]
        prompt = torch.zeros(num_prompt, 3)
        cosines, sines = self._embed(torch.cat([*ids, prompt]))
        return cosines.to(device), sines.to(device)
