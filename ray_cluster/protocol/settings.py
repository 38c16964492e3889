"""Settings as they travel from the dispatcher to gateways and workers.

Versions are compared for equality only: a process with another one gets its whole part. API keys
travel as digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ray_cluster.config.sections.cascades import CascadeConfig
from ray_cluster.config.sections.keys import ApiKey
from ray_cluster.config.sections.pools import DefaultsConfig
from ray_cluster.config.settings import PoolSettings, Settings
from ray_cluster.policies.fidelity import LoraStart, StepTable
from ray_cluster.requests import SamplerName


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Values for what a request leaves out; None takes the model's own default."""

    size: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    sampler: SamplerName | None = None


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model that calls may name.

    Attributes:
        max_num_inference_steps: of any of its pools.
        fewer_steps: replaces the table in its replicas' profile; None leaves that.
        lora_start: of its calls with LoRAs.
    """

    name: str
    max_num_inference_steps: int
    defaults: ModelDefaults = ModelDefaults()
    fewer_steps: StepTable | None = None
    lora_start: LoraStart | None = None


@dataclass(frozen=True, slots=True)
class CascadeModel:
    """A cascade, as far as gateways need it; the fields of the same names in its section."""

    name: str
    light: str
    heavy: str
    discriminator: str


@dataclass(frozen=True, slots=True)
class ControlNetEntry:
    """A ControlNet, as far as gateways and pools' replicas need it.

    Attributes:
        bases: models that it is made for.
        is_service: whether it has workers of its own.
        description: of its maps, for callers.
    """

    name: str
    bases: tuple[str, ...]
    is_service: bool = True
    description: str = ""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """A gateway's settings.

    Attributes:
        api_keys: empty where anybody may call.
        limits: the fields of :class:`ray_cluster.config.sections.cell_wide.LimitsConfig`.
        public_url, trusted_proxies, cors_origins: those of
            :class:`ray_cluster.config.sections.http.HttpSettings`.
        models: those of the document, the default one first.
        cascades: what calls may name beside them.
        controlnets: what calls may name in ``controlnets``.
    """

    version: str
    api_keys: tuple[ApiKey, ...]
    limits: Mapping[str, int | float]
    default_slo_s: float
    attached_timeout_s: float
    retention_s: float
    models: tuple[ModelSettings, ...]
    public_url: str | None = None
    trusted_proxies: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    cascades: tuple[CascadeModel, ...] = ()
    controlnets: tuple[ControlNetEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of one pool's replicas, of a discriminator's or a ControlNet's.

    Attributes:
        poll_s: longest time that a lease poll is to be held.
        defaults: checked against the model when it is loaded.
    """

    version: str
    max_batch: int
    max_in_flight: int
    poll_s: float
    defaults: ModelDefaults = ModelDefaults()


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a replica takes at once, by its settings and its memory.

    Attributes:
        max_in_flight: most requests that it holds.
        max_batch: most requests that it steps together.
    """

    max_in_flight: int
    max_batch: int


def gateway_settings(settings: Settings) -> GatewaySettings:
    """Return the gateways' part of the settings."""
    return GatewaySettings(
        version=settings.version,
        api_keys=settings.api_keys,
        limits=settings.limits.model_dump(),
        default_slo_s=settings.dispatch.default_slo_s,
        attached_timeout_s=settings.dispatch.attached_timeout_s,
        retention_s=settings.storage.retention_s,
        models=tuple(_models(settings).values()),
        public_url=settings.http.public_url,
        trusted_proxies=settings.http.trusted_proxies,
        cors_origins=settings.http.cors_origins,
        cascades=tuple(_cascade(one) for one in settings.cascades),
        controlnets=tuple(
            ControlNetEntry(one.name, one.bases, one.is_service, one.description)
            for one in settings.controlnets
        ),
    )


def worker_settings(settings: Settings, pool: str) -> WorkerSettings | None:
    """Return the part of an application's replicas; None if it isn't in the document.

    Args:
        pool: name of the application: of a pool, a discriminator or a ControlNet.
    """
    poll_s = settings.dispatch.poll_s
    if (control := settings.controlnet(pool)) is not None:
        # it leases nothing
        return WorkerSettings(settings.version, control.max_batch, control.max_batch, poll_s)
    scorer = settings.discriminator(pool)
    if scorer is not None:
        return WorkerSettings(settings.version, scorer.max_batch, scorer.max_in_flight, poll_s)
    found = settings.pool(pool)
    if found is None:
        return None
    return WorkerSettings(
        version=settings.version,
        max_batch=found.max_batch,
        max_in_flight=found.max_in_flight,
        poll_s=poll_s,
        defaults=_defaults(found.defaults),
    )


def _cascade(cascade: CascadeConfig) -> CascadeModel:
    return CascadeModel(cascade.name, cascade.light, cascade.heavy, cascade.discriminator)


def _models(settings: Settings) -> dict[str, ModelSettings]:
    """Return the models by name; of several pools with the same one, the first gives defaults."""
    found: dict[str, ModelSettings] = {}
    for pool in settings.pools:
        found.setdefault(pool.model_name, _model(pool, settings))
    return found


def _model(pool: PoolSettings, settings: Settings) -> ModelSettings:
    same = [one for one in settings.pools if one.model_name == pool.model_name]
    return ModelSettings(
        name=pool.model_name,
        max_num_inference_steps=max(one.max_num_inference_steps for one in same),
        defaults=_defaults(pool.defaults),
        fewer_steps=None if pool.fidelity is None else pool.fidelity.table(),
        lora_start=None if pool.lora_start is None else pool.lora_start.start(),
    )


def _defaults(defaults: DefaultsConfig) -> ModelDefaults:
    return ModelDefaults(**defaults.model_dump())
