"""Named configurations of the service and of the baselines; a further one is a further line."""

from __future__ import annotations

import json
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.baselines.settings import BaselineSettings, Batching
from benchmarks.settings import MODEL
from ray_cluster.config.loading import load_config

_FIRST_PORT = 18800
_READ_S = 10.0


@dataclass(frozen=True, slots=True)
class Site:
    """Where a contender runs.

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
    """What a service counts of the requests that it has accepted."""

    accepted: int
    completed: int
    dropped: int
    failed: int

    @property
    def open(self) -> int:
        """Accepted, and not ended."""
        return self.accepted - self.completed - self.dropped - self.failed

    def since(self, before: Counts) -> Counts:
        """Return the difference of two readings."""
        pairs = zip(astuple(self), astuple(before), strict=True)
        return Counts(*(now - then for now, then in pairs))


@dataclass(frozen=True, kw_only=True)
class Contender(ABC):
    """Serves ``POST /v1/images/generations`` and ``GET /readyz``.

    Attributes:
        what: it is, for readers of the report.
        call: fields of its calls beside the image and the deadline.
        omits: fields that its calls leave out.
    """

    what: str
    call: Mapping[str, Any] = field(default_factory=dict)
    omits: Collection[str] = ()

    @abstractmethod
    def launch(self, site: Site) -> Launch:
        """Write its settings; return how it is started."""

    @abstractmethod
    def counts(self, url: str) -> Counts:
        """Return what the running service counts."""


@dataclass(frozen=True, kw_only=True)
class BaselineContender(Contender):
    """One Serve deployment around the diffusers pipeline."""

    batching: Batching
    is_guarded: bool = False

    def launch(self, site: Site) -> Launch:
        settings = BaselineSettings(
            batching=self.batching,
            is_guarded=self.is_guarded,
            http_port=free_port(_FIRST_PORT),
            ray=site.ray(),
            dtype=site.dtype,
            alone_s=dict(site.alone_s),
        )
        path = site.folder / "baseline.json"
        path.write_text(settings.model_dump_json(), encoding="utf-8")
        command = (sys.executable, "-m", "benchmarks.baselines", str(path))
        return Launch(command, f"http://127.0.0.1:{settings.http_port}")

    def counts(self, url: str) -> Counts:
        found = json.loads(_get(f"{url}/counts"))
        names = ("accepted", "completed", "dropped", "failed")
        return Counts(*(found.get(name, 0) for name in names))


@dataclass(frozen=True, kw_only=True)
class OwnContender(Contender):
    """The service with one pool.

    Attributes:
        simulated_as: its policy in the simulator; None for none.
        pool: what its pool's section has beside the usual.
    """

    call: Mapping[str, Any] = field(
        default_factory=lambda: {"when_late": "refuse", "metadata": False}
    )
    simulated_as: str | None = None
    pool: Mapping[str, Any] = field(default_factory=dict)

    def launch(self, site: Site) -> Launch:
        path, port = site.folder / "service.yaml", free_port(_FIRST_PORT)
        path.write_text(yaml.safe_dump(self.config(site, port)), encoding="utf-8")
        command = (sys.executable, "-m", "ray_cluster.cli", "serve", str(path), "--quiet")
        return Launch(command, f"http://127.0.0.1:{port}")

    def config(self, site: Site, port: int) -> dict[str, Any]:
        """Return the service's configuration."""
        folders = {name: str(site.folder / name) for name in ("results", "states", "inputs")}
        return {
            "http": {"port": port},
            "ray": site.ray(),
            "storage": {"jobs": f"sqlite:///{site.folder}/jobs.db", **folders},
            "pools": [self.pool_section(site.dtype)],
        }

    def pool_section(self, dtype: str) -> dict[str, Any]:
        """Return its one pool, as a configuration has it."""
        default = load_config().pools[0].model_dump(mode="json")
        own = {"model": MODEL, "replicas": 1, "num_threads": 1, "dtype": dtype}
        return {**default, **own, **self.pool}

    def counts(self, url: str) -> Counts:
        events: Counter[str] = Counter()
        for family in text_string_to_metric_families(_get(f"{url}/metrics")):
            for sample in family.samples:
                if sample.name == "ray_cluster_images_total":
                    events[sample.labels["event"]] += int(sample.value)
        failed = sum(events[name] for name in ("error", "invalid", "aborted", "lost"))
        return Counts(events["accepted"], events["completed"], 0, failed)


_OPEN = {"when_late": "accept", "metadata": False}
_GUARDED = "with a bounded queue and a deadline drop"
COMPARED: Mapping[str, Contender] = {
    "one-by-one": BaselineContender(
        what="pipeline, one image after the other", batching="one-by-one"
    ),
    "one-by-one/guarded": BaselineContender(
        what=f"one-by-one {_GUARDED}", batching="one-by-one", is_guarded=True
    ),
    "static": BaselineContender(
        what="pipeline, batches of one size and step count", batching="static"
    ),
    "static/guarded": BaselineContender(
        what=f"static {_GUARDED}", batching="static", is_guarded=True
    ),
    "ours": OwnContender(
        what="the service, images exact, late ones refused", simulated_as="deadline"
    ),
}
# the service without one of its parts
ABLATIONS: Mapping[str, Contender] = {
    "ours/open": OwnContender(
        what="nobody refused: without admission", call=_OPEN, simulated_as="deadline/open"
    ),
    "ours/no-deadlines": OwnContender(
        what="nobody refused, and first come first served: without admission and order",
        call=_OPEN,
        omits=("slo_s",),
    ),
    "ours/one-size": OwnContender(
        what="batches of one size: without mixed batches",
        simulated_as="deadline/one-size",
        pool={"batches": "one-size"},
    ),
    "ours/grouped": OwnContender(
        what="a model call for each size of a batch: without the layout",
        pool={"layout": "grouped"},
    ),
    "ours/one-by-one": OwnContender(
        what="one image after the other: the executor alone", pool={"max_batch": 1}
    ),
}
CONTENDERS: Mapping[str, Contender] = {**COMPARED, **ABLATIONS}
BASELINES = tuple(name for name, one in CONTENDERS.items() if isinstance(one, BaselineContender))


def free_port(first: int) -> int:
    """Return the first port from there on that nothing listens on."""
    for port in range(first, first + 50):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port from {first} on")


def _get(url: str) -> str:
    return httpx.get(url, timeout=_READ_S).raise_for_status().text
