"""What ``generate`` gets back, wherever the images were made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_cluster.api.schema import ImageFidelity
from ray_cluster.errors import RayClusterError


class GenerateFailed(RayClusterError):
    """No image, for a reason that is not in the request's parameters."""


@dataclass(frozen=True, slots=True)
class GeneratedFile:
    """One coded image.

    Attributes:
        timing: seconds by stage.
        effort: its fidelity and steps in words; empty for an exact one.
    """

    data: bytes
    seed: int
    timing: Mapping[str, float]
    effort: str = ""


def effort_words(fidelity: ImageFidelity | None) -> str:
    """Return the fidelity that an image got, with its steps; empty for an exact one."""
    if fidelity is None or fidelity.got == "exact":
        return ""
    num_steps = fidelity.steps_computed + fidelity.steps_reused
    steps = f"{num_steps} of {fidelity.steps_asked} steps"
    if fidelity.steps_reused:
        steps += f", {fidelity.steps_reused} of them reused"
    return steps if fidelity.got is None else f"{fidelity.got}: {steps}"


@dataclass(frozen=True, slots=True)
class MadeImages:
    """The images of one call.

    Attributes:
        size: WIDTHxHEIGHT.
        deadline_met: None where the call had no deadline.
    """

    model: str
    size: str
    images: tuple[GeneratedFile, ...]
    elapsed_s: float
    deadline_met: bool | None
