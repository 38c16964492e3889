"""How many replicas of which model on which GPUs, how large their batches, how much is deferred.

A mixed-integer program over all pools and services, solved by CP-SAT with one worker, so that equal
problems give equal plans. Objectives are lexicographic:

1. quality of the cascades, less what each started replica must bring (hysteresis); 2. deadlines in
a surge: requests above the demand that would find no capacity; 3. cost: GPUs, and again those that
load for the time in which they do; 4. replicas that are stopped without need.

Deadlines under the demand are constraints. Where they can't be met the reply says so, and holds the
plan that leaves the least unserved. DiffServe (section 3.3) solves the case of one cascade on equal
GPUs, for the highest threshold.

A model with capacity c, demand d and q images waiting must satisfy c >= d + q / h: queues do not
grow, and what waits drains within the horizon h. (DiffServe adds the present queue's delay to the
latency instead.) In c a replica that is started now counts for the part of the window in which it
serves, so a swap costs the images that neither model makes meanwhile.
"""

from __future__ import annotations

from dataclasses import replace

from ray_cluster.policies.allocation.modes import modes_of
from ray_cluster.policies.allocation.problem import (
    Allocation,
    AllocationProblem,
    Pool,
    PoolSize,
    Service,
)
from ray_cluster.policies.allocation.program import AllocationModel
from ray_cluster.policies.allocation.variables import THOUSAND, Solution, part_of

# of CP-SAT's own measure of work, which is the same on every machine; a thousand GPUs in 20 pools
# then take some 40 ms in the slowest of a hundred cases, and nine of ten plans are proven the best
SEARCH_LIMIT = 0.009


def allocate(problem: AllocationProblem, *, search_limit: float = SEARCH_LIMIT) -> Allocation:
    """Return the best plan for a problem.

    Args:
        search_limit: work after which the best plan so far is taken, with ``is_proven`` false.
    """
    if (reason := _too_few(problem)) is not None:
        return _unchanged(problem, reason)
    modes = {one.name: modes_of(one, problem) for one in problem.services}
    late = [name for name, some in modes.items() if any(one.is_late for one in some)]
    is_refuted = bool(late)
    if not late:
        model = AllocationModel(problem, modes)
        solution = model.solve(search_limit)
        if solution is not None:
            return _allocation(model, solution, None)
        is_refuted = model.is_refuted
    model = AllocationModel(problem, modes, allows_unserved=True)
    solution = model.solve(search_limit)
    if solution is None:
        return _unchanged(problem, "no plan was found in time")
    shortage = _shortage(model, solution, late)
    if not is_refuted and shortage is None:
        # the search for a plan without lack was cut short, and this one lacks nothing
        return replace(_allocation(model, solution, None), is_proven=False)
    stay = "replicas that have just come would have to stay"
    return _allocation(model, solution, shortage or stay)


def _allocation(model: AllocationModel, solution: Solution, infeasible: str | None) -> Allocation:
    services = model.problem.services
    batches = [one for service in services for one in _batches(model, service, solution)]
    return Allocation(
        sizes=tuple(_size(model, pool, dict(batches), solution) for pool in model.problem.pools),
        deferral_rates=tuple(
            (name, solution.value(rate) / THOUSAND) for name, rate in model.deferred.items()
        ),
        infeasible=infeasible,
        is_proven=solution.is_proven,
    )


def _size(
    model: AllocationModel, pool: Pool, batches: dict[str, int], solution: Solution
) -> PoolSize:
    num = sum(int(solution.solver.value(term.replicas)) for term in model.terms[pool.name])
    return PoolSize(pool.name, num, batches.get(pool.name, _least_batch(pool)))


def _batches(model: AllocationModel, service: Service, solution: Solution) -> list[tuple[str, int]]:
    mode = next(one.mode for one in model.choices[service.name] if solution.value(one.is_chosen))
    found = []
    for stage in (service.first, service.heavy):
        if stage is not None:
            pools = model.problem.pools_of(stage.model)
            for pool, batch in zip(pools, part_of(mode, service, stage), strict=True):
                found.append((pool.name, batch.batch if batch else _least_batch(pool)))
    return found


def _shortage(model: AllocationModel, solution: Solution, late: list[str]) -> str | None:
    """Which demands and deadlines are not met, in words; None if they are."""
    parts = [
        f"{stage.model} of {service.name} lacks capacity for "
        f"{solution.value(unserved) / model.units[service.name]:.3g}/s"
        for service, stage, unserved in model.unserved
        if solution.value(unserved)
    ]
    parts += [f"the shortest batches of {name} take longer than its deadline" for name in late]
    return "; ".join(parts) or None


def _too_few(problem: AllocationProblem) -> str | None:
    """Say where even the fewest replicas of all pools do not fit; None if they do."""
    for supply in problem.supplies:
        pools = [pool for pool in problem.pools if pool.device == supply.device]
        needed = sum(problem.fewest_replicas(pool) * pool.gpus_per_replica for pool in pools)
        if needed > supply.num_gpus:
            names = ", ".join(pool.name for pool in pools if pool.min_replicas)
            return (
                f"the fewest replicas of {names} need {needed} units of {supply.device}, and there "
                f"are {supply.num_gpus}: lower min_replicas"
            )
    return None


def _unchanged(problem: AllocationProblem, reason: str) -> Allocation:
    sizes = [PoolSize(pool.name, pool.num_replicas, _least_batch(pool)) for pool in problem.pools]
    return Allocation(tuple(sizes), infeasible=reason, is_proven=False)


def _least_batch(pool: Pool) -> int:
    return min(one.batch for one in pool.options)
