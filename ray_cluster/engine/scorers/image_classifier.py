"""Scores images with an image classifier, whatever the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.scorers.clip import processed
from ray_cluster.requests import SmallImage


class ImageClassifierScorer:
    """Scores images by the log odds of one label against all others.

    Args:
        model: of transformers, on its device.
        image_processor: of its images.
        label_index: of the label that says that an image is right.
    """

    def __init__(self, model: Any, image_processor: Any, *, label_index: int) -> None:
        self._model = model
        self._image_processor = image_processor
        self._label_index = label_index

    @torch.inference_mode()
    def raw_scores(
        self,
        prompts: Sequence[str],  # noqa: ARG002 - the images alone are classified
        images: Sequence[SmallImage],
    ) -> list[float]:
        """Return log odds; see :meth:`ray_cluster.engine.scorers.scorer.RawScorer.raw_scores`."""
        pixels = processed(self._image_processor, images, self._model.device)
        logits: Tensor = self._model(pixel_values=pixels).logits.float()
        is_other = torch.ones(logits.shape[1], dtype=torch.bool)
        is_other[self._label_index] = False
        odds = logits[:, self._label_index] - torch.logsumexp(logits[:, is_other], 1)
        return odds.tolist()
