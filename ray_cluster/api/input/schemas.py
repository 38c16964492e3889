"""The fields of calls for images, from text and from images: OpenAI's and our extensions.

Of OpenAI's fields each is honoured, accepted with the values that change nothing, or refused by
name; the refused ones stand in :data:`REFUSED` with what to do instead.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from ray_cluster.api.input.controlnet_schema import ControlCards, ControlChoices
from ray_cluster.api.input.lora_schema import LoraCards, LoraChoices, LoraStarted, LoraStartStep
from ray_cluster.api.output.cascade_reply import CascadeCard
from ray_cluster.policies.fidelity import Concession, Fidelity
from ray_cluster.policies.steps.previews import MAX_PREVIEWS
from ray_cluster.policies.types import WhenLate
from ray_cluster.requests import MAX_GUIDANCE_SCALE, ImageFormat, SamplerName

MAX_SEED = 2**63 - 1
MAX_FEATHER_PX = 256
# of an edit
MAX_INPUT_IMAGES = 1
# all that OpenAI has documented for any of its models
Quality = Literal["auto", "standard", "hd", "low", "medium", "high", "xhigh", "max"]

# OpenAI's parameters that this service has no counterpart for -> what to do instead
REFUSED: dict[str, str] = {
    "complexity": "Set the effort with 'num_inference_steps'.",
    "svg": "Images are pixels here; leave it out.",
    "frame_count": "Animations are not made here; ask for several images with 'n'.",
    "frame_duration_ms": "Animations are not made here; leave it out.",
    "markup": "Say in the prompt what is to change, and where with a mask.",
}
_FOR_EDITS = "It belongs to edits: send it with an 'image' to /v1/images/edits, or in a job."
# those that only edits have
REFUSED_WITHOUT_IMAGE: dict[str, str] = dict.fromkeys(
    ("image", "images", "mask", "input_fidelity", "strength", "feather_px", "paste_back", "crop"),
    _FOR_EDITS,
)


class ImageGenerationRequest(BaseModel):
    """What one call asks for; null and absent mean the same."""

    # further fields, which hold images and are checked elsewhere
    image_fields: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra={
            "examples": [
                {"prompt": "a red circle on a blue background", "size": "64x64"},
                {
                    "model": "shapes-sd",
                    "prompt": "a large green triangle on a white background",
                    "negative_prompt": "blurry",
                    "n": 2,
                    "size": "96x64",
                    "seed": 7,
                    "num_inference_steps": 20,
                    "guidance_scale": 3.0,
                    "sampler": "euler",
                    "slo_s": 30,
                },
            ]
        },
    )

    prompt: str = Field(min_length=1, description="What the image shows; not empty.")
    model: str | None = Field(
        None,
        description="A model that `GET /v1/models` lists; the first configured one if absent. "
        "`BASE:NAME` is the model BASE with the LoRA NAME.",
    )
    n: int | None = Field(
        None, ge=1, description="Number of images, 1 if absent; image i is made with `seed + i`."
    )
    size: str | None = Field(
        None,
        pattern=r"^(auto|[1-9][0-9]{0,5}x[1-9][0-9]{0,5})$",
        description="`auto` or WIDTHxHEIGHT in pixels, in the steps and bounds of the model.",
    )
    response_format: Literal["b64_json", "url"] | None = Field(
        None,
        description="`b64_json` if absent: images come in the reply; `url`: links to them do, "
        "which hold for a while. Jobs always give links.",
    )
    output_format: ImageFormat | None = Field(
        None, description="How images are coded; `png` if absent."
    )
    output_compression: int | None = Field(
        None,
        ge=0,
        le=100,
        description="Quality of jpeg and webp in percent; 100 if absent. A png has 100.",
    )
    quality: Quality | None = Field(
        None,
        description="Of a cascade: `low` takes its light model alone, `high`, `hd`, `xhigh` and "
        "`max` its heavy one, all others either. It changes nothing else: `num_inference_steps` "
        "sets the effort.",
    )
    style: Literal["vivid", "natural"] | None = Field(
        None, description="Changes nothing: say the style in the prompt."
    )
    background: Literal["auto", "opaque"] | None = Field(
        None, description="Changes nothing: images are opaque."
    )
    moderation: Literal["auto", "low"] | None = Field(
        None, description="Changes nothing: nothing is moderated."
    )
    stream: bool | None = Field(
        None,
        description="Answer with events: previews, and the image at last. Needs `n: 1`.",
    )
    partial_images: int | None = Field(
        None,
        ge=0,
        le=MAX_PREVIEWS,
        description="Previews of the image on the way; fewer where there are not enough steps. "
        "With `stream`, or in a job, whose events link to them.",
    )
    user: str | None = Field(None, description="Changes nothing: nothing is kept of it.")
    safety_identifier: str | None = Field(
        None, description="Changes nothing: nothing is kept of it."
    )

    negative_prompt: str | None = Field(
        None, description="(extension) What the image shall not show; needs `guidance_scale` > 1."
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=MAX_SEED,
        description="(extension) The same seed and values give the same image; random if absent.",
    )
    num_inference_steps: int | None = Field(
        None, ge=1, description="(extension) Denoising steps, within the sampler's bound."
    )
    min_inference_steps: int | None = Field(
        None,
        ge=1,
        description="(extension) The image may be made with fewer steps, down to this number, "
        "if it or waiting requests of others would be late otherwise; the reply says how many.",
    )
    fidelity: Fidelity | None = Field(
        None,
        description="(extension) `exact` (the default): the image with all its steps. `balanced` "
        "and `fast`: with as few as the model needs for an SSIM of 0.95 or 0.85 to that image, "
        "where they were measured; `GET /v1/models` says for which.",
    )
    allow: list[Concession] | None = Field(
        None,
        description="(extension) What may be given up if it or waiting requests of others would be "
        "late otherwise: `fidelity`, down to `fast`; `steps`, down to `min_inference_steps`, which "
        "alone allows it, too. Nothing if absent.",
    )
    guidance_scale: float | None = Field(
        None,
        ge=0,
        le=MAX_GUIDANCE_SCALE,
        description="(extension) Weight of classifier-free guidance; off at 1 and below.",
    )
    sampler: SamplerName | None = Field(None, description="(extension) Sampler.")
    loras: LoraChoices = None
    lora_start_step: LoraStartStep = None
    controlnets: ControlChoices = None
    priority: int | None = Field(
        None,
        ge=-100,
        le=100,
        description="(extension) Higher is served first; 0 if absent. Above 0 it needs an API key "
        "with the role `operate`, where the service has keys.",
    )
    slo_s: float | None = Field(
        None,
        gt=0,
        le=86400,
        description="(extension) Seconds from arrival to the deadline; the service's if absent.",
    )
    when_late: WhenLate | None = Field(
        None,
        description="(extension) `refuse` answers 429 at once if the images would probably miss "
        "their deadline, or make others miss theirs, and 400 if even an idle service could not "
        "meet the deadline; `accept` (the default) makes them anyway.",
    )
    metadata: bool | None = Field(
        None,
        description="(extension) Whether a png carries its recipe as text; true if absent. Other "
        "formats carry none.",
    )


class ImageEditRequest(ImageGenerationRequest):
    """What one call that edits an image asks for, beside its image and its mask."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "a red circle on a blue background", "image": "iVBORw0KGgo..."},
                {
                    "prompt": "a red circle on a blue background",
                    "image": "data:image/png;base64,iVBORw0KGgo...",
                    "mask": "data:image/png;base64,iVBORw0KGgo...",
                    "feather_px": 4,
                    "crop": "auto",
                },
            ]
        }
    )
    image_fields: ClassVar[tuple[str, ...]] = ("image", "mask")

    strength: float | None = Field(
        None,
        gt=0,
        le=1,
        description="(extension) How much of the noise schedule is run: the higher, the less is "
        "kept of the image. 1 if absent with a mask, 0.8 without.",
    )
    input_fidelity: Literal["high", "low"] | None = Field(
        None,
        description="`low` is the strength if absent; `high` keeps more: 0.8 with a mask, 0.4 "
        "without.",
    )
    feather_px: int | None = Field(
        None,
        ge=0,
        le=MAX_FEATHER_PX,
        description="(extension) Width of the border within the mask over which the edit is "
        "blended into the image; 0 if absent.",
    )
    paste_back: bool | None = Field(
        None,
        description="(extension) Whether pixels outside the mask stay the image's own, bit for "
        "bit; true if absent.",
    )
    crop: Literal["auto"] | None = Field(
        None,
        description="(extension) `auto`: the model sees only the mask's surroundings, at their own "
        "size, and the edit is pasted back into the whole image.",
    )


class ImageVariationRequest(ImageEditRequest):
    """What one call for variations of an image asks for: an edit without a text, or a mask."""

    model_config = ConfigDict(json_schema_extra={"examples": []})
    image_fields: ClassVar[tuple[str, ...]] = ("image",)

    prompt: str = Field("", description="What the image shows; may be left out.")


class ImageTiming(BaseModel):
    """Seconds that one image took; waiting between stages counts to the later one."""

    queue_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    total_s: float = Field(description="From arrival at the dispatcher to completion.")


class ImageFidelity(BaseModel):
    """How near an image is to the exact one with the same seed, and what was done for it."""

    asked: Fidelity
    got: Fidelity | None = Field(
        description="The best mode whose promise its steps keep; null if it is not known of any."
    )
    steps_asked: int = Field(description="Of the exact image.")
    steps_computed: int = Field(description="Steps that were computed whole.")
    steps_reused: int = Field(
        description="Further steps, whose inner blocks' activations are those of an earlier step."
    )
    max_ssim_loss: float | None = Field(
        description="The budget: how much SSIM the worst image may lose, by what the call asked "
        "for and allowed; null where min_inference_steps sets no bound that is known."
    )
    budget_spent: float | None = Field(
        description="Share of that, by the worst image measured with so few steps; null if unknown."
    )


class EditCard(BaseModel):
    """How an image was edited."""

    strength: float = Field(description="How much of the noise schedule was run.")
    mask_ratio: float = Field(description="Share of what the model saw that was edited.")
    crop: list[int] | None = Field(
        description="What the model saw of the image: left, top, width and height in pixels; null "
        "for all of it."
    )


class ImageDetails(BaseModel):
    """What replies say of an image beside the image itself."""

    seed: int = Field(description="(extension) Makes this image again, with `n: 1`.")
    num_inference_steps: int = Field(
        description="(extension) Steps that it was made with; of an edit those of the whole "
        "schedule, of which its strength leaves the last."
    )
    fidelity: ImageFidelity = Field(description="(extension) How near it is to the exact image.")
    timing: ImageTiming | None = Field(
        None, description="(extension) Absent where a dispatcher died before it could be noted."
    )
    cascade: CascadeCard | None = Field(
        None, description="(extension) How a cascade made it; absent for a single model."
    )
    edit: EditCard | None = Field(
        None, description="(extension) How it was edited; absent for an image from text."
    )
    loras: LoraCards = None
    lora_start_step: LoraStarted = None
    controlnets: ControlCards = None


class GeneratedImage(ImageDetails):
    """One image."""

    b64_json: str | None = Field(None, description="The coded image in base64.")
    url: str | None = Field(None, description="Where the image is, with `response_format: url`.")


class Deadline(BaseModel):
    """(extension) The deadline of the call, and whether it was met."""

    slo_s: float = Field(description="Seconds from arrival to the deadline.")
    elapsed_s: float = Field(description="Seconds from arrival until the last image was done.")
    met: bool


class ImagesResponse(BaseModel):
    """OpenAI's ImagesResponse with extensions.

    ``usage``, which OpenAI leaves optional, is absent: nothing is billed in tokens.
    """

    created: int = Field(description="Unix time in seconds.")
    model: str = Field(description="(extension) The model or cascade that made the images.")
    background: Literal["opaque"]
    output_format: ImageFormat
    quality: Literal["auto", "low", "high"] = Field(
        description="`low` and `high` where it chose a cascade's model; the effort is the number "
        "of steps."
    )
    size: str = Field(description="WIDTHxHEIGHT")
    deadline: Deadline
    data: list[GeneratedImage]
