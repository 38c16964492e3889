"""What is done with the finished images of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ray_cluster.api.advice import wrong
from ray_cluster.api.input.schemas import ImageGenerationRequest
from ray_cluster.api.resolve.edits import check_format
from ray_cluster.config.loading import Document
from ray_cluster.requests import UPSCALE_FACTORS, ImageRequest, UpscaleUse


def with_last_stages(
    requests: Sequence[ImageRequest], fields: ImageGenerationRequest, document: Document
) -> tuple[ImageRequest, ...]:
    """Return requests whose images are enlarged by the first upscaler, if that is asked for.

    Raises:
        InvalidRequest: nobody enlarges so, or the images would be too large.
    """
    factor, upscalers = fields.upscale, document.upscalers
    if factor is None or factor == 1:
        return tuple(requests)
    if factor not in UPSCALE_FACTORS:
        raise wrong("upscale", f"must be one of {UPSCALE_FACTORS}; given {factor}")
    if not upscalers:
        raise wrong("upscale", f"is {factor}, but this service has no upscaler", "leave out")
    use, most = UpscaleUse(upscalers[0].name, factor), upscalers[0].max_px
    found = tuple(replace(one, upscale=use) for one in requests)
    for one in found:
        check_format(one.output.image_format, one.output_px)
        if max(one.output_px) > most:
            size = "{}x{}".format(*one.output_px)
            what = f"would make an image of {size}; the longest side is {most} px at most"
            raise wrong("upscale", what, "smaller size")
    return found
