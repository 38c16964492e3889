"""Which tokens of a batch's images and prompts are computed, in each of a transformer's matrices.

Those that are not are still attended to: see ``ray_cluster/engine/step/active.py``. Everything else
that a transformer does with tokens looks at each alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, Literal

import torch
from torch import Tensor

from ray_cluster.engine.dit.packing import Grids, num_tokens
from ray_cluster.engine.step.active import OtherTokens, image_rows
from ray_cluster.engine.step.executor import StepBatch
from ray_cluster.engine.step.rings import Ring, Rings, Rows

Matrix = Literal["image", "joint"]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """What the matrices of tokens have of every model row of a batch.

    Attributes:
        image: the matrix of images' tokens.
        prompt: that of prompts' tokens.
        joint: that of both, each image's before its prompt's.
    """

    image: Rows
    prompt: Rows
    joint: Rows

    @classmethod
    def of(
        cls, batch: StepBatch[Any], num_prompt: int, shrink: int, references: Sequence[Grids]
    ) -> TokenRows:
        """Find them.

        Args:
            num_prompt: tokens of each prompt.
            shrink: pixels of the latents along a side of a token.
            references: grids of each model row's.
        """
        image = image_rows(batch, len(batch.layout.levels) - 1, shrink)
        image = Rows(list(map(add, image.lengths, map(num_tokens, references))), image.active)
        device = batch.latents.device
        prompt: dict[int, Tensor] = {}
        joint: dict[int, Tensor] = {}
        for row, tokens in image.active.items():
            part = batch.reuse[batch.layout.row_request[row]]
            has_prompt = part is not None and part.active is not None and part.active.has_prompt
            prompt[row] = torch.arange(num_prompt * has_prompt, device=device)
            joint[row] = torch.cat([tokens, prompt[row] + image.lengths[row]])
        return cls(
            image,
            Rows([num_prompt] * len(image.lengths), prompt),
            Rows([num_prompt + length for length in image.lengths], joint),
        )

    def others(self, rings: Rings, depth: int) -> OtherTokens[Matrix] | None:
        """Return what is added to the keys and values of a ring; None where nothing is or noted."""
        return OtherTokens.of(rings, depth, {"image": self.image, "joint": self.joint})

    def counts(self, ring: Ring) -> list[tuple[int, int]]:
        """Return per model row of a ring how many tokens of the image and of the prompt it has."""
        return list(zip(self.image.counts(ring), self.prompt.counts(ring), strict=True))
