"""Value types that policies read and return: frozen, without torch, ray, clock or I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ray_cluster.policies.steps.previews import preview_steps

RefusalReason = Literal[
    "queue_full",
    "held_back_full",
    "never_fits",
    "model_not_ready",
    "stage_not_ready",
    "unknown_model",
    "duplicate_id",
    "closing",
    "too_many_jobs",
    "client_limit",
    "too_late",
]
WhenLate = Literal["accept", "refuse"]
CascadeEntry = Literal["light", "heavy"]
CascadeReason = Literal["confident", "deferred", "no_time", "scorer_away", "random_routing"]
EntryReason = Literal["routed", "quality", "add_ons", "size", "prompt", "negative_prompt", "edit"]
"""Why a request is routed by confidence, or goes to one model alone."""

# later requests that may be leased before one, because what it needs is on another replica
MOST_PASSES = 4


def lora_resident(lora_id: str) -> str:
    """Return the resident id of a LoRA."""
    return f"lora:{lora_id}"


def template_resident(sha256: str) -> str:
    """Return the resident id of an edit's template, whose activations are cached."""
    return f"template:{sha256}"


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of one image request.

    Attributes:
        arrival_s: instant on the caller's clock.
        deadline_s: instant by which it should be done, on the same clock.
        steps_done: denoising steps already taken, in an exported state or in a replica.
        num_previews: how often it is decoded before its last step.
        num_preemptions: how often it was preempted.
        when_late: what becomes of it if its deadline cannot be met.
        fewest_steps: that it may be made with, if it or others would be late with more; None for
            all.
        loras: ids of its LoRAs.
        lora_set: the same for requests with the same LoRAs at the same scales; empty without any.
        controls: names of its ControlNets.
        template: digest of the image that it edits, where replicas keep activations of it; None for
            all others.
        mask_ratio: share of the template that is edited, in (0, 1].
        num_passes: later requests that were leased before it.
        step_share: what one of its steps costs in the mean, as a share of one computed whole; below
            1 where some of them reuse activations.
        num_inputs: images of its size that are read and encoded before its first step.
        reference_px: pixels of the pictures that the model looks at in each of its steps; they are
            read and encoded likewise.
    """

    request_id: str
    model: str
    width_px: int
    height_px: int
    num_steps: int
    uses_guidance: bool
    priority: int
    arrival_s: float
    deadline_s: float
    steps_done: int = 0
    num_previews: int = 0
    num_preemptions: int = 0
    when_late: WhenLate = "accept"
    fewest_steps: int | None = None
    loras: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    template: str | None = None
    mask_ratio: float = 1.0
    num_passes: int = 0
    step_share: float = 1.0
    num_inputs: int = 0
    reference_px: int = 0
    lora_set: str = ""

    @property
    def size_px(self) -> tuple[int, int]:
        return (self.width_px, self.height_px)

    @property
    def rows_per_step(self) -> int:
        """Rows of the model batch that one step of this request takes."""
        return 2 if self.uses_guidance else 1

    @property
    def row_px(self) -> int:
        """Pixels of each of these rows: of its image, and of the pictures beside it."""
        return self.width_px * self.height_px + self.reference_px

    @property
    def remaining_steps(self) -> int:
        return self.num_steps - self.steps_done

    @property
    def previews_left(self) -> int:
        if not self.num_previews:
            return 0
        steps = preview_steps(self.num_steps, self.num_previews)
        return sum(step > self.steps_done for step in steps)

    @property
    def has_extras(self) -> bool:
        """Whether add-ons or an edit may change what it costs."""
        return bool(self.loras or self.controls or self.template)

    @property
    def needs(self) -> tuple[str, ...]:
        """Resident ids of its adapters and its template: what a replica fetches if it lacks it."""
        if not self.loras and self.template is None:
            return ()
        templates = () if self.template is None else (template_resident(self.template),)
        return (*map(lora_resident, self.loras), *templates)

    @property
    def passes_left(self) -> int:
        """Later requests that may still be leased before it; none if it needs nothing."""
        return max(0, MOST_PASSES - self.num_passes) if self.needs else 0

    @property
    def encoded_pixels(self) -> int:
        """Image pixels that are still to be encoded: none once it has begun."""
        if self.steps_done:
            return 0
        return self.num_inputs * self.width_px * self.height_px + self.reference_px

    @property
    def spared_pixels(self) -> int:
        """Image pixels that its mask leaves as they are, of each model row."""
        if self.mask_ratio >= 1 or self.template is None:
            return 0
        return round((1 - self.mask_ratio) * self.width_px * self.height_px)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one denoising step of a batch costs, linear in what it computes.

    Every model row counts, so a request with guidance counts twice. A replica also decodes each
    image at its end, and each preview, and encodes the image of an edit. Add-ons and masks are
    priced as shares of a row's work: what its pixels and their squares cost.

    Attributes:
        fixed_s: seconds a step costs whatever is in it.
        per_megapixel_s: seconds per million image pixels of one model row.
        per_squared_megapixel_s: seconds per square of one model row's megapixels (self-attention).
        per_further_size_s: seconds for every image size in a model call but the first.
        decode_per_megapixel_s: seconds of decoding per million image pixels.
        source: ``measured`` on this machine or ``modelled`` before anything was measured.
        control_share: share of a whole row's work that each of its ControlNets adds.
        lora_share: share of the work of a whole row's pixels that each of its LoRAs adds; attention
            itself does not grow.
        spared_share: share of a row's work that the template's activations would save an edit
            without any mask; linear in the mask ratio (InstGenIE, section 4.4).
        encode_per_megapixel_s: seconds of reading and encoding an edit's image, per million pixels.
    """

    fixed_s: float
    per_megapixel_s: float
    decode_per_megapixel_s: float = 0.0
    per_squared_megapixel_s: float = 0.0
    per_further_size_s: float = 0.0
    source: Literal["measured", "modelled"] = "measured"
    control_share: float = 0.0
    lora_share: float = 0.0
    spared_share: float = 0.0
    encode_per_megapixel_s: float = 0.0

    @property
    def prices_extras(self) -> bool:
        return bool(self.control_share or self.lora_share or self.spared_share)


@dataclass(frozen=True, slots=True)
class DegreeCost:
    """What a step of one image costs on so many ranks of a group.

    Attributes:
        cost: with all model rows on all of them.
        apart: with one of a guided image's two model rows on either half; None where that is not
            possible.
    """

    degree: int
    cost: StepCost
    apart: StepCost | None = None


@dataclass(frozen=True, slots=True)
class GroupCost:
    """What a replica is that steps images beside each other, each on ranks of its own.

    Attributes:
        costs: by rising degree, at least one.
        token_px: pixels along a side of a token: an image has no more ranks than tokens.
        switch_s: seconds that an image loses where its ranks change.
        guard: see :class:`ray_cluster.policies.sequence_parallel.rounds.RoundOptions`.
    """

    num_ranks: int
    costs: tuple[DegreeCost, ...]
    token_px: int
    switch_s: float = 0.0
    guard: Literal["large", "most"] = "large"


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a policy may know of one live replica.

    Attributes:
        max_in_flight: most requests it holds at once.
        max_batch: most requests it steps together.
        num_leased: requests it holds now.
        num_free: free slots by its last report, less what it was leased since.
        leased_work_s: replica seconds that the requests it holds still take in full batches.
        residents: ids of adapters and templates that are there, or are being fetched.
        merged: the set of LoRAs that its model is merged with, so that it makes no other images;
            empty where none is.
    """

    replica_id: str
    model: str
    max_in_flight: int
    max_batch: int
    step_cost: StepCost
    num_leased: int = 0
    num_free: int = 0
    leased_work_s: float = 0.0
    residents: frozenset[str] = frozenset()
    merged: str = ""

    @property
    def room(self) -> int:
        """Requests it can be leased now."""
        return max(0, min(self.num_free, self.max_in_flight - self.num_leased))


@dataclass(frozen=True, slots=True)
class RowView:
    """What the step loop may know of one row (a request that a replica is denoising).

    Attributes:
        waited_rounds: batches the replica ran since this row was last in one, or since it joined;
            0 for a row of the latest batch and for one that has just joined.
    """

    request: RequestView
    waited_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """The dispatcher's answer to a group of requests that are admitted or refused together.

    Attributes:
        accepted: whether all of them are queued now.
        predicted_s: seconds until the last of them is predicted to be done. With ``too_late``
            and an infinite ``retry_after_s``: the seconds that even an idle service needs, as
            :func:`ray_cluster.policies.admission.deadlines.least_slo_s` has it.
        retry_after_s: seconds after which the same offer is predicted to be accepted; 0 when
            nothing is known of that (the HTTP layer waits at least a second), infinity when it
            never will be.
        reason: why not, when not accepted: ``queue_full`` now for this client, ``held_back_full``
            likewise where requests wait for their add-ons, ``never_fits`` because the group is
            larger than the whole queue may be, ``model_not_ready`` because no replica of a
            configured model has registered yet, or none has lived for too long,
            ``stage_not_ready`` likewise of a last stage, ``unknown_model`` because it
            is not configured, ``duplicate_id`` because a request of that id is still in the system,
            ``closing`` because the service is about to stop, ``too_many_jobs`` because the client
            has as many open jobs as it may, ``client_limit`` because it has as many attached images
            as it may, ``too_late`` because one of the group, or one that waits, would miss its
            deadline.
        num_steps: of each of the group, if some are made with fewer steps than they ask for; else
            empty.
        limit: the bound that the client has met, with ``client_limit``; images that it may have
            there at present, with ``queue_full`` and ``held_back_full``.
        is_simulated: whether the prediction simulated steps; else it is a fluid's.
        exchanges: ids of preempted requests, each with that of the request that gets its slot; see
            :mod:`ray_cluster.policies.admission.preemption`.
        lane: name of the queue that nobody leases from, with ``stage_not_ready``.
    """

    accepted: bool
    predicted_s: float = 0.0
    retry_after_s: float = 0.0
    reason: RefusalReason | None = None
    limit: int | None = None
    num_steps: tuple[int, ...] = ()
    is_simulated: bool = False
    exchanges: tuple[tuple[str, str], ...] = ()
    lane: str = ""
