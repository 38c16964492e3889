"""How many of an image's first steps are taken without its LoRAs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ray_cluster.api.input.schemas import ImageGenerationRequest
from ray_cluster.api.resolve.fidelity import check_unmeasured
from ray_cluster.api.resolve.loras import BasedLora
from ray_cluster.errors import InvalidRequest
from ray_cluster.requests import ImageRequest, ModelProfile


def start_profile(
    fields: ImageGenerationRequest, loras: Sequence[BasedLora], profile: ModelProfile
) -> ModelProfile:
    """Return what a model accepts of a call that names these LoRAs.

    Raises:
        InvalidRequest: it asks for a fidelity that is not offered with LoRAs, or says when LoRAs
            start and names none.
    """
    if not loras:
        if fields.lora_start_step is not None:
            raise InvalidRequest(
                "The parameter 'lora_start_step' changes nothing without LoRAs; name some in "
                "'loras', or leave it out.",
                "lora_start_step",
            )
        return replace(profile, lora_start=None)
    mode = fields.fidelity or "exact"
    if profile.lora_start is None or profile.lora_start.share(mode) is None:
        check_unmeasured(fields, "without LoRAs", "an image with them")
        return replace(profile, fewer_steps=None)
    # under load, fewer steps yet: what images lose by that is not known at all
    without = fields.model_copy(update={"fidelity": None})
    check_unmeasured(without, "without LoRAs", "an image with them")
    if fields.lora_start_step is not None:
        raise InvalidRequest(
            f"The parameters 'lora_start_step' and 'fidelity' ({mode}) both say when LoRAs start; "
            "leave one of them out.",
            "lora_start_step",
        )
    return profile


def with_start(
    fields: ImageGenerationRequest, requests: Sequence[ImageRequest], profile: ModelProfile
) -> tuple[ImageRequest, ...]:
    """Return a call's requests with the number of their steps before their LoRAs start.

    It follows from the call and the settings alone: the same call makes the same image, however
    long its LoRAs take to arrive.

    Raises:
        InvalidRequest: they would start after the last step.
    """
    num_steps = requests[0].num_steps
    share = (
        None if profile.lora_start is None else profile.lora_start.share(fields.fidelity or "exact")
    )
    start = fields.lora_start_step or 0 if share is None else int(share * num_steps)
    if start >= num_steps:
        raise InvalidRequest(
            f"The parameter 'lora_start_step' must be less than the steps of the image, "
            f"{num_steps}; given {start}. Lower it, or leave the LoRAs out.",
            "lora_start_step",
        )
    if start == 0:
        return tuple(requests)
    return tuple(
        replace(one, add_ons=replace(one.add_ons, lora_start_step=start)) for one in requests
    )
