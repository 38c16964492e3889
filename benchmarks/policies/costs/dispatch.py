"""What a decision of the dispatcher costs.

Nothing computes an image here: replicas only take and report leases.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from benchmarks.policies.costs.samples import DecisionCost, Samples
from benchmarks.policies.costs.settings import CostSettings
from benchmarks.settings import Report
from ray_cluster.cell.front import core_of
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.policies.types import StepCost, WhenLate
from ray_cluster.protocol.leases import Finished, Lease, Poll, Registration
from ray_cluster.requests import ImageRequest, ImageResult, Timing
from ray_cluster.simulator.cell.cell import profile_of

AIM_MS = 2.0
# replicas at which it holds
_AIM_AT = 1024
_MODEL = "model"
_IN_FLIGHT, _BATCH = 4, 2
_COST = StepCost(0.04, 0.017)
# turns between two reports of progress
_REPORT_EVERY = 50


def measure_dispatch(settings: CostSettings, report: Report) -> Iterator[DecisionCost]:
    """Time offers, polls and reports of full cells with long queues, of one size after another."""
    for place, (replicas, waiting) in enumerate(settings.cells):
        # most of the time goes to the largest
        share = replicas / sum(one for one, _ in settings.cells)
        before = sum(one for one, _ in settings.cells[:place]) / sum(
            one for one, _ in settings.cells
        )
        text = f"{replicas} replicas, {waiting} waiting"
        report(before, text)
        crowd = _Crowd(replicas, waiting)
        for turn in range(settings.turns):
            if turn % _REPORT_EVERY == 0:
                report(before + share * (0.5 + 0.5 * turn / settings.turns), text)
            crowd.turn()
        for decision in crowd.samples.seconds:
            yield crowd.samples.row(
                decision,
                gpus=replicas,
                load=f"{waiting} waiting",
                num_requests=waiting,
                aim_ms=AIM_MS if replicas == _AIM_AT else None,
            )


class _Crowd:
    """A cell in which every place is taken and many wait; one ends, one comes, turn by turn."""

    def __init__(self, replicas: int, waiting: int) -> None:
        limits = LimitsConfig(
            max_queue_s=1e9, max_queued_images=2 * waiting + _IN_FLIGHT * replicas
        )
        self._core = core_of(
            ClusterConfig(pools=(PoolConfig(name=_MODEL, model=_MODEL),), limits=limits)
        )
        self._rng = random.Random(replicas)
        self._num = 0
        self._held: dict[str, dict[str, Lease]] = {}
        self.samples = Samples()
        for number in range(replicas):
            name = f"r{number}"
            self._held[name] = {}
            self._core.register(
                Registration(name, profile_of(_MODEL), _IN_FLIGHT, _BATCH, _COST), 0.0
            )
        for _ in range(waiting + _IN_FLIGHT * replicas):
            self._offer("accept")
        for name in self._held:
            self._poll(name)
        self.samples.seconds.clear()

    def turn(self) -> None:
        """Have one request end and be replaced, and another be refused if it would be late."""
        name = self._rng.choice(list(self._held))
        request_id, lease = self._held[name].popitem()
        result = ImageResult(request_id, b"", "png", Timing(), 0)
        event = Finished(request_id, lease.fence, result)
        self.samples.timed("report", lambda: self._core.report(name, [event], 1.0))
        self._poll(name)
        self._offer("accept")
        self._offer("refuse")

    def _poll(self, name: str) -> None:
        held = self._held[name]
        poll = Poll(name, 1, _IN_FLIGHT - len(held), dict.fromkeys(held, 1))
        reply = self.samples.timed("poll", lambda: self._core.poll(poll, 1.0))
        held |= {lease.request.request_id: lease for lease in reply.leases}

    def _offer(self, when_late: WhenLate) -> None:
        self._num += 1
        request = ImageRequest(
            request_id=f"{self._num}",
            model=_MODEL,
            prompt="",
            width_px=1024,
            height_px=1024,
            num_steps=self._rng.randint(20, 50),
            guidance_scale=2.0,
            sampler="ddim",
            seed=0,
            slo_s=self._rng.uniform(1e4, 2e4),
            when_late=when_late,
        )
        decision = "offer" if when_late == "accept" else "offer with a deadline"
        self.samples.timed(decision, lambda: self._core.offer([request], 1.0, client=None))
