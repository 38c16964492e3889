"""What a model's replica and a ControlNet's replica say to each other, step by step.

Heads of messages; the tensors travel beside them as frames (:mod:`ray_cluster.transport`). A
request's prompts and map cross once and are kept; a step sends latents and a timestep, and gets
residuals.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_cluster.codec.values import Codec


@dataclass(frozen=True, slots=True)
class FrameSpec:
    """How the bytes of a frame are read.

    Attributes:
        name: what the tensor is.
        dtype: torch's name of it, such as ``float32`` or ``bfloat16``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Open:
    """Keep what stays the same in all steps of a request.

    Attributes:
        key: by which later messages of this connection name it; never two requests' the same.
        frames: the tensors of its :class:`ray_cluster.engine.step.state.Conditioning`, and ``map``,
            ``[h, w, 3]`` uint8.
    """

    key: str
    frames: tuple[FrameSpec, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a request, of which residuals are to be computed.

    Attributes:
        call: number of the call, which its answer repeats.
        timestep: of the model's own schedule.
        slack_s: seconds from now after which its image would be late; may be negative.
    """

    call: int
    key: str
    timestep: float
    slack_s: float
    latents: FrameSpec


@dataclass(frozen=True, slots=True)
class Steps:
    """Compute residuals; a frame for each step, its request's latents ``[C, h, w]``.

    All that a replica needs for a step of its own comes in one message, so that it is computed
    together.
    """

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """Forget a request."""

    key: str


@dataclass(frozen=True, slots=True)
class Residue:
    """Residuals of a step, a frame for each skip connection, outermost first, and one for the
    middle: ``[R * h * w, C]`` of the request's model rows, with guidance the unconditional one's
    first.
    """

    call: int
    frames: tuple[FrameSpec, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """The request of a step is not kept (any more): open it, and send the step again."""

    call: int
    key: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The residuals of a step cannot be computed, here or on any other replica."""

    call: int
    message: str


ToControl = Open | Steps | Close
FromControl = Residue | Unknown | Refused

TO_CONTROL: Codec[ToControl] = Codec(ToControl)
FROM_CONTROL: Codec[FromControl] = Codec(FromControl)
