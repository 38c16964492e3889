"""Runs what is missing of a comparison: contenders in turns on every trace, loads in turns."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.machine import commit
from benchmarks.serving.compare.calibration import Calibration, image_call, warm_up
from benchmarks.serving.compare.client import run_client
from benchmarks.serving.compare.images import images_folder
from benchmarks.serving.compare.outcomes import CallOutcome, account, figures_of, outcome_of
from benchmarks.serving.compare.results import ComparedCell, Figures, ResultStore
from benchmarks.serving.compare.settings import Settings
from benchmarks.serving.compare.traces import Planned, Trace
from benchmarks.serving.contenders import CONTENDERS, Contender, Counts
from benchmarks.serving.processes import CpuMeter
from benchmarks.serving.service_process import running
from benchmarks.settings import Report

_TIMEOUT_S = 600.0
_SETTLE_S = 5.0
# seconds of a block beside its requests, for the time left
_START_S = 45.0
# images that are stored to be compared, of each contender
_NUM_IMAGES = 60
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Block:
    """Runs of one contender on one trace, with one start of it."""

    contender: str
    trace: Trace
    cells: tuple[ComparedCell, ...]

    @property
    def name(self) -> str:
        """Its name in the progress bar."""
        return f"{self.trace.name}, {self.contender}"

    @property
    def seconds(self) -> float:
        """About how long it takes."""
        span_s = self.trace.requests[-1].arrival_s
        return _START_S + sum(span_s * max(1.0, 1 / cell.load) for cell in self.cells)


def missing_blocks(
    settings: Settings, traces: Sequence[Trace], store: Container[ComparedCell]
) -> list[Block]:
    """Return what has not run yet, in the order in which it should.

    Every trace has another contender first, and another load, so that no one always runs on the
    warmer or the busier machine.
    """
    blocks = []
    for number, trace in enumerate(traces):
        for place, contender in enumerate(_rotated(settings.contenders, number)):
            cells = [
                ComparedCell(contender, load, trace.name)
                for load in _rotated(settings.loads, number + place)
            ]
            missing = tuple(cell for cell in cells if cell not in store)
            if missing:
                blocks.append(Block(contender, trace, missing))
    return blocks


class Experiment:
    """One comparison in one folder.

    Args:
        prompts: for warming up.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        calibration: Calibration,
        store: ResultStore,
        prompts: Sequence[str],
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._calibration = calibration
        self._store = store
        self._prompts = prompts
        self._commit = commit()

    def run(self, block: Block, report: Report) -> None:
        """Start the contender, make all runs of the block, and stop it."""
        report(0.0, "starting")
        contender = CONTENDERS[block.contender]
        log = self._folder / f"service-{block.contender.replace('/', '-')}.log"
        alone_s, dtype = self._calibration.alone_s, self._settings.dtype
        with running(contender, dtype=dtype, alone_s=alone_s, log=log) as url:
            warm_up(url, block.contender, self._settings, self._prompts)
            for index, cell in enumerate(block.cells):
                report((index + 0.3) / (len(block.cells) + 0.3), f"load {cell.load:g}")
                self._store.add(cell, self._run_cell(cell, block.trace, contender, url))

    def _run_cell(
        self, cell: ComparedCell, trace: Trace, contender: Contender, url: str
    ) -> Figures:
        planned = trace.at(cell.load).requests
        calls = [(one.arrival_s, call_body(contender, one)) for one in planned]
        before = _settled(contender, url)
        meter = CpuMeter()
        run = run_client(url, calls, timeout_s=_TIMEOUT_S)
        usage = meter.read(client_cpu_s=run.cpu_s)
        outcomes = [outcome_of(*pair) for pair in zip(planned, run.answers, strict=True)]
        accepted = sum(one.fate != "refused" for one in outcomes)
        counts = _settled(contender, url, before.accepted + accepted).since(before)
        if cell.load == max(self._settings.loads) and trace.name.rpartition("-")[2] == "0":
            self._store_images(cell, outcomes)
        return {
            **figures_of(outcomes),
            "accounts": account(outcomes, counts),
            "client_cpu_share": round(run.cpu_s / run.wall_s, 4),
            "client_late_send_max_s": round(max(one.late_send_s for one in run.answers), 5),
            **usage,
            "commit": self._commit,
        }

    def _store_images(self, cell: ComparedCell, outcomes: Sequence[CallOutcome]) -> None:
        """Store images of a busy run, to be compared with those of other contenders."""
        folder = images_folder(self._folder, cell.contender, cell.trace)
        folder.mkdir(parents=True, exist_ok=True)
        for index, outcome in enumerate(outcomes[:_NUM_IMAGES]):
            if outcome.png:
                (folder / f"{index:03}.png").write_bytes(outcome.png)


def call_body(contender: Contender, planned: Planned) -> dict[str, Any]:
    """Return the body of a contender's call for a request."""
    image = image_call(planned.shape, planned.prompt, planned.seed)
    call = {**contender.call, **image, "slo_s": round(planned.slo_s, 6)}
    return {name: value for name, value in call.items() if name not in contender.omits}


def _settled(contender: Contender, url: str, accepted: int = 0) -> Counts:
    """Return the service's counts once it has accepted so many, and all have ended.

    Or after some seconds as they are then: counts may be late, but not for long.
    """
    until_s = time.monotonic() + _SETTLE_S
    while True:
        counts = contender.counts(url)
        is_settled = counts.open == 0 and counts.accepted >= accepted
        if is_settled or time.monotonic() > until_s:
            return counts
        time.sleep(0.2)


def _rotated(items: Sequence[ItemT], by: int) -> Sequence[ItemT]:
    by %= len(items)
    return [*items[by:], *items[:by]]
