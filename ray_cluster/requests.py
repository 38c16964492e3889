"""What a request is: torch-free value types that gateways, dispatcher and replicas share.

One :class:`ImageRequest` makes one image. An API call with ``n`` images becomes ``n`` of them,
offered to the dispatcher together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, get_args

from ray_cluster.errors import Stage
from ray_cluster.policies.fidelity import Fidelity, ReusedSteps, StepTable, Terms
from ray_cluster.policies.types import RequestView, WhenLate

NoiseSampler = Literal["ddim", "euler", "euler_ancestral", "dpmpp_2m", "lcm", "pndm"]
FlowSampler = Literal["flow_match_euler"]
SamplerName = Literal[NoiseSampler, FlowSampler]
GuidanceKind = Literal["rows", "embedded", "none"]
"""Guidance by a second row per step, by an input of the model, or none."""
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
class ControlUse:
    """A ControlNet, and the image that it follows.

    Attributes:
        name: under which the ControlNet is served.
        scale: weight of its residuals.
        start: share of the steps before which it does nothing, in [0, 1).
        end: share of the steps after which it does nothing, above ``start`` and at most 1.
    """

    name: str
    image: BlobRef
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0


@dataclass(frozen=True, slots=True)
class LoraUse:
    """A LoRA by name, and its weight."""

    name: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class AddOns:
    """What is added to the base model for a request."""

    controls: tuple[ControlUse, ...] = ()
    loras: tuple[LoraUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Edit:
    """What a request changes in a template, if it does not start from noise alone.

    Attributes:
        image: the template.
        mask: where to edit, of the template's size; None for everywhere.
        mask_ratio: share of the image that the mask leaves to edit, in (0, 1].
        strength: how much of the noise schedule is run, in (0, 1].
        paste_back: whether pixels outside the mask become the template's again.
    """

    image: BlobRef
    mask: BlobRef | None = None
    mask_ratio: float = 1.0
    strength: float = 1.0
    paste_back: bool = True


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """One image to make; the same values always give the same image.

    Attributes:
        request_id: unique in the cell.
        model: name under which a pool serves the model.
        width_px: image width; a multiple of the model's ``size_multiple_px``.
        height_px: image height, likewise.
        num_steps: denoising steps.
        guidance_scale: classifier-free guidance weight; guidance is off at 1 or below.
        seed: seeds the request's own noise generator, in [0, 2**63).
        negative_prompt: what guidance leads away from; None is no text, which some models take for
            something else than an empty one.
        priority: higher is served first.
        slo_s: seconds from arrival to the deadline; None takes the service's default.
        when_late: whether it is to be made even if it would miss its deadline.
        add_ons: ControlNets and LoRAs.
        edit: what it changes; None for text to image.
        terms: requested and least fidelity; None for an exact image with all steps.
        embeds_guidance: whether the guidance scale is an input of the model, without second rows.
        call_id: ``X-Request-ID`` of the HTTP call.
        job_id: the durable job that it belongs to; empty for an attached one.
        owner: whose inputs it may read; see :class:`ray_cluster.storage.inputs.InputStore`.
    """

    request_id: str
    model: str
    prompt: str
    width_px: int
    height_px: int
    num_steps: int
    guidance_scale: float
    sampler: SamplerName
    seed: int
    negative_prompt: str | None = None
    priority: int = 0
    slo_s: float | None = None
    when_late: WhenLate = "accept"
    add_ons: AddOns = AddOns()
    edit: Edit | None = None
    terms: Terms | None = None
    output: OutputSpec = OutputSpec()
    embeds_guidance: bool = False
    call_id: str = field(default="", compare=False)
    job_id: str = field(default="", compare=False)
    owner: str = field(default="", compare=False)

    @property
    def size_px(self) -> tuple[int, int]:
        """Width and height."""
        return (self.width_px, self.height_px)

    @property
    def uses_guidance(self) -> bool:
        """Whether a second, unconditional row is computed per step (as diffusers decides it)."""
        return self.guidance_scale > 1.0 and not self.embeds_guidance

    @property
    def fidelity(self) -> Fidelity | None:
        """The best mode that its present steps satisfy; None if that is not known."""
        return "exact" if self.terms is None else self.terms.fidelity(self.num_steps)

    @property
    def reuse(self) -> ReusedSteps | None:
        """Its steps, if some of them reuse activations."""
        return None if self.terms is None else self.terms.reuse

    @property
    def fewest_steps(self) -> int | None:
        """Fewest steps that it may be made with to be in time; None if it needs all it has."""
        fewest = None if self.terms is None else self.terms.fewest_steps
        return fewest if fewest is not None and fewest < self.num_steps else None

    @property
    def inputs(self) -> tuple[BlobRef, ...]:
        """All images that it is made from."""
        controls = (use.image for use in self.add_ons.controls)
        edit = () if self.edit is None else (self.edit.image, self.edit.mask)
        return (*controls, *(one for one in edit if one is not None))

    @property
    def file_id(self) -> str:
        """Name of its image in the result store; as hard to guess as the request's id."""
        return f"{self.request_id}.{self.output.image_format}"

    def preview_file_id(self, index: int) -> str:
        """Name of its preview of that index in the result store."""
        return f"{self.request_id}-{index}.{self.output.image_format}"

    @property
    def file_ids(self) -> tuple[str, ...]:
        """All names that it may have in the result store."""
        previews = (self.preview_file_id(index) for index in range(self.output.num_previews))
        return (self.file_id, *previews)

    def view(self, *, arrival_s: float, deadline_s: float, steps_done: int = 0) -> RequestView:
        """Return what a policy may know of this request, on the caller's clock."""
        return RequestView(
            request_id=self.request_id,
            model=self.model,
            width_px=self.width_px,
            height_px=self.height_px,
            num_steps=self.num_steps,
            uses_guidance=self.uses_guidance,
            priority=self.priority,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            steps_done=steps_done,
            num_previews=self.output.num_previews,
            when_late=self.when_late,
            fewest_steps=self.fewest_steps,
            loras=tuple(use.name for use in self.add_ons.loras),
            controls=tuple(use.name for use in self.add_ons.controls),
            template=None if self.edit is None else self.edit.image.sha256,
            mask_ratio=1.0 if self.edit is None else self.edit.mask_ratio,
            step_share=1.0 if self.reuse is None else self.reuse.cost_share,
        )

    def recipe(self) -> dict[str, str]:
        """Return everything needed to make the image again, as text chunks of a png."""
        recipe = {
            "model": self.model,
            "prompt": self.prompt,
            "size": f"{self.width_px}x{self.height_px}",
            "num_inference_steps": str(self.num_steps),
            "guidance_scale": repr(self.guidance_scale),
            "sampler": self.sampler,
            "seed": str(self.seed),
        }
        if self.negative_prompt is not None:
            recipe["negative_prompt"] = self.negative_prompt
        if self.reuse is not None:
            recipe["reuse"] = str(self.reuse.schedule)
        return recipe


def granted(requests: Sequence[ImageRequest], num_steps: Sequence[int]) -> tuple[ImageRequest, ...]:
    """Return requests with the steps that admission granted; none given: with all their steps."""
    if not num_steps:
        return tuple(requests)
    return tuple(
        replace(request, num_steps=num) for request, num in zip(requests, num_steps, strict=True)
    )


def state_name(request_id: str) -> str:
    """Return the name of a request's exported state in the state store."""
    return f"{request_id}.state"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that one image spent in each stage; waiting counts to the later stage.

    ``queue_s`` is what the last dispatcher has seen: too little for a job that outlived one.
    """

    queue_s: float = 0.0
    encode_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All stages together."""
        return self.queue_s + self.encode_s + self.denoise_s + self.decode_s

    def as_dict(self) -> dict[str, float]:
        """Return the stages by name, in seconds."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SmallImage:
    """An image as a discriminator gets it: small, and not coded.

    Attributes:
        data: ``height_px * width_px * 3`` bytes, red, green and blue of each pixel, row by row.
    """

    width_px: int
    height_px: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ImageResult:
    """A coded image and how long it took.

    Attributes:
        data: the image; empty where it went to the result store.
        num_bytes: its size.
    """

    request_id: str
    data: bytes
    image_format: ImageFormat
    timing: Timing
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ended without an image.

    Attributes:
        kind: ``error``: an exception; ``invalid``: found wrong only by the replica (a prompt with
            too many tokens); ``aborted`` by its client; ``lost``: too many replicas died under it.
        param: the parameter that is wrong, as the API spells it; with ``invalid`` only.
        code: machine-readable reason; likewise.
        attempts: leases it took, as the dispatcher counted them.
    """

    request_id: str
    kind: Literal["error", "invalid", "aborted", "lost"]
    message: str
    stage: Stage
    param: str | None = None
    attempts: int = 0
    code: str = "invalid_value"


@dataclass(frozen=True, slots=True)
class PromptTokenizer:
    """A tokenizer that counts the tokens of a model's prompts.

    Attributes:
        content: its JSON in the form of the ``tokenizers`` library, compressed with zlib.
        max_tokens: most tokens of a prompt, without those that mark its ends.
    """

    content: bytes = field(repr=False)
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What a model accepts, as its replicas register it; the gateway validates with it.

    Attributes:
        size_multiple_px: width and height must be multiples of this.
        min_px: smallest side.
        max_px: largest side.
        default_width_px: used for ``size: auto``.
        max_prompt_tokens: longer prompts are refused, never silently cut.
        max_steps_by_sampler: most denoising steps each sampler can take.
        guidance: what a guidance scale does.
        fewer_steps: steps by fidelity; None where that was not measured.
        outer_blocks: fewest and most outer blocks of its reuse schedules; None for no reuse.
        prompt_digest: of the tokenizers that count; empty where only replicas can count.
    """

    model: str
    family: str
    size_multiple_px: int
    min_px: int
    max_px: int
    default_width_px: int
    default_height_px: int
    default_num_steps: int
    default_guidance_scale: float
    default_sampler: SamplerName
    max_steps_by_sampler: dict[SamplerName, int]
    max_prompt_tokens: int
    created_s: int
    guidance: GuidanceKind = "rows"
    fewer_steps: StepTable | None = None
    outer_blocks: tuple[int, int] | None = None
    prompt_digest: str = ""
