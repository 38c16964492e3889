"""Requests that look at pictures, through the engine and through diffusers' own pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ray_cluster.engine.models.loading import LoadedModel, encode_sent, start_states
from ray_cluster.engine.step.state import RequestState
from ray_cluster.imaging.edit_images import EditPixels, SentPixels
from ray_cluster.requests import BlobRef, ImageRequest, Reference
from tests.engine.dits import SIZES_PX, DiTReference, dit_request
from tests.engine.edits import template

# none, and others than the images'
SEEN_PX = (None, (64, 96), (96, 96), (32, 32))


def looking(size_px: tuple[int, int] | None, request_id: str = "a", **changes: Any) -> ImageRequest:
    """A request that looks at a picture of a size, if one is given."""
    whole = dit_request(request_id, **changes)
    seen = () if size_px is None else (Reference(BlobRef("7c" * 32, 1), *size_px),)
    return replace(whole, references=seen)


def pictures(one: ImageRequest) -> SentPixels:
    """What a request looks at: other pictures for other seeds."""
    sizes = [(seen.width_px, seen.height_px) for seen in one.references]
    return SentPixels(None, tuple(template(size, one.seed) for size in sizes))


def start_looking(
    model: LoadedModel, requests: Sequence[ImageRequest], edits: Sequence[EditPixels | None] = ()
) -> list[RequestState]:
    """Return states before the first step, pictures encoded one by one."""
    sent = [
        replace(pictures(one), edit=edit)
        for one, edit in zip(requests, edits or [None] * len(requests), strict=True)
    ]
    with torch.inference_mode():
        latents = [encode_sent(model, [one])[0] for one in sent]
        return start_states(model, requests, now_s=0.0, latents=latents)


def company() -> list[ImageRequest]:
    """Of all sizes, with pictures of several sizes or none, and prompts of any length."""
    return [
        looking(
            SEEN_PX[index % 4],
            f"r{index}",
            prompt=f"{'large ' * index}red circle",
            num_steps=2 + index % 2,
            seed=100 + index,
            width_px=SIZES_PX[index % 3][0],
            height_px=SIZES_PX[index % 3][1],
            guidance_scale=(1.0, 2.0, 4.0)[index % 3],
        )
        for index in range(8)
    ]


class LookingReference(DiTReference):
    """diffusers' Kontext pipeline, for one request at a time."""

    def _run(
        self, requests: Sequence[ImageRequest], output_type: str, watch: list[Tensor] | None = None
    ) -> Any:
        assert watch is None
        (one,) = requests
        seen = pictures(one).references
        images = self.pipeline(
            image=torch.from_numpy(seen[0]).permute(2, 0, 1)[None] / 255 if seen else None,
            prompt=one.prompt,
            height=one.height_px,
            width=one.width_px,
            max_area=one.width_px * one.height_px,
            num_inference_steps=one.num_steps,
            guidance_scale=one.guidance_scale,
            generator=torch.Generator().manual_seed(one.seed),
            output_type=output_type,
            _auto_resize=False,
        ).images
        if output_type != "latent":
            return images
        factor = self.pipeline.vae_scale_factor
        return self.pipeline._unpack_latents(images, one.height_px, one.width_px, factor)
