"""The JSON of replies about models, jobs and errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from ray_cluster.api.input.controlnet_schema import ControlCard
from ray_cluster.api.input.lora_schema import LoraCard
from ray_cluster.api.input.schemas import EditCard, ImageFidelity, ImageTiming
from ray_cluster.api.output.cascade_reply import CascadeCard
from ray_cluster.protocol.jobs import JobState
from ray_cluster.protocol.outcomes import CascadeStage
from ray_cluster.requests import EditKind, SamplerName


class StepsByFidelity(BaseModel):
    """Steps by fidelity, for a number of requested steps."""

    asked: int = Field(description="Fewer that stand in no row take the next one.")
    balanced: int
    fast: int
    balanced_reuse: str | None = Field(
        None, description="The schedule by which some of these steps reuse activations."
    )
    fast_reuse: str | None = Field(None, description="Likewise.")


class FewerStepsCard(BaseModel):
    """The steps that make a model `balanced` and `fast`."""

    sampler: SamplerName = Field(description="The only one it was measured with.")
    max_guidance_scale: float
    steps: list[StepsByFidelity]


class CascadeParts(BaseModel):
    """What a cascade consists of."""

    light: str = Field(description="The model that makes each image first.")
    heavy: str = Field(description="The one that makes it anew if that is not good enough.")
    discriminator: str = Field(description="What says how good it is.")


class ModelCard(BaseModel):
    """OpenAI's Model, with its bounds and defaults."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ray-cluster"
    family: str = Field(description="(extension)")
    size_multiple_px: int = Field(description="(extension) Width and height are multiples of it.")
    min_px: int = Field(description="(extension) Shortest side.")
    max_px: int = Field(description="(extension) Longest side.")
    default_size: str = Field(description="(extension) What `size: auto` means.")
    max_prompt_tokens: int = Field(description="(extension) Longer prompts are refused.")
    max_steps_by_sampler: dict[str, int] = Field(
        description="(extension) The samplers, with the most `num_inference_steps` of each."
    )
    edits: EditKind = Field(
        description="(extension) `any`: images from text, edits with and without a mask; `masked`: "
        "edits with a mask alone, as of an inpainting model."
    )
    max_input_images: int = Field(description="(extension) Most images of an edit.")
    fewer_steps: FewerStepsCard | None = Field(
        description="(extension) Where `fidelity` can be other than `exact`; null: nowhere."
    )
    controlnets: list[str] = Field([], description="(extension) The ControlNets made for it.")
    cascade: CascadeParts | None = Field(
        None, description="(extension) Of a cascade; its bounds are those of its heavy model."
    )


class LoraModelCard(BaseModel):
    """OpenAI's Model, for a model with a LoRA; all else is as of its base."""

    id: str = Field(description="BASE:NAME")
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ray-cluster"
    parent: str = Field(description="(extension) The model that the LoRA is made for.")


class ModelList(BaseModel):
    """The models that are ready, and these with each of their LoRAs."""

    object: Literal["list"] = "list"
    data: list[ModelCard | LoraModelCard]


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="What was given, what is allowed, what to change.")
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: Annotated[str | None, Field(description="The parameter that is wrong.")]
    code: str | None


class ErrorResponse(BaseModel):
    """Every error has this form."""

    error: ErrorDetail


class JobImage(BaseModel):
    """One finished image of a job."""

    url: str = Field(description="Where it is, until it is forgotten with its job.")
    seed: int = Field(description="Makes this image again, with `n: 1`.")
    num_inference_steps: int = Field(
        description="Steps that it was made with; of an edit those of the whole schedule."
    )
    fidelity: ImageFidelity | None = Field(
        description="null for jobs of earlier versions that may have been degraded."
    )
    num_bytes: int
    timing: ImageTiming | None = Field(
        description="null where a dispatcher died before it could be noted."
    )
    cascade: CascadeCard | None = Field(None, description="How a cascade made it; null likewise.")
    edit: EditCard | None = Field(None, description="How it was edited; null if from text.")
    lora_start_step: int | None = Field(
        None, description="How many of its first steps were made without its LoRAs; null for none."
    )


class JobPreview(BaseModel):
    """The last preview of an unfinished image of a job."""

    url: str = Field(description="Where the preview is, until it is forgotten with its job.")
    image: int = Field(description="Which image of the job, from 0.")
    index: int = Field(description="Which preview of that image, from 0.")
    step: int = Field(description="Denoising steps done.")


class JobDeadline(BaseModel):
    """The deadline of a job."""

    slo_s: float = Field(description="Seconds from `created` to the deadline.")
    met: bool | None = Field(description="null while it can still be met.")


class JobResponse(BaseModel):
    """A job."""

    id: str
    object: Literal["job"] = "job"
    state: JobState
    created: float = Field(description="Unix time in seconds.")
    finished: float | None = Field(description="Unix time in seconds; null while it is open.")
    model: str
    prompt: str
    size: str = Field(description="WIDTHxHEIGHT")
    loras: list[LoraCard] = Field([], description="The LoRAs of each image.")
    controlnets: list[ControlCard] = Field([], description="The ControlNets of each image.")
    n: int = Field(description="Number of images.")
    step: int = Field(description="Denoising steps done, over all images.")
    num_steps: int = Field(description="Denoising steps to do, over all images.")
    fidelity: ImageFidelity | None = Field(
        description="Of each image, known from the start; null as in `data`."
    )
    queue_position: int | None = Field(
        description="Images of the model that wait before its next one; null when none waits."
    )
    predicted_finish: float | None = Field(description="Unix time in seconds; null if unknown.")
    cascade_stages: list[CascadeStage] = Field(
        [], description="Of a cascade: the present stage of each unfinished image."
    )
    attempts: int = Field(description="Leases of its images to replicas: one each, if none died.")
    deadline: JobDeadline
    error: ErrorDetail | None = Field(description="Why it failed.")
    previews: list[JobPreview] = Field(
        description="The last preview of each unfinished image, as `partial_images` asked for."
    )
    data: list[JobImage] = Field(description="The images, once the job is completed.")


class JobList(BaseModel):
    """A page of jobs, the newest first."""

    object: Literal["list"] = "list"
    data: list[JobResponse]
    first_id: str | None
    last_id: str | None = Field(description="Give it as `after` for the next page.")
    has_more: bool
