"""Whether a model fits on a device, and how large its batches may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SizePx = tuple[int, int]
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
        activation_by_size: an entry for each image size that must be possible; at least one.
        pinned_weights_bytes: weights that must stay on the device even with offloading.
    """

    weights_bytes: int
    activation_by_size: Mapping[SizePx, ActivationCost]
    pinned_weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a model runs within its budget.

    Attributes:
        verdict: ``fits`` at the full batch; ``capped`` to smaller batches for some size;
            ``offload``: only with weights moved off the device (batches may be capped, too);
            ``refused``: some size does not fit even alone.
        max_batch_by_size: most requests in one batch; 0 where not even one fits.
        weights_bytes: weights that stay on the device.
        peak_bytes: these, and the activations of the largest batch that is allowed.
        explanation: what was given, what is allowed, what to change.
    """

    verdict: Literal["fits", "capped", "offload", "refused"]
    max_batch_by_size: Mapping[SizePx, int]
    weights_bytes: int
    peak_bytes: int
    explanation: str


def plan_memory(
    need: MemoryNeed, *, budget_bytes: int, max_batch: int, can_offload: bool
) -> MemoryPlan:
    """Decide how the model runs: smaller batches rather than offloading, either before refusing.

    Args:
        budget_bytes: device memory that the model may use.
        max_batch: requests per batch that are wanted.
        can_offload: whether weights may be moved off the device between their uses.
    """
    weights_bytes = need.weights_bytes
    batches = _largest_batches(need, budget_bytes - weights_bytes, max_batch)
    offloads = can_offload and not _all_run(batches)
    if offloads:
        weights_bytes = need.pinned_weights_bytes
        batches = _largest_batches(need, budget_bytes - weights_bytes, max_batch)
    verdict: Literal["fits", "capped", "offload", "refused"]
    if not _all_run(batches):
        verdict = "refused"
    elif offloads:
        verdict = "offload"
    elif min(batches.values()) < max_batch:
        verdict = "capped"
    else:
        verdict = "fits"
    costs = need.activation_by_size
    activation_bytes = max(costs[size].at(batch) for size, batch in batches.items())
    given = f"{_mib(budget_bytes)} for {_mib(need.weights_bytes)} of weights"
    if offloads:
        given += f" ({_mib(weights_bytes)} with offloading)"
    return MemoryPlan(
        verdict=verdict,
        max_batch_by_size=batches,
        weights_bytes=weights_bytes,
        peak_bytes=weights_bytes + activation_bytes,
        explanation=f"{verdict}: given {given} and batches of {max_batch}; "
        + _advice(need, verdict, batches, weights_bytes, max_batch),
    )


def _largest_batches(need: MemoryNeed, left_bytes: int, max_batch: int) -> dict[SizePx, int]:
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


def _advice(
    need: MemoryNeed,
    verdict: str,
    batches: Mapping[SizePx, int],
    weights_bytes: int,
    max_batch: int,
) -> str:
    """What is allowed and what to change."""
    if verdict == "refused":
        short = [size for size, batch in batches.items() if batch < 1]
        needed = max(weights_bytes + need.activation_by_size[size].at(1) for size in short)
        change = f"give it {_mib(needed)} (memory_gib), lower max_px"
        if weights_bytes > need.pinned_weights_bytes:
            change += ", or allow offload"
        return f"no room for even one image of {_sizes(short)}; {change}"
    capped = {size: batch for size, batch in batches.items() if batch < max_batch}
    full = need.weights_bytes + max(c.at(max_batch) for c in need.activation_by_size.values())
    allowed = ", ".join(f"{batch} at {_sizes([size])}" for size, batch in sorted(capped.items()))
    if verdict == "offload":
        allowed = f"weights are moved in and out; batches of at most {allowed or max_batch}"
    elif capped:
        allowed = f"batches of at most {allowed}"
    else:
        return f"at most {_mib(full)} are taken"
    return f"{allowed}; {_mib(full)} (memory_gib) would take all of it"


def _sizes(sizes: list[SizePx]) -> str:
    return ", ".join(f"{width}x{height}" for width, height in sorted(sizes))


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // MIB)} MiB"
