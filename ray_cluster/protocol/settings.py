"""Settings as they travel from the dispatcher to gateways and workers.

Versions are compared for equality only: a process with another one gets its whole part. API keys
travel as digests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ray_cluster.config.loading import WorkerT
from ray_cluster.config.sections.keys import ApiKey
from ray_cluster.config.settings import Settings
from ray_cluster.config.slices import settings_part, with_settings


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """A gateway's settings.

    Attributes:
        api_keys: empty where anybody may call.
        document: as of :meth:`ray_cluster.config.settings.Settings.for_gateways`.
    """

    version: str
    api_keys: tuple[ApiKey, ...]
    document: str


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of a worker's replicas.

    Attributes:
        poll_s: longest time that a lease poll is to be held.
        live: what its section has, as JSON of :func:`ray_cluster.config.slices.settings_part`.
    """

    version: str
    max_batch: int
    max_in_flight: int
    poll_s: float
    live: str = "{}"


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a replica takes at once, by its settings and its memory.

    Attributes:
        max_in_flight: most requests that it holds.
        max_batch: most requests that it steps together.
    """

    max_in_flight: int
    max_batch: int


def in_force(worker: WorkerT, settings: WorkerSettings | None) -> WorkerT:
    """Return a worker's section with the settings in force; with the defaults where there are none.

    Raises:
        ConfigError: see :func:`ray_cluster.config.slices.with_settings`.
    """
    return worker if settings is None else with_settings(worker, json.loads(settings.live))


def gateway_settings(settings: Settings) -> GatewaySettings:
    """Return the gateways' part of the settings."""
    return GatewaySettings(settings.version, settings.api_keys, settings.for_gateways())


def worker_settings(settings: Settings, name: str) -> WorkerSettings | None:
    """Return the part of a worker's replicas; None if it isn't in the document."""
    found = settings.find(name)
    if found is None:
        return None
    return WorkerSettings(
        settings.version,
        found.max_batch,
        found.most_in_flight,
        settings.dispatch.poll_s,
        json.dumps(settings_part(found)),
    )
