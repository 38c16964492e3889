"""What is known of diffusers' pipelines without loading one: their signatures, and a small table.

A guidance scale has one meaning at our interfaces: ``negative + scale * (positive - negative)``,
off at 1 and below. What each class takes is in :data:`_GUIDANCE`; classes that are not there and
have ``guidance_scale`` mean the same by it (read in each of diffusers 0.42's pipelines).
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import diffusers
import numpy as np
from PIL import Image

from ray_cluster.errors import ModelUnsupported
from ray_cluster.imaging.edit_images import SentPixels
from ray_cluster.requests import GuidanceKind, ImageRequest

# rewriting of prompts and sizes: the image is what was asked for
_SWITCHES: Mapping[str, bool] = {
    "clean_caption": False,
    "enable_prompt_rewrite": False,
    "skip_text_cleaning": True,
    "use_pe": False,
    "use_resolution_binning": False,
}
_NEEDED = ("prompt", "width", "height", "num_inference_steps", "generator", "output_type")
# parts of names of classes that are not called, by why
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "it makes no single picture": ("Video", "Latte", "Layered", "LDM3D"),
    "what steers it is a picture of another kind": ("Control", "Adapter", "Pix2Pix", "GLIGEN"),
    "take the folder of its text-to-image pipeline, which edits": ("Img2Img", "Inpaint"),
    "it starts from a picture in a way of its own": (
        *("Edit", "Fill", "SuperResolution", "Refiner"),
    ),
    "it is one of several pipelines that make a picture together": ("Prior", "Combined"),
    "it has more than one kind of guidance, which no scale turns off": (
        *("PAG", "SAG", "Semantic", "UniDiffuser", "Ideogram4"),
    ),
    "its checker is downloaded when it is loaded": ("Cosmos",),
    "it takes several steps at once": ("Paradigms",),
    "it has models of classes of its own": ("AltDiffusion", "LDMText", "UnCLIP", "Versatile"),
}
# what a class imports only when it is called
_PACKAGES: Mapping[str, str] = {
    "OmniGenPipeline": "torchvision",
    "PRXPipeline": "ftfy",
    "PRXPixelPipeline": "ftfy",
}
# pixels that sides are multiples of, where that is more than a patch of latent pixels
MULTIPLES: Mapping[str, int] = {
    "GlmImagePipeline": 32,
    "Kandinsky3Pipeline": 64,
    "QwenImage21Pipeline": 32,
}
# what stands for no negative prompt, as the models' cards have it
_NO_NEGATIVE = " "


Callback = Literal["callback_on_step_end", "callback"]


@dataclass(frozen=True, slots=True)
class Guidance:
    """How a pipeline is guided.

    Attributes:
        kind: ``rows`` where a negative prompt counts, ``empty`` where the second row has none.
        argument: that takes the scale; None if nothing does.
        offset: what our scale is less than by.
    """

    kind: GuidanceKind
    argument: str | None = "guidance_scale"
    offset: float = 0.0

    def arguments(self, request: ImageRequest) -> dict[str, Any]:
        """Return the arguments of a call that are about guidance."""
        scale = request.guidance_scale
        if self.argument is None:
            return {}
        if self.kind == "embedded":
            return {self.argument: scale}
        found: dict[str, Any] = {self.argument: max(1.0, scale) - self.offset}
        if scale > 1:
            negative = request.negative_prompt
            if self.argument == "true_cfg_scale":
                # without any, it takes no second row
                negative = negative or _NO_NEGATIVE
            found |= {"negative_prompt": negative} if negative else {}
        return found


_GUIDANCE: Mapping[str, Guidance] = {
    "DreamLiteMobilePipeline": Guidance("none", None),
    "Flux2KleinKVPipeline": Guidance("none", None),
    "Flux2KleinPipeline": Guidance("empty"),
    "FluxKontextPipeline": Guidance("embedded"),
    "FluxPipeline": Guidance("embedded"),
    "GlmImagePipeline": Guidance("empty"),
    "HunyuanImagePipeline": Guidance("none", None),
    "Krea2Pipeline": Guidance("rows", offset=1.0),
    "OmniGenPipeline": Guidance("empty"),
    "QwenImage21Pipeline": Guidance("rows", "true_cfg_scale"),
    "QwenImageEditPipeline": Guidance("rows", "true_cfg_scale"),
    "QwenImageEditPlusPipeline": Guidance("rows", "true_cfg_scale"),
    "QwenImagePipeline": Guidance("rows", "true_cfg_scale"),
    "ZImageOmniPipeline": Guidance("rows", offset=1.0),
    "ZImagePipeline": Guidance("rows", offset=1.0),
}


@dataclass(frozen=True, slots=True)
class Looks:
    """How a pipeline takes the pictures that its model looks at.

    Attributes:
        most: what its model is made for; the pipeline may take more.
        are_needed: whether it makes nothing without one.
        is_list: whether it takes several, as a list.
        is_fixed: whether it scales all to one number of pixels, smaller ones, too.
        min_side_px, max_ratio: of what it takes; diffusers fails at others.
    """

    most: int
    are_needed: bool = False
    is_list: bool = True
    is_fixed: bool = False
    min_side_px: int = 1
    max_ratio: int | None = None


# ``Flux2ImageProcessor.check_image_input``
_flux2 = partial(Looks, min_side_px=64, max_ratio=8)
# ``smart_resize`` of Qwen2-VL takes 200, after the sides were rounded to multiples of 32
_QWEN_RATIO = 100
# by what the models' cards say
_LOOKS: Mapping[str, Looks] = {
    "Flux2KleinKVPipeline": _flux2(4),
    "Flux2KleinPipeline": _flux2(4),
    "Flux2Pipeline": _flux2(6),
    "FluxKontextPipeline": Looks(1, is_list=False, is_fixed=True),
    "Kandinsky5I2IPipeline": Looks(1, are_needed=True, is_list=False),
    "QwenImage21Pipeline": Looks(4, is_fixed=True, max_ratio=_QWEN_RATIO),
    "QwenImageEditPipeline": Looks(
        1, are_needed=True, is_list=False, is_fixed=True, max_ratio=_QWEN_RATIO
    ),
    "QwenImageEditPlusPipeline": Looks(3, are_needed=True, is_fixed=True, max_ratio=_QWEN_RATIO),
    "ZImageOmniPipeline": _flux2(4),
}
# tokens that a pipeline reads whose call does not say it
_READS: Mapping[str, int] = {
    "HunyuanDiTPipeline": 256,
    "IFPipeline": 77,
    "Kandinsky3Pipeline": 128,
}


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """A pipeline class that makes an image from text, or from pictures and a text.

    Attributes:
        defaults: of its call's arguments.
        callback: the argument that is called at the ends of steps; None if there is none.
        looks: None for one whose model looks at nothing.
        edits: the classes of the same components that start from an image, without and with a
            mask; None where there is none that takes masks, with which it edits everything, too.
    """

    kind: type[Any]
    defaults: Mapping[str, Any]
    guidance: Guidance
    callback: Callback | None
    looks: Looks | None = None
    edits: tuple[type[Any], type[Any]] | None = None

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.kind.__name__

    @property
    def default_scale(self) -> float:
        """Our guidance scale of a call that gives none."""
        found = self.defaults.get(self.guidance.argument or "")
        return 1.0 if found is None else float(found) + self.guidance.offset

    @property
    def max_tokens(self) -> int | None:
        """Most tokens that it reads of a prompt; None if only its loaded components say it."""
        found = self.defaults.get("max_sequence_length") or _READS.get(self.name)
        return None if found is None else int(found)

    @property
    def most_beside_edit(self) -> int:
        """Pictures that its model looks at beside the one that is edited."""
        taken = {} if self.edits is None else inspect.signature(self.edits[1].__call__).parameters
        return int("image_reference" in taken)

    def set_size(self, pipeline: Any, request: ImageRequest) -> None:
        """Let a pipeline that makes one area, or a few sizes, make the one asked for."""
        if hasattr(pipeline, "resolutions"):
            pipeline.resolutions = [request.size_px]
        if self.name == "HiDreamImagePipeline":
            # a little more, as it rounds down
            side_px = math.sqrt(math.prod(request.size_px)) * (1 + 1e-9)
            pipeline.default_sample_size = side_px / pipeline.vae_scale_factor

    def class_of(self, sent: SentPixels) -> type[Any]:
        """Return the class that makes a request that comes with these images."""
        if sent.edit is None:
            return self.kind
        assert self.edits is not None, "the runner has refused edits"
        return self.edits[sent.edit.mask is not None]

    def arguments(self, request: ImageRequest, sent: SentPixels) -> dict[str, Any]:
        """Return the arguments of a request's call, but for its generator and callback."""
        found = {
            "prompt": request.prompt,
            "width": request.width_px,
            "height": request.height_px,
            "num_inference_steps": request.schedule_steps,
            "output_type": "np",
            **{name: one for name, one in _SWITCHES.items() if name in self.defaults},
            **self.guidance.arguments(request),
        }
        if request.schedule_steps != 2 and "intermediate_timesteps" in self.defaults:
            # of two steps, the second's; refused beside other numbers
            found["intermediate_timesteps"] = None
        if "max_area" in self.defaults:
            # else it makes other sizes
            found["max_area"] = request.width_px * request.height_px
        if sent.edit is not None and request.edit is not None:
            found |= {"image": Image.fromarray(sent.edit.work), "strength": request.edit.strength}
            mask = sent.edit.mask
            mask = np.ones(sent.edit.work.shape[:2], np.bool_) if mask is None else mask
            found["mask_image"] = Image.fromarray(mask).convert("L")
            # the first is the one that is edited, which the class shows its model itself
            for one in sent.references[1:]:
                found["image_reference"] = Image.fromarray(one)
            taken = inspect.signature(self.class_of(sent).__call__).parameters
            return {name: value for name, value in found.items() if name in taken}
        if sent.references and self.looks is not None:
            pictures = [Image.fromarray(one) for one in sent.references]
            found["image"] = pictures if self.looks.is_list else pictures[0]
        return found


def pipeline_facts(name: str, index: Mapping[str, Any]) -> PipelineFacts:
    """Return what is known of a pipeline class by its name.

    Args:
        index: ``model_index.json`` of a folder.

    Raises:
        ModelUnsupported: diffusers has no such class, or its calls make no image from text, or
            from pictures and text; says why.
    """
    kind = getattr(diffusers, name, None)
    is_pipeline = inspect.isclass(kind) and issubclass(kind, diffusers.DiffusionPipeline)
    # what stands for a class whose packages are not installed is none
    if kind is None or not (is_pipeline or hasattr(kind, "_backends")):
        raise ModelUnsupported(f"diffusers {diffusers.__version__} has no pipeline {name}")
    parameters = inspect.signature(kind.__call__).parameters
    if why := _why_not(name, kind, parameters):
        raise ModelUnsupported(f"{name} of diffusers {diffusers.__version__} is not run: {why}")
    guidance = _guidance(name, parameters, index)
    callback: Callback | None = next((one for one in get_args(Callback) if one in parameters), None)
    defaults = {key: one.default for key, one in parameters.items()}
    edits = _editing(kind, name, callback)
    return PipelineFacts(kind, defaults, guidance, callback, _LOOKS.get(name), edits)


def _why_not(name: str, kind: type[Any], parameters: Mapping[str, Any]) -> str | None:
    """Return why calls of a class make no image here; None if they do."""
    packages = [*getattr(kind, "_backends", ()), *filter(None, [_PACKAGES.get(name)])]
    if missing := [one for one in packages if importlib.util.find_spec(one) is None]:
        return f"install {', '.join(missing)}, which it needs"
    needs = {key for key, one in parameters.items() if one.default is one.empty}
    needs -= {"self", "args", "kwargs", "prompt"} | ({"image"} if name in _LOOKS else set())
    if needs:
        return f"it needs {', '.join(sorted(needs))}"
    if "num_frames" in parameters:
        return "it makes videos"
    if lacks := [one for one in _NEEDED if one not in parameters]:
        return f"it takes no {', '.join(lacks)}, so that calls cannot say the size"
    whys = (why for why, parts in _OTHERS.items() if any(one in name for one in parts))
    return None if name in _LOOKS else next(whys, None)


def _editing(
    kind: type[Any], name: str, callback: str | None
) -> tuple[type[Any], type[Any]] | None:
    """Return the two classes that edit with a pipeline's components, if one takes masks."""
    root, made_of = name.removesuffix("Pipeline"), _components(kind)
    found: list[type[Any]] = []
    for suffix in ("Img2ImgPipeline", "InpaintPipeline"):
        other = getattr(diffusers, root + suffix, None)
        if other is not None and _components(other) == made_of:
            taken = inspect.signature(other.__call__).parameters
            if {"image", "strength", "generator", callback} <= taken.keys():
                found.append(other)
    masking = next((one for one in found if one.__name__.endswith("InpaintPipeline")), None)
    return None if masking is None else (found[0], masking)


def _components(kind: type[Any]) -> set[str]:
    parameters = inspect.signature(kind.__init__).parameters.values()
    return {one.name for one in parameters if not isinstance(one.default, bool | int)}


def _guidance(name: str, parameters: Mapping[str, Any], index: Mapping[str, Any]) -> Guidance:
    if index.get("is_distilled"):
        return Guidance("none", None)
    if name in _GUIDANCE:
        return _GUIDANCE[name]
    if "guidance_scale" not in parameters:
        raise ModelUnsupported(f"what guides a {name} is not known: it takes no guidance_scale")
    return Guidance("rows" if "negative_prompt" in parameters else "embedded")
