"""From a pool's configuration to a replica's skill: model loaded and warmed up, parts joined."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ray_cluster.config.sections.cell_wide import StorageConfig
from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.slices import WorkerArguments
from ray_cluster.engine.batch.step_costs import StepCosts
from ray_cluster.engine.controlnets.loading import load_bank
from ray_cluster.engine.controlnets.local import LocalControlNets, SplitControlNets
from ray_cluster.engine.device.gpu import number_format_here
from ray_cluster.engine.files.folders import resolve_folder
from ray_cluster.engine.files.weights import DTYPE_BY_NAME
from ray_cluster.engine.models.loading import LoadedModel, load_model
from ray_cluster.engine.stages.building import build_runner
from ray_cluster.engine.stages.runner import EngineRunner
from ray_cluster.engine.stages.warmup import device_name, prepare_threads, warm_up
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.models.local import model_digest
from ray_cluster.models.prompt_tokens import digest_of
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import LoadedWords
from ray_cluster.protocol.settings import WorkerSettings, in_force
from ray_cluster.replica.controlnet.client import RemoteControlNets
from ray_cluster.replica.delivery import Delivery
from ray_cluster.replica.denoise.lora_shelf import LoraShelf
from ray_cluster.replica.denoise.sent_images import EditImages, reading_per_megapixel_s
from ray_cluster.replica.denoise.skill import DenoiseSkill
from ray_cluster.replica.host import Host
from ray_cluster.replica.lora_store.folder import LoraFolder
from ray_cluster.replica.states.transfer import StateTransfer
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import InputStore

logger = logging.getLogger(__name__)

# of a step that nobody has measured
_UNKNOWN = StepCost(fixed_s=0.1, per_megapixel_s=1.0, source="modelled")


def started_pool(arguments: WorkerArguments, settings: WorkerSettings | None) -> PoolConfig:
    """Return the configuration that a replica loads its model by.

    A table of fewer steps is the gateways' alone: here is only what the model itself comes with.
    """
    (pool,) = arguments.pools
    return in_force(pool, settings).model_copy(update={"fidelity": None})


def build(arguments: WorkerArguments, settings: WorkerSettings | None, host: Host) -> DenoiseSkill:
    """Load the model of a pool, warm it up, and return its skill, not yet started.

    For a brief call no step is made first: only requests tell what they cost.

    Raises:
        ConfigError, ModelUnsupported, MemoryRefused: see
            :func:`ray_cluster.engine.models.loading.load_model`.
    """
    began_s, clock, coder = host.clock(), host.clock, host.coder
    pool, storage = started_pool(arguments, settings), arguments.storage
    prepare_threads(pool.num_threads)
    model = load_model(pool)
    digest = model_digest(resolve_folder(*pool.files))
    states = states_of(storage, digest)
    is_on_cpu = model.executor.device.type == "cpu"
    costs = StepCosts(clock=clock, busy_clock=time.thread_time if is_on_cpu else None)
    remote = RemoteControlNets(clock=clock)
    local = _local_controlnets(arguments, pool, model.executor.device)
    runner = build_runner(
        model,
        pool,
        clock=clock,
        costs=costs,
        sink=states.writer,
        controls=SplitControlNets(local, remote, frozenset(local.names)) if local.names else remote,
        merges=arguments.loras.merges,
    )
    step_cost = _UNKNOWN if host.is_brief else _measured(runner, pool, coder, clock, local)
    costs.begin(step_cost)
    logger.info("pool %s: %s; step %s", pool.name, model.memory.explanation, step_cost)
    return DenoiseSkill(
        replace(
            host.registration("denoise", pool, step_cost=step_cost, began_s=began_s),
            served_as="",
            model_digest=digest,
            **loaded_facts(model, device_name(model.executor.device), number_format_here(pool)),
        ),
        runner=runner,
        delivery=delivery_of(storage, coder),
        states=states,
        loras=shelf_of(runner.model, arguments.loras),
        controls=remote,
        link=host.link,
        settings=settings,
    )


def loaded_facts(model: LoadedModel, device_type: str, number_format: str) -> dict[str, Any]:
    """Return what a replica registers of its model."""
    tokenizers = model.encoder.tokenizers
    return {
        "profile": replace(model.profile, prompt_digest=digest_of(tokenizers)),
        "device_type": device_type,
        "prompt_tokenizers": tokenizers,
        "words": LoadedWords(number_format, model.sampling_words, model.memory.explanation),
    }


def states_of(storage: StorageConfig, model_digest: str) -> StateTransfer:
    """Return where a replica's states go to, and come from."""
    # a power failure may take a state: its request begins again
    return StateTransfer(BlobStore(storage.states, is_durable=False), model_digest=model_digest)


def delivery_of(storage: StorageConfig, coder: ImageCoder) -> Delivery:
    """Return where the images of edits come from, and finished ones go to."""
    inputs = InputStore.open(storage.inputs, grace_s=storage.inputs_grace_s)
    return Delivery(coder, BlobStore(storage.results), EditImages(inputs, coder))


def shelf_of(model: LoadedModel, given: LorasConfig) -> LoraShelf:
    """Return the LoRAs that a replica has in memory."""
    return LoraShelf(model, LoraFolder(given), max_bytes=given.max_held_bytes)


def _local_controlnets(
    arguments: WorkerArguments, pool: PoolConfig, device: torch.device
) -> LocalControlNets:
    """Return the ControlNets of this process, loaded in the number format of their base."""
    dtype = DTYPE_BY_NAME[number_format_here(pool)]
    return LocalControlNets(
        {one.name: load_bank(one, device, dtype) for one in arguments.controlnets}
    )


def _measured(
    runner: EngineRunner,
    pool: PoolConfig,
    coder: ImageCoder,
    clock: Callable[[], float],
    controls: LocalControlNets,
) -> StepCost:
    """Return what steps of a pool's model cost here, and what comes before them."""
    cost = warm_up(
        runner.model,
        max_batch=pool.max_batch,
        clock=clock,
        call=runner.call,
        controls=controls,
    )
    encode_s = cost.encode_per_megapixel_s + reading_per_megapixel_s(coder, clock)
    return replace(cost, encode_per_megapixel_s=encode_s)
