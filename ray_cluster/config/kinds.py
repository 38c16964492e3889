"""The kinds of workers, and where the configuration has each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

WorkerKind = Literal["denoise", "score", "control", "lora", "upscale"]
"""What a worker does with leased requests, with calls to its endpoint, or with orders."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of worker.

    Attributes:
        section: of the configuration that lists such workers, or that is the only one.
        title: in messages, before a worker's name.
        deployment: name of the Serve deployment.
        also_reads: sections that its processes are started with, beside its own and those that all
            read.
        is_light: whether it has no model: its processes reserve nothing, and one runs on a node.
    """

    section: str
    title: str
    deployment: str
    also_reads: tuple[str, ...] = ()
    is_light: bool = False


KINDS: Mapping[WorkerKind, Kind] = {
    "denoise": Kind("pools", "pool", "BaseModel", ("storage", "loras")),
    "score": Kind("discriminators", "discriminator", "Discriminator"),
    "control": Kind("controlnets", "ControlNet", "ControlNet"),
    "upscale": Kind("upscalers", "upscaler", "Upscaler", ("storage",)),
    "lora": Kind("loras", "store of LoRAs", "LoraStore", is_light=True),
}
"""All kinds; those of a list have the names that the configuration gives them."""

LORAS = "loras"
"""The application of the stores of LoRAs."""
