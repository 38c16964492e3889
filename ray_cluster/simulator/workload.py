"""Workloads: requests drawn from mixes at random instants, with add-ons by popularity.

Everything is drawn from one seed, so that policies are compared on the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np

from ray_cluster.simulator.arrivals import Floats, RateCurve, draw_arrivals

# shares are given to few digits
_SHARES_WITHIN = 0.002


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload.

    Attributes:
        arrival_s: instant, from the workload's beginning.
        slo_s: seconds from arrival to the deadline; infinite for one without.
        slo_class: under which its outcome is counted.
        fewest_steps: that its client accepts to have it in time; None for all.
        mask_ratio: of an edit, the share of its latents that is made anew; None without a mask.
        template: of an edit, the image it starts from.
        reference_px: pixels of the pictures that the model looks at.
        confidence: of a cascade, that the light model's image will get.
        coin: in [0, 1), for random routing.
    """

    arrival_s: float
    model: str
    width_px: int
    height_px: int
    num_steps: int
    uses_guidance: bool = True
    slo_s: float = math.inf
    slo_class: str = "default"
    priority: int = 0
    controlnets: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    fewest_steps: int | None = None
    mask_ratio: float | None = None
    template: str | None = None
    reference_px: int = 0
    confidence: float = 1.0
    coin: float = 0.0

    @property
    def deadline_s(self) -> float:
        return self.arrival_s + self.slo_s


ArrivalOf = Callable[[str], Arrival]
"""A request of a workload, by its id."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request, and its share of a mix (shares need not add up to 1)."""

    share: float
    model: str
    width_px: int
    height_px: int
    num_steps: int
    uses_guidance: bool = True
    slo_class: str = "default"
    priority: int = 0


@dataclass(frozen=True, slots=True)
class AddOns:
    """How many add-ons of one sort requests have, and which.

    Attributes:
        name: what their names begin with.
        count_shares: share of the requests with 0, 1, 2, ... of them.
        num_distinct: how many there are.
        zipf: exponent of their popularity: the k-th is called as often as k to the minus this.
    """

    name: str
    count_shares: tuple[float, ...]
    num_distinct: int
    zipf: float

    def __post_init__(self) -> None:
        total = math.fsum(self.count_shares)
        if min(self.count_shares) < 0 or abs(total - 1) > _SHARES_WITHIN:
            raise ValueError(
                f"{self.name}: shares of counts must not be negative and add up to 1; given "
                f"{self.count_shares}"
            )
        if self.num_distinct < len(self.count_shares) - 1:
            raise ValueError(
                f"{self.name}: {self.num_distinct} distinct ones can't give a request "
                f"{len(self.count_shares) - 1} of them"
            )

    def popularity(self) -> Floats:
        """Shares of calls by rank, [num_distinct]."""
        weights = np.arange(1, self.num_distinct + 1, dtype=float) ** -self.zipf
        shares: Floats = weights / weights.sum()
        return shares

    def draw(self, count: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
        """Draw the add-ons of so many requests; none has the same one twice."""
        shares, most = np.array(self.count_shares), len(self.count_shares) - 1
        counts = rng.choice(most + 1, size=count, p=shares / shares.sum())
        popularity = self.popularity()
        ranks = rng.choice(self.num_distinct, size=(count, most), p=popularity)
        for place in range(1, most):
            # one that the request has already is drawn again: that is drawing without replacement
            while (again := (ranks[:, :place] == ranks[:, place, None]).any(1)).any():
                ranks[again, place] = rng.choice(self.num_distinct, again.sum(), p=popularity)
        return [
            tuple(f"{self.name}-{rank + 1}" for rank in row[:number])
            for row, number in zip(ranks.tolist(), counts.tolist(), strict=True)
        ]


# production mixes (SwiftDiffusion, section 2 and its published logs): ControlNets, then LoRAs
SERVICE_A = (
    AddOns("controlnet", (0.0, 0.305, 0.695), 47, 2.8),
    AddOns("lora", (0.002, 0.088, 0.91), 6980, 1.1),
)
SERVICE_B = (
    AddOns("controlnet", (0.019, 0.251, 0.699, 0.031), 94, 2.1),
    AddOns("lora", (0.072, 0.736, 0.192), 7463, 1.1),
)
# of a public trace of another system, in which most requests have none (GenTD26)
ADAPTER_POOR = (AddOns("lora", (0.83, 0.17), 7000, 1.1),)


@dataclass(frozen=True, slots=True)
class Mix:
    """Kinds of requests by share, with deadlines by kind, and add-ons drawn for all kinds alike."""

    kinds: tuple[Kind, ...]
    slo_s: Callable[[Kind], float]
    controlnets: AddOns | None = None
    loras: AddOns | None = None

    def __post_init__(self) -> None:
        if not self.kinds or min(kind.share for kind in self.kinds) < 0:
            raise ValueError(f"a mix needs kinds, with shares of 0 or more; given {self.kinds}")
        if sum(kind.share for kind in self.kinds) <= 0:
            raise ValueError("a mix needs a kind with a share of more than 0")


def draw_workload(mix: Mix, curve: RateCurve, *, seed: int, cv: float = 1.0) -> list[Arrival]:
    """Draw a workload: arrivals at a curve's rate, each of a kind of the mix.

    Instants, kinds and add-ons have generators of their own, so that a change of one does not alter
    the others. See :func:`draw_arrivals` for `cv`.
    """
    instants, kinds_rng, controlnets_rng, loras_rng = (
        np.random.default_rng([seed, stream]) for stream in range(4)
    )
    times_s = draw_arrivals(curve, instants, cv=cv)
    shares = np.array([kind.share for kind in mix.kinds])
    chosen = kinds_rng.choice(len(mix.kinds), size=len(times_s), p=shares / shares.sum())
    prototypes = []
    for kind in mix.kinds:
        content = asdict(kind)
        del content["share"]
        prototypes.append(Arrival(0.0, slo_s=mix.slo_s(kind), **content))
    controlnets, loras = (
        [()] * len(times_s) if one is None else one.draw(len(times_s), rng)
        for one, rng in ((mix.controlnets, controlnets_rng), (mix.loras, loras_rng))
    )
    return [
        replace(prototypes[number], arrival_s=time_s, controlnets=controls, loras=adapters)
        for time_s, number, controls, adapters in zip(
            times_s.tolist(), chosen, controlnets, loras, strict=True
        )
    ]
