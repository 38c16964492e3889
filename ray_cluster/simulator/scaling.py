"""Replicas of a simulated cluster: GPUs for them, their loads, failures and departures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ray_cluster.policies.cluster_state import DeviceState, PoolState
from ray_cluster.policies.fleet import Fleet, PoolSpec
from ray_cluster.simulator.events import EventQueue, Timer
from ray_cluster.simulator.gpu_time import GpuPool
from ray_cluster.simulator.outcomes import Faults
from ray_cluster.simulator.replica import StepRun
from ray_cluster.simulator.serving import Serving

# of a spread that is reported: what changes less changes no plan
_DIGITS = 2


@dataclass(slots=True, eq=False)
class Holder:
    """One replica, from its load to its end.

    Attributes:
        name: no other replica has it or had it.
        gpus: of its pool's type.
        load: going on.
    """

    spec: PoolSpec
    name: str
    gpus: tuple[int, ...]
    started_s: float
    is_ready: bool = False
    is_leaving: bool = False
    load: Timer | None = None


Watch = Callable[[Holder, StepRun], None]


class Scaling:
    """Has as many replicas of each pool as are wanted, as far as there are GPUs.

    Args:
        num_gpus: of every type.
        rng: of failures and loads.
        noise_cv: of the seconds of loads, lognormal.
        faults: of GPUs; None for none.
        watch: told of every batch that was made.
    """

    def __init__(
        self,
        events: EventQueue,
        fleet: Fleet,
        num_gpus: dict[str, int],
        serving: Serving,
        rng: np.random.Generator,
        *,
        noise_cv: float,
        faults: Faults | None,
        watch: Watch | None = None,
    ) -> None:
        self._events = events
        self._serving = serving
        self._rng = rng
        self._sigma = math.sqrt(math.log1p(noise_cv**2))
        self._faults = faults
        self._watch = watch
        self._gpus = {device: GpuPool(number) for device, number in num_gpus.items()}
        self._specs = {spec.name: spec for spec in fleet.pools}
        self._wanted: dict[str, int] = dict.fromkeys(self._specs, 0)
        self._holders: dict[str, list[Holder]] = {name: [] for name in self._specs}
        self._num_started = 0

    def scale(self, pool: str, num_replicas: int) -> None:
        """Have so many replicas, soon."""
        self._wanted[pool] = num_replicas
        staying = sorted(self._staying(pool), key=self._use)
        for holder in staying[: max(0, len(staying) - num_replicas)]:
            self._stop(holder)
        self._start_wanted()

    def _use(self, holder: Holder) -> tuple[bool, bool, float, float]:
        """Whom to do without first: who loads, then who is idle, then whoever is free first."""
        if not holder.is_ready:
            return (False, False, 0.0, -holder.started_s)
        name = holder.name
        is_making, free_in_s = self._serving.is_making(name), self._serving.free_in_s(name)
        return (True, is_making, free_in_s, -holder.started_s)

    @property
    def gpu_hours(self) -> float:
        """For which GPUs were held, loading or serving."""
        return sum(one.held_s(self._events.now_s) for one in self._gpus.values()) / 3600

    def devices(self) -> tuple[DeviceState, ...]:
        """Return the GPUs of every type that work."""
        return tuple(DeviceState(name, one.num_working) for name, one in self._gpus.items())

    def pools(self, dwell_s: float) -> tuple[PoolState, ...]:
        """Return the replicas of every pool; those count as young that are younger than that."""
        return tuple(self._pool(name, self._events.now_s - dwell_s) for name in self._specs)

    def _pool(self, name: str, young_s: float) -> PoolState:
        staying = self._staying(name)
        return PoolState(
            name,
            num_ready=sum(one.is_ready for one in staying),
            num_loading=sum(not one.is_ready for one in staying),
            num_young=sum(one.started_s > young_s for one in staying),
            spread=round(self._serving.spread(name), _DIGITS),
        )

    def _staying(self, pool: str) -> list[Holder]:
        return [one for one in self._holders[pool] if not one.is_leaving]

    def _start_wanted(self) -> None:
        for name, spec in self._specs.items():
            num_missing = self._wanted[name] - len(self._staying(name))
            free = self._gpus[spec.device]
            for _ in range(min(num_missing, free.num_free // spec.gpus_per_replica)):
                self._start(spec)

    def _start(self, spec: PoolSpec) -> None:
        now_s = self._events.now_s
        gpus = self._gpus[spec.device].take(spec.gpus_per_replica, now_s)
        holder = Holder(spec, f"{spec.name}-{self._num_started}", gpus, now_s)
        self._num_started += 1
        self._holders[spec.name].append(holder)
        holder.load = self._events.after(
            spec.load_s * self._factor(), lambda: self._bring_up(holder)
        )
        if self._faults is not None and math.isfinite(self._faults.mean_s_between):
            lives_s = self._rng.exponential(self._faults.mean_s_between / len(gpus))
            self._events.after(lives_s, lambda: self._fail(holder))

    def _factor(self) -> float:
        """A lognormal factor with a mean of 1."""
        if self._sigma == 0:
            return 1.0
        return float(math.exp(self._rng.normal(-(self._sigma**2) / 2, self._sigma)))

    def _bring_up(self, holder: Holder) -> None:
        holder.is_ready, holder.load = True, None
        watch = self._watch
        self._serving.bring_up(
            holder.name,
            holder.spec.name,
            on_drained=lambda: self._gone(holder),
            watch=None if watch is None else lambda _, run: watch(holder, run),
        )

    def _stop(self, holder: Holder) -> None:
        holder.is_leaving = True
        if holder.load is None:
            self._serving.drain(holder.name)
            return
        holder.load.call_off()
        self._gone(holder)

    def _gone(self, holder: Holder) -> None:
        """A replica has left: its GPUs are for others."""
        self._forget(holder)
        self._start_wanted()

    def _fail(self, holder: Holder) -> None:
        if holder not in self._holders[holder.spec.name]:
            return
        assert self._faults is not None
        device, gpu = self._gpus[holder.spec.device], holder.gpus[0]
        device.break_down(gpu)
        if holder.load is None:
            self._serving.fail(holder.name, is_silent=self._faults.are_silent)
        else:
            holder.load.call_off()
        self._forget(holder)

        def repaired() -> None:
            device.repair(gpu)
            self._start_wanted()

        self._events.after(self._faults.repair_s, repaired)
        self._start_wanted()

    def _forget(self, holder: Holder) -> None:
        self._holders[holder.spec.name].remove(holder)
        self._gpus[holder.spec.device].give_back(holder.gpus, self._events.now_s)
