"""What it costs a step that its ControlNet runs in another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import torch

from benchmarks.controlnets.services import arguments_of, services
from benchmarks.controlnets.settings import ControlSettings
from benchmarks.controlnets.subject import controlled_requests, maps_of
from benchmarks.engine.subject import Subject, load_subject
from benchmarks.report import Row, Section
from benchmarks.settings import Report
from benchmarks.stats import summarise
from ray_cluster.engine.controlnets.asks import ControlNetAsk, ControlNetBackend
from ray_cluster.engine.controlnets.loading import load_bank
from ray_cluster.engine.controlnets.local import LocalControlNets

_BATCHES = (1, 4)


def measure(settings: ControlSettings, report: Report) -> Section:
    """Return the section."""
    report(0.0, "loading")
    subject, rows = load_subject(), list[Row]()
    local = LocalControlNets({"edges": load_bank(arguments_of("edges"), torch.device("cpu"))})
    for index, shares_memory in enumerate((True, False)):
        with services(shares_memory=shares_memory) as remote:
            for batch in _BATCHES:
                kind = "shared memory" if shares_memory else "tcp"
                report(index / 2, f"{kind}, {batch} requests")
                asks = _asks(subject, batch, settings)
                rows.append(_row(kind, batch, asks, local, remote.controls, settings.step_rounds))
    return {
        "what": f"ms until the residuals of a step of requests of {settings.px} px with guidance "
        "are there: computed in the process, and asked of a service that is otherwise idle; in "
        "turns, wall clock",
        "tables": {"a step's residuals": rows},
    }


def _asks(subject: Subject, count: int, settings: ControlSettings) -> list[ControlNetAsk]:
    requests = controlled_requests(count, 1, px=settings.px, num_steps=settings.num_steps)
    with torch.inference_mode():
        states = subject.start(requests)
    return [
        ControlNetAsk(
            name="edges",
            key=f"{state.request.request_id}/0",
            conditioning=state.conditioning,
            map=torch.from_numpy(maps_of(state.request)[0]),
            latents=state.latents,
            timestep=500.0,
            deadline_s=time.monotonic() + 1e6,
        )
        for state in states
    ]


def _row(
    kind: str,
    batch: int,
    asks: list[ControlNetAsk],
    local: ControlNetBackend,
    remote: ControlNetBackend,
    rounds: int,
) -> dict[str, Any]:
    ways: dict[str, Callable[[], None]] = {
        "here": lambda: _answered(local, asks),
        "there": lambda: _answered(remote, asks),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(5 + rounds):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            began_s = time.perf_counter()
            ways[name]()
            # the first steps open requests, and make kernels
            if number >= 5:
                taken[name].append(1e3 * (time.perf_counter() - began_s))
    for controls in (local, remote):
        for one in asks:
            controls.forget(one.key)
    more = [there - here for here, there in zip(taken["here"], taken["there"], strict=True)]
    return {
        "link": kind,
        "batch": batch,
        "here_ms": summarise(taken["here"]).as_dict(),
        "there_ms": summarise(taken["there"]).as_dict(),
        "overhead_ms": summarise(more).as_dict(),
    }


@torch.inference_mode()
def _answered(controls: ControlNetBackend, asks: list[ControlNetAsk]) -> None:
    futures = controls.ask(asks)
    wait(futures)
    for one in futures:
        one.result()
