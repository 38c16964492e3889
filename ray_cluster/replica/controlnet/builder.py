"""From a ControlNet's configuration to its skill: loaded, measured, joined."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from ray_cluster.config.slices import WorkerArguments
from ray_cluster.engine.controlnets.bank import BankRow, ControlNetBank
from ray_cluster.engine.controlnets.loading import load_bank
from ray_cluster.engine.stages.warmup import device_name, prepare_threads
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.settings import WorkerSettings, in_force
from ray_cluster.replica.controlnet.server import ControlNetServer
from ray_cluster.replica.controlnet.skill import ControlNetSkill
from ray_cluster.replica.host import Host
from ray_cluster.replica.measuring import measured_cost

logger = logging.getLogger(__name__)

# side of the latents that it is measured with
_LATENT_SIDE = 16
_KEY = "measured"


def build(
    arguments: WorkerArguments, settings: WorkerSettings | None, host: Host
) -> ControlNetSkill:
    """Load a ControlNet, measure it, and return its skill, not yet started.

    Raises:
        ConfigError, ModelUnsupported: see :func:`ray_cluster.engine.controlnets.loading.load_bank`.
    """
    began_s, clock = host.clock(), host.clock
    (given,) = arguments.controlnets
    given = in_force(given, settings)
    max_batch = given.max_batch
    prepare_threads(given.num_threads)
    device = torch.device(given.device)
    bank = load_bank(given, device)
    server = ControlNetServer(
        given.name,
        bank,
        max_batch=max_batch,
        clock=clock,
        device=device,
        num_threads=given.num_threads,
    )
    step_cost = server.call(lambda: measure_controlnet(bank, max_batch=max_batch, clock=clock))
    logger.info("ControlNet %s: a step %s", given.name, step_cost)
    registration = host.registration(
        "control", given, step_cost=step_cost, began_s=began_s, device_type=device_name(device)
    )
    return ControlNetSkill(registration, server, link=host.link, settings=settings)


def measure_controlnet(
    bank: ControlNetBank, *, max_batch: int, clock: Callable[[], float]
) -> StepCost:
    """Return what a step of a ControlNet costs, without guidance."""
    executor, side = bank.executor, _LATENT_SIDE
    size_px = side * executor.map_factor
    conditioning = executor.blank_conditioning()
    several = max(2, max_batch)
    for index in range(several):
        control_map = torch.from_numpy(np.zeros((size_px, size_px, 3), np.uint8))
        bank.open(f"{_KEY}{index}", conditioning, control_map)
    latents = torch.zeros(executor.num_channels, side, side)
    rows = [BankRow(f"{_KEY}{index}", latents, 500.0) for index in range(several)]
    try:
        return measured_cost(
            (size_px, size_px),
            lambda count: bank.compute(rows[:count]),
            max_batch=max_batch,
            clock=clock,
        )
    finally:
        for index in range(several):
            bank.close(f"{_KEY}{index}")
