"""Pictures that a model looks at: how many it takes, in which sizes it sees them, what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ray_cluster.api.advice import wrong
from ray_cluster.api.input.schemas import (
    MAX_INPUT_IMAGES,
    ImageEditRequest,
    ImageGenerationRequest,
    ImageVariationRequest,
)
from ray_cluster.api.input.sent_images import CheckedImages
from ray_cluster.api.resolve.generation import canvas_size, resolve
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.policies.edits import SizeBounds, SizePx, edit_geometry, reference_size
from ray_cluster.requests import ImageRequest, ModelProfile, Reference


def max_input_images(profile: ModelProfile) -> int:
    """Return how many images an edit by a model may have."""
    return max(min(profile.max_references, MAX_INPUT_IMAGES), int(profile.edits != "none"))


def max_masked_input_images(profile: ModelProfile) -> int:
    """Return how many with a mask, the one that it is for included; 0 if it takes no mask."""
    if profile.edits == "none":
        return 0
    return min(max_input_images(profile), profile.max_masked_references or MAX_INPUT_IMAGES)


def check_number(
    num_images: int,
    param: str,
    profile: ModelProfile,
    profiles: Mapping[str, ModelProfile] | None = None,
    *,
    is_masked: bool = False,
) -> None:
    """Refuse more images than a model takes.

    Args:
        profiles: of all models, for advice.
        is_masked: whether the first of them is edited with a mask.

    Raises:
        InvalidRequest: with both numbers, and the models that take so many.
    """
    # a model that takes no mask refuses it later
    is_masked = is_masked and profile.edits != "none"
    most = max_masked_input_images(profile) if is_masked else max_input_images(profile)
    if num_images <= max(1, most):
        return
    takes = f"takes {most}" if most else "makes images from text alone here"
    if is_masked:
        takes += " with a mask, the one that is edited among them"
    others = [name for name, one in (profiles or {}).items() if max_input_images(one) >= num_images]
    advice = f"So many are taken by: {', '.join(others)}." if others else ""
    if profiles is not None and not others:
        advice = "No model here takes so many: send fewer (GET /v1/models has max_input_images)."
    raise wrong(param, f"holds {num_images} images; {profile.model} {takes}", more=advice)


def looks_at_pictures(
    fields: ImageGenerationRequest, images: CheckedImages, profile: ModelProfile
) -> bool:
    """Whether a model looks at the images of an edit, instead of starting from the first of them.

    Raises:
        InvalidRequest: the call says how far to go from one image, and the model does not start
            from one, or has several.
    """
    assert isinstance(fields, ImageEditRequest), "only edits have images"
    is_variation = isinstance(fields, ImageVariationRequest)
    if not profile.max_references or images.mask is not None or is_variation:
        return False
    if fields.strength is None:
        return profile.edits != "masked"
    if profile.edits == "none" or images.more:
        what = f"says how far to go from an image; {profile.model} looks at whole images"
        raise wrong("strength", f"{what}{', if it gets several' * bool(images.more)}", "leave out")
    return False


def references_of(images: CheckedImages, profile: ModelProfile) -> tuple[Reference, ...]:
    """Return all pictures of an edit as its model looks at them; none if it does not.

    Raises:
        InvalidRequest: one of them is too long a strip for the model.
    """
    if not profile.max_references:
        return ()
    most = profile.max_reference_ratio
    for index, one in enumerate(images.pictures):
        if most is not None and max(one.size_px) > most * min(one.size_px):
            what = "is {}x{}".format(*one.size_px)
            what += f", a longer strip than the {most}:1 that {profile.model} looks at"
            raise wrong(images.param_of(index), what, more="Cut it.")
    return tuple(Reference(one.ref, *_seen(one.size_px, profile)) for one in images.pictures)


def resolve_looking(
    fields: ImageEditRequest,
    images: CheckedImages,
    profile: ModelProfile,
    limits: LimitsConfig,
    *,
    is_stored: bool,
) -> tuple[ImageRequest, ...]:
    """Return one request per image whose model looks at pictures; see ``resolve``."""
    pictures = references_of(images, profile)
    size_px = canvas_size(fields, profile) or _size_of_first(images.size_px, profile)
    wanted = fields.model_copy(update={"size": "{}x{}".format(*size_px)})
    # fewer steps were measured for images from text alone
    own = replace(profile, fewer_steps=None, outer_blocks=None)
    bases = resolve(wanted, own, limits, is_stored=is_stored)
    return tuple(replace(one, references=pictures) for one in bases)


def _seen(size_px: SizePx, profile: ModelProfile) -> SizePx:
    return reference_size(
        size_px,
        profile.size_multiple_px,
        profile.max_reference_px,
        profile.min_reference_px,
        least_side_px=profile.min_reference_side_px,
        most_ratio=profile.max_reference_ratio,
    )


def _size_of_first(size_px: SizePx, profile: ModelProfile) -> SizePx:
    """Return the size in which the model sees the first picture, or the nearest that it makes."""
    native_px = (profile.default_width_px, profile.default_height_px)
    bounds = SizeBounds(profile.size_multiple_px, profile.min_px, profile.max_px, native_px)
    return edit_geometry(_seen(size_px, profile), bounds).work_px
