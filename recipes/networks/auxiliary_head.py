"""An auxiliary head on a middle layer of the transformer, in training only.

Which word decides what is drawn where is a small part of a denoising loss. So the head also
predicts, for each token of a middle layer, which object covers it and where its centre is. The
renderer gives these labels. (REPA, arXiv 2410.06940, trains a middle layer so on features of a
vision model.)
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel
from torch import Tensor, nn

from ray_cluster.quality.render import Placed, pixel_grid
from ray_cluster.quality.scenes import BACKGROUNDS, COLOURS, SHAPES

# of an object's bounding square, around it
_MARGIN = 1.15


@dataclass(frozen=True)
class TokenLabels:
    """What a picture shows at each of its T tokens.

    `shape`, `colour`: [B, T] class indices, 0 where no object is; `background`: [B, T];
    `offset`: [B, T, 3], from the token to the object's middle as (x, y) in radii, and the radius in
    tokens, 0 where none is.
    """

    shape: Tensor
    colour: Tensor
    background: Tensor
    offset: Tensor


def label_tokens(placed: Placed, *, columns: int, rows: int) -> TokenLabels:
    """Label the tokens of pictures that are `columns` by `rows` tokens large, row by row."""
    grid = pixel_grid(columns, rows, placed.radius.device).flatten(0, 1)
    away = placed.centre[:, None] - grid[:, None]  # [B, T, N, 2]
    radius = placed.radius[:, None].clamp_min(1e-6)
    relative = away / radius[..., None]
    # the object that the token is deepest in; missing ones have no extent
    depth, nearest = relative.abs().amax(-1).min(-1)
    covered = depth < _MARGIN

    def chosen(values: Tensor) -> Tensor:
        """Values [B, N] of each token's nearest object, [B, T]."""
        return values.gather(1, nearest)

    middle = relative.gather(2, nearest[..., None, None].expand(-1, -1, 1, 2))[:, :, 0]
    size = chosen(placed.radius)[..., None] * min(columns, rows)
    return TokenLabels(
        shape=torch.where(covered, 1 + chosen(placed.shape), 0),
        colour=torch.where(covered, 1 + chosen(placed.colour), 0),
        background=placed.background[:, None].expand_as(covered),
        offset=torch.cat([middle, size], -1) * covered[..., None],
    )


class TransformerWithHead(nn.Module):
    """A transformer with a head on its tokens after `layer` blocks; the head is not published.

    Args:
        transformer: trained through the reading as well.
        layer: how many blocks come before.
    """

    def __init__(self, transformer: SD3Transformer2DModel, layer: int) -> None:
        super().__init__()
        self.transformer = transformer
        self._sizes = (1 + len(SHAPES), 1 + len(COLOURS), len(BACKGROUNDS), 3)
        width = int(transformer.inner_dim)
        self.head = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, sum(self._sizes)),
        )
        self._tokens: Tensor | None = None
        transformer.transformer_blocks[layer - 1].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        del module, inputs
        # captions' tokens first, then the picture's
        self._tokens = output[1]

    def forward(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        """Call the transformer; returns its prediction and the tokens read, [B, T, .]."""
        predicted: Tensor = self.transformer(**inputs, return_dict=False)[0]
        assert self._tokens is not None
        tokens, self._tokens = self._tokens, None
        read: Tensor = self.head(tokens)
        return predicted, read

    def head_error(self, read: Tensor, labels: TokenLabels) -> Tensor:
        """Cross entropies [.] of the classes, objects' and empty tokens' counted alike, and the
        squared error of the offsets.
        """
        shape, colour, background, offset = read.split(self._sizes, -1)
        covered = labels.shape > 0
        share = covered.to(read.dtype).mean().clamp(0.01, 0.99)
        weights = torch.where(covered, 0.5 / share, 0.5 / (1 - share))

        def wrong(logits: Tensor, target: Tensor) -> Tensor:
            each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
            return (each * weights.flatten()).mean()

        apart = ((offset - labels.offset) ** 2).mean(-1) * covered
        classes = [
            wrong(logits, target)
            for logits, target in (
                (shape, labels.shape),
                (colour, labels.colour),
                (background, labels.background),
            )
        ]
        return torch.stack([*classes, (apart * weights).mean()]).sum()
