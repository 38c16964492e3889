"""Whether a model fits on a device, and how large its batches may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SizePx = tuple[int, int]
Verdict = Literal["fits", "capped", "offload", "refused"]
Offloaded = Literal["nothing", "text encoders", "all"]
"""Which weights rest in the machine's memory and come to the device layer by layer."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ActivationCost:
    """Bytes that a step of one image size needs beside the weights.

    Attributes:
        fixed_bytes: needed whatever the batch is.
        per_row_bytes: per request of the batch, its guidance half included.
    """

    fixed_bytes: int
    per_row_bytes: int

    def at(self, batch: int) -> int:
        return self.fixed_bytes + self.per_row_bytes * batch


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What the caller measured.

    Attributes:
        weights_bytes: of the whole model.
        activation_by_size: an entry for each image size that must be possible; at least one.
        encoder_bytes: what the device is spared where the text encoders are offloaded.
        pinned_weights_bytes: weights that are on the device even where all are offloaded.
        context_bytes: what the process takes of the device beside tensors.
    """

    weights_bytes: int
    activation_by_size: Mapping[SizePx, ActivationCost]
    encoder_bytes: int = 0
    pinned_weights_bytes: int = 0
    context_bytes: int = 0

    def resident_bytes(self, offloaded: Offloaded) -> int:
        """Weights that are on the device."""
        if offloaded == "all":
            return self.pinned_weights_bytes
        spared = self.encoder_bytes if offloaded == "text encoders" else 0
        return self.weights_bytes - spared


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a model runs within its budget.

    Attributes:
        verdict: ``fits`` at the full batch; ``capped`` to smaller batches for some size;
            ``offload``: only with weights moved off the device (batches may be capped, too);
            ``refused``: some size does not fit even alone.
        offloaded: which weights are.
        max_batch_by_size: most requests in one batch; 0 where not even one fits.
        weights_bytes: weights that stay on the device.
        host_bytes: weights that stay in the machine's memory instead.
        peak_bytes: the former, the context, and the activations of the largest batch that is
            allowed.
        explanation: what was given, what is allowed, what to change.
        spare_bytes: of the budget, beyond the peak.
    """

    verdict: Verdict
    offloaded: Offloaded
    max_batch_by_size: Mapping[SizePx, int]
    weights_bytes: int
    host_bytes: int
    peak_bytes: int
    explanation: str
    spare_bytes: int = 0


def plan_memory(
    need: MemoryNeed, *, budget_bytes: int, max_batch: int, can_offload: bool
) -> MemoryPlan:
    """Decide how the model runs: with smaller batches; if that is not enough, with the text
    encoders offloaded, which run once an image; then with all weights offloaded; or not at all.

    Args:
        budget_bytes: device memory that the model may use.
        max_batch: requests per batch that are wanted.
        can_offload: whether weights may be moved off the device between their uses.
    """
    offloaded: Offloaded = "nothing"
    batches = _largest_batches(need, offloaded, budget_bytes, max_batch)
    further: tuple[Offloaded, ...] = ("text encoders", "all") if can_offload else ()
    for more in further:
        if _all_run(batches):
            break
        offloaded = more
        batches = _largest_batches(need, offloaded, budget_bytes, max_batch)
    verdict = _verdict(batches, offloaded, max_batch)
    weights_bytes = need.resident_bytes(offloaded)
    costs = need.activation_by_size
    activation_bytes = max(costs[size].at(batch) for size, batch in batches.items())
    peak_bytes = need.context_bytes + weights_bytes + activation_bytes
    return MemoryPlan(
        verdict=verdict,
        offloaded=offloaded,
        max_batch_by_size=batches,
        weights_bytes=weights_bytes,
        host_bytes=need.weights_bytes - weights_bytes,
        peak_bytes=peak_bytes,
        explanation=f"{verdict}: given {_given(need, budget_bytes, offloaded)} and batches of "
        f"{max_batch}; {_advice(need, verdict, offloaded, batches, max_batch)}",
        spare_bytes=max(0, budget_bytes - peak_bytes),
    )


def _largest_batches(
    need: MemoryNeed, offloaded: Offloaded, budget_bytes: int, max_batch: int
) -> dict[SizePx, int]:
    left_bytes = budget_bytes - need.context_bytes - need.resident_bytes(offloaded)
    batches = {}
    for size, cost in need.activation_by_size.items():
        spare_bytes = left_bytes - cost.fixed_bytes
        if spare_bytes < 0:
            batches[size] = 0
        elif cost.per_row_bytes <= 0:
            batches[size] = max_batch
        else:
            batches[size] = min(max_batch, spare_bytes // cost.per_row_bytes)
    return batches


def _all_run(batches: Mapping[SizePx, int]) -> bool:
    return min(batches.values()) >= 1


def _verdict(batches: Mapping[SizePx, int], offloaded: Offloaded, max_batch: int) -> Verdict:
    if not _all_run(batches):
        return "refused"
    if offloaded != "nothing":
        return "offload"
    return "capped" if min(batches.values()) < max_batch else "fits"


def _given(need: MemoryNeed, budget_bytes: int, offloaded: Offloaded) -> str:
    given = f"{_mib(budget_bytes)} for {_mib(need.weights_bytes)} of weights"
    if offloaded != "nothing":
        what = "all of them" if offloaded == "all" else "the text encoders"
        given += f" ({_mib(need.resident_bytes(offloaded))} with {what} offloaded)"
    if need.context_bytes:
        given += f", {_mib(need.context_bytes)} of CUDA context"
    return given


def _advice(
    need: MemoryNeed,
    verdict: Verdict,
    offloaded: Offloaded,
    batches: Mapping[SizePx, int],
    max_batch: int,
) -> str:
    """What is allowed and what to change."""
    costs = need.activation_by_size
    if verdict == "refused":
        short = [size for size, batch in batches.items() if batch < 1]
        resident_bytes = need.context_bytes + need.resident_bytes(offloaded)
        needed = resident_bytes + max(costs[size].at(1) for size in short)
        change = f"give it {_mib(needed)} (memory_gib), lower max_px"
        if need.resident_bytes(offloaded) > need.pinned_weights_bytes:
            change += ", or allow offload"
        return f"no room for even one image of {_sizes(short)}; {change}"
    capped = {size: batch for size, batch in batches.items() if batch < max_batch}
    most = max(cost.at(max_batch) for cost in costs.values())
    full = need.context_bytes + need.weights_bytes + most
    allowed = ", ".join(f"{batch} at {_sizes([size])}" for size, batch in sorted(capped.items()))
    if verdict == "offload":
        moved = "all weights" if offloaded == "all" else "the text encoders' weights"
        allowed = f"{moved} are moved in and out; batches of at most {allowed or max_batch}"
    elif capped:
        allowed = f"batches of at most {allowed}"
    else:
        return f"at most {_mib(full)} are taken"
    return f"{allowed}; {_mib(full)} (memory_gib) would take all of it"


def _sizes(sizes: list[SizePx]) -> str:
    return ", ".join(f"{width}x{height}" for width, height in sorted(sizes))


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // MIB)} MiB"
