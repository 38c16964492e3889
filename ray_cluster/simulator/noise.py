"""How long simulated steps really take: the cost, and noise that depends on seeds alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.simulator.arrivals import Floats
from ray_cluster.simulator.controlnets.add_ons import AddOnCost, AddOnStore
from ray_cluster.simulator.workload import ArrivalOf

# steps after which a device's noise repeats
_PERIOD = 4096


@dataclass(frozen=True, slots=True)
class Hardware:
    """The true speed of a kind of device.

    Attributes:
        cost: of a step, and of decoding.
        encode_s: seconds from the lease of a request until it can step.
        noise_cv: standard deviation over the mean of the seconds of equal steps.
        load_s: seconds from the start of a replica to its registration.
        add_ons: what ControlNets and LoRAs cost; None if nothing.
        batch_s: seconds of all steps of so many images, whose noise is one; None where `cost` says
            what each step takes.
    """

    cost: StepCost
    encode_s: float = 0.0
    noise_cv: float = 0.0
    load_s: float = 0.0
    add_ons: AddOnCost | None = None
    batch_s: Callable[[int], float] | None = None


class Device:
    """One device. Noise is a function of the step's number, so that runs of any length agree.

    Args:
        hardware: its kind.
        seed: of its noise.
        arrival_of: a request, by its id; needed where add-ons cost something.
    """

    def __init__(
        self, hardware: Hardware, seed: Sequence[int], arrival_of: ArrivalOf | None = None
    ) -> None:
        self.hardware = hardware
        self._add_ons: AddOnStore | None = None
        if hardware.add_ons is not None and arrival_of is not None:
            self._add_ons = AddOnStore(hardware.add_ons, arrival_of)
        self._num_steps = 0
        self._noise: Floats | None = None
        if hardware.noise_cv > 0:
            # log-normal: never negative, and with a mean of 1
            variance = float(np.log1p(hardware.noise_cv**2))
            rng = np.random.default_rng(list(seed))
            self._noise = rng.lognormal(-variance / 2, variance**0.5, _PERIOD)

    def prepare_s(self, request_id: str, now_s: float) -> float:
        """Return the seconds from the lease of a request until it can step."""
        encode_s = self.hardware.encode_s
        if self._add_ons is None:
            return encode_s
        return max(encode_s, self._add_ons.ready_s(request_id, now_s) - now_s)

    def step_ends_s(
        self, requests: Sequence[RequestView], count: int, *, start_s: float
    ) -> tuple[float, ...]:
        """Return the instants at which each of the next equal steps ends, [count]."""
        each_s = self.step_s(requests)
        if self._noise is not None and self.hardware.batch_s is not None:
            each_s *= float(self._noise[self._num_steps % _PERIOD])
        if self._noise is None or self.hardware.batch_s is not None:
            return tuple([start_s + each_s * number for number in range(1, count + 1)])
        places = np.arange(self._num_steps, self._num_steps + count) % _PERIOD
        return tuple((start_s + (each_s * self._noise[places]).cumsum()).tolist())

    def noisy_step_s(self, requests: Sequence[RequestView]) -> float:
        (seconds,) = self.step_ends_s(requests, 1, start_s=0.0)
        return seconds

    def step_s(self, requests: Sequence[RequestView]) -> float:
        """Return the seconds of a step of these requests without noise."""
        if self.hardware.batch_s is not None:
            return self.hardware.batch_s(len(requests)) / requests[0].num_steps
        each_s = step_s(self.hardware.cost, work_of(requests))
        if self._add_ons is not None:
            each_s += self._add_ons.step_s(self.hardware.cost, requests)
        return each_s

    def took(self, num_steps: int) -> None:
        """Count steps that were really made; images of a table are made in one."""
        self._num_steps += num_steps if self.hardware.batch_s is None else 1

    def decode_s(self, requests: Sequence[RequestView]) -> float:
        """Return the seconds of decoding the images of these requests."""
        pixels = sum(one.width_px * one.height_px for one in requests)
        return self.hardware.cost.decode_per_megapixel_s * pixels / 1e6
