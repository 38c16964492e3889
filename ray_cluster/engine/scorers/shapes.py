"""Runs the built-in discriminators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ray_cluster.imaging.small_images import pixels_of
from ray_cluster.models.discriminators import Discriminator, PictureDiscriminator, PromptIds
from ray_cluster.models.picture_reader import to_reading_size
from ray_cluster.requests import SmallImage


class ShapesScorer:
    """Scores images with a built-in discriminator, those of one shape together.

    Args:
        model: on its device.
        prompt_ids: of the prompts, if it takes them.
    """

    def __init__(
        self, model: Discriminator, prompt_ids: PromptIds | None, device: torch.device
    ) -> None:
        self._model = model
        self._prompt_ids = prompt_ids
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
            found = self._scores([prompts[index] for index in indices], pixels)
            for index, score in zip(indices, found.tolist(), strict=True):
                scores[index] = score
        return scores

    def _picture(self, image: SmallImage) -> Tensor:
        """Return ``[3, H, W]`` in 0..1, as small as the network reads it."""
        pixels = torch.from_numpy(np.array(pixels_of(image))).to(self._device)
        return to_reading_size(pixels.permute(2, 0, 1)[None].float() / 255)[0]

    def _scores(self, prompts: Sequence[str], pixels: Tensor) -> Tensor:
        if isinstance(self._model, PictureDiscriminator) or self._prompt_ids is None:
            return self._model(pixels)  # type: ignore[no-any-return]
        return self._model(pixels, self._prompt_ids(prompts).to(self._device))  # type: ignore[no-any-return]
