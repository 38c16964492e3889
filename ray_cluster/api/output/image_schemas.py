"""The JSON of images in replies and in streams of events: OpenAI's and our extensions."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from ray_cluster.api.input.schemas import optional
from ray_cluster.policies.fidelity import Fidelity
from ray_cluster.protocol.outcomes import AnswerReason, CascadeStage
from ray_cluster.requests import ImageFormat


class LoraCard(BaseModel):
    """A LoRA that an image is made with."""

    name: str
    scale: float = Field(description="Its weight.")


class ControlNetUseCard(BaseModel):
    """A ControlNet that an image follows."""

    name: str
    scale: float = Field(description="Its weight.")
    start: float = Field(description="Share of the steps before which it does nothing.")
    end: float = Field(description="Share of the steps after which it does nothing.")
    preprocess: str = Field(description="The detector that made its map.")


class StageCard(BaseModel):
    """What a stage took."""

    stage: CascadeStage
    name: str = Field(description="The model or the discriminator.")
    queue_s: float = Field(description="Seconds until it began, of `took_s`.")
    took_s: float = Field(description="All its seconds.")


class CascadeCard(BaseModel):
    """How a cascade came to its answer."""

    model: str = Field(description="Whose image it is.")
    stage: CascadeStage = Field(description="The stage that made it.")
    reason: AnswerReason = Field(
        description="Why it is of that model: `confident`, `deferred` (its confidence was below "
        "the threshold), `no_time` for the heavy one, `scorer_away`, `heavy_failed`; or why it was "
        "not routed: `quality`, or what the light model does not take."
    )
    confidence: float | None = Field(description="Of the light image; null if none was scored.")
    threshold: float | None = Field(
        description="Below which it was deferred, by the time that was left; null likewise."
    )
    stages: list[StageCard] = Field(description="Those that ended.")


class ImageTiming(BaseModel):
    """Seconds that one image took; waiting between stages counts to the later one."""

    queue_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    upscale_s: float = 0.0
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
    timing: ImageTiming | None = optional(
        "(extension) Absent where a dispatcher died before it could be noted."
    )
    steps_by_degree: dict[int, int] | None = optional(
        "(extension) How many of its steps ran on how many ranks of a group; absent elsewhere."
    )
    cascade: CascadeCard | None = optional(
        "(extension) How a cascade made it; absent for a single model."
    )
    edit: EditCard | None = optional(
        "(extension) How it was edited; absent for an image from text."
    )
    loras: list[LoraCard] | None = optional(
        "(extension) The LoRAs it was made with; absent without any."
    )
    lora_start_step: int | None = optional(
        "(extension) How many of its first steps were made without its LoRAs; absent for none."
    )
    controlnets: list[ControlNetUseCard] | None = optional(
        "(extension) The ControlNets that it follows; absent without any."
    )
    warnings: list[str] | None = optional(
        "(extension) What was carried out, and probably meant otherwise; absent without any."
    )


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


class EstimateResponse(BaseModel):
    """(extension) What a call for images would be answered now; nothing is made or kept."""

    object: Literal["estimate"] = "estimate"
    accepted: bool = Field(description="Whether they would be made.")
    finish_in_s: float | None = Field(
        description="Seconds until the last of them is predicted to be done, if accepted."
    )
    in_time: bool = Field(description="Whether that is before the deadline.")
    deadline_s: float = Field(description="Seconds from now to the deadline.")
    num_inference_steps: int = Field(description="That they would be made with.")
    reason: str | None = Field(description="Why not, if they would not be made: an error's code.")
    message: str | None = Field(description="Likewise, for people.")
    retry_in_s: float | None = Field(
        description="Seconds after which they are predicted to be accepted, where that is known."
    )


class TokenCounts(BaseModel):
    """OpenAI's, of the prompt."""

    image_tokens: int
    text_tokens: int


class Usage(BaseModel):
    """OpenAI's; all zero, as nothing is counted in tokens here."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: TokenCounts


class ImageEvent(BaseModel):
    """The fields that both events of a stream have."""

    created_at: int = Field(description="Unix time in seconds.")
    background: Literal["opaque"]
    output_format: ImageFormat
    quality: Literal["auto", "low", "high"]
    size: str = Field(description="WIDTHxHEIGHT")
    b64_json: str = Field(description="The coded image in base64.")


class PartialImageEvent(ImageEvent):
    """A preview: the image as the model estimates it at this step."""

    type: Literal["image_generation.partial_image", "image_edit.partial_image"]
    partial_image_index: int = Field(description="From 0.")
    step: int = Field(description="(extension) Denoising steps done.")
    num_steps: int = Field(description="(extension) Denoising steps to do.")


class CompletedEvent(ImageEvent, ImageDetails):
    """The image."""

    type: Literal["image_generation.completed", "image_edit.completed"]
    usage: Usage
    model: str = Field(description="(extension) The model that made the image.")
    deadline: Deadline
