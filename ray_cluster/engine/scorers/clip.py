"""Scores images with CLIP-type models: how near image and prompt are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ray_cluster.imaging.small_images import pixels_of
from ray_cluster.requests import SmallImage


class ClipScorer:
    """Scores images by the cosine between the embeddings of image and prompt.

    Args:
        model: of transformers, with text and image towers, on its device.
        tokenizer: of its prompts.
        image_processor: of its images.
        max_tokens: to which every prompt is cut or padded, so that others do not change it.
    """

    def __init__(
        self, model: Any, tokenizer: Any, image_processor: Any, *, max_tokens: int
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._image_processor = image_processor
        self._max_tokens = max_tokens

    @torch.inference_mode()
    def raw_scores(self, prompts: Sequence[str], images: Sequence[SmallImage]) -> list[float]:
        """Return cosines; see :meth:`ray_cluster.engine.scorers.scorer.RawScorer.raw_scores`."""
        texts = self._tokenizer(
            list(prompts),
            padding="max_length",
            truncation=True,
            max_length=self._max_tokens,
            return_tensors="pt",
        ).to(self._model.device)
        pixels = processed(self._image_processor, images, self._model.device)
        asked = self._model.get_text_features(**texts)
        seen = self._model.get_image_features(pixel_values=pixels)
        cosines: Tensor = torch.cosine_similarity(_embeddings(asked), _embeddings(seen))
        return cosines.float().tolist()


def processed(processor: Any, images: Sequence[SmallImage], device: torch.device) -> Tensor:
    """Return images ``[B, 3, H, W]`` as a transformers model takes them."""
    arrays = [pixels_of(image) for image in images]
    pixels: Tensor = processor(
        images=arrays, return_tensors="pt", input_data_format="channels_last"
    )["pixel_values"]
    return pixels.to(device)


def _embeddings(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.pooler_output
