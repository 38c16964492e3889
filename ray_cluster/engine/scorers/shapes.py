"""Runs the built-in discriminators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ray_cluster.imaging.small_images import pixels_of
from ray_cluster.models.discriminators import LoadedDiscriminator
from ray_cluster.models.picture_reader import to_reading_size
from ray_cluster.requests import SmallImage


class ShapesScorer:
    """Scores images with a built-in discriminator, those of one shape together."""

    def __init__(self, discriminator: LoadedDiscriminator, device: torch.device) -> None:
        self._discriminator = discriminator
        self._device = device

    @torch.inference_mode()
    def raw_scores(self, prompts: Sequence[str], images: Sequence[SmallImage]) -> list[float]:
        """Return logits; see :meth:`ray_cluster.engine.scorers.scorer.RawScorer.raw_scores`."""
        pictures = [self._picture(image) for image in images]
        together: dict[torch.Size, list[int]] = {}
        for index, picture in enumerate(pictures):
            together.setdefault(picture.shape, []).append(index)
        scores = [0.0] * len(images)
        for indices in together.values():
            pixels = torch.stack([pictures[index] for index in indices])
            asked = [prompts[index] for index in indices]
            found = self._discriminator.scores(asked, pixels)
            for index, score in zip(indices, found.tolist(), strict=True):
                scores[index] = score
        return scores

    def _picture(self, image: SmallImage) -> Tensor:
        """Return ``[3, H, W]`` in 0..1, as small as the network reads it."""
        pixels = torch.from_numpy(np.array(pixels_of(image))).to(self._device)
        return to_reading_size(pixels.permute(2, 0, 1)[None].float() / 255)[0]
