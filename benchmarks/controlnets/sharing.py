"""Two models that share one ControlNet: what rows without it pay for the others' waits.

A row without ControlNets shares steps with one that has one. While another process keeps the
ControlNet busy, answers come later; how much later the first row's steps come is what is measured.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.controlnets.services import services
from benchmarks.controlnets.settings import ControlSettings
from benchmarks.controlnets.subject import controlled_requests, maps_of
from benchmarks.engine.streams import by_engine
from benchmarks.engine.subject import Subject, load_subject
from benchmarks.report import Row, Section
from benchmarks.settings import Report
from benchmarks.stats import summarise
from ray_cluster.engine.controlnets.asks import ControlNetBackend
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.engine.stages.warmup import prepare_threads
from ray_cluster.protocol.leases import Directory
from ray_cluster.replica.controlnet.client import RemoteControlNets

_JOIN_S = 20.0
_WARM_S = 3.0
_NUM_ROWS = 3
_OTHER_IN_FLIGHT = 4


def measure(settings: ControlSettings, report: Report) -> Section:
    """Return the section."""
    report(0.0, "loading")
    subject, rows = load_subject(), list[Row]()
    with services() as remote:
        for index, is_busy in enumerate((False, True)):
            with _other(remote.directory, settings) if is_busy else _nobody():
                for num_controlled in (0, 1):
                    words = f"{num_controlled} of {_NUM_ROWS} rows with a ControlNet"
                    report((2 * index + num_controlled) / 4, words)
                    rows.append(
                        {"with_controlnet": num_controlled, "other": "busy" if is_busy else "idle"}
                        | _steps(subject, remote.controls, num_controlled, settings)
                    )
    return {
        "what": f"ms from one step of a row without ControlNets to its next, in batches of "
        f"{_NUM_ROWS} at {settings.px} px; other: a second model's process that asks the same "
        "ControlNet without a pause. Three busy processes share two cores: compare rows of the "
        "same 'other'. late: steps of the row with a ControlNet that others did not wait for",
        "tables": {"steps of rows without ControlNets": rows},
    }


def _steps(
    subject: Subject, controls: ControlNetBackend, num_controlled: int, settings: ControlSettings
) -> dict[str, Any]:
    requests = controlled_requests(_NUM_ROWS, 0, px=settings.px, num_steps=settings.step_rounds)[
        num_controlled:
    ]
    requests += controlled_requests(
        num_controlled, 1, px=settings.px, num_steps=settings.step_rounds
    )
    engine = build_engine(
        subject.model, max_batch=_NUM_ROWS, clock=time.monotonic, controls=controls
    )
    taken, num_late, last_s = list[float](), 0, None
    with torch.inference_mode():
        for state in subject.start(requests):
            state.maps = tuple(map(torch.from_numpy, maps_of(state.request)))
            engine.add(state)
        plain = requests[0].request_id
        while len(engine):
            report = engine.step()
            num_late += len(report.late)
            if plain in report.stepped:
                now_s = time.perf_counter()
                if last_s is not None:
                    taken.append(1e3 * (now_s - last_s))
                last_s = now_s
            elif engine.is_waiting:
                time.sleep(0.001)
    taken.sort()
    return {
        "step_ms": summarise(taken).as_dict(),
        "p95_ms": taken[int(0.95 * (len(taken) - 1))],
        "late": num_late,
    }


@contextmanager
def _nobody() -> Iterator[None]:
    yield


@contextmanager
def _other(directory: Directory, settings: ControlSettings) -> Iterator[None]:
    """Run a second model's process within the block."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=_keep_busy, args=(directory, settings, stop))
    process.start()
    try:
        time.sleep(_WARM_S)
        yield
    finally:
        stop.set()
        process.join(_JOIN_S)
        if process.is_alive():
            process.kill()
            process.join()


def _keep_busy(directory: Directory, settings: ControlSettings, stop: Any) -> None:
    prepare_threads(1)
    subject = load_subject()
    controls = RemoteControlNets(clock=time.monotonic)
    controls.set_peers(directory)
    requests = controlled_requests(
        _OTHER_IN_FLIGHT, 1, px=settings.px, num_steps=settings.num_steps
    )
    while not stop.is_set():
        by_engine(
            subject,
            requests,
            _OTHER_IN_FLIGHT,
            controls=controls,
            maps_of=lambda one: tuple(map(torch.from_numpy, maps_of(one))),
        )
    controls.close()
