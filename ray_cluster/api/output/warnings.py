"""What replies say of a call that was carried out, and probably not as it was meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ray_cluster.requests import ImageRequest

# what other programs take out of a prompt; here all of it is words
_LORA = re.compile(
    r"<(?:lora|lyco|hypernet):([^:<>]{1,100})(?::([0-9.+-]{1,10}))?[^<>]{0,40}>", re.IGNORECASE
)
_WEIGHT = re.compile(r"\([^()]{1,100}:\s*(?:[0-2](?:\.[0-9]{0,3})?|\.[0-9]{1,3})\)")


def warnings_of(request: ImageRequest) -> list[str]:
    """Return them, each once."""
    return list(dict.fromkeys(_warnings(request)))


def _warnings(request: ImageRequest) -> Iterator[str]:
    for name, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt)):
        if found := _LORA.search(text or ""):
            entry = f"{{'name': {found[1]!r}, 'scale': {found[2] or 1}}}"
            yield (
                f"{found[0]!r} in '{name}' was read as words: a prompt loads nothing. Send "
                f"'loras': [{entry}]; GET /v1/loras lists them."
            )
        if found := _WEIGHT.search(text or ""):
            yield (
                f"{found[0]!r} in '{name}' was read as words: a prompt has no weights. Put what "
                "matters first, or say it in other words."
            )
    for lora in request.add_ons.loras:
        if lora.scale == 0:
            yield f"The LoRA {lora.name!r} has a scale of 0, and changes nothing."
    for use in request.add_ons.controls:
        if use.scale == 0:
            yield f"The ControlNet {use.name!r} has a weight of 0, and changes nothing."
        elif use.is_picture:
            yield (
                f"The ControlNet {use.name!r} follows the image as it is, which has the colours of "
                "a picture and not of a map. Unless it is made for pictures, have a map made with "
                "'preprocess' (GET /v1/controlnets lists detectors)."
            )
