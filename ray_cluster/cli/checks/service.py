"""Whether a configuration's pools and ports can be had on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from ray_cluster.cli.checks import Finding, ok, problem, warning
from ray_cluster.cli.checks.cards import check_cards
from ray_cluster.cli.service.model_plans import PlannedModel, plan_pool
from ray_cluster.cli.service.ports import port_problem, running_ports, wanted_listeners
from ray_cluster.cli.service.report import open_service_warnings
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cascades import CascadeConfig, DiscriminatorConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.sections.upscalers import UpscalerConfig
from ray_cluster.engine.controlnets.checks import check_controlnet
from ray_cluster.engine.files.folders import is_hub_id, local_folder
from ray_cluster.engine.scorers.checks import check_scorer
from ray_cluster.errors import RayClusterError
from ray_cluster.imaging.enlarging import replica_memory
from ray_cluster.models.builtin import controlnet_folder, discriminator_folder
from ray_cluster.models.weight_files import INDEX
from ray_cluster.policies.costs.gpu_shares import Card, GpuTenants, fullest_card, replica_bytes

_GIB = 2**30
# a replica of Ray Serve that has imported torch and diffusers, without weights; measured: 0.72 GiB
_WORKER_BYTES = 0.75 * _GIB
# what a replica on a CPU keeps for later steps of the same sizes (compiled kernels, freed memory);
# measured: 0.57 GiB after 5,500 calls of 25 sizes, the last 3,000 of which added 0.04
_KEPT_BYTES = 0.65 * _GIB


def check_service(config: ClusterConfig, card: Card | None = None) -> Iterator[Finding]:
    """Yield findings about ports, pools, processors, and memory of the machine and its GPUs.

    Args:
        card: the GPU that pools on one are planned for, if it is known.
    """
    running = running_ports(config) if config.ray.address is None else set()
    for listener in wanted_listeners(config):
        subject = f"port {listener.port}"
        if listener.port in running:
            yield warning(
                subject,
                f"{listener.purpose}: in use by a running ray-cluster",
                f"stop that before this configuration is served, or choose {listener.change}",
            )
        elif found := port_problem(listener):
            yield problem(subject, found)
        else:
            yield ok(subject, f"free for {listener.purpose}")
    for message in open_service_warnings(config):
        yield warning("access", message)
    plans = []
    for pool in config.pools:
        finding, plan = _check_pool(pool, card)
        yield finding
        yield from _on_cards(pool)
        if plan is not None:
            plans.append((pool, plan))
    yield from map(_check_discriminator, config.discriminators)
    yield from map(_cascade, config.cascades)
    for control in config.controlnets:
        yield _check_controlnet(control, config)
    yield from map(_upscaler, config.upscalers)
    if card is not None:
        yield _shared_gpu(config, {pool.name: plan for pool, plan in plans}, card)
    if config.ray.address is None:
        yield _processors(config)
        yield _all_replicas(plans, config, is_running=bool(running))


def _check_pool(pool: PoolConfig, card: Card | None) -> tuple[Finding, PlannedModel | None]:
    subject = f"pool {pool.name}"
    try:
        here = _on_this_machine(pool)
        if here is None:
            return _not_downloaded(pool.model), None
        plan = plan_pool(here, card)
    except RayClusterError as error:
        return problem(subject, str(error)), None
    found = f"{pool.replicas} x {pool.files_words} on {pool.device} in {plan.format_words}: "
    if pool.is_group:
        found += f"{pool.ranks} ranks, the weights whole on each; "
    found += f"{plan.memory_words}; "
    found += plan.sampling_words
    if plan.memory is not None and plan.memory.verdict in {"capped", "offload"}:
        return warning(subject, found, "raise memory_gib, or lower max_px or max_batch"), plan
    return ok(subject, found), plan


def _on_cards(pool: PoolConfig) -> Iterator[Finding]:
    # a model that cannot be read has been reported
    with suppress(RayClusterError):
        if (here := _on_this_machine(pool)) is not None:
            yield check_cards(here)


def _cascade(cascade: CascadeConfig) -> Finding:
    rule = f"threshold {cascade.threshold}"
    if cascade.threshold is None:
        rule = f"{cascade.deferral_rate:.0%} made anew"
    found = f"{cascade.light}, then {cascade.heavy}; {cascade.discriminator} decides, {rule}"
    return ok(f"cascade {cascade.name}", found)


def _check_discriminator(given: DiscriminatorConfig) -> Finding:
    subject = f"discriminator {given.name}"
    is_here = discriminator_folder(given.model) or Path(given.model).expanduser().is_dir()
    if not is_here and is_hub_id(given.model):
        return warning(subject, f"{given.model} is not checked before it is downloaded")
    try:
        check_scorer(given.model, calibration=given.calibration)
    except RayClusterError as error:
        return problem(subject, str(error))
    return ok(subject, f"{given.replicas} x {given.model} on {given.device}, calibrated")


def _check_controlnet(given: ControlNetConfig, config: ClusterConfig) -> Finding:
    subject = f"ControlNet {given.name}"
    is_here = controlnet_folder(given.model) or Path(given.model).expanduser().is_dir()
    if not is_here and is_hub_id(given.model):
        return warning(subject, f"{given.model} is not checked before it is downloaded")
    try:
        check_controlnet(given, config)
    except RayClusterError as error:
        return problem(subject, str(error))
    where = f"{given.replicas} x {given.model} on {given.device}"
    if not given.is_service:
        where = f"{given.model} in their replicas"
    return ok(subject, f"for {', '.join(given.bases)}: {where}")


def _upscaler(given: UpscalerConfig) -> Finding:
    found = f"{given.replicas} x, up to {replica_memory(given.max_px) / _GIB:.1f} GiB each, for "
    return ok(f"upscaler {given.name}", f"{found}images of at most {given.max_px} px a side")


def _on_this_machine(pool: PoolConfig) -> PoolConfig | None:
    """Return the pool with the folder of a hub model in the cache, or None if it is not there.

    The doctor downloads nothing: not what the cache lacks of it either.
    """
    from huggingface_hub import try_to_load_from_cache

    if local_folder(*pool.files) is not None or not is_hub_id(pool.model):
        return pool
    index = try_to_load_from_cache(pool.model, INDEX)
    if not isinstance(index, str):
        return None
    return pool.model_copy(update={"model": str(Path(index).parent)})


def _not_downloaded(model: str) -> Finding:
    """Say that a model would have to be downloaded first."""
    from huggingface_hub import constants

    subject, found = f"model {model}", f"is not in the cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        return problem(
            subject,
            f"{found}, and HF_HUB_OFFLINE forbids to download it",
            f"hf download {model} on a machine with access, or give a folder as the pool's model",
        )
    return warning(
        subject, found, f"the first start downloads it; hf download {model} does that now"
    )


def _processors(config: ClusterConfig) -> Finding:
    """Compare what Ray will reserve, and what threads will really run, with what there is."""
    cores = os.cpu_count() or 1
    offered = config.ray.num_cpus or cores
    reserved = sum(one.reserved_cpus * one.replicas for one in config.workers)
    threads = sum(
        one.num_processes * one.hardware.num_threads * one.replicas for one in config.workers
    )
    found = f"{cores}; replicas reserve {reserved:g} of {offered} and run {threads} thread(s)"
    if reserved > offered:
        return problem(
            "processors",
            found,
            "some replicas would wait for ever: lower replicas or num_cpus (it is what Ray "
            "reserves, not a limit), or raise ray.num_cpus",
        )
    if threads > cores:
        return warning("processors", found, "lower num_threads, replicas or ranks: too many run")
    return ok("processors", found)


def _replica_bytes(pool: PoolConfig, plan: PlannedModel) -> float:
    """Return what a replica takes of the machine's memory in the end."""
    if plan.memory is None:
        return _WORKER_BYTES
    num_workers = 1 + pool.ranks * pool.is_group
    if pool.device != "cpu":
        return num_workers * _WORKER_BYTES + plan.memory.host_bytes
    return num_workers * _WORKER_BYTES + pool.ranks * (_KEPT_BYTES + plan.memory.peak_bytes)


def _weight_bytes(model: str, builtin: Path | None) -> float:
    """Return what a worker takes that holds a model's weights and little else."""
    folder = builtin or Path(model).expanduser()
    return _WORKER_BYTES + sum(one.stat().st_size for one in folder.rglob("*.safetensors"))


def _all_replicas(
    plans: list[tuple[PoolConfig, PlannedModel]],
    config: ClusterConfig,
    *,
    is_running: bool,
) -> Finding:
    """Add up what all replicas take: each plans as if it were alone."""
    if is_running:
        return warning(
            "memory of all replicas",
            "a running ray-cluster has a share that is not known here",
            "ask again when it is stopped",
        )
    each = {pool.name: _replica_bytes(pool, plan) for pool, plan in plans}
    each |= {one.name: replica_memory(one.max_px) for one in config.upscalers}
    for scorer in config.discriminators:
        each[scorer.name] = _weight_bytes(scorer.model, discriminator_folder(scorer.model))
    for controlnet in [one for one in config.controlnets if one.is_service]:
        each[controlnet.name] = _weight_bytes(controlnet.model, controlnet_folder(controlnet.model))
    workers = [one for one in config.workers if one.name in each]
    needed = sum(one.replicas * each[one.name] for one in workers)
    available = psutil.virtual_memory().available
    limits = ", ".join(f"{name} {one / _GIB:.1f}" for name, one in each.items())
    found = (
        f"grows to {needed / _GIB:.1f} of {available / _GIB:.1f} GiB free; a replica in GiB, "
        f"without Ray's own processes: {limits or 'not known'}"
    )
    if needed > available:
        return problem("memory of all replicas", found, "lower replicas, or end other programs")
    return ok("memory of all replicas", found)


def _shared_gpu(config: ClusterConfig, plans: Mapping[str, PlannedModel], card: Card) -> Finding:
    """Add up what may be on one GPU at worst: each replica plans as if it were alone."""
    pools = [pool for pool in config.pools if pool.device == "cuda"]
    if not pools:
        return warning("the given GPU", "no pool runs on one", "set device: cuda and num_gpus: 1")
    shares = {pool.name: replica_bytes(card, pool.num_gpus, pool.memory_bytes) for pool in pools}
    tenants = [
        GpuTenants(pool.name, pool.num_gpus, shares[pool.name], pool.replicas) for pool in pools
    ]
    counts = {name: count for name, count in fullest_card(tenants).items() if count}
    total_bytes = sum(count * shares[name] for name, count in counts.items())
    parts = []
    for name, count in counts.items():
        words = f"{count} x {name}, up to {shares[name] / _GIB:.1f} GiB each"
        if (plan := plans.get(name)) is not None and plan.memory is not None:
            words += f" ({plan.memory.peak_bytes / _GIB:.1f} planned)"
        parts.append(words)
    found = (
        f"{total_bytes / _GIB:.1f} of {card.total_bytes / _GIB:.1f} GiB at most, CUDA contexts "
        f"included: {'; '.join(parts)}"
    )
    if total_bytes <= card.total_bytes:
        return ok("replicas on one GPU", found)
    return problem(
        "replicas on one GPU",
        found,
        "lower memory_gib, or raise num_gpus so that fewer replicas share a GPU",
    )
