"""What the controller is shown of a cell: counters, queues, workers and bounds at one instant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ray_cluster.config.section import part
from ray_cluster.config.sections.cascades import CascadeConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.sections.workers import WorkerConfig
from ray_cluster.config.settings import Settings
from ray_cluster.config.slices import started_section
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.records import ReplicaRecord
from ray_cluster.dispatch.reports.demand import typical_request
from ray_cluster.dispatch.reports.snapshots import CascadeView, ClusterSnapshot
from ray_cluster.errors import LAST_STAGES
from ray_cluster.policies.planning.plan import PlannedSettings
from ray_cluster.protocol.controller import (
    ModelQueue,
    Observation,
    ObservedCascade,
    ObservedLimits,
    ObservedPool,
    ObservedReplica,
    ServiceCount,
    TypicalRequest,
)
from ray_cluster.protocol.leases import Registration


@dataclass(frozen=True, slots=True)
class Instant:
    """The same instant on two clocks.

    Attributes:
        now_s: on the dispatch core's.
        unix_s: on the wall's, which a controller that restarts elsewhere knows, too.
    """

    now_s: float
    unix_s: float


@dataclass(frozen=True, slots=True)
class InForce:
    """What is applied: the document, and within it a plan.

    Attributes:
        started_s: Unix time at which the dispatcher started.
    """

    settings: Settings
    started_s: float
    plan: PlannedSettings | None = None
    is_paused: bool = False


def observe(
    core: DispatchCore,
    in_force: InForce,
    known: Mapping[str, Registration],
    cursors: Mapping[str, int],
    instant: Instant,
) -> Observation:
    """Return the state of the cell.

    Args:
        known: the last registration of each pool's workers, live or not.
        cursors: confidences that the caller has, by cascade.
    """
    settings, snapshot = in_force.settings, core.snapshot(instant.now_s)
    return Observation(
        now_s=instant.unix_s,
        started_s=in_force.started_s,
        default_slo_s=settings.dispatch.default_slo_s,
        services=_services(snapshot, settings),
        models=tuple(_queues(core, snapshot, instant.now_s)),
        pools=tuple(_pools(core, settings, known, instant.now_s)),
        cascades=tuple(_cascades(snapshot.cascades, settings, cursors)),
        limits=_limits(in_force),
        warnings=snapshot.warnings,
        settings_version=settings.version,
        plan=in_force.plan,
    )


def _limits(in_force: InForce) -> ObservedLimits:
    control = in_force.settings.control
    return ObservedLimits(**part(control, "live"), is_paused=in_force.is_paused)


def _services(snapshot: ClusterSnapshot, settings: Settings) -> tuple[ServiceCount, ...]:
    accepted, unmet = snapshot.demand.accepted, snapshot.demand.unmet
    names = (
        *(one.model_name for one in settings.pools),
        *(one.name for one in settings.cascades),
        *accepted,
    )
    return tuple(ServiceCount(name, accepted[name], unmet[name]) for name in dict.fromkeys(names))


def _queues(core: DispatchCore, snapshot: ClusterSnapshot, now_s: float) -> Iterator[ModelQueue]:
    for model, num_waiting in snapshot.num_waiting_by_model.items():
        yield ModelQueue(
            model,
            num_waiting,
            core.replicas.in_progress(model).num_requests,
            core.queue.safety_factor(model, now_s, is_simulated=True),
        )


def _pools(
    core: DispatchCore, settings: Settings, known: Mapping[str, Registration], now_s: float
) -> Iterator[ObservedPool]:
    """Yield the workers of the settings that have been there."""
    for worker in settings.workers:
        name = worker.name
        last = known.get(name)
        if last is None or not last.arguments:
            continue
        started = started_section(last.kind, last.arguments)
        if started is not None:
            live = [one for one in core.replicas if one.registration.pool == name]
            yield _pool(settings, last, started, live, now_s)


def _pool(
    settings: Settings,
    last: Registration,
    started: WorkerConfig,
    live: Iterable[ReplicaRecord],
    now_s: float,
) -> ObservedPool:
    found = settings.find(last.pool)
    tuning = found if isinstance(found, PoolConfig) else None
    is_called = last.profile is not None and last.profile.engine == "diffusers"
    # a group steps one image on a set, a pipeline one in a call, whatever the settings say
    steps_alone = is_called or last.group is not None
    return ObservedPool(
        pool=last.pool,
        kind=last.kind,
        serves=last.model,
        device=started.hardware.device,
        num_cpus=started.reserved_cpus,
        num_gpus=started.reserved_gpus,
        load_s=last.load_s,
        step_cost=last.step_cost,
        typical=_typical(tuning, last),
        max_batch=last.max_batch if found is None or steps_alone else found.max_batch,
        min_replicas=1 if tuning is None else tuning.min_replicas,
        max_replicas=None if tuning is None else tuning.max_replicas,
        replicas=tuple(_replica(one, now_s) for one in live),
        callers=_callers(settings, last),
    )


def _callers(settings: Settings, last: Registration) -> tuple[str, ...]:
    """Return the models whose images a worker that makes none is called for."""
    found = settings.find(last.pool)
    if last.kind in LAST_STAGES:
        return tuple(pool.model_name for pool in settings.pools)
    if isinstance(found, ControlNetConfig):
        return found.bases
    return tuple(one.light for one in settings.cascades if one.discriminator == last.pool)


def _typical(tuning: PoolConfig | None, last: Registration) -> TypicalRequest | None:
    if tuning is None or last.profile is None:
        return None
    return typical_request(tuning, last.profile)


def _replica(replica: ReplicaRecord, now_s: float) -> ObservedReplica:
    return ObservedReplica(
        replica.replica_id,
        age_s=now_s - replica.joined_s,
        num_held=len(replica.held),
        max_batch=replica.registration.max_batch,
        step_cost=replica.step_cost,
        settings_version=replica.settings_version,
    )


def _most_deferred(config: CascadeConfig, view: CascadeView) -> float | None:
    if config.threshold is None or not view.window:
        return config.deferral_rate
    return sum(one < config.threshold for one in view.window) / len(view.window)


def _cascades(
    views: Iterable[CascadeView], settings: Settings, cursors: Mapping[str, int]
) -> Iterator[ObservedCascade]:
    by_name = {one.name: one for one in views}
    for config in settings.cascades:
        view = by_name.get(config.name)
        yield ObservedCascade(
            name=config.name,
            light=config.light,
            heavy=config.heavy,
            discriminator=config.discriminator,
            curves=config.curves,
            threshold=config.threshold,
            deferral_rate=config.deferral_rate,
            reserve_s=config.reserve_s,
            most_deferred=config.deferral_rate if view is None else _most_deferred(config, view),
            num_scored=0 if view is None else view.num_scored,
            confidences=() if view is None else view.confidences_since(cursors.get(config.name, 0)),
        )
