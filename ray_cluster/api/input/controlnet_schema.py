"""The JSON of ControlNets: as calls name them, as replies show them, and as they are listed."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

# of one image
MAX_CONTROLS = 3
MAX_CONTROL_SCALE = 2
_MAX_NAME_CHARS = 64


class ControlChoice(BaseModel):
    """A ControlNet that a call names, beside the image that it follows."""

    # a further field, which holds an image and is checked elsewhere
    image_fields: ClassVar[tuple[str, ...]] = ("image",)

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    name: str = Field(
        min_length=1,
        max_length=_MAX_NAME_CHARS,
        description="One that `GET /v1/controlnets` lists.",
    )
    preprocess: str | None = Field(
        None,
        min_length=1,
        max_length=_MAX_NAME_CHARS,
        description="The detector that makes the map of the image, of those that "
        "`GET /v1/controlnets` lists; `none` if absent: the image is a map.",
    )
    scale: float | None = Field(
        None,
        ge=0,
        le=MAX_CONTROL_SCALE,
        description="Weight; 1 if absent, and 0 is as without it.",
    )
    start: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Share of the steps before which it does nothing; 0 if absent.",
    )
    end: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Share of the steps after which it does nothing, above `start`; 1 if absent.",
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


class ControlCard(BaseModel):
    """A ControlNet that an image follows."""

    name: str
    scale: float = Field(description="Its weight.")
    start: float = Field(description="Share of the steps before which it does nothing.")
    end: float = Field(description="Share of the steps after which it does nothing.")
    preprocess: str = Field(description="The detector that made its map.")


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


class PreprocessRequest(BaseModel):
    """What one call for a map asks for, beside its image; null and absent mean the same."""

    image_fields: ClassVar[tuple[str, ...]] = ("image",)

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        json_schema_extra={
            "examples": [{"image": "iVBORw0KGgo...", "preprocess": "canny", "size": "64x64"}]
        },
    )

    preprocess: str = Field(
        min_length=1,
        max_length=_MAX_NAME_CHARS,
        description="The detector, of those that `GET /v1/controlnets` lists.",
    )
    size: str | None = Field(
        None,
        pattern=r"^(auto|[1-9][0-9]{0,5}x[1-9][0-9]{0,5})$",
        description="WIDTHxHEIGHT of the map in pixels, to which the image is brought first; "
        "the image's own if absent or `auto`.",
    )


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


ControlChoices = Annotated[
    list[ControlChoice] | None,
    Field(
        max_length=MAX_CONTROLS,
        description="(extension) ControlNets of the model, each with the image that it follows; "
        "none if absent.",
    ),
]
ControlCards = Annotated[
    list[ControlCard] | None,
    Field(description="(extension) The ControlNets that it follows; absent without any."),
]
