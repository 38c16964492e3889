"""A small cascade's fleet, and clusters behind the control loop's protocol."""

from __future__ import annotations

import numpy as np

from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.cascade import DeferralCurve, QualityCurve
from ray_cluster.policies.planning.fleet import (
    CascadeSpec,
    DeviceSpec,
    Fleet,
    PoolSpec,
    ServiceSpec,
)
from ray_cluster.simulator.control.cluster import STEPS, SimulatedCluster, Watch, whole_image
from ray_cluster.simulator.control.scaling import Faults
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.workload import Arrival

FLEET = Fleet(
    (DeviceSpec("gpu"),),
    (
        PoolSpec("light", "l", "gpu", (BatchOption(1, 1.0), BatchOption(4, 2.0)), load_s=10.0),
        PoolSpec("heavy", "h", "gpu", (BatchOption(1, 4.0), BatchOption(2, 6.0)), load_s=20.0),
    ),
    (
        ServiceSpec(
            "s",
            "l",
            slo_s=20.0,
            cascade=CascadeSpec(
                "h",
                QualityCurve((0.0, 0.5, 1.0), (9.0, 5.0, 6.0)),
                DeferralCurve((0.0, 1.0), (0.0, 1.0)),
                discriminate_s=0.5,
            ),
        ),
    ),
)


def simulated(
    num_gpus: int = 4,
    *,
    noise_cv: float = 0.0,
    faults: Faults | None = None,
    dwell_s: float = 0.0,
    seed: int = 0,
    watch: Watch | None = None,
) -> tuple[SimulatedCluster, EventQueue]:
    events = EventQueue()
    cluster = SimulatedCluster(
        events,
        FLEET,
        {"gpu": num_gpus},
        np.random.default_rng(seed),
        noise_cv=noise_cv,
        faults=faults,
        dwell_s=dwell_s,
        watch=watch,
    )
    return cluster, events


def job(at_s: float, confidence: float = 0.5, slo_s: float = 20.0) -> Arrival:
    return whole_image(at_s, "s", slo_s, num_steps=STEPS, confidence=confidence, coin=0.5)
