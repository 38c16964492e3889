"""From the fields of an edit, and what its images are, to image requests."""

from __future__ import annotations

import math
from dataclasses import replace

from ray_cluster.api.advice import missing, wrong
from ray_cluster.api.input.schemas import ImageEditRequest, ImageVariationRequest
from ray_cluster.api.input.sent_images import CheckedImages
from ray_cluster.api.resolve.fidelity import check_unmeasured
from ray_cluster.api.resolve.generation import canvas_size, resolve
from ray_cluster.api.resolve.references import (
    check_number,
    looks_at_pictures,
    references_of,
    resolve_looking,
)
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.errors import InvalidRequest
from ray_cluster.policies.edits import (
    Box,
    EditGeometry,
    SizeBounds,
    SizePx,
    computed_steps,
    edit_geometry,
)
from ray_cluster.policies.fidelity import Terms
from ray_cluster.requests import FLOW_SAMPLER_NAMES, Edit, ImageFormat, ImageRequest, ModelProfile

# by whether there is a mask, and what input_fidelity says
_STRENGTH = {
    (True, "low"): 1.0,
    (True, "high"): 0.8,
    (False, "low"): 0.8,
    (False, "high"): 0.4,
}
_VARIATION_STRENGTH = 0.6
# to which one that would do is rounded up
_STRENGTH_DIGITS = 1000
# longest side that a container holds; no png reaches its own bound
_LONGEST_PX = {"webp": 16383, "jpeg": 65500}


def resolve_edit(
    fields: ImageEditRequest,
    images: CheckedImages,
    profile: ModelProfile,
    limits: LimitsConfig,
    *,
    is_stored: bool = False,
) -> tuple[ImageRequest, ...]:
    """Return one request per image; errors and arguments are those of ``resolve``.

    A mask of everything, at full strength, is text to image. A model that looks at pictures does
    that to all of them, beside the edit of the first; without a mask and a strength there is none.

    Raises:
        InvalidRequest: also for a mask of another size than the image, for what the model makes no
            edits with, and for a strength that leaves no step.
    """
    check_number(len(images.pictures), "image", profile, is_masked=images.mask is not None)
    is_looking = looks_at_pictures(fields, images, profile)
    if not is_looking:
        _check_images(images, profile)
    _check_fields(fields, images)
    if is_looking:
        return resolve_looking(fields, images, profile, limits, is_stored=is_stored)
    strength = _strength(fields, images)
    geometry = _geometry(fields, images, profile)
    # fewer steps were measured for images from text alone
    own = replace(profile, fewer_steps=None, outer_blocks=None)
    work = "{}x{}".format(*geometry.work_px)
    wanted = fields.model_copy(update={"size": work})
    bases = resolve(wanted, own, limits, is_stored=is_stored)
    if images.mask is not None:
        looked_at = references_of(images, profile)
        bases = tuple(replace(one, references=looked_at) for one in bases)
    check_format(bases[0].output.image_format, geometry.canvas_px)
    is_whole = images.mask_facts is not None and images.mask_facts.ratio == 1
    if is_whole and strength == 1 and geometry.is_plain and profile.edits == "any":
        return bases
    edit = Edit(
        image=images.image,
        canvas_px=geometry.canvas_px,
        schedule_steps=bases[0].num_steps,
        mask=images.mask,
        mask_ratio=_mask_ratio(images, geometry),
        strength=strength,
        paste_back=fields.paste_back is not False,
        feather_px=fields.feather_px or 0,
        window=geometry.window,
    )
    return tuple(_edited(one, edit, profile) for one in bases)


def _check_images(images: CheckedImages, profile: ModelProfile) -> None:
    if profile.edits == "none" and profile.max_references:
        what = f"{profile.model}, which looks at whole images and changes no part of one"
        if images.mask is None:
            raise wrong("model", f"is {what}; for variations choose another")
        raise wrong("mask", f"is for {what}", "leave out")
    if profile.edits == "none":
        what = f"is {profile.model}, which makes images from text alone here"
        raise wrong("model", what, "any edits")
    facts = images.mask_facts
    if facts is None:
        if profile.edits == "masked":
            raise missing("mask", f"{profile.model} is an inpainting model: it fills in masks")
        return
    if (facts.width_px, facts.height_px) != images.size_px:
        own, other = f"{facts.width_px}x{facts.height_px}", "{}x{}".format(*images.size_px)
        what = f"has {own} pixels, and 'image' {other}; both must have the same size"
        raise wrong("mask", what)


def _check_fields(fields: ImageEditRequest, images: CheckedImages) -> None:
    """Refuse what would change nothing, and what was not measured for edits."""
    # what a value says that is the default changes nothing, and is no mistake
    given = {
        "feather_px": bool(fields.feather_px),
        "paste_back": fields.paste_back is False,
        "crop": fields.crop is not None,
    }
    for name, is_given in given.items():
        if is_given and images.mask is None:
            raise wrong(name, "changes nothing without a mask: everything is made anew", "mask")
    if fields.paste_back is False:
        if fields.crop is not None:
            what = "changes nothing together with 'crop', which pastes back"
            raise wrong("paste_back", what, "pastes back")
        if fields.feather_px:
            raise wrong("feather_px", "changes nothing while paste_back is false", "paste back")
    if fields.strength is not None and fields.input_fidelity is not None:
        what = "and 'strength' say the same, 'strength' more exactly"
        raise wrong("input_fidelity", what, "leave one out")
    check_unmeasured(fields, "for images from text alone", "an edit")


def check_format(image_format: ImageFormat, canvas_px: SizePx) -> None:
    """Refuse a format that cannot hold the image: what is cropped may be of any size."""
    longest = _LONGEST_PX.get(image_format)
    if longest is not None and max(canvas_px) > longest:
        what = "holds sides of at most {} px; the image that is returned has {}x{}"
        what = f"is {image_format!r}, which {what.format(longest, *canvas_px)}"
        raise wrong("output_format", what, "container")


def _strength(fields: ImageEditRequest, images: CheckedImages) -> float:
    if fields.strength is not None:
        return float(fields.strength)
    if isinstance(fields, ImageVariationRequest) and fields.input_fidelity != "high":
        return _VARIATION_STRENGTH
    return _STRENGTH[images.mask is not None, fields.input_fidelity or "low"]


def _geometry(
    fields: ImageEditRequest, images: CheckedImages, profile: ModelProfile
) -> EditGeometry:
    bounds = SizeBounds(
        multiple_px=profile.size_multiple_px,
        min_px=profile.min_px,
        max_px=profile.max_px,
        native_px=(profile.default_width_px, profile.default_height_px),
    )
    own = edit_geometry(images.size_px, bounds, crop_to=_crop_to(fields, images, images.size_px))
    # a recipe repeats it, on the model's grid or not
    if fields.size == "{}x{}".format(*own.canvas_px):
        return own
    size_px = canvas_size(fields, profile)
    if size_px is None:
        return own
    crop_to = _crop_to(fields, images, size_px)
    return edit_geometry(images.size_px, bounds, size_px=size_px, crop_to=crop_to)


def _crop_to(fields: ImageEditRequest, images: CheckedImages, canvas_px: SizePx) -> Box | None:
    """Return the bounds of the mask on the canvas; None for an edit that is not cropped."""
    if fields.crop is None:
        return None
    assert images.mask_facts is not None, "a crop without a mask was refused"
    return _scaled(images.mask_facts.box, images.size_px, canvas_px)


def _scaled(box: Box, size_px: SizePx, to_px: SizePx) -> Box:
    """Return a box of an image in the image's pixels at another size; no pixel of it is lost."""
    across, down = to_px[0] / size_px[0], to_px[1] / size_px[1]
    left, top = math.floor(box.left_px * across), math.floor(box.top_px * down)
    right = min(to_px[0], math.ceil((box.left_px + box.width_px) * across))
    bottom = min(to_px[1], math.ceil((box.top_px + box.height_px) * down))
    return Box(left, top, right - left, bottom - top)


def _mask_ratio(images: CheckedImages, geometry: EditGeometry) -> float:
    if images.mask_facts is None:
        return 1.0
    canvas = geometry.canvas_px
    window = canvas if geometry.window is None else geometry.window.size_px
    share = (canvas[0] * canvas[1]) / (window[0] * window[1])
    return min(1.0, images.mask_facts.ratio * share)


def _edited(request: ImageRequest, edit: Edit, profile: ModelProfile) -> ImageRequest:
    is_flow = request.sampler in FLOW_SAMPLER_NAMES
    num_steps = computed_steps(request.num_steps, edit.strength, is_flow=is_flow)
    if num_steps == 0:
        raise _no_step(request, edit, profile)
    return replace(
        request, num_steps=num_steps, terms=_terms(request.terms, edit, is_flow), edit=edit
    )


def _no_step(request: ImageRequest, edit: Edit, profile: ModelProfile) -> InvalidRequest:
    is_flow = request.sampler in FLOW_SAMPLER_NAMES
    # of any strength, however near to 0: as far as the sampler goes
    longer = range(request.num_steps, profile.max_steps_by_sampler[request.sampler] + 1)
    enough = (steps for steps in longer if computed_steps(steps, edit.strength, is_flow=is_flow))
    least = next(enough, None)
    steps = "" if least is None else f"num_inference_steps to at least {least}, or "
    strength = math.ceil(_STRENGTH_DIGITS / request.num_steps) / _STRENGTH_DIGITS
    return wrong(
        "strength",
        f"is {edit.strength:g}, which leaves none of the {request.num_steps} steps of the schedule",
        more=f"Raise {steps}the strength to at least {strength:g}.",
    )


def _terms(terms: Terms | None, edit: Edit, is_flow: bool) -> Terms | None:
    """Return terms in steps that are computed; nothing was measured of edits."""
    if terms is None:
        return None
    most, fewest = (
        computed_steps(steps, edit.strength, is_flow=is_flow)
        for steps in (terms.num_steps, terms.fewest_steps)
    )
    return replace(terms, num_steps=most, fewest_steps=max(1, fewest), known=None)
