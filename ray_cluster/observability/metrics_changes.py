"""What has changed in a process's metrics since they were last passed on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ray_cluster.observability.metrics_snapshot import Labels, Snapshot

_TOTAL = "_total"


@dataclass(frozen=True, slots=True)
class Change:
    """News of one sample.

    Attributes:
        name: of the sample, without the ``_total`` of a counter.
        value: what has come on top of a counter, always above 0; what a gauge is now.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help_text: str
    labels: Labels
    value: float


class Changes:
    """Follows one process's snapshots: its counts as increments, its gauges as they are.

    A histogram is passed on as what it consists of, each of which only grows: the counts of its
    buckets, their sum, and the sum of what was observed.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, Labels], float] = {}
        self._gauges: dict[tuple[str, Labels], str] = {}

    def since_last(self, snapshot: Snapshot) -> list[Change]:
        """Return the news; a gauge that is not there any more is told once, as 0."""
        news: list[Change] = []
        gone, self._gauges = self._gauges, {}
        for family in snapshot:
            for key, value in family.samples.items():
                name, labels = key
                if family.is_lasting:
                    more = value - self._counts.get(key, 0.0)
                    self._counts[key] = value
                    if more > 0:
                        short = name.removesuffix(_TOTAL)
                        news.append(Change(short, "counter", family.help_text, labels, more))
                else:
                    gone.pop(key, None)
                    self._gauges[key] = family.help_text
                    news.append(Change(name, "gauge", family.help_text, labels, value))
        news += [
            Change(name, "gauge", help_text, labels, 0.0)
            for (name, labels), help_text in gone.items()
        ]
        return news
