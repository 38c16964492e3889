"""One set of LoRAs after the other with merged weights, over all of them in one batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import median

import torch

from benchmarks.engine.subject import Subject, load_subject, make_requests
from benchmarks.loras.settings import LoraSettings
from benchmarks.loras.subject import different, read_styles
from benchmarks.report import Row, Section
from benchmarks.settings import Report
from benchmarks.stats import paired_ratio
from benchmarks.stopwatch import in_turns
from benchmarks.verdicts import at_least
from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.merged_weights import MergedWeights
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.policies.steps.lora_merging import (
    MergedRun,
    MergeView,
    decide_merge,
    merging_saves_s,
)

# more than are ever taken: no row is done while it is measured
_NUM_STEPS = 900
_ROWS = 8
_STYLES = {4: "pastel", 16: "texture"}
_GROUPED, _MERGED, _MAKE, _SWAP = "grouped", "merged", "make", "swap"
# parts are measured over so many steps, the first of them after steps of other rows
_PART_STEPS = 4
_AIM_PERCENT = 90.0

Ways = Mapping[str, Callable[[], object]]


class Cell:
    """Eight rows of some sets, ready to be stepped together, or set by set.

    Args:
        sets: different ones, each for as many neighbours.
    """

    def __init__(self, subject: Subject, sets: Sequence[AdapterSet], px: int) -> None:
        self._subject, self._sets, self._px = subject, sets, px
        per_set = _ROWS // len(sets)
        self._grouped = self._engine([one for one in sets for _ in range(per_set)])
        self._alone = [self._engine([one] * per_set) for one in sets]

    def _engine(self, sets: Sequence[AdapterSet]) -> StepEngine:
        engine = build_engine(self._subject.model, max_batch=_ROWS, clock=time.monotonic)
        requests = make_requests(len(sets), px=self._px, num_steps=_NUM_STEPS, guidance_scale=1.0)
        for state, own in zip(self._subject.start(requests), sets, strict=True):
            engine.add(state, own.denoiser)
        return engine

    def ways(self, num_steps: int) -> Ways:
        """Return both ways to take so many steps of all rows; merging pays for what it needs."""

        def by_set() -> None:
            for number in range(len(self._sets)):
                self._alone[number].weights.merge(self._made(number))
                _steps(self._alone[number], num_steps)
                self._alone[number].weights.unmerge()

        return {_GROUPED: lambda: _steps(self._grouped, num_steps), _MERGED: by_set}

    def parts(self) -> Ways:
        """Return what the policy knows the costs of: steps of either kind, making, and swaps."""
        first, weights = self._alone[0], self._made(0)

        def step() -> None:
            first.weights.merge(weights)
            _steps(first, _PART_STEPS)
            first.weights.unmerge()

        def swap() -> None:
            first.weights.merge(weights)
            first.weights.unmerge()

        return {
            _GROUPED: lambda: _steps(self._grouped, _PART_STEPS),
            _MERGED: step,
            _MAKE: lambda: self._made(0),
            _SWAP: swap,
        }

    def _made(self, number: int) -> MergedWeights:
        deltas = self._sets[number].denoiser
        assert deltas is not None, "the built-in LoRAs change the denoiser"
        weights = self._subject.model.executor.merged(deltas)
        while not weights.is_made:
            weights.make_next()
        return weights


def _steps(engine: StepEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


@torch.inference_mode()
def measure(settings: LoraSettings, report: Report) -> Section:
    """Return the section."""
    report(0.0, "loading")
    subject, styles = load_subject(), read_styles()
    rows: list[Row] = []
    kinds = list(product(_STYLES, settings.sets))
    for index, (rank, num_sets) in enumerate(kinds):
        report(index / len(kinds), f"{num_sets} sets of rank {rank}")
        loras = different(styles[_STYLES[rank]], num_sets)
        cell = Cell(
            subject, [bind_adapters(subject.model, [(one, 1.0)]) for one in loras], settings.px
        )
        rows += _rows(cell, rank, num_sets, settings)
    return {
        "what": f"{_ROWS} rows of {settings.px} px, no guidance, one thread, CPU time, in turns: "
        "steps of all sets in one batch (grouped), over those of one set after the other with its "
        "merged weights, which are made, put in place and taken out again for that. picks: by the "
        "costs of single parts and the number of steps, whichever way is expected to be faster; "
        "replica: what a replica does that has these rows, which never lets one set wait for "
        "another",
        "tables": {"merge against grouped": rows},
        "aims": [_aim(rows, "picks"), _aim(rows, "replica")],
    }


def _rows(cell: Cell, rank: int, num_sets: int, settings: LoraSettings) -> list[Row]:
    in_turns(cell.parts(), 1)
    costs = in_turns(cell.parts(), settings.merge_rounds)
    part_s = {name: median(one.cpu_s for one in costs[name]) for name in costs}
    step_s = (part_s[_MERGED] - part_s[_SWAP]) / _PART_STEPS
    run = MergedRun(step_s, part_s[_MAKE], part_s[_SWAP])
    grouped_s = part_s[_GROUPED] / _PART_STEPS
    found: list[Row] = []
    for num_steps in settings.run_steps:
        times = in_turns(cell.ways(num_steps), settings.merge_rounds)
        grouped, merged = ([one.cpu_s for one in times[way]] for way in (_GROUPED, _MERGED))
        ratio = paired_ratio(merged, grouped).as_dict()
        saved_s = merging_saves_s(num_steps, grouped_s, [run] * num_sets)
        low, high = ratio["ci95"]
        found.append(
            {
                "rank": rank,
                "sets": num_sets,
                "steps": num_steps,
                "merged_over_grouped": ratio,
                "grouped_ms": 1e3 * median(grouped),
                "merged_ms": 1e3 * median(merged),
                "make_ms": 1e3 * run.make_s,
                "swap_ms": 1e3 * run.swap_s,
                "faster": _MERGED if ratio["median"] < 1 else _GROUPED,
                "is_clear": high < 1 or low > 1,
                "picks": _MERGED if saved_s > 0 else _GROUPED,
                "replica": _choice(run, grouped_s - step_s, num_sets, num_steps),
            }
        )
    return found


def _choice(run: MergedRun, delta_s: float, num_sets: int, num_steps: int) -> str:
    """Return what a replica does that knows how long its rows run, and of no further ones."""
    view = MergeView(
        is_merged=False,
        run=run,
        delta_s=delta_s,
        num_others=_ROWS - _ROWS // num_sets,
        share=0.0,
        steps_left=num_steps,
    )
    return _MERGED if decide_merge(view) == "merge" else _GROUPED


def _aim(rows: Sequence[Row], who: str) -> dict[str, object]:
    right = [row[who] == row["faster"] for row in rows]
    # a cell whose interval has both ways in it is right either way, or wrong either way
    most = [one or not row["is_clear"] for one, row in zip(right, rows, strict=True)]
    least = [one and row["is_clear"] for one, row in zip(right, rows, strict=True)]
    share, low, high = (100 * sum(ones) / len(rows) for ones in (right, least, most))
    name = f"cells of merge against grouped in which {who} is the faster way"
    return at_least(name, _AIM_PERCENT, share, (low, high), "%").as_dict()
