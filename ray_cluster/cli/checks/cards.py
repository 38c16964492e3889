"""How each pool's model would run on the usual sizes of GPUs: the best way that fits, its price."""

from __future__ import annotations

from itertools import groupby

from ray_cluster.cli.checks import Finding, ok
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.policies.costs.gpu_shares import CUDA_CONTEXT_BYTES, Card
from ray_cluster.policies.costs.memory import MemoryPlan

_SIZES_GIB = (8, 12, 16, 24, 48, 80)
_CAPABILITY = (8, 0)
_GIB = 2**30


def check_cards(pool: PoolConfig) -> Finding:
    """Return what a replica that has a GPU of each size to itself would do.

    Args:
        pool: whose model is on this machine.

    Raises:
        RayClusterError: as of ``plan_pool``.
    """
    from ray_cluster.engine.files.folders import is_called
    from ray_cluster.engine.files.memory import plan_on_cards
    from ray_cluster.engine.models.loading import inspect_model, number_type
    from ray_cluster.engine.pipelines.loading import inspect_pipeline

    on_gpu = {"device": "cuda", "num_gpus": 1.0, "memory_gib": None}
    own = pool.model_copy(update=on_gpu)
    own = own.model_copy(update={"dtype": own.number_format(_CAPABILITY)})
    totals = [gib * _GIB for gib in _SIZES_GIB]
    cards = [Card(total, total, _CAPABILITY) for total in totals]
    if is_called(own):
        weights = inspect_pipeline(own).weight_bytes
        ways = [_called(weights, total - CUDA_CONTEXT_BYTES, own) for total in totals]
    else:
        model = inspect_model(own)
        plans = plan_on_cards(model.folder, own, model.sizes, number_type(own, cards[0]), cards)
        ways = [_stepped(plan, own) for plan in plans]
    lines = []
    for way, sizes in groupby(zip(_SIZES_GIB, ways, strict=True), key=lambda one: one[1]):
        first, *more = [size for size, _ in sizes]
        name = f"{first} to {more[-1]} GiB" if more else f"{first} GiB"
        lines.append(f"{name}: {way}")
    return ok(f"pool {pool.name}, a GPU each", "\n".join(lines))


def _stepped(plan: MemoryPlan, pool: PoolConfig) -> str:
    """Return how the step engine would run, and what that costs."""
    host = f"{plan.host_bytes / _GIB:.1f} GiB"
    if plan.verdict == "refused" or (pool.is_group and plan.offloaded == "all"):
        return "no room for one image of the largest size; lower max_px"
    batches = [f"{most} of {width}x{height}" for (width, height), most in _batches(plan)]
    taken = f"batches of {', '.join(batches)}, {plan.peak_bytes / _GIB:.1f} GiB taken"
    if plan.offloaded == "all":
        return f"all weights offloaded, {host} copied in each step; {taken}"
    if plan.offloaded == "text encoders":
        return f"text encoders offloaded, {host} copied for the prompts of each image; {taken}"
    return f"whole; {taken}"


def _batches(plan: MemoryPlan) -> list[tuple[tuple[int, int], int]]:
    return sorted(plan.max_batch_by_size.items())


def _called(weight_bytes: int, room_bytes: int, pool: PoolConfig) -> str:
    """Return how a pipeline would be called; what its images take is known by a call alone."""
    weights = f"{weight_bytes / _GIB:.1f} GiB of weights"
    if weight_bytes < room_bytes:
        return f"whole, {weights} and what an image takes"
    if pool.offload == "auto":
        return f"models take turns, {weights} copied for each image, if the largest has room"
    return f"no room for {weights}; set offload: auto"
