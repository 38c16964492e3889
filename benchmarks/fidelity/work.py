"""Makes the images of a run and notes how long every step took; a run that is there stays."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.fidelity.plan import BATCH, FidelityRun
from benchmarks.stopwatch import Stopwatch
from ray_cluster.config.pools import PoolConfig
from ray_cluster.engine.image_decoder import Pixels
from ray_cluster.engine.loading import LoadedModel, load_model
from ray_cluster.engine.starting import start_states
from ray_cluster.engine.state import RequestState
from ray_cluster.engine.step_engine import StepEngine
from ray_cluster.engine.warmup import prepare_threads
from ray_cluster.models.builtin import BUILTIN_MODELS
from ray_cluster.requests import ImageRequest
from ray_cluster.training.suite import SuitePrompt, suite_prompts

_WARM_STEPS = 2
_TIMES = ("wall_s", "cpu_s", "num_reused", "whole_wall_s", "whole_cpu_s")


@dataclass(frozen=True, slots=True)
class Made:
    """What came of a run.

    Attributes:
        images: ``[8, H, W, 3]`` uint8.
        wall_s: of every step.
        cpu_s: of the thread, likewise.
        num_reused: per step, how many of the rows reused.
        whole_wall_s: from prompts to pixels; 0 in files that are older than this figure.
        whole_cpu_s: of the thread, likewise.
    """

    images: npt.NDArray[np.uint8]
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    num_reused: tuple[int, ...]
    whole_wall_s: float = 0.0
    whole_cpu_s: float = 0.0

    def save(self, path: Path) -> None:
        """Write it; a file is there as a whole or not at all."""
        times = {name: getattr(self, name) for name in _TIMES}
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez_compressed(file, images=self.images, times=np.array(json.dumps(times)))
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path) -> Made:
        """Read what :meth:`save` wrote."""
        with np.load(path) as file:
            return cls(file["images"], **json.loads(str(file["times"])))


def load_made(runs: Iterable[FidelityRun], work: Path) -> dict[FidelityRun, Made]:
    """Return the finished ones of some runs."""
    files = {run: work / f"{run.name}.npz" for run in runs}
    return {run: Made.load(file) for run, file in files.items() if file.exists()}


def prompts_of(batch: int) -> list[tuple[SuitePrompt, int]]:
    """Return the prompts of a batch with the seeds of their noise: as many easy as hard ones."""
    half = BATCH // 2
    found = []
    for kind in ("easy", "hard"):
        some = suite_prompts(kind, half * (batch + 1))[-half:]
        found += [(one, one.noise_seed(batch)) for one in some]
    return found


class Workshop:
    """The models, each loaded when it is first asked for, on one thread."""

    def __init__(self, max_px: int) -> None:
        prepare_threads(1)
        self._max_px = max_px
        self._models: dict[str, LoadedModel] = {}

    @torch.inference_mode()
    def make(self, run: FidelityRun) -> Made:
        """Make the images of a run."""
        if run.model not in self._models:
            self._models[run.model] = self._load(run.model)
        model = self._models[run.model]
        with Stopwatch() as watch:
            states = self._states(model, run)
            made = _drive(model, states)
            images: list[Pixels] = model.decoder.decode([state.latents for state in states])
        whole = watch.cost
        return replace(
            made,
            images=np.stack(images),
            whole_wall_s=whole.wall_s,
            whole_cpu_s=whole.cpu_s,
        )

    def _load(self, name: str) -> LoadedModel:
        assert name in BUILTIN_MODELS
        model = load_model(PoolConfig(name=name, model=name, max_px=self._max_px))
        # the first steps of a process are slower
        for px in {64, self._max_px}:
            _drive(model, self._states(model, FidelityRun(name, px, 0, _WARM_STEPS)))
        return model

    def _states(self, model: LoadedModel, run: FidelityRun) -> list[RequestState]:
        profile = model.profile
        guidance = profile.default_guidance_scale if run.guidance is None else run.guidance
        requests = [
            ImageRequest(
                request_id=f"{index}",
                model=run.model,
                prompt=prompt.caption,
                width_px=run.px,
                height_px=run.px,
                num_steps=run.num_steps,
                guidance_scale=guidance,
                sampler=profile.default_sampler,
                seed=seed,
            )
            for index, (prompt, seed) in enumerate(prompts_of(run.batch))
        ]
        states = start_states(model, requests, now_s=0.0)
        for state in states:
            state.reuse = run.schedule
        return states


def _drive(model: LoadedModel, states: list[RequestState]) -> Made:
    """Step all rows together to their ends."""
    engine = StepEngine(
        model.executor,
        lambda rows, _now_s: [row.request.request_id for row in rows],
        model.tables,
        time.monotonic,
    )
    for state in states:
        engine.add(state)
    steps: list[tuple[float, float, int]] = []
    while len(engine):
        before = sum(state.num_reused for state in states)
        with Stopwatch() as watch:
            report = engine.step()
        assert not report.failed, "a run whose rows fail measures nothing"
        num_reused = sum(state.num_reused for state in states) - before
        steps.append((watch.cost.wall_s, watch.cost.cpu_s, num_reused))
    wall_s, cpu_s, reused = zip(*steps, strict=True)
    nothing: Any = np.zeros((0, 0, 0, 3), np.uint8)
    return Made(nothing, tuple(wall_s), tuple(cpu_s), tuple(reused))
