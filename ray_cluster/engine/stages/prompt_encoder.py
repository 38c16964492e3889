"""The encode stage: prompts to conditioning, in batches, with the model's own text encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ray_cluster.engine.adapters.deltas import LayerDeltas, RowDeltas, adding, bound_deltas
from ray_cluster.engine.adapters.grouping import Delta
from ray_cluster.engine.files.folders import text_pipeline
from ray_cluster.engine.files.prompt_limits import PromptReader, clip_length, prompt_lengths
from ray_cluster.engine.files.weights import is_text_encoder
from ray_cluster.engine.models.wide_layers import widen
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.errors import ModelUnsupported
from ray_cluster.models.prompt_tokens import packed, too_long
from ray_cluster.requests import ImageRequest, PromptTokenizer


@dataclass(frozen=True, slots=True, eq=False)
class PromptDeltas:
    """What a request adds to the layers of text encoders.

    Attributes:
        parts: text encoders, each with its own.
    """

    parts: tuple[tuple[nn.Module, LayerDeltas], ...]


class PromptEncoder(Protocol):
    """Turns prompts into conditioning."""

    @property
    def max_prompt_tokens(self) -> int:
        """Most tokens of a prompt, without those that mark its ends."""

    @property
    def tokenizers(self) -> tuple[PromptTokenizer, ...]:
        """The tokenizers that count, for processes without the model; none if they need Python."""

    def bind(self, deltas: Mapping[str, Mapping[str, Delta]]) -> PromptDeltas:
        """Return deltas for the prompts of requests.

        Args:
            deltas: by text encoder, such as ``text_encoder_2``, and the path of a layer in it.

        Raises:
            ModelUnsupported: there is no such encoder or layer.
        """

    def encode(
        self, requests: Sequence[ImageRequest], deltas: Sequence[PromptDeltas | None] = ()
    ) -> list[Conditioning]:
        """Return one conditioning per request.

        Args:
            deltas: of each request; may be left out where none has any.

        Raises:
            InvalidRequest: a prompt is longer than the text encoder can read.
        """


@dataclass(frozen=True, slots=True)
class _Family:
    """How a pipeline's ``encode_prompt`` is called, and what it returns.

    Attributes:
        options: arguments beside the prompts.
        pooled_at: where its result has the pooled embeddings; None for a family without.
        takes_negative: whether guidance takes an embedding of the negative prompt.
        has_time_ids: whether the image's size is a condition.
    """

    options: dict[str, Any]
    pooled_at: int | None = None
    takes_negative: bool = True
    has_time_ids: bool = False


_ALONE = {"do_classifier_free_guidance": False}
_FLUX = _Family({"prompt_2": None}, pooled_at=1, takes_negative=False)
_FAMILIES = {
    "StableDiffusionPipeline": _Family(_ALONE),
    "StableDiffusionXLPipeline": _Family(_ALONE, pooled_at=2, has_time_ids=True),
    "StableDiffusion3Pipeline": _Family(_ALONE | {"prompt_2": None, "prompt_3": None}, pooled_at=2),
    "FluxPipeline": _FLUX,
    "FluxKontextPipeline": _FLUX,
    "FluxFillPipeline": _FLUX,
}


class PipelineEncoder:
    """Encodes with the ``encode_prompt`` of a pipeline of one of the families covered.

    Args:
        pipeline: a loaded diffusers pipeline.
        device: where its text encoders are.
    """

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        self._pipeline = pipeline
        self._device = device
        self._family = _FAMILIES[text_pipeline(type(pipeline).__name__)]
        for name, part in pipeline.components.items():
            if is_text_encoder(name) and part is not None:
                widen(part, device)
        self._limits = _token_limits(pipeline)

    @property
    def max_prompt_tokens(self) -> int:
        """Most tokens of a prompt, without those that mark its ends."""
        return min(limit for _, limit in self._limits)

    @property
    def tokenizers(self) -> tuple[PromptTokenizer, ...]:
        """Those that count; see :class:`PromptEncoder`."""
        if not all(hasattr(one, "backend_tokenizer") for one, _ in self._limits):
            return ()
        # of two that are equal one is enough
        return tuple(
            dict.fromkeys(
                packed(one.backend_tokenizer.to_str(), limit) for one, limit in self._limits
            )
        )

    def bind(self, deltas: Mapping[str, Mapping[str, Delta]]) -> PromptDeltas:
        """Return deltas for the prompts of requests; see :class:`PromptEncoder`."""
        parts = []
        for name, layers in deltas.items():
            encoder = getattr(self._pipeline, name, None)
            if encoder is None:
                kind = type(self._pipeline).__name__
                raise ModelUnsupported(f"this {kind} has no {name} that deltas could change")
            parts.append((encoder, bound_deltas(encoder, layers)))
        return PromptDeltas(tuple(parts))

    def encode(
        self, requests: Sequence[ImageRequest], deltas: Sequence[PromptDeltas | None] = ()
    ) -> list[Conditioning]:
        """Return one conditioning per request; see :class:`PromptEncoder`."""
        for request in requests:
            self._check_length(request.prompt, "prompt")
            self._check_length(request.negative_prompt or "", "negative_prompt")
        owners = deltas or [None] * len(requests)
        takes_negative = self._family.takes_negative
        places = [
            index for index, one in enumerate(requests) if takes_negative and one.uses_guidance
        ]
        guided = [requests[index] for index in places]
        positive = self._embed([request.prompt for request in requests], owners)
        negative = self._embed(
            [request.negative_prompt or "" for request in guided],
            [owners[index] for index in places],
        )
        if self._pipeline.config.get("force_zeros_for_empty_prompt", False):
            negative = [
                tuple(torch.zeros_like(part) for part in pair)
                if request.negative_prompt is None
                else pair
                for pair, request in zip(negative, guided, strict=True)
            ]
        negative_by_id = {r.request_id: n for r, n in zip(guided, negative, strict=True)}
        return [
            self._conditioning(request, embeds, negative_by_id.get(request.request_id))
            for request, embeds in zip(requests, positive, strict=True)
        ]

    def _check_length(self, prompt: str, param: str) -> None:
        for tokenizer, limit in self._limits:
            marks = tokenizer.num_special_tokens_to_add()
            count = len(tokenizer(prompt, truncation=False, verbose=False).input_ids) - marks
            if count > limit:
                raise too_long(param, count, limit)

    def _embed(
        self, prompts: Sequence[str], owners: Sequence[PromptDeltas | None]
    ) -> list[tuple[Tensor, ...]]:
        """Return per prompt ``(embeds,)``, or ``(embeds, pooled)`` for families that have it."""
        if not prompts:
            return []
        owned = [{} if own is None else dict(own.parts) for own in owners]
        with ExitStack() as stack:
            for encoder in dict.fromkeys(encoder for own in owned for encoder in own):
                rows = RowDeltas.of([own.get(encoder) for own in owned])
                stack.enter_context(adding(rows, encoder))
            encoded = self._pipeline.encode_prompt(
                prompt=list(prompts),
                device=self._device,
                num_images_per_prompt=1,
                **self._family.options,
            )
        pooled_at = self._family.pooled_at
        parts = (encoded[0],) if pooled_at is None else (encoded[0], encoded[pooled_at])
        return [tuple(part[index] for part in parts) for index in range(len(prompts))]

    def _conditioning(
        self,
        request: ImageRequest,
        embeds: tuple[Tensor, ...],
        negative: tuple[Tensor, ...] | None,
    ) -> Conditioning:
        if len(embeds) == 1:
            return Conditioning(embeds[0], negative[0] if negative else None)
        ids = None
        if self._family.has_time_ids:
            size = [request.height_px, request.width_px]
            ids = torch.tensor([*size, 0, 0, *size], dtype=embeds[0].dtype, device=embeds[0].device)
        return Conditioning(
            prompt_embeds=embeds[0],
            negative_embeds=negative[0] if negative else None,
            pooled_embeds=embeds[1],
            negative_pooled_embeds=negative[1] if negative else None,
            time_ids=ids,
        )


def _token_limits(pipeline: Any) -> list[tuple[Any, int]]:
    """Return the tokenizers that count with the most tokens of a prompt, without marks.

    A CLIP tokenizer that knows no limit gets its text encoder's, to which the pipeline fills up.
    """
    readers = []
    for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
        tokenizer = getattr(pipeline, name, None)
        encoder = getattr(pipeline, name.replace("tokenizer", "text_encoder"), None)
        if tokenizer is None or encoder is None:
            continue
        positions = getattr(encoder.config, "max_position_embeddings", None)
        reader = PromptReader(name, type(encoder).__name__, tokenizer.model_max_length, positions)
        readers.append(reader)
        if positions is not None:
            tokenizer.model_max_length = clip_length(tokenizer.model_max_length, positions)
    lengths = prompt_lengths(text_pipeline(type(pipeline).__name__), readers)
    limits = []
    for name, length in lengths.items():
        tokenizer = getattr(pipeline, name)
        limits.append((tokenizer, length - tokenizer.num_special_tokens_to_add()))
    return limits
