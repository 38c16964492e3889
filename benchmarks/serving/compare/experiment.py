"""Runs what is missing of a comparison: contenders in turns on every trace, loads in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.machine import commit
from benchmarks.serving.compare.calibration import Calibration, image_call, warm_up
from benchmarks.serving.compare.cells import CellStore, ComparedCell, Figures
from benchmarks.serving.compare.client_run import ClientRun, run_client
from benchmarks.serving.compare.contenders import CONTENDERS, Contender, Counts
from benchmarks.serving.compare.outcomes import CallOutcome, account, figures_of, outcome_of
from benchmarks.serving.compare.service_process import running
from benchmarks.serving.compare.settings import Settings
from benchmarks.serving.compare.traces import Planned, Trace
from benchmarks.serving.processes import CpuMeter
from benchmarks.settings import Report
from benchmarks.stats import percentile

_TIMEOUT_S = 600.0
_SETTLE_S = 5.0
# of a run that others disturb
_TRIES = 3
# seconds of a block beside its requests, for the time left
_START_S = 45.0
# images that are kept to be compared, of each contender
_KEPT_IMAGES = 60
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
        folder: where results go.
        settings: what is compared.
        calibration: of this machine.
        store: the results.
        prompts: for warming up.
        most_others: cores that other processes may keep busy during a run; if they take more, it is
            made again, some times, and the calmest counts.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        calibration: Calibration,
        store: CellStore,
        prompts: Sequence[str],
        *,
        most_others: float = math.inf,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._calibration = calibration
        self._store = store
        self._prompts = prompts
        self._most_others = most_others
        self._commit = commit()

    def run(self, block: Block, report: Report) -> None:
        """Start the contender, make all runs of the block, and stop it."""
        report(0.0, "starting")
        contender = CONTENDERS[block.contender]
        slug = block.contender.replace("/", "-")
        log = self._folder / f"service-{slug}.log"
        alone_s, dtype = self._calibration.alone_s, self._settings.dtype
        with running(contender, dtype=dtype, alone_s=alone_s, log=log) as url:
            warm_up(url, block.contender, self._settings, self._prompts)
            for index, cell in enumerate(block.cells):
                report((index + 0.3) / (len(block.cells) + 0.3), f"load {cell.load:g}")
                self._store.add(cell, self._calm_run(cell, block.trace, contender, url))

    def _calm_run(
        self, cell: ComparedCell, trace: Trace, contender: Contender, url: str
    ) -> Figures:
        found = self._run_cell(cell, trace, contender, url)
        for _ in range(_TRIES - 1):
            if found["cores_of_others"] <= self._most_others:
                break
            # by how much it was disturbed, never by what came of it
            again = self._run_cell(cell, trace, contender, url)
            found = min(found, again, key=lambda one: float(one["cores_of_others"]))
        return found

    def _run_cell(
        self, cell: ComparedCell, trace: Trace, contender: Contender, url: str
    ) -> Figures:
        asked = trace.at(cell.load).requests
        calls = [(one.arrival_s, self._call(contender, one)) for one in asked]
        before = _settled(contender, url)
        meter = CpuMeter()
        run = run_client(url, calls, timeout_s=_TIMEOUT_S)
        usage = meter.read(client_cpu_s=run.usage.cpu_s)
        outcomes = [outcome_of(*pair) for pair in zip(asked, run.answers, strict=True)]
        accepted = sum(one.fate != "refused" for one in outcomes)
        counts = _settled(contender, url, before.accepted + accepted).since(before)
        if cell.load == max(self._settings.loads) and trace.name.rpartition("-")[2] == "0":
            self._keep_images(cell, outcomes)
        return {
            **figures_of(asked, outcomes),
            "books": account(outcomes, counts),
            "client": client_figures(run),
            **usage,
            "commit": self._commit,
        }

    def _call(self, contender: Contender, one: Planned) -> dict[str, Any]:
        image = image_call(one.shape, one.prompt, one.seed, sampler=self._settings.sampler)
        call = {**contender.call, **image, "slo_s": round(one.slo_s, 6)}
        return {name: value for name, value in call.items() if name not in contender.omits}

    def _keep_images(self, cell: ComparedCell, outcomes: Sequence[CallOutcome]) -> None:
        """Keep images of a busy run, to be compared with those of other contenders."""
        folder = images_folder(self._folder, cell.contender, cell.trace)
        folder.mkdir(parents=True, exist_ok=True)
        for index, outcome in enumerate(outcomes[:_KEPT_IMAGES]):
            if outcome.png:
                (folder / f"{index:03}.png").write_bytes(outcome.png)


def images_folder(folder: Path, contender: str, trace: str) -> Path:
    """Return where a contender's images of a trace are kept."""
    return folder / "images" / trace / contender.replace("/", "-")


def client_figures(run: ClientRun) -> dict[str, Any]:
    """Return what the client took, and how late it was."""
    late_s = [answer.late_send_s for answer in run.answers]
    return {
        "cpu_share": round(run.usage.cpu_s / run.usage.wall_s, 4),
        "wall_s": round(run.usage.wall_s, 2),
        "late_send_p50_s": round(percentile(late_s, 50), 5),
        "late_send_max_s": round(max(late_s), 5),
    }


def _settled(contender: Contender, url: str, accepted: int = 0) -> Counts:
    """Return the service's counts once it has let in so many, and all have ended.

    Or after some seconds as they are then: books may be late, but not for long.
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
