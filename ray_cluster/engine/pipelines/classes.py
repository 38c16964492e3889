"""What is known of diffusers' pipelines without loading one: their signatures, and a small table.

A guidance scale has one meaning at our interfaces: ``negative + scale * (positive - negative)``,
off at 1 and below. What each class takes is in :data:`_GUIDANCE`; classes that are not there and
have ``guidance_scale`` mean the same by it (read in each of diffusers 0.42's pipelines).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import diffusers

from ray_cluster.errors import ModelUnsupported
from ray_cluster.requests import GuidanceKind, ImageRequest

# rewriting of prompts and sizes: the image is what was asked for
_SWITCHED_OFF = ("use_resolution_binning", "clean_caption", "use_pe", "enable_prompt_rewrite")
_NEEDED = ("prompt", "width", "height", "num_inference_steps", "generator", "output_type")
# that make something else, need an image whatever their signature says, or have more than one kind
# of guidance, which no scale turns off
_OTHERS = (
    *("Control", "Edit", "Img2Img", "Inpaint", "Fill", "Layered", "Adapter", "Pix2Pix", "Omni"),
    *("Video", "Prior", "Combined", "SuperResolution", "LDM3D", "GLIGEN", "UniDiffuser"),
    *("PAG", "SAG", "Semantic", "Ideogram4"),
)
# what stands for no negative prompt, as the models' cards have it
_NO_NEGATIVE = " "


@dataclass(frozen=True, slots=True)
class Guidance:
    """How a pipeline is guided.

    Attributes:
        kind: ``rows`` where a negative prompt counts.
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
    "FluxKontextPipeline": Guidance("embedded"),
    "FluxPipeline": Guidance("embedded"),
    "Krea2Pipeline": Guidance("rows", offset=1.0),
    "QwenImage21Pipeline": Guidance("rows", "true_cfg_scale"),
    "QwenImagePipeline": Guidance("rows", "true_cfg_scale"),
    "ZImagePipeline": Guidance("rows", offset=1.0),
}


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """A pipeline class that makes an image from text.

    Attributes:
        defaults: of its call's arguments.
        callback: the argument that is called at the ends of steps; None if there is none.
    """

    kind: type[Any]
    defaults: Mapping[str, Any]
    guidance: Guidance
    callback: Literal["callback_on_step_end", "callback"] | None

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.kind.__name__

    @property
    def default_scale(self) -> float:
        """Our guidance scale of a call that gives none."""
        found = self.defaults.get(self.guidance.argument or "")
        return 1.0 if found is None else float(found) + self.guidance.offset

    def arguments(self, request: ImageRequest) -> dict[str, Any]:
        """Return the arguments of a request's call, but for its generator and callback."""
        return {
            "prompt": request.prompt,
            "width": request.width_px,
            "height": request.height_px,
            "num_inference_steps": request.num_steps,
            "output_type": "np",
            **{name: False for name in _SWITCHED_OFF if name in self.defaults},
            **self.guidance.arguments(request),
        }


def pipeline_facts(name: str, index: Mapping[str, Any]) -> PipelineFacts:
    """Return what is known of a pipeline class by its name.

    Args:
        index: ``model_index.json`` of a folder.

    Raises:
        ModelUnsupported: diffusers has no such class, or it makes no image from text alone.
    """
    kind = getattr(diffusers, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, diffusers.DiffusionPipeline)):
        raise ModelUnsupported(f"diffusers {diffusers.__version__} has no pipeline {name}")
    parameters = inspect.signature(kind.__call__).parameters
    needs = {key for key, one in parameters.items() if one.default is one.empty}
    needs -= {"self", "args", "kwargs", "prompt"}
    lacks = [one for one in _NEEDED if one not in parameters]
    if lacks or needs or "num_frames" in parameters or any(one in name for one in _OTHERS):
        why = f"it needs {', '.join(sorted(needs))}" if needs else "it is made for something else"
        raise ModelUnsupported(f"{name} makes no image from text alone: {why}")
    guidance = _guidance(name, parameters, index)
    callback = next((one for one in _CALLBACKS if one in parameters), None)
    defaults = {key: one.default for key, one in parameters.items()}
    return PipelineFacts(kind, defaults, guidance, callback)


_CALLBACKS: tuple[Literal["callback_on_step_end", "callback"], ...] = (
    "callback_on_step_end",
    "callback",
)


def _guidance(name: str, parameters: Mapping[str, Any], index: Mapping[str, Any]) -> Guidance:
    if index.get("is_distilled"):
        return Guidance("none", None)
    if name in _GUIDANCE:
        return _GUIDANCE[name]
    if "guidance_scale" not in parameters:
        raise ModelUnsupported(f"what guides a {name} is not known: it takes no guidance_scale")
    return Guidance("rows" if "negative_prompt" in parameters else "embedded")
