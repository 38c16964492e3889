"""The JSON of the events of ``stream: true``: OpenAI's and our extensions."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from ray_cluster.api.input.schemas import Deadline, ImageDetails
from ray_cluster.requests import ImageFormat


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
