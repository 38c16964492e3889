"""Where ControlNets run: in the replicas of their base, or as services, and on how many replicas.

A ControlNet in the base's replica makes each of its rows' steps longer by all that it takes. As
a service it works beside the first half of the step, so that only what outlasts that half is added;
but its devices are held all the time, and are idle whenever nobody calls it. SwiftDiffusion (in its
section 4.1) gives ControlNets GPUs of their own for the sake of latency; in most settings of its
own logs that makes fewer images per minute of a GPU than plain diffusers does. So devices come
first here:

    minimise    the devices that services hold, which at a given rate of requests are the
                device-seconds of an image beyond those of the base's replicas
    then        the work of the base's replicas
    subject to  a step of no request takes longer than the target,
                no replica of the base or of a service is busy for more than a given share,
                what runs in a base's replica fits into its memory, and
                no more devices are held than are free.

A ControlNet thus becomes a service where a step would be too long otherwise, where the base's
replicas have too much to do, or where they have no memory for it, and nowhere else. The answer is
exact: a mixed-integer program, solved for one of these aims after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

Floats = npt.NDArray[np.float64]
Shortage = Literal["memory", "time"]

# by how much an earlier aim may be missed for the sake of a later one
_TOLERANCE = 1e-6
# in times of what a ControlNet takes
_SHORT_QUEUE = 0.02


@dataclass(frozen=True, slots=True)
class PlacedControlNet:
    """A ControlNet that is to be placed.

    Attributes:
        control_s: seconds that it takes for one row of a usual batch.
        memory_bytes: of a process that has it, beyond what the base takes.
        device_share: part of a device that one replica of a service holds; in (0, 1].
    """

    name: str
    control_s: float
    memory_bytes: int
    device_share: float = 1.0


@dataclass(frozen=True, slots=True)
class ControlNetSteps:
    """The steps of requests that have the same ControlNets, or none.

    Attributes:
        per_s: requests per second times their steps.
    """

    names: tuple[str, ...]
    per_s: float


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """What is to be placed.

    Attributes:
        encode_s, decode_s: of one row of a usual batch, the halves of a step of the base.
        transport_s: of a row's latents to a service, and of its residuals back.
        most_step_s: target for the step of any row.
        num_bases: replicas of the base.
        memory_bytes: that is free for ControlNets in each of them.
        num_devices: that are free for services.
        most_busy: share of the time for which a replica may be busy, below 1.
    """

    controlnets: tuple[PlacedControlNet, ...]
    steps: tuple[ControlNetSteps, ...]
    encode_s: float
    decode_s: float
    transport_s: float
    most_step_s: float
    num_bases: int
    memory_bytes: int
    num_devices: int
    most_busy: float = 0.8

    def per_s(self, name: str) -> float:
        """Return the steps per second of a ControlNet."""
        return sum(one.per_s for one in self.steps if name in one.names)

    def busy(self, one: PlacedControlNet, num_replicas: int) -> float:
        """Return the share of the time for which each replica of a service is busy."""
        return self.per_s(one.name) * one.control_s / num_replicas

    def queue_s(self, one: PlacedControlNet, num_replicas: int) -> float:
        """Return the mean seconds that a row waits for a replica of a service.

        Each is one server with random arrivals and equal times (M/D/1).
        """
        busy = self.busy(one, num_replicas)
        return one.control_s * busy / (2 * (1 - busy))

    def wait_s(self, one: PlacedControlNet, num_replicas: int) -> float:
        """Return the seconds by which a service outlasts the first half, its queue included."""
        answer_s = one.control_s + self.transport_s + self.queue_s(one, num_replicas)
        return max(0.0, answer_s - self.encode_s)

    def choices(self, one: PlacedControlNet) -> list[int]:
        """Return the numbers of replicas that a ControlNet may have; 0 is in the base's.

        No more than are of use: with the last one, nothing is waited for, or hardly any queue.
        """
        most = int(self.num_devices / one.device_share + _TOLERANCE)
        found = [0]
        for num in range(1, most + 1):
            if self.busy(one, num) > self.most_busy:
                continue
            found.append(num)
            is_short = self.queue_s(one, num) <= _SHORT_QUEUE * one.control_s
            if is_short or not self.wait_s(one, num):
                break
        return found


@dataclass(frozen=True, slots=True)
class ControlNetPlacement:
    """Where ControlNets run.

    Attributes:
        num_replicas: of each as a service, by name; 0 in the base's replicas.
        num_devices: that services hold.
        busy: share of the time for which the base's replicas are busy.
        longest_step_s: of all requests.
        shortage: what there is too little of, if not everything is met. With ``memory`` nothing is
            placed; with ``time`` steps are too long or the base's replicas too busy, by as little
            as possible.
    """

    num_replicas: Mapping[str, int]
    num_devices: float = 0.0
    busy: float = 0.0
    longest_step_s: float = 0.0
    shortage: Shortage | None = None


def place_controlnets(problem: PlacementProblem) -> ControlNetPlacement:
    """Return where each ControlNet is to run.

    Raises:
        ValueError: a request names a ControlNet that is not among those to be placed.
    """
    known = {one.name for one in problem.controlnets}
    unknown = sorted({name for one in problem.steps for name in one.names} - known)
    if unknown:
        raise ValueError(
            f"steps name {unknown[0]!r}; there are {', '.join(sorted(known)) or 'none'}"
        )
    program = _Program(problem)
    excess = program.minimise(program.excess)
    if excess is None:
        return ControlNetPlacement({}, shortage="memory")
    program.minimise(program.devices)
    program.minimise(program.work)
    placement = evaluated(problem, program.num_replicas)
    return placement if excess <= _TOLERANCE else replace(placement, shortage="time")


def evaluated(problem: PlacementProblem, num_replicas: Mapping[str, int]) -> ControlNetPlacement:
    """Return what comes of numbers of replicas, whether or not they are allowed."""
    by_name = {one.name: one for one in problem.controlnets}
    held = sum(num * by_name[name].device_share for name, num in num_replicas.items())
    times_s = []
    for one in problem.steps:
        nets = [by_name[name] for name in one.names]
        local_s = sum(net.control_s for net in nets if not num_replicas[net.name])
        waits_s = [problem.wait_s(net, num) for net in nets if (num := num_replicas[net.name])]
        times_s.append(problem.encode_s + problem.decode_s + local_s + max(waits_s, default=0.0))
    work = sum(one.per_s * time_s for one, time_s in zip(problem.steps, times_s, strict=True))
    return ControlNetPlacement(
        dict(num_replicas), held, work / problem.num_bases, max(times_s, default=0.0)
    )


class _Program:
    """The mixed-integer program; what is minimised stays a constraint of what is minimised later.

    Index sets: c ControlNets, n numbers of replicas that c may have, k kinds of requests.

    Variables, in this order:
        has[c, n]: 1 if c has n replicas, else 0
        wait[k]: seconds that a step of k waits for services
        late[k]: by how much a step of k exceeds the target, as a share of that
        over: by how many replicas of the base there are too few
    """

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        self._has = [(c, n) for c in problem.controlnets for n in problem.choices(c)]
        self._num = len(self._has) + 2 * len(problem.steps) + 1
        self._constraints = self._written()
        self._solution: Floats = np.zeros(self._num)

    @property
    def num_replicas(self) -> dict[str, int]:
        """The numbers of replicas that were found."""
        chosen = self._solution[: len(self._has)] > 0.5
        return {c.name: n for (c, n), is_it in zip(self._has, chosen, strict=True) if is_it}

    @property
    def excess(self) -> Floats:
        """By how much targets are missed."""
        return self._row(over=1.0, late=[1.0] * len(self._problem.steps))

    @property
    def devices(self) -> Floats:
        """Devices that services hold."""
        return self._row(has=[n * c.device_share for c, n in self._has])

    @property
    def work(self) -> Floats:
        """Replicas of the base that work all the time."""
        problem = self._problem
        rates = [one.per_s for one in problem.steps]
        # steps without any ControlNet are the same wherever those are
        return self._row(
            has=[0.0 if n else problem.per_s(c.name) * c.control_s for c, n in self._has],
            wait=rates,
        )

    def minimise(self, aim: Floats) -> float | None:
        """Find the least value of an aim, and keep to it from now on; None if there is none."""
        num_has = len(self._has)
        found = milp(
            aim,
            integrality=np.repeat([1, 0], [num_has, self._num - num_has]),
            bounds=Bounds(0, np.repeat([1.0, np.inf], [num_has, self._num - num_has])),
            constraints=self._constraints,
            options={"mip_rel_gap": 0.0},
        )
        if found.x is None:
            return None
        self._solution = found.x
        value = float(aim @ found.x)
        self._constraints.append(LinearConstraint(aim, -np.inf, value + _TOLERANCE))
        return value

    def _row(
        self,
        *,
        has: Sequence[float] = (),
        wait: Sequence[float] = (),
        late: Sequence[float] = (),
        over: float = 0.0,
    ) -> Floats:
        """Return coefficients of all variables; 0 of those that are left out."""
        kinds = len(self._problem.steps)
        parts = ((has, len(self._has)), (wait, kinds), (late, kinds), ([over], 1))
        return np.concatenate([part if len(part) else np.zeros(size) for part, size in parts])

    def _written(self) -> list[LinearConstraint]:
        problem, has = self._problem, self._has
        plain_s = problem.encode_s + problem.decode_s
        unit = np.eye(len(problem.steps))
        # each ControlNet is placed once
        rows: list[tuple[Floats, float, float]] = [
            (self._row(has=[float(c is net) for c, _ in has]), 1, 1) for net in problem.controlnets
        ]
        # memory of a base's replica, in the unit of all of it, and devices
        whole = max(1, problem.memory_bytes)
        used = self._row(has=[0.0 if n else c.memory_bytes / whole for c, n in has])
        rows.append((used, -np.inf, problem.memory_bytes / whole))
        rows.append((self.devices, -np.inf, problem.num_devices))
        for k, kind in enumerate(problem.steps):
            # it waits for each of its services
            for name in kind.names:
                waits_s = [problem.wait_s(c, n) if n and c.name == name else 0.0 for c, n in has]
                rows.append((self._row(has=waits_s, wait=-unit[k]), -np.inf, 0))
            # and its step is not too long, or late by some share
            local_s = [0.0 if n or c.name not in kind.names else c.control_s for c, n in has]
            late = -problem.most_step_s * unit[k]
            step = self._row(has=local_s, wait=unit[k], late=late)
            rows.append((step, -np.inf, problem.most_step_s - plain_s))
        # the base's replicas are not too busy, or too few by some
        plain = plain_s * sum(one.per_s for one in problem.steps)
        work = self.work + self._row(over=-problem.most_busy)
        rows.append((work, -np.inf, problem.most_busy * problem.num_bases - plain))
        return [LinearConstraint(row, low, high) for row, low, high in rows]
