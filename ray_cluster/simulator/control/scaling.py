"""Replicas of a simulated cluster: GPUs for them, their loads, failures and departures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from ray_cluster.policies.planning.cluster_state import DeviceState
from ray_cluster.policies.planning.fleet import Fleet, PoolSpec
from ray_cluster.simulator.cell.cell import PoolSpec as ServedPool
from ray_cluster.simulator.cell.cell import SimulatedCell
from ray_cluster.simulator.events import Timer


@dataclass(frozen=True, slots=True)
class Faults:
    """How often GPUs fail. A replica on one is gone without notice, as with its machine.

    Attributes:
        mean_s_between: of one GPU that is held; exponentially distributed.
        repair_s: for which it is unusable.
    """

    mean_s_between: float
    repair_s: float


@dataclass(slots=True, eq=False)
class Holder:
    """One replica, from its load to its end.

    Attributes:
        name: unique in a run.
        load: going on.
    """

    spec: PoolSpec
    name: str
    started_s: float
    is_ready: bool = False
    is_leaving: bool = False
    load: Timer | None = None


class Gpus:
    """GPUs of one type, by what they are: held, broken or free."""

    def __init__(self, num: int) -> None:
        self.num_free = self._num = num
        self.num_broken = 0
        self._held_s = 0.0
        self._holders: list[Holder] = []

    @property
    def num_working(self) -> int:
        return self._num - self.num_broken

    def held_s(self, now_s: float) -> float:
        held = (one.spec.gpus_per_replica * (now_s - one.started_s) for one in self._holders)
        return self._held_s + sum(held)

    def take(self, holder: Holder) -> None:
        """Take free GPUs for a replica, of which there must be enough."""
        self.num_free -= holder.spec.gpus_per_replica
        assert self.num_free >= 0
        self._holders.append(holder)

    def release(self, holder: Holder, now_s: float, *, num_broken: int = 0) -> None:
        """Make a replica's GPUs free again, except broken ones."""
        num = holder.spec.gpus_per_replica
        self._holders.remove(holder)
        self._held_s += num * (now_s - holder.started_s)
        self.num_free += num - num_broken
        self.num_broken += num_broken

    def repair(self) -> None:
        self.num_broken -= 1
        self.num_free += 1


class Scaling:
    """Keeps as many replicas of each pool as are wanted, as far as there are GPUs.

    Args:
        cell: that they serve.
        pools: of it, by name.
        num_gpus: of every type.
        rng: of failures and loads.
        noise_cv: of the seconds of loads, lognormal.
        faults: of GPUs; None for none.
    """

    def __init__(
        self,
        cell: SimulatedCell,
        pools: Mapping[str, ServedPool],
        fleet: Fleet,
        num_gpus: dict[str, int],
        rng: np.random.Generator,
        *,
        noise_cv: float,
        faults: Faults | None,
    ) -> None:
        self._events, self._cell, self._pools = cell.events, cell, pools
        self._rng = rng
        self._sigma = math.sqrt(math.log1p(noise_cv**2))
        self._faults = faults
        self._gpus = {device: Gpus(number) for device, number in num_gpus.items()}
        self._specs = {spec.name: spec for spec in fleet.pools}
        self._wanted: dict[str, int] = dict.fromkeys(self._specs, 0)
        self._holders: dict[str, list[Holder]] = {name: [] for name in self._specs}
        self._all: dict[str, Holder] = {}

    def scale(self, pool: str, num_replicas: int) -> None:
        """Start or stop replicas until there are so many."""
        self._wanted[pool] = num_replicas
        staying = sorted(self.staying(pool), key=self._use)
        for holder in staying[: max(0, len(staying) - num_replicas)]:
            self._stop(holder)
        self._start_wanted()

    def _use(self, holder: Holder) -> tuple[bool, bool, float, float]:
        """Sort key of what to stop first: what loads, then what is idle, then what is free soon."""
        if not holder.is_ready:
            return (False, False, 0.0, -holder.started_s)
        held = self._cell.core.replicas[holder.name].held.values()
        batch_s = self._pools[holder.spec.name].hardware.batch_s
        if not held or batch_s is None:
            return (True, False, 0.0, -holder.started_s)
        end_s = max(one.leased_s for one in held) + batch_s(len(held))
        return (True, True, max(0.0, end_s - self._events.now_s), -holder.started_s)

    @property
    def gpu_hours(self) -> float:
        """For which GPUs were held, loading or serving."""
        return sum(one.held_s(self._events.now_s) for one in self._gpus.values()) / 3600

    def devices(self) -> tuple[DeviceState, ...]:
        return tuple(DeviceState(name, one.num_working) for name, one in self._gpus.items())

    def staying(self, pool: str) -> list[Holder]:
        """Return the replicas of a pool that are not about to leave."""
        return [one for one in self._holders[pool] if not one.is_leaving]

    def pool_of(self, replica_id: str) -> str | None:
        """Return the pool of a replica; None for one that is not scaled."""
        holder = self._all.get(replica_id)
        return None if holder is None else holder.spec.name

    def _start_wanted(self) -> None:
        for name, spec in self._specs.items():
            num_missing = self._wanted[name] - len(self.staying(name))
            free = self._gpus[spec.device]
            for _ in range(min(num_missing, free.num_free // spec.gpus_per_replica)):
                self._start(spec)

    def _start(self, spec: PoolSpec) -> None:
        holder = Holder(spec, f"{spec.name}-{len(self._all)}", self._events.now_s)
        self._gpus[spec.device].take(holder)
        self._all[holder.name] = holder
        self._holders[spec.name].append(holder)
        # a lognormal factor with a mean of 1
        factor, sigma = 1.0, self._sigma
        if sigma:
            factor = math.exp(self._rng.normal(-(sigma**2) / 2, sigma))
        holder.load = self._events.after(spec.load_s * factor, partial(self._bring_up, holder))
        if self._faults is not None:
            mean_s = self._faults.mean_s_between / spec.gpus_per_replica
            self._events.after(self._rng.exponential(mean_s), partial(self._fail, holder))

    def _bring_up(self, holder: Holder) -> None:
        holder.is_ready, holder.load = True, None
        self._cell.bring_up(self._pools[holder.spec.name], holder.name)

    def _stop(self, holder: Holder) -> None:
        holder.is_leaving = True
        if holder.load is None:
            self._cell.drain(holder.name, partial(self._gone, holder))
        else:
            holder.load.call_off()
            self._gone(holder)

    def _gone(self, holder: Holder, *, num_broken: int = 0) -> None:
        """A replica has left: its GPUs are for others, unless they are broken."""
        self._holders[holder.spec.name].remove(holder)
        now_s = self._events.now_s
        self._gpus[holder.spec.device].release(holder, now_s, num_broken=num_broken)
        self._start_wanted()

    def _fail(self, holder: Holder) -> None:
        if holder not in self._holders[holder.spec.name]:
            return
        assert self._faults is not None
        if holder.load is None:
            self._cell.fail(holder.name)
        else:
            holder.load.call_off()

        def repaired() -> None:
            self._gpus[holder.spec.device].repair()
            self._start_wanted()

        self._events.after(self._faults.repair_s, repaired)
        self._gone(holder, num_broken=1)
