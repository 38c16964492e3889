"""From a pool's configuration to a group's skill: ranks started and measured, parts joined."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.slices import WorkerArguments
from ray_cluster.engine.batch.batch_caps import BatchCaps
from ray_cluster.engine.files.folders import component_config, denoiser_name
from ray_cluster.engine.files.prompt_limits import max_prompt_tokens
from ray_cluster.engine.files.weights import DTYPE_BY_NAME
from ray_cluster.engine.groups.degree_costs import DegreeCosts, Way
from ray_cluster.engine.groups.group_engine import GroupEngine
from ray_cluster.engine.groups.group_executor import GroupExecutor, GroupModel
from ray_cluster.engine.groups.measuring import (
    GroupTimer,
    measured_switch_s,
    measured_ways,
    warm_up_sets,
)
from ray_cluster.engine.models.denoisers import guidance_kind, is_flux
from ray_cluster.engine.models.loading import InspectedModel, LoadedModel, inspect_model
from ray_cluster.engine.stages.building import build_group_runner
from ray_cluster.engine.stages.warmup import prepare_threads
from ray_cluster.models.local import group_degrees, model_digest, patch_size, vae_scale_factor
from ray_cluster.policies.costs.cost_model import StepWork, step_s
from ray_cluster.policies.costs.memory import MemoryPlan
from ray_cluster.policies.sequence_parallel.rounds import RoundOptions, plan_round
from ray_cluster.policies.types import DegreeCost, GroupCost, StepCost
from ray_cluster.protocol.groups import Up
from ray_cluster.protocol.settings import WorkerSettings
from ray_cluster.replica.denoise.builder import (
    delivery_of,
    loaded_facts,
    shelf_of,
    started_pool,
    states_of,
)
from ray_cluster.replica.group.coder import RemoteDecoder, RemoteEncoder, RemoteImages
from ray_cluster.replica.group.ranks import GroupRanks
from ray_cluster.replica.group.skill import GroupSkill
from ray_cluster.replica.host import Host
from ray_cluster.requests import PromptTokenizer

logger = logging.getLogger(__name__)

# a step that has not ended by then hangs: so long at least, and so many of the slowest
_LEAST_BOUND_S, _BOUND_STEPS = 10.0, 10.0
# of a step that nobody has measured, on one rank
_UNKNOWN = StepCost(fixed_s=0.1, per_megapixel_s=1.0, source="modelled")


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a group's model allows.

    Attributes:
        ways: of a step.
        token_px: image pixels along a side of a token.
    """

    ways: tuple[Way, ...]
    token_px: int
    model: GroupModel


def build(arguments: WorkerArguments, settings: WorkerSettings | None, host: Host) -> GroupSkill:
    """Start the ranks of a pool's group, measure their steps, and return its skill, not yet
    started.

    Raises:
        ConfigError, ModelUnsupported: the model is not covered.
        RuntimeError: the ranks do not start.
    """
    began_s, clock = host.clock(), host.clock
    pool = started_pool(arguments, settings)
    prepare_threads(pool.num_threads)
    inspected = inspect_model(pool)
    digest = model_digest(inspected.folder)
    states = states_of(arguments.storage, digest)
    ranks = GroupRanks(pool.model_dump_json(), pool.ranks, host.start_rank, clock=clock)
    try:
        engine, model, up = open_group(pool, inspected, ranks, clock, is_brief=host.is_brief)
        runner = build_group_runner(model, pool, engine, clock=clock, sink=states.writer)
        ranks.call_when_news(runner.wake)
    except BaseException:
        ranks.close()
        raise
    group = engine.costs.current
    registration = host.registration(
        "denoise", pool, step_cost=group.costs[-1].cost, began_s=began_s
    )
    return GroupSkill(
        replace(
            registration,
            served_as="",
            max_batch=1,
            model_digest=digest,
            group=group,
            **loaded_facts(model, up.device_type, up.dtype),
        ),
        ranks=ranks,
        engine=engine,
        runner=runner,
        delivery=delivery_of(arguments.storage, host.coder),
        states=states,
        loras=shelf_of(model, arguments.loras),
        link=host.link,
        settings=settings,
    )


def open_group(
    pool: PoolConfig,
    inspected: InspectedModel,
    ranks: GroupRanks,
    clock: Callable[[], float],
    *,
    is_brief: bool = False,
) -> tuple[GroupEngine, LoadedModel, Up]:
    """Return the engine of a group, its model's stages, and what a rank says of itself, once the
    ranks are there and, unless that is to be brief, measured."""
    ups, contents = ranks.wait_up()
    shape = _shape(pool, inspected, ups[0])
    model = _model(inspected, ranks, shape, ups, contents)
    costs = DegreeCosts(
        shape.ways,
        GroupCost(pool.ranks, (DegreeCost(1, _UNKNOWN),), shape.token_px, guard=pool.guard),
        clock,
    )
    if not is_brief:
        _measure(ranks, model, costs, clock)
    engine = GroupEngine(
        GroupExecutor(shape.model, ranks),
        model.tables,
        clock,
        costs=costs,
        planner=partial(plan_round, options=RoundOptions(pool.guard, drops=False)),
    )
    return engine, model, ups[0]


def _shape(pool: PoolConfig, inspected: InspectedModel, up: Up) -> _Shape:
    folder = inspected.folder
    config = component_config(folder, denoiser_name(folder))
    patch, degrees = patch_size(config), group_degrees(pool, config)
    if len(degrees) < len(pool.set_degrees):
        logger.warning(
            "pool %s: the model's %d heads are divided by %s alone; other degrees are left out",
            pool.name,
            config["num_attention_heads"],
            ", ".join(map(str, degrees)),
        )
    ways = [Way(degree) for degree in degrees]
    if guidance_kind(config) == "rows":
        apart = [degree for degree in degrees if degree // 2 in degrees]
        ways += [Way(degree, "apart") for degree in apart]
    factor = vae_scale_factor(component_config(folder, "vae"))
    channels = config["in_channels"] // (patch**2 if is_flux(config) else 1)
    model = GroupModel(DTYPE_BY_NAME[up.dtype], channels, patch, factor)
    return _Shape(tuple(ways), factor * patch, model)


def _model(
    inspected: InspectedModel,
    ranks: GroupRanks,
    shape: _Shape,
    ups: Mapping[int, Up],
    contents: Sequence[bytes],
) -> LoadedModel:
    """Return the model's stages, each of which asks the ranks."""
    coder, profile = ups[ranks.num_ranks - 1], inspected.profile
    tokenizers = tuple(map(PromptTokenizer, contents, coder.tokenizers))
    sizes = {(profile.default_width_px, profile.default_height_px), (profile.max_px,) * 2}
    plan = MemoryPlan("fits", "nothing", dict.fromkeys(sizes, 1), 0, 0, 0, coder.memory)
    return LoadedModel(
        encoder=RemoteEncoder(ranks, tokenizers, max_prompt_tokens(inspected.folder)),
        images=RemoteImages(ranks, shape.model.vae_scale_factor),
        executor=GroupExecutor(shape.model, ranks),
        decoder=RemoteDecoder(ranks),
        tables=inspected.tables,
        # nothing of a step is kept for a later one
        profile=replace(profile, outer_blocks=None),
        sampling_words=inspected.sampling_words,
        memory=plan,
        max_batch_by_size=BatchCaps(plan.max_batch_by_size),
    )


def _measure(
    ranks: GroupRanks, model: LoadedModel, costs: DegreeCosts, clock: Callable[[], float]
) -> None:
    """Warm all sets up, and begin from what their steps cost."""
    news = threading.Event()
    ranks.call_when_news(news.set)
    timer = GroupTimer(model, ranks, news)
    try:
        warm_up_sets(timer, model, costs.ways, ranks.num_ranks)
        found = measured_ways(timer, model, costs, clock)
        costs.begin(found, measured_switch_s(timer, model, costs))
        ranks.bound_s = max(_LEAST_BOUND_S, _BOUND_STEPS * _slowest_s(found, model))
    finally:
        timer.close()
    logger.info("a group of %d ranks: %s", ranks.num_ranks, _words(costs.current))


def _slowest_s(found: Mapping[Way, StepCost], model: LoadedModel) -> float:
    """Return the seconds of the slowest step that may be asked for."""
    largest = 2 * model.profile.max_px**2 / 1e6
    return max(step_s(cost, StepWork(largest, largest**2 / 2)) for cost in found.values())


def _words(group: GroupCost) -> str:
    return "; ".join(
        f"degree {one.degree}: {one.cost.fixed_s:.4f} s and {one.cost.per_megapixel_s:.4f} s a "
        "megapixel a step"
        for one in group.costs
    )
