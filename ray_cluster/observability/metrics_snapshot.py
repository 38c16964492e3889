"""Metrics of processes as values that travel, add up, and outlive their process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

# dead processes that may yet turn out to be alive
_MAX_DEAD = 200

Labels = tuple[tuple[str, str], ...]
# what only ever grows, and so counts after the end of its process
_LASTING = frozenset({"counter", "histogram"})


@dataclass(frozen=True, slots=True)
class Family:
    """All samples of one metric.

    Attributes:
        kind: prometheus' type: counter, gauge, histogram.
        samples: value by sample name and labels.
    """

    name: str
    help_text: str
    kind: str
    samples: dict[tuple[str, Labels], float]

    @property
    def is_lasting(self) -> bool:
        """Whether it counts after the end of its process."""
        return self.kind in _LASTING


Snapshot = tuple[Family, ...]


def take(registry: CollectorRegistry) -> Snapshot:
    """Return the present values of a registry."""
    return tuple(
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            {
                # a flag would not travel as what it is said to be
                (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
                for sample in metric.samples
                # when a counter was made says nothing once it is added to others
                if not sample.name.endswith("_created")
            },
        )
        for metric in registry.collect()
    )


def lasting(snapshot: Snapshot) -> Snapshot:
    """Return what of a snapshot counts after the end of its process."""
    return tuple(family for family in snapshot if family.is_lasting)


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Add the samples of the same name and labels.

    Gauges that must not be added carry a label that tells their processes apart.
    """
    merged: dict[str, Family] = {}
    for family in (family for snapshot in snapshots for family in snapshot):
        known = merged.get(family.name)
        if known is None:
            merged[family.name] = Family(
                family.name, family.help_text, family.kind, dict(family.samples)
            )
            continue
        for key, value in family.samples.items():
            known.samples[key] = known.samples.get(key, 0.0) + value
    return tuple(merged[name] for name in sorted(merged))


class _Fixed(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        for family in self._snapshot:
            metric = Metric(family.name, family.help_text, family.kind)
            for (name, labels), value in family.samples.items():
                metric.add_sample(name, dict(labels), value)
            yield metric


def render(snapshot: Snapshot) -> bytes:
    """Return prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed(snapshot))
    return generate_latest(registry)


class MetricsBook:
    """The latest metrics of every process of a cell; sums never fall when a process ends.

    Args:
        silence_s: seconds without news after which a process counts as dead.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._live: dict[str, tuple[Snapshot, float]] = {}
        self._dead: dict[str, Snapshot] = {}
        self._folded: Snapshot = ()

    def update(self, process_id: str, snapshot: Snapshot, now_s: float) -> None:
        """Replace a process's metrics; it is alive, even if it was taken for dead."""
        self._dead.pop(process_id, None)
        self._live[process_id] = (snapshot, now_s)

    def merged(self, now_s: float, *own: Snapshot) -> Snapshot:
        """Return the sums over all processes, and the given snapshots."""
        return merge([*self.parts(now_s), *own])

    def parts(self, now_s: float) -> tuple[Snapshot, ...]:
        """Return what is to be added up; it can be done in another thread."""
        for process_id, (snapshot, heard_s) in list(self._live.items()):
            if now_s - heard_s > self._silence_s:
                del self._live[process_id]
                self._dead[process_id] = lasting(snapshot)
        while len(self._dead) > _MAX_DEAD:
            oldest = next(iter(self._dead))
            self._folded = merge([self._folded, self._dead.pop(oldest)])
        live = (snapshot for snapshot, _ in self._live.values())
        return (self._folded, *self._dead.values(), *live)
