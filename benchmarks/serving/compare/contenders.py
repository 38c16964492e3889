"""Who is compared: named configurations of the service and of the baselines.

A further one (an ablation of the service, say) is a further line in :data:`CONTENDERS`.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.baselines.settings import BaselineSettings, Batching
from benchmarks.serving.running import free_port
from benchmarks.settings import MODEL
from ray_cluster.config.loading import load_config

_FIRST_PORT = 18800
_ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class Site:
    """Where a contender runs and what it is told.

    Attributes:
        folder: of its own, for settings and what it stores.
        ray_folder: of its Ray; a short path.
        alone_s: seconds of an image alone by its shape's name, as far as they are known yet.
    """

    folder: Path
    ray_folder: Path
    dtype: str
    alone_s: Mapping[str, float]

    def ray(self) -> dict[str, Any]:
        """Return the ``ray`` section of either configuration."""
        return {
            "auth": "disabled",
            "num_cpus": max(2, os.cpu_count() or 2),
            "include_dashboard": False,
            "metrics_port": free_port(_FIRST_PORT + 100),
            "temp_dir": str(self.ray_folder),
        }


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start, and where it will listen."""

    command: tuple[str, ...]
    url: str


@dataclass(frozen=True, slots=True)
class Counts:
    """What a service says of the requests that it has let in."""

    accepted: int
    completed: int
    dropped: int
    failed: int

    @property
    def open(self) -> int:
        """Let in, and not ended."""
        return self.accepted - self.completed - self.dropped - self.failed

    def since(self, before: Counts) -> Counts:
        """Return what has come since."""
        return Counts(
            self.accepted - before.accepted,
            self.completed - before.completed,
            self.dropped - before.dropped,
            self.failed - before.failed,
        )


class Contender(Protocol):
    """Serves ``POST /v1/images/generations`` and ``GET /readyz``."""

    @property
    def what(self) -> str:
        """What it is, for readers of the report."""

    @property
    def call(self) -> Mapping[str, Any]:
        """What its calls say beside the image and the deadline."""

    @property
    def omits(self) -> Collection[str]:
        """What its calls leave out of these."""

    def launch(self, site: Site) -> Launch:
        """Write its settings; return how it is started."""

    def counts(self, url: str) -> Counts:
        """Ask the running service."""


@dataclass(frozen=True, slots=True)
class BaselineContender:
    """One Serve deployment around the diffusers pipeline."""

    batching: Batching
    is_guarded: bool
    what: str
    call: Mapping[str, Any] = field(default_factory=dict)
    omits: Collection[str] = ()

    def launch(self, site: Site) -> Launch:
        """See :class:`Contender`."""
        settings = BaselineSettings.model_validate(
            {
                "batching": self.batching,
                "is_guarded": self.is_guarded,
                "http_port": free_port(_FIRST_PORT),
                "ray": site.ray(),
                "dtype": site.dtype,
                "alone_s": dict(site.alone_s),
            }
        )
        path = site.folder / "baseline.json"
        path.write_text(settings.model_dump_json(), encoding="utf-8")
        command = (sys.executable, "-m", "benchmarks.baselines", str(path))
        return Launch(command, f"http://127.0.0.1:{settings.http_port}")

    def counts(self, url: str) -> Counts:
        """See :class:`Contender`."""
        found = json.loads(_get(f"{url}/counts"))
        names = ("accepted", "completed", "dropped", "failed")
        return Counts(*(found.get(name, 0) for name in names))


@dataclass(frozen=True, slots=True)
class OwnContender:
    """The service with one replica.

    Attributes:
        simulated_as: the simulator's policy that stands for it; None for none.
        pool: what its pool says beside that.
    """

    what: str
    simulated_as: str | None
    pool: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(
        default_factory=lambda: {"when_late": "refuse", "metadata": False}
    )
    omits: Collection[str] = ()

    def launch(self, site: Site) -> Launch:
        """See :class:`Contender`."""
        path = site.folder / "service.yaml"
        port = free_port(_FIRST_PORT)
        path.write_text(yaml.safe_dump(self.config(site, port)), encoding="utf-8")
        command = (sys.executable, "-m", "ray_cluster.cli", "serve", str(path), "--quiet")
        return Launch(command, f"http://127.0.0.1:{port}")

    def config(self, site: Site, port: int) -> dict[str, Any]:
        """Return the service's configuration."""
        return {
            "http": {"port": port},
            "ray": site.ray(),
            "storage": {
                "jobs": f"sqlite:///{site.folder}/jobs.db",
                "results": str(site.folder / "results"),
                "states": str(site.folder / "states"),
                "inputs": str(site.folder / "inputs"),
            },
            "pools": [self.pool_section(site.dtype)],
        }

    def pool_section(self, dtype: str) -> dict[str, Any]:
        """Return its one pool, as a configuration has it."""
        default = load_config().pools[0].model_dump(mode="json")
        own = {"model": MODEL, "replicas": 1, "num_threads": 1, "dtype": dtype}
        return {**default, **own, **self.pool}

    def counts(self, url: str) -> Counts:
        """See :class:`Contender`."""
        events: Counter[str] = Counter()
        for family in text_string_to_metric_families(_get(f"{url}/metrics")):
            for sample in family.samples:
                if sample.name == "ray_cluster_images_total":
                    events[sample.labels["event"]] += int(sample.value)
        failed = sum(events[name] for name in ("error", "invalid", "aborted", "lost"))
        return Counts(events["accepted"], events["completed"], 0, failed)


_OPEN = {"when_late": "accept", "metadata": False}
COMPARED: Mapping[str, Contender] = {
    "one-by-one": BaselineContender("one-by-one", False, "pipeline, one image after the other"),
    "one-by-one/guarded": BaselineContender(
        "one-by-one", True, "the same with a bounded queue and a deadline drop"
    ),
    "static": BaselineContender("static", False, "pipeline, batches of one size and step count"),
    "static/guarded": BaselineContender(
        "static", True, "the same with a bounded queue and a deadline drop"
    ),
    "ours": OwnContender("the service, images exact, late ones refused", "deadline"),
}
# the service without one of its parts
ABLATIONS: Mapping[str, Contender] = {
    "ours/open": OwnContender("nobody refused: without admission", "deadline/open", call=_OPEN),
    "ours/no-deadlines": OwnContender(
        "nobody refused, and first come first served: without admission and order",
        None,
        call=_OPEN,
        omits=("slo_s",),
    ),
    "ours/one-size": OwnContender(
        "batches of one size: without mixed batches", "deadline/one-size", {"batches": "one-size"}
    ),
    "ours/grouped": OwnContender(
        "a model call for each size of a batch: without the layout", None, {"layout": "grouped"}
    ),
    "ours/one-by-one": OwnContender(
        "one image after the other: the executor alone", None, {"max_batch": 1}
    ),
}
CONTENDERS: Mapping[str, Contender] = {**COMPARED, **ABLATIONS}
BASELINES = tuple(name for name, one in CONTENDERS.items() if isinstance(one, BaselineContender))


def _get(url: str) -> str:
    return httpx.get(url, timeout=_ASK_S).raise_for_status().text
