"""What is done with the finished images of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ray_cluster.api.advice import wrong
from ray_cluster.api.input.schemas import ImageGenerationRequest
from ray_cluster.api.resolve.edits import check_format
from ray_cluster.config.loading import Document
from ray_cluster.errors import InvalidRequest
from ray_cluster.requests import UPSCALE_FACTORS, ImageRequest, UpscaleUse


def with_last_stages(
    requests: Sequence[ImageRequest], fields: ImageGenerationRequest, document: Document
) -> tuple[ImageRequest, ...]:
    """Return requests whose images are enlarged, if that is asked for.

    Raises:
        InvalidRequest: nobody enlarges so, or the images would be too large.
    """
    factor, upscaler = fields.upscale, next(iter(document.upscalers), None)
    if factor is None or factor == 1:
        return tuple(requests)
    if upscaler is None:
        raise wrong("upscale", f"is {factor}, but this service has no upscaler", "leave out")
    use = UpscaleUse(upscaler.name, factor)
    found = tuple(replace(one, upscale=use) for one in requests)
    for one in found:
        check_format(one.output.image_format, one.output_px)
        if max(one.output_px) > upscaler.max_px:
            raise _too_large(one, factor, upscaler.max_px)
    return found


def _too_large(request: ImageRequest, factor: int, most_px: int) -> InvalidRequest:
    (width, height), (wide, high) = request.canvas_px, request.output_px
    what = f"is {factor}, which makes {wide}x{high} of {width}x{height}; the longest side is "
    fits = [one for one in UPSCALE_FACTORS[1:] if one * max(width, height) <= most_px]
    smaller = f"Set it to {fits[-1]}, or give" if fits else "Leave it out, or give"
    advice = f"{smaller} a smaller 'size', of at most {most_px // factor} px a side."
    return wrong("upscale", f"{what}{most_px} px at most", more=advice)
