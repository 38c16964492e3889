"""The kinds of workers, and where the configuration has each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ray_cluster.errors import LastStage

WorkerKind = Literal["denoise", "score", "control", "lora", LastStage]
"""What a worker does with leased requests, with calls to its endpoint, or with orders."""


_REPLICA = "ray_cluster.replica"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of worker.

    Attributes:
        section: of the configuration that lists such workers, or that is the only one.
        title: in messages, before a worker's name.
        deployment: name of the Serve deployment.
        builder: module whose ``build`` makes the skill of such a worker.
        also_reads: sections that its processes are started with, beside its own and those that all
            read.
        has_model: whether its processes import the model libraries, which they do in turns.
        work: what is done with a finished image, for messages; only of last stages.
        scale: how many times as wide and high as the model's its image is taken to be, in plans.
        is_light: whether its processes reserve nothing, have no settings, and one runs on a node.
    """

    section: str
    title: str
    deployment: str
    builder: str
    also_reads: tuple[str, ...] = ()
    has_model: bool = True
    work: str = ""
    scale: int = 1
    is_light: bool = False


KINDS: Mapping[WorkerKind, Kind] = {
    "denoise": Kind(
        "pools", "pool", "BaseModel", f"{_REPLICA}.denoise.builder", ("storage", "loras")
    ),
    "score": Kind("discriminators", "discriminator", "Discriminator", f"{_REPLICA}.score.builder"),
    "control": Kind("controlnets", "ControlNet", "ControlNet", f"{_REPLICA}.controlnet.builder"),
    "upscale": Kind(
        "upscalers",
        "upscaler",
        "Upscaler",
        f"{_REPLICA}.upscale.builder",
        ("storage",),
        has_model=False,
        work="upscaling",
        scale=2,
    ),
    "lora": Kind(
        "loras",
        "store of LoRAs",
        "LoraStore",
        f"{_REPLICA}.lora_store.builder",
        has_model=False,
        is_light=True,
    ),
}
"""All kinds; those of a list have the names that the configuration gives them."""

GROUP_DEPLOYMENT, GROUP_BUILDER = "DiTGroup", f"{_REPLICA}.group.builder"
"""What stands in the place of a pool's own where its replicas are groups of ranks."""

CALLS_BUILDER = f"{_REPLICA}.fallback.builder"
"""Likewise where its model is run call by call."""

LORAS = "loras"
"""The application of the stores of LoRAs."""

WORKER_DEPLOYMENTS = frozenset(
    [GROUP_DEPLOYMENT, *(one.deployment for one in KINDS.values() if not one.is_light)]
)
"""Names of the Serve deployments whose replicas a plan counts."""
