"""From valid fields to image requests: the model's bounds, defaults, and what fits together."""

from __future__ import annotations

import secrets
from dataclasses import replace

from ray_cluster.api.advice import wrong
from ray_cluster.api.input.schemas import MAX_SEED, ImageGenerationRequest
from ray_cluster.api.input.validation import describe
from ray_cluster.api.resolve.fidelity import Setting, resolve_steps
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.requests import ImageRequest, ModelProfile, OutputSpec, SamplerName, size_of


def resolve(
    fields: ImageGenerationRequest,
    profile: ModelProfile,
    limits: LimitsConfig,
    *,
    is_stored: bool = False,
) -> tuple[ImageRequest, ...]:
    """Return one request per image.

    Args:
        profile: the model's, with the pool's defaults.
        is_stored: whether the images go to the result store.

    Raises:
        InvalidRequest: a value is out of the model's or the service's bounds, or changes nothing
            beside the others.
    """
    num_images = _num_images(fields, limits)
    # only a variation's may be empty
    if fields.prompt:
        _check_prompt("prompt", fields.prompt, limits)
    _check_prompt("negative_prompt", fields.negative_prompt or "", limits)
    default_px = (profile.default_width_px, profile.default_height_px)
    width_px, height_px = canvas_size(fields, profile) or default_px
    sampler = _sampler(fields, profile)
    num_steps = _num_steps(fields, profile, sampler)
    guidance_scale = _guidance_scale(fields, profile)
    setting = Setting(
        profile.model,
        profile.fewer_steps,
        sampler,
        guidance_scale,
        num_steps,
        profile.outer_blocks,
        profile.lora_start,
    )
    num_steps, terms = resolve_steps(fields, setting)
    output = replace(_output(fields, profile), is_stored=is_stored)
    first_seed = _first_seed(fields, num_images)
    return tuple(
        ImageRequest(
            request_id=f"img-{secrets.token_hex(16)}",
            model=profile.model,
            prompt=fields.prompt,
            negative_prompt=fields.negative_prompt,
            width_px=width_px,
            height_px=height_px,
            num_steps=num_steps,
            guidance_scale=guidance_scale,
            sampler=sampler,
            seed=first_seed + index,
            priority=fields.priority or 0,
            slo_s=fields.slo_s,
            when_late=fields.when_late or "accept",
            terms=terms,
            output=output,
            embeds_guidance=profile.guidance == "embedded",
        )
        for index in range(num_images)
    )


def _num_images(fields: ImageGenerationRequest, limits: LimitsConfig) -> int:
    count = 1 if fields.n is None else fields.n
    # a group is admitted as a whole: one that is larger than the queue would never fit
    most = min(limits.max_images_per_request, limits.max_queued_images)
    if count > most:
        raise wrong("n", f"must be at most {most}; given {describe(count)}", "ask for less")
    return count


def _check_prompt(name: str, text: str, limits: LimitsConfig) -> None:
    if name == "prompt" and not text.strip():
        raise wrong(name, "is blank; say what the image shows")
    if len(text) > (most := limits.max_prompt_chars):
        what = f"has {len(text)} characters; at most {most} are allowed"
        raise wrong(name, what, "shorten", code="string_above_max_length")
    if "\0" in text:
        raise wrong(name, "holds a NUL character", "remove")


def canvas_size(fields: ImageGenerationRequest, profile: ModelProfile) -> tuple[int, int] | None:
    """Return width and height in pixels that a call asks for; None for ``auto``.

    Raises:
        InvalidRequest: the model does not make that size.
    """
    if fields.size is None or fields.size == "auto":
        return None
    size = size_of(fields.size)
    widths, heights = (_nearest_sides(side, profile) for side in size)
    if [size] == [(width, height) for width in widths for height in heights]:
        return size
    near = [f"{width}x{height}" for width in widths for height in heights]
    raise wrong(
        "size",
        f"is {size[0]}x{size[1]}, but {profile.model} makes sides of {profile.min_px} to "
        f"{profile.max_px} px in multiples of {profile.size_multiple_px}",
        more=f"Nearest: {', '.join(near)}.",
    )


def _nearest_sides(side_px: int, profile: ModelProfile) -> list[int]:
    """Return the side itself where it is allowed, else the allowed one or two next to it."""
    step = profile.size_multiple_px
    lowest = -(-profile.min_px // step) * step
    highest = profile.max_px // step * step
    below = side_px // step * step
    above = -(-side_px // step) * step
    return sorted({min(max(side, lowest), highest) for side in (below, above)})


def _sampler(fields: ImageGenerationRequest, profile: ModelProfile) -> SamplerName:
    sampler = fields.sampler or profile.default_sampler
    if sampler not in profile.max_steps_by_sampler:
        allowed = ", ".join(profile.max_steps_by_sampler)
        what = f"is {sampler!r}, which {profile.model} does not offer; allowed: {allowed}"
        raise wrong("sampler", what)
    return sampler


def _num_steps(fields: ImageGenerationRequest, profile: ModelProfile, sampler: SamplerName) -> int:
    most = profile.max_steps_by_sampler[sampler]
    given = fields.num_inference_steps
    if given is None:
        # the sampler that was asked for may take fewer than the default
        return min(profile.default_num_steps, most)
    if given > most:
        where = f"with sampler {sampler!r} on {profile.model}"
        what = f"must be from 1 to {most} {where}; given {describe(given)}"
        raise wrong("num_inference_steps", what)
    return given


def _guidance_scale(fields: ImageGenerationRequest, profile: ModelProfile) -> float:
    _check_guidance(fields, profile)
    scale = fields.guidance_scale
    if scale is None:
        scale = profile.default_guidance_scale
    if fields.negative_prompt and scale <= 1:
        what = f"changes nothing while guidance is off (guidance_scale {scale:g})"
        raise wrong("negative_prompt", what, "guidance")
    return float(scale)


def _check_guidance(fields: ImageGenerationRequest, profile: ModelProfile) -> None:
    """Refuse what a model without this kind of guidance would ignore."""
    if profile.guidance == "none" and (fields.guidance_scale or 0) > 1:
        what = f"changes nothing: {profile.model} is made to do without guidance"
        raise wrong("guidance_scale", what, "leave out")
    if profile.guidance != "rows" and fields.negative_prompt:
        what = f"changes nothing: {profile.model} is not guided away from a prompt of its own"
        raise wrong("negative_prompt", what, "leave out")


def _num_previews(fields: ImageGenerationRequest, profile: ModelProfile) -> int:
    if fields.partial_images and profile.engine == "diffusers":
        what = f"is {fields.partial_images}, but {profile.model} is run call by call"
        raise wrong("partial_images", f"{what}, and shows no previews", "leave out")
    return fields.partial_images or 0


def _output(fields: ImageGenerationRequest, profile: ModelProfile) -> OutputSpec:
    num_previews = _num_previews(fields, profile)
    image_format = fields.output_format or "png"
    compression, metadata = fields.output_compression, fields.metadata
    if image_format == "png":
        if compression not in {None, 100}:
            what = "changes nothing with png, which is lossless"
            raise wrong("output_compression", what, "lossless")
        return OutputSpec("png", None, metadata is not False, num_previews=num_previews)
    if metadata:
        what = f"is true, but {image_format} has none: only a png carries its recipe"
        raise wrong("metadata", what, "recipe")
    return OutputSpec(
        image_format, 100 if compression is None else compression, False, num_previews=num_previews
    )


def _first_seed(fields: ImageGenerationRequest, num_images: int) -> int:
    if fields.seed is None:
        # 2**53 - 1 is the largest integer that every JSON client can send back unchanged
        return secrets.randbelow(2**53 - num_images)
    if fields.seed > (most := MAX_SEED - (num_images - 1)):
        what = f"must be at most {most} with n {num_images}, as image i takes seed + i"
        raise wrong("seed", f"{what}; given {fields.seed}")
    return fields.seed
