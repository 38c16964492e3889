"""A process's metrics at one instant, as values that travel, add up, and outlive the process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

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
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
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
