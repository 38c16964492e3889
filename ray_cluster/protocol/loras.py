"""LoRAs as gateways, the dispatcher and the stores of LoRAs speak of them.

A LoRA is registered once in a cell, under a name. Stores, one a node, fetch its file, verify it and
keep its factors for the replicas of their node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ray_cluster.protocol.calling.changes import Mark

# statuses in one answer: each lists its nodes, and others wait while it is made
MAX_LORAS_AT_ONCE = 250

LoraState = Literal["registered", "fetching", "ready", "failed", "removing"]
"""Not asked for yet; on its way; on a node at least; not to be had; to be forgotten once its last
open request has ended."""
LoraRefusal = Literal[
    "exists",
    "unknown_base",
    "too_many",
    "too_many_own",
    "too_many_pinned",
    "too_many_own_pinned",
    "source_not_allowed",
]
"""Those that end in ``own`` concern the share of one client."""
FailureKind = Literal["invalid", "unreachable", "no_room"]
"""The file will never do; or the source may answer another time; or it is pinned, no request needs
it, and other pinned ones fill their share of the disk."""


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
        owner: the client that registered it; empty for one of the settings.
    """

    lora_id: str
    name: str
    base: str
    source: str
    sha256: str = ""
    is_pinned: bool = False
    added_s: float = 0.0
    owner: str = ""


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
        reason: what is wrong with its source, or how many are allowed.
        is_new: whether this call has registered it.
    """

    status: LoraStatus | None
    refused: LoraRefusal | None = None
    reason: str = ""
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class LoraLookup:
    """LoRAs by names that a call gives.

    Attributes:
        found: by name; names without a LoRA are missing.
        near: names that look like the first of these, by it; empty for the others.
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
    """What a store says of a LoRA that it has, or could not get.

    Attributes:
        facts: of one that is ready.
        failure: of one that failed, with the reason.
        attempt: of the order that it answers.
        took_s: seconds from the order until it was ready.
    """

    lora_id: str
    state: Literal["ready", "failed"]
    facts: LoraFacts | None = None
    failure: FailureKind | None = None
    reason: str = ""
    attempt: int = 0
    took_s: float = 0.0

    @property
    def is_for_want_of_room(self) -> bool:
        """Whether it would be fetched if a request needed it."""
        return self.failure == "no_room"


@dataclass(frozen=True, slots=True)
class LoraOrders:
    """What has changed of what a store is to have; all of it where ``after`` has number 0.

    Attributes:
        after: the changes before these. A store that has not applied them ignores this message.
        upto: number of the last of these changes.
        orders: what is new, or different from before.
        dropped: ids of what it need not have any more.
        removed: ids of what nobody will use again, so that it can delete it.
    """

    after: Mark
    upto: int
    orders: tuple[LoraOrder, ...] = ()
    dropped: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoraReports:
    """What has changed of what a store has; all of it where ``after`` has number 0.

    Attributes:
        after: the changes before these. Who has not heard them ignores this message.
        upto: number of the last of these changes.
        reports: what is new, or different from before.
        gone: ids of what it has no more.
    """

    after: Mark
    upto: int
    reports: tuple[LoraReport, ...] = ()
    gone: tuple[str, ...] = ()

    @property
    def lora_ids(self) -> tuple[str, ...]:
        """The LoRAs that something is said of."""
        return (*(one.lora_id for one in self.reports), *self.gone)
