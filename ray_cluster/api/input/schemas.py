"""The fields of calls: OpenAI's and our extensions.

Of OpenAI's fields each is honoured, accepted with the values that change nothing, or refused by
name; the refused ones stand in :data:`~ray_cluster.api.advice.REFUSED` with what to do instead.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from ray_cluster.config.sections.loras import LORA_NAME
from ray_cluster.policies.fidelity import Concession, Fidelity
from ray_cluster.policies.steps.previews import MAX_PREVIEWS
from ray_cluster.policies.types import WhenLate
from ray_cluster.requests import MAX_GUIDANCE_SCALE, ImageFormat, SamplerName

MAX_SEED = 2**63 - 1
MAX_FEATHER_PX = 256
# of an edit, as of OpenAI's
MAX_INPUT_IMAGES = 16
# of one image
MAX_LORAS = 8
MAX_LORA_SCALE = 4
MAX_CONTROLNETS = 3
MAX_CONTROLNET_SCALE = 2
# all that OpenAI has documented for any of its models
Quality = Literal["auto", "standard", "hd", "low", "medium", "high", "xhigh", "max"]
# registered names are shorter; in a process of its own, `generate` names files by their paths
_MAX_LORA_CHARS = 512
_MAX_SOURCE_CHARS = 1000
_MAX_CONTROLNET_CHARS = 128
_SIZE = r"^(auto|[1-9][0-9]{0,5}x[1-9][0-9]{0,5})$"


def optional(description: str, **bounds: Any) -> Any:
    """Return a field that may be left out."""
    return Field(None, description=description, **bounds)


class CallFields(BaseModel):
    """The fields of some call; null and absent mean the same."""

    # further fields, which hold images and are checked elsewhere
    image_fields: ClassVar[tuple[str, ...]] = ()

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class LoraChoice(CallFields):
    """A LoRA that a call names, and its weight."""

    name: str = Field(
        min_length=1, max_length=_MAX_LORA_CHARS, description="One that `GET /v1/loras` lists."
    )
    scale: float | None = optional(
        "Weight; 1 if absent, and 0 is as without it.", ge=-MAX_LORA_SCALE, le=MAX_LORA_SCALE
    )

    @property
    def weight(self) -> float:
        """How often its difference to the base counts."""
        return 1.0 if self.scale is None else float(self.scale)


class ControlNetChoice(CallFields):
    """A ControlNet that a call names, beside the image that it follows."""

    image_fields: ClassVar[tuple[str, ...]] = ("image",)

    name: str = Field(
        min_length=1,
        max_length=_MAX_CONTROLNET_CHARS,
        description="One that `GET /v1/controlnets` lists.",
    )
    preprocess: str | None = optional(
        "The detector that makes the map of the image, of those that "
        "`GET /v1/controlnets` lists; `none` if absent: the image is a map.",
        min_length=1,
        max_length=_MAX_CONTROLNET_CHARS,
    )
    scale: float | None = optional(
        "Weight; 1 if absent, and 0 is as without it.", ge=0, le=MAX_CONTROLNET_SCALE
    )
    start: float | None = optional(
        "Share of the steps before which it does nothing; 0 if absent.", ge=0, lt=1
    )
    end: float | None = optional(
        "Share of the steps after which it does nothing, above `start`; 1 if absent.", gt=0, le=1
    )

    @property
    def detector(self) -> str:
        """Name of the detector."""
        return "none" if self.preprocess is None else self.preprocess

    @property
    def weight(self) -> float:
        """How much its residuals count."""
        return 1.0 if self.scale is None else float(self.scale)

    @property
    def span(self) -> tuple[float, float]:
        """The shares of the steps between which it does something."""
        first = 0.0 if self.start is None else float(self.start)
        return first, 1.0 if self.end is None else float(self.end)


class ImageGenerationRequest(CallFields):
    """What one call asks for; null and absent mean the same."""

    model_config = ConfigDict(
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
    model: str | None = optional(
        "A model that `GET /v1/models` lists; the first configured one if absent. "
        "`BASE:NAME` is the model BASE with the LoRA NAME."
    )
    n: int | None = optional(
        "Number of images, 1 if absent; image i is made with `seed + i`.", ge=1
    )
    size: str | None = optional(
        "`auto` or WIDTHxHEIGHT in pixels, in the steps and bounds of the model.", pattern=_SIZE
    )
    response_format: Literal["b64_json", "url"] | None = optional(
        "`b64_json` if absent: images come in the reply; `url`: links to them do, "
        "which hold for a while. Jobs always give links."
    )
    output_format: ImageFormat | None = optional("How images are coded; `png` if absent.")
    output_compression: int | None = optional(
        "Quality of jpeg and webp in percent; 100 if absent. A png has 100.", ge=0, le=100
    )
    quality: Quality | None = optional(
        "Of a cascade: `low` takes its light model alone, `high`, `hd`, `xhigh` and "
        "`max` its heavy one, all others either. It changes nothing else: `num_inference_steps` "
        "sets the effort."
    )
    style: Literal["vivid", "natural"] | None = optional(
        "Changes nothing: say the style in the prompt."
    )
    background: Literal["auto", "opaque"] | None = optional("Changes nothing: images are opaque.")
    moderation: Literal["auto", "low"] | None = optional("Changes nothing: nothing is moderated.")
    stream: bool | None = optional(
        "Answer with events: previews, and the image at last. Needs `n: 1`."
    )
    partial_images: int | None = optional(
        "Previews of the image on the way; fewer where there are not enough steps. "
        "With `stream`, or in a job, whose events link to them.",
        ge=0,
        le=MAX_PREVIEWS,
    )
    user: str | None = Field(None, description="Changes nothing: nothing is kept of it.")
    safety_identifier: str | None = optional("Changes nothing: nothing is kept of it.")

    negative_prompt: str | None = optional(
        "(extension) What the image shall not show; needs `guidance_scale` > 1."
    )
    seed: int | None = optional(
        "(extension) The same seed and values give the same image; random if absent.",
        ge=0,
        le=MAX_SEED,
    )
    num_inference_steps: int | None = optional(
        "(extension) Denoising steps, within the sampler's bound.", ge=1
    )
    min_inference_steps: int | None = optional(
        "(extension) The image may be made with fewer steps, down to this number, "
        "if it or waiting requests of others would be late otherwise; the reply says how many.",
        ge=1,
    )
    fidelity: Fidelity | None = optional(
        "(extension) `exact` (the default): the image with all its steps. `balanced` "
        "and `fast`: with as few as the model needs for an SSIM of 0.95 or 0.85 to that image, "
        "where they were measured; `GET /v1/models` says for which."
    )
    allow: list[Concession] | None = optional(
        "(extension) What may be given up if it or waiting requests of others would be "
        "late otherwise: `fidelity`, down to `fast`; `steps`, down to `min_inference_steps`, which "
        "alone allows it, too. Nothing if absent."
    )
    guidance_scale: float | None = optional(
        "(extension) Weight of classifier-free guidance; off at 1 and below.",
        ge=0,
        le=MAX_GUIDANCE_SCALE,
    )
    sampler: SamplerName | None = Field(None, description="(extension) Sampler.")
    loras: list[LoraChoice] | None = optional(
        "(extension) LoRAs of the model, with their weights; none if absent.", max_length=MAX_LORAS
    )
    lora_start_step: int | None = optional(
        "(extension) How many of the image's first steps are made without its LoRAs; "
        "0 if absent. With a `fidelity` other than `exact` the service chooses it.",
        ge=0,
    )
    controlnets: list[ControlNetChoice] | None = optional(
        "(extension) ControlNets of the model, each with the image that it follows; "
        "none if absent.",
        max_length=MAX_CONTROLNETS,
    )
    upscale: Literal[1, 2, 4] | None = optional(
        "(extension) 2 or 4: the finished image is enlarged so many times, where the service has "
        "an upscaler; 1 if absent.",
    )
    priority: int | None = optional(
        "(extension) Higher is served first; 0 if absent. Above 0 it needs an API key "
        "with the role `operate`, where the service has keys.",
        ge=-100,
        le=100,
    )
    slo_s: float | None = optional(
        "(extension) Seconds from arrival to the deadline; the service's if absent.", gt=0, le=86400
    )
    require: Literal["heavy"] | None = optional(
        "(extension) Of a cascade: with `heavy`, a light image that is to be made anew is never "
        "the answer: the call waits for the heavy model, however late, or fails."
    )
    when_late: WhenLate | None = optional(
        "(extension) `refuse` answers 429 at once if the images would probably miss "
        "their deadline, or make others miss theirs, and 400 if even an idle service could not "
        "meet the deadline; `accept` (the default) makes them anyway."
    )
    metadata: bool | None = optional(
        "(extension) Whether a png carries its recipe as text; true if absent. Other "
        "formats carry none."
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
    max_images: ClassVar[int] = MAX_INPUT_IMAGES

    strength: float | None = optional(
        "(extension) How much of the noise schedule is run: the higher, the less is "
        "kept of the image. 1 if absent with a mask, 0.8 without; a model that looks at pictures "
        "does that instead, if it is absent.",
        gt=0,
        le=1,
    )
    input_fidelity: Literal["high", "low"] | None = optional(
        "`low` is the strength if absent; `high` keeps more: 0.8 with a mask, 0.4 without. Changes "
        "nothing where the model looks at pictures."
    )
    feather_px: int | None = optional(
        "(extension) Width of the border within the mask over which the edit is "
        "blended into the image; 0 if absent.",
        ge=0,
        le=MAX_FEATHER_PX,
    )
    paste_back: bool | None = optional(
        "(extension) Whether pixels outside the mask stay the image's own, bit for "
        "bit; true if absent."
    )
    crop: Literal["auto"] | None = optional(
        "(extension) `auto`: the model sees only the mask's surroundings, at their own "
        "size, and the edit is pasted back into the whole image."
    )


class ImageVariationRequest(ImageEditRequest):
    """What one call for variations of an image asks for: an edit without a text, or a mask."""

    model_config = ConfigDict(json_schema_extra={"examples": []})
    image_fields: ClassVar[tuple[str, ...]] = ("image",)
    max_images: ClassVar[int] = 1

    prompt: str = Field("", description="What the image shows; may be left out.")


class FileUpload(CallFields):
    """What uploads a file, beside the file itself."""

    purpose: Literal["vision"] = Field(description="OpenAI's; `vision`: an image.")


class LoraRegistration(CallFields):
    """What registers a LoRA; null and absent mean the same."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"name": "pastel", "base": "shapes-sd", "source": "builtin:pastel"},
                {
                    "name": "sketch",
                    "base": "shapes-sd",
                    "source": "/models/loras/sketch.safetensors",
                    "pinned": True,
                },
            ]
        },
    )

    name: str = Field(
        pattern=f"^{LORA_NAME.pattern}$",
        description="How calls choose it: letters, digits, `.`, `_` and `-`.",
    )
    base: str = Field(min_length=1, description="The model that it is made for.")
    source: str = Field(
        min_length=1,
        max_length=_MAX_SOURCE_CHARS,
        description="Where its file is: `builtin:NAME`, a path, a URL, or `hf:OWNER/NAME`. The "
        "service's configuration says what is allowed (`loras.sources`).",
    )
    sha256: str | None = optional(
        "Digest of the file; another file is refused. Any will do if absent.",
        pattern="^[0-9a-f]{64}$",
    )
    pinned: bool | None = optional("Whether it is fetched at once and never removed to make space.")


class PreprocessRequest(CallFields):
    """What one call for a map asks for, beside its image; null and absent mean the same."""

    image_fields: ClassVar[tuple[str, ...]] = ("image",)

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"image": "iVBORw0KGgo...", "preprocess": "canny", "size": "64x64"}]
        },
    )

    preprocess: str = Field(
        min_length=1,
        max_length=_MAX_CONTROLNET_CHARS,
        description="The detector, of those that `GET /v1/controlnets` lists.",
    )
    size: str | None = optional(
        "WIDTHxHEIGHT of the map in pixels, to which the image is brought first; "
        "the image's own if absent or `auto`.",
        pattern=_SIZE,
    )
