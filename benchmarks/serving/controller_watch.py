"""Watches a cell from outside, and plans it by another policy: ``python -m`` this module.

A driver of the service's own Ray cluster. It observes and acts through what the service's
controller uses: the same loop, cluster and scaler. Only the planner differs. Every round is a line
of JSON in a file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ray_cluster.codec.values import TextCodec
from ray_cluster.control.cell_fleet import CellFleet, Curves
from ray_cluster.control.live import LiveCluster
from ray_cluster.control.loop import FAILURES, ControlLoop, LoopLimits
from ray_cluster.control.records import Glance
from ray_cluster.models.cascade_curves import load_curves
from ray_cluster.policies.baselines.threshold_maximising import ThresholdPlanner
from ray_cluster.policies.planning.cluster_state import ClusterState, DeviceState
from ray_cluster.policies.planning.fleet import Fleet, PoolSpec
from ray_cluster.policies.planning.plan import Plan, PoolPlan
from ray_cluster.policies.planning.planner import Planner
from ray_cluster.protocol.controller import Observation

NONE, DIFFSERVE = "none", "diffserve"
_PATIENCE_S = 10.0
_log = logging.getLogger(__name__)
_SEEN: TextCodec[Observation] = TextCodec(Observation)


@dataclass(frozen=True, slots=True)
class Round:
    """What the watcher has seen at one instant.

    Attributes:
        at_s: Unix time.
        targets: replicas that Serve is to keep, by pool.
        supply: hundredths of devices.
    """

    at_s: float
    targets: Mapping[str, int]
    supply: int
    seen: Observation


def read_rounds(path: Path) -> list[Round]:
    """Return the rounds of a watcher's file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [
        Round(one["at_s"], one["targets"], one["supply"], _SEEN.decode(one["seen"])) for one in rows
    ]


def curves_of(source: str) -> Curves:
    """Return the calibrated curves of a cascade."""
    found = load_curves(source)
    return Curves(found.quality, found.deferral)


class SlotPlanner:
    """Has a cell planned by a policy for equal devices that one replica each takes.

    Live replicas share devices in hundredths. What remains beside discriminators is counted in
    replicas; a discriminator keeps its replicas.

    Args:
        glance: returns the latest observation.
        build: makes the planner of a fleet.
    """

    def __init__(
        self, glance: Callable[[], Glance | None], build: Callable[[Fleet], Planner[Any]]
    ) -> None:
        self._glance = glance
        self._build = build

    def begin(self, state: ClusterState) -> Any:
        planned = self._planned
        return self._build(slot_fleet(planned.fleet)).begin(in_slots(state, planned))

    def plan(self, state: ClusterState, memory: Any) -> tuple[Plan, Any]:
        planned = self._planned
        planner = self._build(slot_fleet(planned.fleet))
        plan, memory = planner.plan(in_slots(state, planned), memory)
        kept = tuple(
            PoolPlan(one.name, max(1, state.pool(one.name).num_replicas), one.max_batch)
            for one in planned.helpers
        )
        return replace(plan, pools=(*plan.pools, *kept)), memory

    @property
    def _planned(self) -> CellFleet:
        glance = self._glance()
        assert glance is not None, "nothing was observed yet"
        return glance.planned


def slot_fleet(fleet: Fleet) -> Fleet:
    """Return a fleet whose replicas take one device each, light models first."""
    pools = tuple(replace(one, gpus_per_replica=1) for one in light_first(fleet))
    return replace(fleet, pools=pools)


def light_first(fleet: Fleet) -> tuple[PoolSpec, ...]:
    """Return the pools, those of models that requests enter first."""
    first = {one.model for one in fleet.services}
    return tuple(sorted(fleet.pools, key=lambda one: one.model not in first))


def in_slots(state: ClusterState, planned: CellFleet) -> ClusterState:
    """Return a state whose devices are the replicas of models that there are devices for."""
    shares = [one.gpus_per_replica for one in planned.fleet.pools]
    used = sum(
        one.gpus_per_replica * max(1, state.pool(one.name).num_replicas) for one in planned.helpers
    )
    [device] = state.devices
    count = replicas_within(device.num_gpus - used, shares)
    return replace(state, devices=(DeviceState(device.device, count),))


def replicas_within(supply: int, shares: Sequence[int]) -> int:
    """Return how many replicas there are devices for: one of the lightest, others the heaviest.

    Args:
        supply: hundredths of devices for them.
        shares: hundredths that a replica of each model takes.
    """
    return max(0, 1 + (supply - min(shares)) // max(shares))


def diffserve(fleet: Fleet, settings: Mapping[str, float]) -> ThresholdPlanner:
    """Return DiffServe's planner with settings found in the simulator."""
    return ThresholdPlanner(
        fleet, smoothing=settings["smoothing"], demand_factor=settings["demand_factor"]
    )


def chosen_settings(kind: str, policy: str) -> dict[str, float]:
    """Return the settings of a policy in the simulator's experiments."""
    path = Path(__file__).resolve().parents[1] / "policies" / "control_choices.json"
    for one in json.loads(path.read_text(encoding="utf-8")):
        if (one["kind"], one["policy"]) == (kind, policy):
            return dict(one["settings"])
    raise ValueError(f"{path} has no settings of {kind}/{policy}")


async def _watch(out: Path, policy: str, period_s: float) -> None:
    # imports Ray
    from ray_cluster.compat import dashboard_url
    from ray_cluster.deployments.dispatcher_handle import DispatcherHandle
    from ray_cluster.deployments.serve.serve_scaler import ServeScaler

    calls = DispatcherHandle(patience_s=_PATIENCE_S).control
    loop = asyncio.get_running_loop()
    cluster = LiveCluster(calls, loop, ServeScaler(dashboard_url), cache(curves_of))

    def limits() -> LoopLimits:
        # the service's own controller is paused, this one is not
        return replace(cluster.limits(), acts=True)

    settings = chosen_settings("cascade", DIFFSERVE)
    rival = ControlLoop(
        SlotPlanner(lambda: cluster.glance, lambda fleet: diffserve(fleet, settings)),
        cluster,
        time.monotonic,
        limits=limits,
    )
    with out.open("a", encoding="utf-8") as file:
        while True:
            began_s = time.monotonic()
            act = rival.run_round if policy == DIFFSERVE and _is_known(cluster) else cluster.observe
            try:
                await asyncio.to_thread(act)
            except FAILURES as error:
                _log.warning("nothing is observed: %s", error)
            else:
                file.write(_line(cluster) + "\n")
                file.flush()
            await asyncio.sleep(max(0.0, began_s + period_s - time.monotonic()))


def _is_known(cluster: LiveCluster) -> bool:
    """Whether both models of the cascade have been seen, so that it can be planned."""
    return cluster.glance is not None and any(
        one.cascade for one in cluster.glance.planned.fleet.services
    )


def _line(cluster: LiveCluster) -> str:
    assert cluster.glance is not None
    state = cluster.glance.state
    assert state.in_force is not None
    targets = {one.pool: one.num_replicas for one in state.in_force.pools}
    return json.dumps(
        {
            "at_s": time.time(),
            "targets": targets,
            "supply": sum(one.num_gpus for one in state.devices),
            "seen": _SEEN.encode(cluster.glance.seen),
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Watch until the process is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="of the service's Ray")
    parser.add_argument("out", type=Path, help="file of the rounds")
    parser.add_argument("--policy", choices=(NONE, DIFFSERVE), default=NONE)
    parser.add_argument("--period-s", type=float, default=2.0)
    options = parser.parse_args(arguments)
    # reads the environment
    import ray

    ray.init(address=options.address, log_to_driver=False, logging_level=logging.ERROR)
    asyncio.run(_watch(options.out, options.policy, options.period_s))


if __name__ == "__main__":
    main()
