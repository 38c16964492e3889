"""The JSON of replies about models, jobs, files, LoRAs, ControlNets and errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from ray_cluster.api.input.schemas import optional
from ray_cluster.api.output.image_schemas import (
    CascadeCard,
    ControlNetUseCard,
    EditCard,
    ImageFidelity,
    ImageTiming,
    LoraCard,
)
from ray_cluster.errors import without_password
from ray_cluster.protocol.jobs import JobState
from ray_cluster.protocol.loras import LoraState, LoraStatus
from ray_cluster.protocol.outcomes import CascadeStage
from ray_cluster.requests import EditKind, EngineKind, SamplerName


class StepsByFidelity(BaseModel):
    """Steps by fidelity, for a number of requested steps."""

    asked: int = Field(description="Fewer that stand in no row take the next one.")
    balanced: int
    fast: int
    balanced_reuse: str | None = optional(
        "The schedule by which some of these steps reuse activations."
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


class UpscaleCard(BaseModel):
    """How finished images may be enlarged."""

    factors: list[int] = Field(description="What `upscale` may be.")
    max_px: int = Field(description="Longest side of an enlarged image.")


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
        "edits with a mask alone, as of an inpainting model; `none`: images from text alone, and "
        "from pictures that it looks at, where `max_input_images` is not 0."
    )
    engine: EngineKind = Field(
        description="(extension) `steps`: its images share steps, and any may stop at each; "
        "`diffusers`: a pipeline as it is, an image a call, which starts over when it is stopped."
    )
    max_input_images: int = Field(description="(extension) Most images of an edit; 0: none.")
    max_masked_input_images: int = Field(
        description="(extension) Most images of an edit with a mask; 0: it takes no mask."
    )
    needs_image: bool = Field(description="(extension) Whether it makes nothing from text alone.")
    fewer_steps: FewerStepsCard | None = Field(
        description="(extension) Where `fidelity` can be other than `exact`; null: nowhere."
    )
    controlnets: list[str] = Field([], description="(extension) The ControlNets made for it.")
    upscale: UpscaleCard | None = Field(
        description="(extension) How its finished images may be enlarged; null: not at all."
    )
    cascade: CascadeParts | None = optional(
        "(extension) Of a cascade; its bounds are those of its heavy model."
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
    steps_by_degree: dict[int, int] | None = optional(
        "How many of its steps ran on how many ranks of a group; absent elsewhere."
    )
    lora_start_step: int | None = optional(
        "How many of its first steps were made without its LoRAs; null for none."
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
    controlnets: list[ControlNetUseCard] = Field([], description="The ControlNets of each image.")
    warnings: list[str] = Field([], description="What was probably meant otherwise.")
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


class FileResponse(BaseModel):
    """OpenAI's File: an uploaded image."""

    id: str = Field(description="Names it in `file_id`, and wherever calls take an image.")
    object: Literal["file"] = "file"
    bytes: int = Field(description="Its size.")
    created_at: int = Field(
        description="Unix time in seconds, of its upload or of the last call that named it."
    )
    expires_at: int = Field(
        description="Unix time in seconds until which it is kept at least; each call that names it "
        "starts that time anew."
    )
    filename: str = Field(description="Made of the id: the name that was sent is not kept.")
    purpose: Literal["vision"] = "vision"
    status: Literal["processed"] = "processed"


class LoraResponse(BaseModel):
    """A registered LoRA."""

    id: str = Field(description="Its name.")
    object: Literal["lora"] = "lora"
    name: str = Field(description="How calls choose it.")
    base: str = Field(description="The model that it is made for.")
    model: str = Field(description="The name under which it is a model of its own.")
    source: str = Field(description="Where its file is; the query of a URL is left out.")
    sha256: str | None = Field(
        description="Digest of the file: the one that it was registered with, else of the file "
        "that was fetched; null before."
    )
    pinned: bool
    created: float = Field(description="Unix time in seconds.")
    state: LoraState = Field(
        description="`registered`: no call has needed it yet; `fetching`; `ready` on a node at "
        "least; `failed`; `removing`: it is forgotten once its last image is made."
    )
    error: str | None = Field(description="Why it failed; null otherwise.")
    is_permanent: bool = Field(description="Whether it will fail again, whatever is done.")
    num_bytes: int | None = Field(description="Size of its factors; null before it was fetched.")
    ranks: list[int] | None = Field(description="The different ranks of its layers; null likewise.")
    num_layers: int | None = Field(description="Layers that it changes; null likewise.")
    changes_prompts: bool | None = Field(
        description="Whether text encoders are among them; null likewise."
    )
    num_uses: int = Field(description="Images accepted with it.")
    nodes: list[str] = Field(description="The nodes that have it.")


class LoraList(BaseModel):
    """A page of LoRAs, by name."""

    object: Literal["list"] = "list"
    data: list[LoraResponse]
    first_id: str | None
    last_id: str | None = Field(description="Give it as `after` for the next page.")
    has_more: bool


def lora_reply(status: LoraStatus) -> LoraResponse:
    """Return a LoRA as replies show it."""
    lora, facts = status.lora, status.facts
    return LoraResponse(
        id=lora.name,
        name=lora.name,
        base=lora.base,
        model=f"{lora.base}:{lora.name}",
        # a signed URL is a secret of who registered it
        source=without_password(lora.source),
        sha256=lora.sha256 or (None if facts is None else facts.sha256),
        pinned=lora.is_pinned,
        created=lora.added_s,
        state=status.state,
        error=status.reason or None,
        is_permanent=status.is_permanent,
        num_bytes=None if facts is None else facts.num_bytes,
        ranks=None if facts is None else list(facts.ranks),
        num_layers=None if facts is None else facts.num_layers,
        changes_prompts=None if facts is None else facts.changes_prompts,
        num_uses=status.num_uses,
        nodes=list(status.nodes),
    )


class ControlNetCard(BaseModel):
    """A ControlNet of the service."""

    id: str = Field(description="Its name.")
    object: Literal["controlnet"] = "controlnet"
    name: str = Field(description="How calls choose it.")
    bases: list[str] = Field(description="The models that it is made for.")
    mode: Literal["service", "local"] = Field(
        description="Whether it has processes of its own, or runs in those of its bases; images "
        "are the same."
    )
    description: str = Field(
        description="What its maps show and which detector makes them, in the operator's words; "
        "empty where the configuration says nothing."
    )


class ControlNetList(BaseModel):
    """The ControlNets of the service, and the detectors that make their maps."""

    object: Literal["list"] = "list"
    data: list[ControlNetCard]
    detectors: list[str] = Field(description="What `preprocess` may name here.")


class MapImage(BaseModel):
    """A map."""

    b64_json: str = Field(description="The map in base64, a png.")
    file_id: str = Field(description="Names it in the `image` of a ControlNet.")


class PreprocessResponse(BaseModel):
    """The map of an image."""

    created: int = Field(description="Unix time in seconds.")
    preprocess: str = Field(description="The detector that made it.")
    size: str = Field(description="WIDTHxHEIGHT")
    output_format: Literal["png"] = "png"
    data: list[MapImage] = Field(description="One.")
