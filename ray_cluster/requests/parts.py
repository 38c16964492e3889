"""What requests are made of: samplers, output, add-ons, edits, cascades."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ray_cluster.policies.edits import Box
from ray_cluster.policies.types import CascadeEntry, EntryReason

NoiseSampler = Literal["ddim", "euler", "euler_ancestral", "dpmpp_2m", "lcm", "pndm"]
FlowSampler = Literal["flow_match_euler"]
SamplerName = Literal[NoiseSampler, FlowSampler]
GuidanceKind = Literal["rows", "empty", "embedded", "none"]
"""A second row for a negative prompt, or for an empty one alone; an input of the model; nothing."""
"""Guidance by a second row per step, by an input of the model, or none."""
EditKind = Literal["any", "masked", "none"]
"""Images from text and any edits; edits with a mask alone; or images from text alone."""
EngineKind = Literal["steps", "diffusers"]
"""Own steps of any mixture of images, or calls of diffusers' pipelines, one image each."""
ImageFormat = Literal["png", "jpeg", "webp"]
# for models trained on noise schedules, and for those trained on flows
SAMPLER_NAMES: tuple[NoiseSampler, ...] = get_args(NoiseSampler)
FLOW_SAMPLER_NAMES: tuple[FlowSampler, ...] = get_args(FlowSampler)
# diffusers has no formula of theirs for models that predict the sample
_NOT_FOR_SAMPLE = ("euler_ancestral", "pndm")
# beyond it, nothing but noise comes of any model
MAX_GUIDANCE_SCALE = 30
IMAGE_FORMATS: tuple[ImageFormat, ...] = get_args(ImageFormat)


def size_of(text: str) -> tuple[int, int]:
    """Return width and height in pixels of a size written as WIDTHxHEIGHT."""
    width, _, height = text.partition("x")
    return int(width), int(height)


def noise_samplers(prediction_type: str) -> tuple[NoiseSampler, ...]:
    """Return the samplers for a model of a noise schedule, by what it predicts."""
    if prediction_type == "sample":
        return tuple(name for name in SAMPLER_NAMES if name not in _NOT_FOR_SAMPLE)
    return SAMPLER_NAMES


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """How the finished pixels are encoded.

    Attributes:
        image_format: container of the reply.
        compression: quality in percent for jpeg and webp (100 is best); None for png.
        metadata: whether a png carries its recipe as text chunks.
        is_stored: whether the image goes to the result store instead of into the reply.
        num_previews: how many previews are sent before it is done, in the same format.
    """

    image_format: ImageFormat = "png"
    compression: int | None = None
    metadata: bool = True
    is_stored: bool = False
    num_previews: int = 0


@dataclass(frozen=True, slots=True)
class BlobRef:
    """An image that a client has sent, by its SHA-256 in hexadecimal digits.

    Its bytes are in the input store, and nowhere else.
    """

    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ControlNetUse:
    """A ControlNet, and the map that it follows.

    Attributes:
        name: under which the ControlNet is served.
        image: the map, a png of the size of the image that the model makes.
        scale: weight of its residuals.
        start: share of the steps before which it does nothing, in [0, 1).
        end: share of the steps after which it does nothing, above ``start`` and at most 1.
        preprocess: name of the detector that made the map of what the client sent.
        sent_sha256: digest of what the client sent.
        is_picture: whether that is the map, and has the colours of a picture.
    """

    name: str
    image: BlobRef
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0
    preprocess: str = "none"
    sent_sha256: str = ""
    is_picture: bool = False

    def is_active(self, step_index: int, num_steps: int) -> bool:
        """Whether it does something in a step, as diffusers decides it."""
        first, last = step_index / num_steps, (step_index + 1) / num_steps
        return self.scale != 0 and not (first < self.start or last > self.end)


@dataclass(frozen=True, slots=True)
class LoraUse:
    """A LoRA by name, and its weight.

    Attributes:
        lora_id: the one that the name meant when the call came.
    """

    name: str
    scale: float = 1.0
    lora_id: str = ""


@dataclass(frozen=True, slots=True)
class AddOns:
    """What is added to the base model for a request.

    Attributes:
        lora_start_step: how many of its first steps are taken without its LoRAs; fewer than all.
    """

    controls: tuple[ControlNetUse, ...] = ()
    loras: tuple[LoraUse, ...] = ()
    lora_start_step: int = 0

    @property
    def lora_set(self) -> str:
        """The same for the same LoRAs at the same scales, in any order; empty without any."""
        return "+".join(sorted(f"{use.lora_id or use.name}@{use.scale!r}" for use in self.loras))


@dataclass(frozen=True, slots=True)
class Edit:
    """What a request changes in a template, if it does not start from noise alone.

    The template is brought to the size of the canvas; what the window shows of it is brought to the
    request's size, on which the model works, and what comes of that goes back into the window.

    Attributes:
        image: the template.
        canvas_px: width and height of the image that is returned.
        schedule_steps: steps of the whole schedule, of which the request's are the last.
        mask: what to edit (where it is transparent), of the template's size; None for everywhere.
        mask_ratio: share of the window that the mask leaves to edit, in (0, 1].
        strength: how much of the noise schedule is run, in (0, 1].
        paste_back: whether pixels outside the mask become the template's again.
        feather_px: width of the border within the mask over which the edit is blended in.
        window: what the model sees of the canvas; None for all of it.
    """

    image: BlobRef
    canvas_px: tuple[int, int]
    schedule_steps: int
    mask: BlobRef | None = None
    mask_ratio: float = 1.0
    strength: float = 1.0
    paste_back: bool = True
    feather_px: int = 0
    window: Box | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """A picture that the model looks at beside the prompt.

    Attributes:
        image: as it was sent.
        width_px: of what the model sees of it, which is scaled to that; a multiple of the model's
            ``size_multiple_px``.
        height_px: likewise.
    """

    image: BlobRef
    width_px: int
    height_px: int


@dataclass(frozen=True, slots=True)
class LightStage:
    """How the light model of a cascade makes an image, before a discriminator looks at it.

    Attributes:
        discriminator: name of the one that does.
        schedule_steps: of an edit, those of the whole schedule; None for text to image.
    """

    model: str
    discriminator: str
    num_steps: int
    guidance_scale: float
    sampler: SamplerName
    embeds_guidance: bool = False
    schedule_steps: int | None = None


# how many times an image may be enlarged
UPSCALE_FACTORS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class UpscaleUse:
    """How a finished image is enlarged, and by whom.

    Attributes:
        name: of the upscaler.
        factor: how many times as wide and as high it gets.
    """

    name: str
    factor: int


@dataclass(frozen=True, slots=True)
class CascadeUse:
    """The cascade that a request was sent to.

    Attributes:
        name: the model that the call names.
        light: the first stage; None where one model alone makes the image.
        entry: which model makes the first image.
        reason: why the image is routed, or made by one model alone.
        requires_heavy: whether a light image that is to be made anew is never the answer, however
            long that takes.
    """

    name: str
    light: LightStage | None = None
    entry: CascadeEntry = "light"
    reason: EntryReason = "routed"
    requires_heavy: bool = False
