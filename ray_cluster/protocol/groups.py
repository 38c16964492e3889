"""What the head of a group and its ranks say to each other, step by step.

Heads of messages; tensors travel beside them as frames (:mod:`ray_cluster.transport`). A request's
prompts and LoRAs cross once and are kept by all ranks; a step sends its latents to each rank of its
set, and gets the guided prediction from the first of them. The last rank encodes prompts and
images, and decodes latents, beside its steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ray_cluster.codec.values import Codec
from ray_cluster.protocol.controlnets import FrameSpec
from ray_cluster.requests import ImageRequest


@dataclass(frozen=True, slots=True)
class GroupStart:
    """What a rank is started with.

    Attributes:
        pool: its section of the configuration, as JSON.
        rank: its own number.
        target: of the head's listener.
        secret: for it; not to be logged.
        store: host and port of the head's store, where the ranks find each other.
        world: number of this start of all ranks; each has names of its own in the store.
        timeout_s: of a collective.
    """

    pool: str
    rank: int
    num_ranks: int
    target: str
    secret: str = field(repr=False)
    store: str
    world: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep what stays the same in all steps of a request.

    Attributes:
        deltas: number of the bound deltas that it adds to the model.
        frames: the tensors of its :class:`ray_cluster.engine.step.state.Conditioning`.
    """

    key: int
    deltas: int | None
    frames: tuple[FrameSpec, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget a request."""

    key: int


@dataclass(frozen=True, slots=True)
class Bind:
    """Bind low-rank products to layers; a frame has them as safetensors.

    Attributes:
        number: of these deltas.
        has_prompts: whether their paths begin with the name of a text encoder.
    """

    call: int
    number: int
    has_prompts: bool


@dataclass(frozen=True, slots=True)
class Unbind:
    """Forget bound deltas."""

    number: int


@dataclass(frozen=True, slots=True)
class SetStep:
    """Take one step of a request with the other ranks of a set.

    Attributes:
        first: rank of the set, which answers.
        degree: ranks of the set.
        rows: see :data:`ray_cluster.engine.groups.ranks.GuidanceRows`.
        height: of the latents.
    """

    call: int
    key: int
    first: int
    degree: int
    rows: Literal["together", "apart"]
    height: int
    width: int
    timestep: float
    guidance_scale: float
    latents: FrameSpec


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode prompts; a frame has the requests, :data:`REQUESTS`.

    Attributes:
        deltas: numbers of the deltas that each adds to text encoders.
    """

    call: int
    deltas: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class EncodeImages:
    """Encode images of one size, ``[H, W, 3]`` uint8 each."""

    call: int
    images: tuple[FrameSpec, ...]


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode latents of one size, ``[C, h, w]`` each."""

    call: int
    latents: tuple[FrameSpec, ...]


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank has found the head, and begins to load.

    Attributes:
        pid: of its process.
    """

    rank: int
    world: int
    pid: int


@dataclass(frozen=True, slots=True)
class Up:
    """A rank has loaded the model and reached all others.

    Attributes:
        dtype: that its model computes in, as torch names it.
        device_type: see :class:`ray_cluster.protocol.leases.Registration`.
        memory: the plan that the last rank was loaded under; empty from others.
        tokenizers: most tokens of each that counts, of the last rank; a frame has each.
    """

    rank: int
    dtype: Literal["float32", "bfloat16", "float16"]
    device_type: str
    memory: str = ""
    tokenizers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call asked for.

    Attributes:
        rank: that answers.
        frames: none of :class:`Bind`.
    """

    call: int
    rank: int
    frames: tuple[FrameSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call was wrong, or what it asks for cannot be done.

    Attributes:
        call: -1 where it is none: the rank cannot load, or goes no further.
        kind: ``unsupported`` by the model, ``invalid`` of a request, ``failed`` for another reason.
        param: of a request, that is invalid.
    """

    call: int
    rank: int
    kind: Literal["unsupported", "invalid", "failed"]
    message: str
    param: str | None = None
    code: str = ""


ToRank = Keep | Forget | Bind | Unbind | SetStep | Encode | EncodeImages | Decode
FromRank = Hello | Up | Answer | Refusal

TO_RANK: Codec[ToRank] = Codec(ToRank)
FROM_RANK: Codec[FromRank] = Codec(FromRank)
GROUP_START: Codec[GroupStart] = Codec(GroupStart)
REQUESTS: Codec[tuple[ImageRequest, ...]] = Codec(tuple[ImageRequest, ...])
