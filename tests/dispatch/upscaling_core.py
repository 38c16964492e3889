"""A dispatch core with a model and an upscaler, on a virtual clock, for the tests beside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.config.settings import Settings, settings_of
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.types import Offer, StepCost
from ray_cluster.protocol.leases import Lease, Registration
from ray_cluster.protocol.outcomes import Outcome
from ray_cluster.requests import ImageRequest, Timing, UpscaleUse
from tests.dispatch.cascade_core import made
from tests.fakes import image_request, poll_of, registration

CONFIG = DispatchConfig(
    default_slo_s=30.0, replica_timeout_s=6.0, max_attempts=2, model_lost_s=60.0, preemption=False
)
LANE = "upscale:big"
# replicas say how far they are at least so often
_TICK_S = 0.25


def settings(*, upscalers: Sequence[str] = ("big",)) -> Settings:
    """Settings of a model "m", and of these upscalers."""
    sections: dict[str, Any] = {
        "pools": [{"name": "m", "model": "shapes-sd", "served_as": "m"}],
        "upscalers": [{"name": name} for name in upscalers],
        "dispatch": CONFIG.model_dump(),
    }
    return settings_of(ClusterConfig.model_validate(sections))


def upscaler(replica_id: str = "u", *, image_s: float = 0.5, slots: int = 1) -> Registration:
    """The registration of an upscaler that takes so many seconds for an image of any size."""
    cost = StepCost(fixed_s=image_s, per_megapixel_s=0.0)
    return Registration(replica_id, None, slots, 1, cost, kind="upscale", served_as="big")


def model(replica_id: str = "r", *, step_s: float = 0.1) -> Registration:
    """The registration of a replica that makes one image at a time."""
    cost = StepCost(fixed_s=step_s, per_megapixel_s=0.0)
    return replace(registration(replica_id, "m", 1, 1), step_cost=cost)


def make_core(*registrations: Registration, epoch: int = 1) -> DispatchCore:
    """A core of these settings with workers none of which has polled."""
    core = DispatchCore(
        config=CONFIG,
        limits=LimitsConfig(max_queued_images=200),
        epoch=epoch,
        configured=("m", LANE),
    )
    core.apply(settings(), 0.0)
    for one in registrations:
        core.register(one, 0.0)
    return core


def request(request_id: str = "a", factor: int = 2, **changes: Any) -> ImageRequest:
    """A request for ten steps, whose image is enlarged unless the factor is 1."""
    use = None if factor == 1 else UpscaleUse("big", factor)
    return image_request(request_id, "m", upscale=use, **changes)


@dataclass
class Worker:
    """One that makes one image at a time, and takes as long as it has registered.

    Attributes:
        lease: that it works on.
        end_s: instant at which that is done.
    """

    registration: Registration
    lease: Lease | None = None
    begin_s: float = 0.0
    end_s: float = float("inf")

    @property
    def replica_id(self) -> str:
        return self.registration.replica_id

    @property
    def step_s(self) -> float:
        return self.registration.step_cost.fixed_s

    def poll(self, core: DispatchCore, now_s: float) -> None:
        """Say how far it is, and begin with what it gets."""
        done = {}
        if self.lease is not None and self.registration.kind == "denoise":
            done = {self.lease.request.request_id: int((now_s - self.begin_s) / self.step_s)}
        elif self.lease is not None:
            done = {self.lease.request.request_id: 0}
        reply = core.poll(poll_of(self.replica_id, int(self.lease is None), done), now_s)
        for lease in reply.leases:
            assert self.lease is None
            steps = lease.request.num_steps if self.registration.kind == "denoise" else 1
            self.lease, self.begin_s, self.end_s = lease, now_s, now_s + steps * self.step_s

    def finish(self, core: DispatchCore, now_s: float) -> tuple[Outcome, ...]:
        """Report what it has made."""
        assert self.lease is not None
        lease, self.lease, self.end_s = self.lease, None, float("inf")
        took_s, is_model = now_s - self.begin_s, self.registration.kind == "denoise"
        timing = Timing(
            queue_s=lease.queued_s, **{"denoise_s" if is_model else "upscale_s": took_s}
        )
        event = made(lease)
        # as if the model's worker were a group
        degrees = ((2, lease.request.num_steps),) if is_model else ()
        result = replace(event.result, timing=timing, steps_by_degree=degrees)
        event = replace(event, result=result)
        return core.report(self.replica_id, [event], now_s)[0]


def run(
    core: DispatchCore,
    workers: Iterable[Worker],
    arrivals: Sequence[tuple[float, ImageRequest]],
    end_s: float,
) -> tuple[dict[str, Offer], dict[str, Outcome]]:
    """Have workers make what arrives until an instant; return the answers, and how each ended."""
    offers, outcomes, left, workers = {}, {}, list(reversed(arrivals)), list(workers)
    now_s = 0.0
    while now_s < end_s:
        for worker in workers:
            if worker.end_s <= now_s:
                outcomes |= {one.request_id: one for one in worker.finish(core, now_s)}
        while left and left[-1][0] <= now_s:
            new = left.pop()[1]
            offers[new.request_id] = core.offer([new], now_s, client=None)
        for worker in workers:
            worker.poll(core, now_s)
        next_s = [worker.end_s for worker in workers] + [one[0] for one in left[-1:]]
        now_s = min(*next_s, now_s + _TICK_S)
    return offers, outcomes
