"""What comes before and after the steps of a group's images: done by one of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ray_cluster.engine.adapters.grouping import Delta
from ray_cluster.engine.groups.ranks import RankDeltas
from ray_cluster.engine.stages.autoencoder import Mask, Pixels
from ray_cluster.engine.stages.prompt_encoder import PromptDeltas
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.errors import ModelUnsupported
from ray_cluster.protocol.groups import REQUESTS, Decode, Encode, EncodeImages
from ray_cluster.replica.frames import framed
from ray_cluster.replica.group.ranks import GroupRanks
from ray_cluster.requests import ImageRequest, PromptTokenizer


@dataclass(frozen=True, slots=True)
class RankPrompts(PromptDeltas):
    """What a request adds to text encoders that are on a rank."""

    bound: RankDeltas = field(kw_only=True)


class RemoteEncoder:
    """A :class:`~ray_cluster.engine.stages.prompt_encoder.PromptEncoder` on a rank."""

    def __init__(
        self, ranks: GroupRanks, tokenizers: tuple[PromptTokenizer, ...], max_prompt_tokens: int
    ) -> None:
        self._ranks = ranks
        self.tokenizers = tokenizers
        self.max_prompt_tokens = max_prompt_tokens

    def bind(self, deltas: Mapping[str, Mapping[str, Delta]]) -> PromptDeltas:
        """Return deltas for the prompts of requests."""
        flat = {
            f"{encoder}:{path}": one
            for encoder, layers in deltas.items()
            for path, one in layers.items()
        }
        bound = self._ranks.bind(flat, has_prompts=True)
        return RankPrompts((), bound=bound)

    def encode(
        self, requests: Sequence[ImageRequest], deltas: Sequence[PromptDeltas | None] = ()
    ) -> list[Conditioning]:
        """Return one conditioning per request."""
        own = [one.bound.number if isinstance(one, RankPrompts) else None for one in deltas]
        numbers = tuple(own or [None] * len(requests))
        content = np.frombuffer(REQUESTS.encode(tuple(requests)), dtype=np.uint8)
        found = self._ranks.call(lambda call: Encode(call, numbers), (content,))
        parts: list[dict[str, Tensor]] = [{} for _ in requests]
        for key, tensor in found.items():
            index, _, name = key.partition(".")
            parts[int(index)][name] = tensor
        return list(map(Conditioning.of, parts))


class RemoteImages:
    """An :class:`~ray_cluster.engine.stages.autoencoder.ImageEncoder` on a rank."""

    def __init__(self, ranks: GroupRanks, factor: int) -> None:
        self._ranks = ranks
        self.factor = factor

    def encode(self, images: Sequence[Pixels], greyed: Sequence[Mask | None] = ()) -> list[Tensor]:
        """Return float32 latents ``[C, h, w]`` for each ``[H, W, 3]`` uint8, all of one size."""
        if any(one is not None for one in greyed):
            raise ModelUnsupported("a group has no model that sees what a mask spares")
        sent = framed({str(i): torch.from_numpy(np.array(one)) for i, one in enumerate(images)})
        found = self._ranks.call(lambda call: EncodeImages(call, sent.specs), sent.frames)
        return list(found.values())


class RemoteDecoder:
    """An :class:`~ray_cluster.engine.stages.autoencoder.ImageDecoder` on a rank."""

    def __init__(self, ranks: GroupRanks) -> None:
        self._ranks = ranks

    def decode(self, latents: Sequence[Tensor]) -> list[Pixels]:
        """Return ``[H, W, 3]`` uint8 pixels for each ``[C, h, w]``, all of one size."""
        sent = framed({str(index): one for index, one in enumerate(latents)})
        found = self._ranks.call(lambda call: Decode(call, sent.specs), sent.frames)
        return [one.numpy() for one in found.values()]
