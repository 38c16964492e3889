"""The encode stage: prompts to conditioning, in batches, with the model's own text encoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ray_cluster.engine.state import Conditioning
from ray_cluster.errors import InvalidRequest
from ray_cluster.requests import ImageRequest


class PromptEncoder(Protocol):
    """Turns prompts into conditioning."""

    @property
    def max_prompt_tokens(self) -> int:
        """Most tokens of a prompt, without the two that mark its ends."""

    def encode(self, requests: Sequence[ImageRequest]) -> list[Conditioning]:
        """Return one conditioning per request.

        Raises:
            InvalidRequest: a prompt is longer than the text encoder can read.
        """


class PipelineEncoder:
    """Encodes with the ``encode_prompt`` of a Stable Diffusion or SDXL pipeline.

    Args:
        pipeline: a loaded diffusers pipeline of one of the two families.
        device: where its text encoders are.
    """

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        self._pipeline = pipeline
        self._device = device
        names = ("tokenizer", "tokenizer_2")
        found = (getattr(pipeline, name, None) for name in names)
        self._tokenizers = [tokenizer for tokenizer in found if tokenizer is not None]
        self._is_xl = len(self._tokenizers) == 2

    @property
    def max_prompt_tokens(self) -> int:
        """Most tokens of a prompt, without the two that mark its ends."""
        return min(int(tokenizer.model_max_length) for tokenizer in self._tokenizers) - 2

    def encode(self, requests: Sequence[ImageRequest]) -> list[Conditioning]:
        """Return one conditioning per request; see :class:`PromptEncoder`."""
        for request in requests:
            self._check_length(request.prompt, "prompt")
            self._check_length(request.negative_prompt, "negative_prompt")
        guided = [request for request in requests if request.uses_guidance]
        positive = self._embed([request.prompt for request in requests])
        negative = self._embed([request.negative_prompt for request in guided])
        if self._is_xl and self._pipeline.config.force_zeros_for_empty_prompt:
            negative = [
                pair if request.negative_prompt else tuple(torch.zeros_like(part) for part in pair)
                for pair, request in zip(negative, guided, strict=True)
            ]
        negative_by_id = {r.request_id: n for r, n in zip(guided, negative, strict=True)}
        return [
            self._conditioning(request, embeds, negative_by_id.get(request.request_id))
            for request, embeds in zip(requests, positive, strict=True)
        ]

    def _check_length(self, prompt: str, param: str) -> None:
        for tokenizer in self._tokenizers:
            count = len(tokenizer(prompt, truncation=False, verbose=False).input_ids) - 2
            if count > self.max_prompt_tokens:
                raise InvalidRequest(
                    f"The parameter {param!r} has {count} tokens; this model reads at most "
                    f"{self.max_prompt_tokens}, some 4 characters each. Shorten it.",
                    param=param,
                    code="string_above_max_length",
                )

    def _embed(self, prompts: Sequence[str]) -> list[tuple[Tensor, ...]]:
        """Return per prompt ``(embeds,)``, or ``(embeds, pooled)`` for SDXL."""
        if not prompts:
            return []
        encoded = self._pipeline.encode_prompt(
            prompt=list(prompts),
            device=self._device,
            num_images_per_prompt=1,
            do_classifier_free_guidance=False,
        )
        parts = (encoded[0], encoded[2]) if self._is_xl else (encoded[0],)
        return [tuple(part[index] for part in parts) for index in range(len(prompts))]

    def _conditioning(
        self,
        request: ImageRequest,
        embeds: tuple[Tensor, ...],
        negative: tuple[Tensor, ...] | None,
    ) -> Conditioning:
        if not self._is_xl:
            return Conditioning(embeds[0], negative[0] if negative else None)
        size = [request.height_px, request.width_px]
        return Conditioning(
            prompt_embeds=embeds[0],
            negative_embeds=negative[0] if negative else None,
            pooled_embeds=embeds[1],
            negative_pooled_embeds=negative[1] if negative else None,
            time_ids=torch.tensor(
                [*size, 0, 0, *size], dtype=embeds[0].dtype, device=embeds[0].device
            ),
        )
