"""Whether masked edits gain by their template's cached activations: ``-m benchmarks.edits.trial``.

What is cached is the template's *companion*: at each noise level its encoded image with its own
noise, run once with the empty prompt; or twice, with the template's own prompt too. Within a cut,
an edit computes the tokens of its mask, and of a ring around it, and takes the others from that
(InstGenIE, section 3.1). Its rivals are exact edits of fewer steps, at equal CPU time.
Results are added to those in ``--out``, so that each cell may be a run of its own.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count, product
from pathlib import Path
from typing import Any

# before torch is imported: one thread is compared with one thread
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1")

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from benchmarks.edits.trial_figures import (
    Cell,
    Judged,
    Way,
    judge,
    plot_trial,
    print_verdict,
    rows_of,
)
from benchmarks.edits.trial_scenes import Subject, held, subjects
from benchmarks.machine import describe_run
from benchmarks.progress import Reports, comma_list, progress_bar, wide_console
from benchmarks.report import as_json
from benchmarks.run import RESULTS
from benchmarks.settings import Report
from benchmarks.stopwatch import in_turns
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.models.loading import LoadedModel, load_model
from ray_cluster.engine.stages.warmup import prepare_threads
from ray_cluster.engine.step.executor import KeptRow, RowReuse
from ray_cluster.engine.step.mixed_step import advance, call_of
from ray_cluster.engine.step.reuse_steps import Turn
from ray_cluster.engine.step.step_call import Held, SamplerInputs
from ray_cluster.policies.steps.reuse import ActivePatches
from ray_cluster.quality.captions import write_caption
from ray_cluster.quality.classifier import load_classifier

Save = Callable[[dict[str, Any]], None]
NUM_STEPS, FEWER, REUSING_STEPS = 20, (3, 4, 6, 8), (8, 5)
RATIOS, SCALES, BATCHES = (0.1, 0.3, 0.6), (1.0, 2.0), (1, 4)
KINDS = ("empty prompt", "template's prompt")
CONTROLS = ("other template", "other level", "edit's prompt")
EDITS = {128: 24, 256: 10}
# edits that are made together
GROUP, ROUNDS = 5, {1: 5, 4: 3}
CELLS = tuple(f"{m}-{px}" for m, px in product(("shapes-sd3", "shapes-sd"), EDITS))
# of negative controls: what a wrong level is off by
_LEVELS_OFF, CONTROL_CELL = 3, Cell(0.3, 2.0)


def step(model: LoadedModel, rows: Sequence[Held], parts: Sequence[RowReuse | None]) -> list[Any]:
    """Compute a step of rows by the engine's parts; return what they advance to."""
    turns, executor = [Turn(reuse=part) for part in parts], model.executor
    call, order = call_of(rows, turns, executor)
    prediction = executor.decode_half(executor.encode_half(call.batch))
    made = advance(SamplerInputs.of(call, ()), executor.device, prediction, turns)
    assert order == tuple(range(len(rows))), "all are of one size"
    return made


Companion = list[tuple[KeptRow, ...]]
"""By step, in 16 bits: the row of the empty prompt, and with another prompt that one's too."""


def companion_rows(
    model: LoadedModel, edits: Sequence[Subject], way: Way, prompts: Sequence[str]
) -> list[list[KeptRow]]:
    """Run templates, each at all levels of an edit's schedule; return what is kept, by step."""
    assert way.cut is not None
    spared = [np.zeros(one.pixels.shape[:2], np.bool_) for one in edits]
    rows = held(model, edits, prompts, spared, way.steps, 1.0)
    found: list[list[KeptRow]] = [[] for _ in rows]
    for index in range(rows[0].table.num_calls):
        for row in rows:
            assert row.state.template is not None
            row.state.latents = row.state.template.at(row.table.levels[index])
            row.state.step_index = index
        parts = [RowReuse(way.cut, is_by_patch=True) for _ in rows]
        step(model, rows, parts)
        for own, part in zip(found, parts, strict=True):
            assert part.fresh is not None
            [kept] = part.fresh
            own.append(in_16_bits(kept))
    return found


def num_bytes(companion: Companion) -> int:
    """Return what a companion takes."""
    return sum(one.nbytes for rows in companion for row in rows for part in row for one in part)


def in_16_bits(kept: KeptRow) -> KeptRow:
    """Return what is stored of a row."""
    return KeptRow(*(tuple(one.half() for one in some) for some in kept))


def reusing(row: Held, companion: Companion, way: Way, patch: int, index: int) -> RowReuse:
    """Return a row's part in a step, the companion's tensors loaded."""
    template, num_rows = row.state.template, 1 + row.state.conditioning.is_guided
    loaded = [
        KeptRow(*(tuple(one.float() for one in some) for some in kept))
        for kept in companion[index][-num_rows:]
    ]
    assert template is not None
    assert template.mask is not None
    assert way.cut is not None
    pooled = F.max_pool2d(template.mask[None].float(), patch, ceil_mode=True)
    grown = F.max_pool2d(pooled, 2 * way.ring + 1, stride=1, padding=way.ring).flatten() > 0
    active = ActivePatches(patch, tuple(grown.tolist()), has_prompt=True)
    # without one of its own, guidance takes the same for both rows
    kept_rows = (loaded[0],) * (num_rows - len(loaded)) + tuple(loaded)
    return RowReuse(way.cut, kept_rows, is_by_patch=True, active=active)


class Trial:
    """Edits of a model at a size, in groups, by every way."""

    def __init__(self, name: str, px: int, num_edits: int) -> None:
        pool = PoolConfig(name="trial", model=name, max_batch=8, max_in_flight=8, max_px=256)
        self.model = load_model(pool)
        self.subjects = subjects(self.model, px, num_edits)
        self.patch = self.model.executor.patch_multiple
        self.exact: dict[Cell, npt.NDArray[np.uint8]] = {}
        cuts = self.model.executor.num_outer
        # of a UNet's six some: the larger size takes long
        cuts = cuts[:: 1 if px == min(EDITS) else -(-len(cuts) // 3)]
        # a patch is a token of a transformer, and sixteen pixels of a UNet's latents
        ring, (steps, fewer) = int(self.patch == 2), REUSING_STEPS
        self.ways = [Way(NUM_STEPS), *map(Way, FEWER)]
        self.ways += [Way(steps, cuts[0], one) for one in (KINDS[0], *CONTROLS)]
        self.ways += [Way(steps, cuts[0], KINDS[1], one) for one in range(1 + ring)]
        self.ways += [Way(steps, cut, KINDS[1]) for cut in cuts[1:]]
        self.ways += [Way(fewer, cuts[0], KINDS[1], ring)]
        # of companions, the latest: ways with the same follow each other
        self._kept: dict[Any, list[list[KeptRow]]] = {}

    def rows(self, edits: Sequence[Subject], cell: Cell, steps: int) -> list[Held]:
        """Return edits of a cell before their first step."""
        prompts = [write_caption(one.edited(cell.ratio)) for one in edits]
        masks = [one.mask(cell.ratio) for one in edits]
        return held(self.model, edits, prompts, masks, steps, cell.scale)

    def cached(self, edits: Sequence[Subject], way: Way) -> list[Companion]:
        """Return what edits made in a way have from their templates, or what a control has."""
        if way.cut is None:
            return []
        prompts = [[""] * len(edits)]
        if way.companion == "edit's prompt":
            prompts.append([write_caption(one.edited(CONTROL_CELL.ratio)) for one in edits])
        elif way.companion != KINDS[0]:
            prompts.append([write_caption(one.scene) for one in edits])
        place = (edits[0].index, len(edits), way.steps, way.cut)
        self._kept = {key: rows for key, rows in self._kept.items() if key[:-1] == place}
        for some in prompts:
            if (key := (*place, tuple(some))) not in self._kept:
                self._kept[key] = companion_rows(self.model, edits, way, some)
        rows = [self._kept[*place, tuple(some)] for some in prompts]
        found = [list(zip(*parts, strict=True)) for parts in zip(*rows, strict=True)]
        if way.companion == "other template":
            found = [*found[1:], found[0]]
        if way.companion == "other level":
            found = [[*one[_LEVELS_OFF:], *one[-1:] * _LEVELS_OFF] for one in found]
        return found

    def make(
        self, edits: Sequence[Subject], cell: Cell, way: Way, cached: Sequence[Companion]
    ) -> npt.NDArray[np.uint8]:
        """Return what the model makes of edits, ``[B, px, px, 3]``, nothing pasted back."""
        rows = self.rows(edits, cell, way.steps)
        for index in range(rows[0].table.num_calls):
            for row, new in zip(rows, self.step(rows, way, cached, index), strict=True):
                state = row.state
                state.latents, state.denoised, state.outputs = (
                    new.latents,
                    new.denoised,
                    new.outputs,
                )
                state.step_index += 1
        return np.stack(self.model.decoder.decode([row.state.latents for row in rows]))

    def step(
        self, rows: Sequence[Held], way: Way, cached: Sequence[Companion], index: int
    ) -> list[Any]:
        """Compute a step of rows in a way; loads are part of it."""
        parts: list[RowReuse | None] = [None] * len(rows)
        if way.cut is not None:
            pairs = zip(rows, cached, strict=True)
            parts = [reusing(row, own, way, self.patch, index) for row, own in pairs]
        return step(self.model, rows, parts)

    def costs(
        self, cell: Cell, batch: int, cached: Mapping[Way, Sequence[Companion]]
    ) -> dict[Way, list[float]]:
        """Return CPU seconds of the same steps of exact edits, and of cached ones."""
        steps = REUSING_STEPS[0]
        rows = self.rows(self.subjects[:batch], cell, steps)
        for row in rows:
            row.state.step_index = steps // 2

        def timed(way: Way) -> Callable[[], object]:
            # from another step's tensors each time, so that caches of the processor have none
            own, turns = list(cached.get(way, ()))[:batch], count()
            return lambda: self.step(rows, way, own, next(turns) % steps)

        names = {way.name: way for way in (Way(steps), *cached)}
        ways = {name: timed(way) for name, way in names.items()}
        in_turns(ways, 1)
        costs = in_turns(ways, ROUNDS[batch])
        return {names[name]: [one.cpu_s for one in some] for name, some in costs.items()}


@torch.inference_mode()
def measure(
    name: str, px: int, num_edits: int, ratios: Sequence[float], report: Report, save: Save
) -> None:
    """Measure a model at a size; save its figures after every group of edits."""
    report(0.0, "loading")
    trial, classifier = Trial(name, px, num_edits), load_classifier()
    cells = [Cell(*pair) for pair in product(ratios, SCALES)]
    judged: dict[tuple[Cell, Way], list[Judged]] = {}
    timed = [way for way in trial.ways if way.steps == REUSING_STEPS[0] and way.companion in KINDS]
    stored = {way: trial.cached(trial.subjects[: max(BATCHES)], way) for way in timed}
    mib = {way.name: round(num_bytes(own[0]) / 2**20, 1) for way, own in stored.items()}
    costs = {}
    for index, (cell, batch) in enumerate(todo_costs := list(product(cells, BATCHES))):
        report(0.1 * index / len(todo_costs), f"time, batch {batch}")
        costs[cell, batch] = trial.costs(cell, batch, stored)
    groups = [trial.subjects[at : at + GROUP] for at in range(0, num_edits, GROUP)]
    todo = list(product(groups, trial.ways))
    for index, (group, way) in enumerate(todo):
        report(0.1 + 0.9 * index / len(todo), f"edits to {group[-1].index + 1}, {way.name}")
        cached = trial.cached(group, way)
        for cell in cells:
            if way.companion in CONTROLS and cell != CONTROL_CELL:
                continue
            made = trial.make(group, cell, way, cached)
            if way == trial.ways[0]:
                trial.exact[cell] = made
            edits = [(one.pixels, one.mask(cell.ratio), one.wanted(cell.ratio)) for one in group]
            found = judge(classifier, made, trial.exact[cell], edits)
            judged.setdefault((cell, way), []).append(found)
        if way == trial.ways[-1]:
            figures = {"edits": group[-1].index + 1, "mib_by_template": mib}
            save(figures | {"rows": rows_of(judged, costs)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, add to the results, plot them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.edits.trial")
    parser.add_argument("--out", type=Path, help="JSON file of the results, which are added to")
    parser.add_argument("--only", type=comma_list(CELLS), default=CELLS, metavar="LIST")
    parser.add_argument("--edits", type=int, help="of each cell, at least 4")
    parser.add_argument("--ratios", type=comma_list([str(one) for one in RATIOS]), metavar="LIST")
    options, started = parser.parse_args(arguments), datetime.now(UTC)
    path = options.out or RESULTS / f"{started:%Y-%m-%d_%H%M%S}-edits-trial.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    ratios = tuple(map(float, options.ratios)) if options.ratios else RATIOS
    result = describe_run("ray-cluster edits-trial 1", quick=bool(options.edits), started=started)
    result["cells"] = json.loads(path.read_text())["cells"] if path.exists() else {}
    prepare_threads(1)
    with progress_bar(console := wide_console()) as progress:
        reports = Reports(progress, dict.fromkeys(options.only, 1.0))
        for key in options.only:
            name, px = key.rsplit("-", 1)

            def save(found: dict[str, Any], key: str = key) -> None:
                # those of other mask ratios stay
                before = result["cells"].get(key, {}).get("rows", ())
                found["rows"] += [row for row in before if row["mask_ratio"] not in ratios]
                result["cells"][key] = found
                path.write_text(as_json(result), encoding="utf-8")

            num_edits = options.edits or EDITS[int(px)]
            measure(name, int(px), num_edits, ratios, reports.of(key), save)
        reports.say("done", complete=True)
    plot_trial(result, path.with_suffix(".png"))
    print_verdict(result, console)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
