"""LoRAs as gateways, the dispatcher and the stores of LoRAs speak of them.

A LoRA is registered once in a cell, under a name. Stores, one a node, fetch its file, verify it and
keep its factors for the replicas of their node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LoraState = Literal["registered", "fetching", "ready", "failed", "removing"]
"""Not asked for yet; on its way; on a node at least; not to be had; to be forgotten once its last
open request has ended."""
LoraRefusal = Literal["exists", "unknown_base", "too_many", "source_not_allowed"]
FailureKind = Literal["invalid", "unreachable"]
"""The file will never do; or the source may answer another time."""


@dataclass(frozen=True, slots=True)
class Lora:
    """A registered LoRA.

    Attributes:
        lora_id: unique for ever; a name may be given again.
        name: by which calls choose it, unique in the cell.
        base: the model that it is made for.
        source: where its file is: ``builtin:pastel``, a path, an fsspec URL, or ``hf:OWNER/NAME``
            with ``/FILE`` behind it where there are several.
        sha256: of the file, in hexadecimal digits; empty if any will do.
        is_pinned: whether stores fetch it at once and keep it whether it is used or not.
        added_s: Unix time.
    """

    lora_id: str
    name: str
    base: str
    source: str
    sha256: str = ""
    is_pinned: bool = False
    added_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoraFacts:
    """What is known of a LoRA once its file is there.

    Attributes:
        sha256: of the file.
        num_bytes: of its factors.
        ranks: the different ones of its layers, in rising order.
        num_layers: that it changes.
        changes_prompts: whether text encoders are among them.
    """

    sha256: str
    num_bytes: int
    ranks: tuple[int, ...]
    num_layers: int
    changes_prompts: bool = False


@dataclass(frozen=True, slots=True)
class LoraStatus:
    """A registered LoRA as it is now.

    Attributes:
        facts: None before its file was first there.
        reason: why it is not to be had, with ``failed``.
        is_permanent: whether it never will be.
        num_uses: images accepted with it.
        nodes: those whose store has it.
    """

    lora: Lora
    state: LoraState
    facts: LoraFacts | None = None
    reason: str = ""
    is_permanent: bool = False
    num_uses: int = 0
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoraAdded:
    """The answer to a registration.

    Attributes:
        status: of the LoRA of that name, registered now or before; None if there is none.
        refused: why it is not the one given; None if it is.
        reason: what is wrong with its source.
    """

    status: LoraStatus | None
    refused: LoraRefusal | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LoraLookup:
    """LoRAs by names that a call gives.

    Attributes:
        found: by name; names without a LoRA are missing.
        near: by each of these, names that there are and that look like it.
    """

    found: dict[str, LoraStatus]
    near: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class LoraOrder:
    """A LoRA that a store is to have.

    Attributes:
        base_model: what pools of its base call their model: a folder, a built-in or a hub id.
        attempt: greater than before where an earlier failure is to be forgotten.
        is_needed: whether a request waits for it; others are fetched after these.
    """

    lora: Lora
    base_model: str
    attempt: int = 0
    is_needed: bool = True


@dataclass(frozen=True, slots=True)
class LoraReport:
    """What a store says of a LoRA that it has, fetches, or could not get.

    Attributes:
        facts: of one that is ready.
        failure: of one that failed, with the reason.
        attempt: of the order that it answers.
        took_s: seconds from the order until it was ready.
    """

    lora_id: str
    state: Literal["fetching", "ready", "failed"]
    facts: LoraFacts | None = None
    failure: FailureKind | None = None
    reason: str = ""
    attempt: int = 0
    took_s: float = 0.0
