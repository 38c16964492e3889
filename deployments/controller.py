"""The Controller deployment: exactly one per cell, an application of its own.

Duties: run the plan loop, in a thread; plan again every period, and at once
when a model without a replica is called or a replica has gone; save the planner's memory through
the dispatcher, and go on from it; report its health. Without it, serving goes on with the last
plan.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from contextvars import Context
from functools import cache

from ray_cluster.codec.values import CodecError, TextCodec
from ray_cluster.compat import dashboard_url
from ray_cluster.config.loading import Document
from ray_cluster.config.sections.controller import Scaling
from ray_cluster.control.cell_fleet import Curves
from ray_cluster.control.live import LiveCluster, LivePlanner, Scaler
from ray_cluster.control.loop import ControlLoop
from ray_cluster.control.records import Times, record_of
from ray_cluster.deployments.actors import set_up_actor_logs
from ray_cluster.deployments.dispatcher_handle import DispatcherHandle
from ray_cluster.deployments.serve.plan_scaling import write_planned
from ray_cluster.deployments.serve.policy_scaler import PolicyScaler, serve_applications
from ray_cluster.deployments.serve.serve_scaler import ServeScaler
from ray_cluster.errors import ConfigError, DispatcherUnavailable
from ray_cluster.models.cascade_curves import load_curves
from ray_cluster.policies.planning.cell_planner import CellMemory, drain_s_of

logger = logging.getLogger(__name__)

# between two tries while the dispatcher does not answer
_RETRY_S = 1.0
_PERIOD_S = 5.0
# between two rounds, however much happens
_LEAST_GAP_S = 0.5
# a death costs no more of the memory
_SAVE_EVERY_S = 30.0
_MEMORY: TextCodec[CellMemory] = TextCodec(CellMemory)


class Controller:
    """Plans the cell for as long as it lives."""

    # Serve awaits the constructor: it runs on the event loop
    async def __init__(self, arguments: Document) -> None:  # type: ignore[misc]
        set_up_actor_logs(arguments.logs)
        # what the imports have left is not searched for garbage in the middle of a round
        gc.freeze()
        self._calls = DispatcherHandle(patience_s=arguments.dispatch.patience_s).control
        self._cluster = LiveCluster(
            self._calls,
            asyncio.get_running_loop(),
            _scaler_of(arguments.control.scaling),
            cache(_curves_of),
        )
        # in a context of its own: Serve cancels what a cancelled request has called
        self._task = asyncio.create_task(self._run(), context=Context())

    async def _run(self) -> None:
        cluster = self._cluster
        loop = ControlLoop(
            LivePlanner(lambda: cluster.glance),
            cluster,
            time.monotonic,
            memory=await self._saved_memory(),
            limits=cluster.limits,
        )
        saved_s, events = time.monotonic(), 0
        while True:
            began_s = time.monotonic()
            report = await asyncio.to_thread(loop.run_round)
            now_s = time.monotonic()
            is_due = now_s - saved_s >= _SAVE_EVERY_S or bool(
                report.actions and report.actions.scales
            )
            memory = _MEMORY.encode(loop.memory) if is_due and loop.memory is not None else None
            drain_s = (
                1.0 if cluster.glance is None else drain_s_of(cluster.glance.seen.default_slo_s)
            )
            times = Times(time.time(), now_s - began_s, drain_s)
            record = record_of(report, cluster.glance, loop.memory, times)
            try:
                await self._calls.note_round(record, memory)
                saved_s = now_s if memory is not None else saved_s
            except DispatcherUnavailable as error:
                logger.warning("a round is not noted: %s", error)
            seen = cluster.glance
            period_s = _PERIOD_S if seen is None else seen.seen.limits.period_s
            await asyncio.sleep(_LEAST_GAP_S)
            events = await self._next_event(events, began_s + period_s - time.monotonic())

    async def _next_event(self, seen: int, wait_s: float) -> int:
        """Wait until something calls for a plan at once, or the period is over."""
        try:
            return await self._calls.wake(seen, max(0.0, wait_s))
        except DispatcherUnavailable:
            await asyncio.sleep(max(0.0, wait_s))
            return seen

    async def _saved_memory(self) -> CellMemory | None:
        """Return what the last controller has saved; None if it is of no use."""
        while True:
            try:
                text = await self._calls.memory()
            except DispatcherUnavailable as error:
                logger.info("the controller waits for the dispatcher: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                return _MEMORY.decode(text) if text else None
            except CodecError as error:
                logger.warning("the saved memory is not used: %s", error)
                return None

    async def check_health(self) -> None:
        """Raise when the loop has ended, so that Serve starts another controller."""
        if self._task.done():
            raise RuntimeError(f"the plan loop has ended: {self._task.exception()!r}")

    async def __del__(self) -> None:
        """Plan no more; the cell stays as it is."""
        if hasattr(self, "_task"):
            self._task.cancel()


def _scaler_of(scaling: Scaling) -> Scaler:
    if scaling == "policy":
        return PolicyScaler(serve_applications, write_planned)
    return ServeScaler(dashboard_url)


def _curves_of(source: str) -> Curves:
    """Return the calibrated curves of a cascade; next to nothing where they cannot be read."""
    try:
        found = load_curves(source)
    except ConfigError as error:
        logger.warning("quality is taken to rise evenly with the deferral rate: %s", error)
        return Curves()
    return Curves(found.quality, found.deferral)
