"""Loads a model in this process, makes the images of a calibration, and writes what it found."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from ray_cluster.cli.images.call_check import choose_pool
from ray_cluster.cli.models.calibration_folder import (
    USUAL_PROMPTS,
    claim,
    device_words,
    model_words,
    prompts_in,
    save_arrays,
)
from ray_cluster.cli.models.config_edit import with_fidelity
from ray_cluster.cli.output import stderr, stdout
from ray_cluster.cli.progress import step_progress
from ray_cluster.cli.service.model_plans import profile_of
from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.sections.pools import FidelityConfig, PoolConfig
from ray_cluster.engine.device.timing import make_timed
from ray_cluster.engine.files.folders import resolve_folder
from ray_cluster.engine.models.loading import LoadedModel, load_model
from ray_cluster.engine.stages.warmup import device_name, prepare_threads
from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import BUILTIN_MODELS
from ray_cluster.models.weight_files import folder_hashes
from ray_cluster.policies.fidelity import ReusedSteps, Terms
from ray_cluster.quality.calibration import Made, Plan, Run, SizePx, Study
from ray_cluster.quality.calibration_report import write_report
from ray_cluster.quality.suite import suite_prompts
from ray_cluster.requests import ImageRequest, ModelProfile, SamplerName

_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
_BATCH = 8
_QUICK_STEPS, _USUAL_STEPS = "6", "10,20,30,50"
_QUICK_IMAGES = 4
_WARM_STEPS = 2
_SEED = 20_000


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What ``models calibrate`` was asked for; sizes and steps as they were written."""

    model: str
    config: Path | None
    prompts: Path | None
    sizes: tuple[str, ...]
    sampler: str | None
    guidance: float | None
    steps: str
    num_images: int
    out: Path | None
    write: Path | None
    is_quick: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """What all images of a calibration share."""

    model: str
    sampler: SamplerName
    guidance_scale: float
    prompts: tuple[str, ...]
    batch_size: int
    embeds_guidance: bool

    def requests(self, run: Run) -> list[ImageRequest]:
        """Return the requests of a run; the two halves have prompts and seeds of their own."""
        prompts = self.prompts[run.batch % 2 :: 2] or self.prompts
        first = run.batch // 2 * self.batch_size
        width, height = run.size_px
        terms = None
        if run.schedule is not None:
            reused = ReusedSteps(run.num_steps, run.schedule, 1.0, 1.0)
            terms = Terms("fast", run.num_steps, run.num_steps, reuse=reused)
        return [
            ImageRequest(
                request_id=f"image-{index}",
                model=self.model,
                prompt=prompts[index % len(prompts)],
                width_px=width,
                height_px=height,
                num_steps=run.num_steps,
                guidance_scale=self.guidance_scale,
                sampler=self.sampler,
                seed=_SEED + 2 * index + run.batch % 2,
                terms=terms,
                embeds_guidance=self.embeds_guidance,
            )
            for index in range(first, first + self.batch_size)
        ]


def run_calibration(options: CalibrateOptions) -> None:
    """Make what is missing, choose, report, and write the table.

    Raises:
        ConfigError: an option can't be used, or the model can't be loaded.
        InvalidRequest: nothing serves such a model.
    """
    config = load_config(options.config)
    pool = _pool(options, config)
    prepare_threads(pool.num_threads)
    # what is wrong is said before the weights are loaded
    if options.write is not None:
        with_fidelity(options.write.read_text(encoding="utf-8"), pool.name, {})
    profile = profile_of(pool)
    sizes = _sizes(options.sizes, profile)
    num_images = min(options.num_images, _QUICK_IMAGES) if options.is_quick else options.num_images
    setting = _setting(options, pool, profile, num_images)
    asked = _asked(options, profile.max_steps_by_sampler[setting.sampler])
    folder = options.out or Path(".runs") / f"calibrate-{pool.name}"
    claim(folder, _setting_words(setting, pool))
    fewest, most = profile.outer_blocks or (0, -1)
    num_batches = -(-num_images // setting.batch_size)
    plan = Plan.of(sizes, asked, range(fewest, most + 1), num_batches, is_quick=options.is_quick)
    workshop = _Workshop(pool, setting, folder / "runs")
    made = workshop.made(list(plan.choosing()), "choosing")
    choices = Study(plan, made).choices()
    study = Study(plan, made | workshop.made(list(plan.reporting(choices)), "checking"))
    table = study.table(sampler=setting.sampler, max_guidance_scale=setting.guidance_scale)
    device = device_name(torch.device(pool.device))
    title = f"{pool.model}, {setting.sampler}, guidance {setting.guidance_scale:g}, {device}"
    write_report(study, title, table, folder)
    _conclude(options, pool, table, folder)


def _conclude(
    options: CalibrateOptions, pool: PoolConfig, table: dict[str, Any] | None, folder: Path
) -> None:
    """Write the table beside the report, and into the configuration that was named."""
    stdout().print(f"report: {folder / 'report.md'}", markup=False)
    if table is None:
        stdout().print("nothing keeps a bar at a lower cost: there is no table for this model")
        return
    FidelityConfig.model_validate(table)
    text = yaml.safe_dump({"fidelity": table}, sort_keys=False)
    (folder / "fidelity.yaml").write_text(text, encoding="utf-8")
    if pool.model in BUILTIN_MODELS:
        shipped = {"weights_sha256": denoiser_hash(resolve_folder(*pool.files)), "fidelity": table}
        name = folder / f"{pool.model}.json"
        name.write_text(json.dumps(shipped, indent=2) + "\n", encoding="utf-8")
    if options.write is None:
        stdout().print(f"for the pool in your configuration:\n\n{text}", markup=False)
        return
    changed = with_fidelity(options.write.read_text(encoding="utf-8"), pool.name, table)
    load_config(yaml.safe_load(changed))
    part = options.write.with_name(options.write.name + ".part")
    part.write_text(changed, encoding="utf-8")
    os.replace(part, options.write)
    stdout().print(f"written: fidelity of pool {pool.name} in {options.write}", markup=False)


class _Workshop:
    """Makes runs, and keeps them in a folder; the model is loaded when it is first needed."""

    def __init__(self, pool: PoolConfig, setting: Setting, folder: Path) -> None:
        self._pool = pool
        self._setting = setting
        self._folder = folder
        self._model: LoadedModel | None = None
        self._warm: set[SizePx] = set()
        is_one_thread = pool.device == "cpu" and pool.num_threads == 1
        # a thread's own time is hardly touched by other processes
        self._clock: Callable[[], float] = time.thread_time if is_one_thread else time.perf_counter

    def made(self, runs: Sequence[Run], what: str) -> dict[Run, Made]:
        """Return runs by what came of them, after making those that are not there yet."""
        missing = [run for run in runs if not self._file(run).exists()]
        with step_progress(stderr()) as progress:
            total = sum(run.num_steps for run in missing)
            task = progress.add_task(what, total=total)
            for run in missing:
                self._save(run, self._make(run))
                progress.advance(task, run.num_steps)
        return {run: self._load(run) for run in runs}

    def _make(self, run: Run) -> Made:
        if self._model is None:
            self._model = load_model(self._pool)
        if run.size_px not in self._warm:
            # the first steps of a size are slower
            warm = self._setting.requests(Run(0, run.size_px, _WARM_STEPS))
            make_timed(self._model, warm, self._clock)
            self._warm.add(run.size_px)
        timed = make_timed(self._model, self._setting.requests(run), self._clock)
        return Made(timed.images, timed.step_s, timed.is_reused)

    def _file(self, run: Run) -> Path:
        return self._folder / f"{run.name}.npz"

    def _save(self, run: Run, made: Made) -> None:
        """Write a run; a file is there as a whole or not at all."""
        arrays = {"images": made.images, "step_s": made.step_s, "is_reused": made.is_reused}
        save_arrays(self._file(run), arrays)

    def _load(self, run: Run) -> Made:
        with np.load(self._file(run)) as file:
            return Made(file["images"], tuple(file["step_s"]), tuple(file["is_reused"]))


def _pool(options: CalibrateOptions, config: ClusterConfig) -> PoolConfig:
    named = [pool for pool in config.pools if pool.name == options.model]
    if options.write is not None and not named:
        names = ", ".join(pool.name for pool in config.pools)
        raise ConfigError(
            f"--write {options.write}: it has no pool {options.model!r}; give one of {names}"
        )
    pool = named[0] if named else choose_pool(config, options.model, None)
    # a table that does not suit the model is what this is to replace
    return pool.model_copy(update={"fidelity": None})


def _setting_words(setting: Setting, pool: PoolConfig) -> dict[str, Any]:
    """Return what images depend on."""
    return {**asdict(setting), "model": model_words(pool), "device": device_words(pool)}


def _sizes(given: tuple[str, ...], profile: ModelProfile) -> tuple[SizePx, ...]:
    if not given:
        return ((profile.default_width_px, profile.default_height_px),)
    found = []
    for text in given:
        match = _SIZE.fullmatch(text)
        width, height = (int(side) for side in match.groups()) if match else (0, 0)
        if not all(
            profile.min_px <= side <= profile.max_px and side % profile.size_multiple_px == 0
            for side in (width, height)
        ):
            raise ConfigError(
                f"--size {text}: write WIDTHxHEIGHT, sides of this model are multiples of "
                f"{profile.size_multiple_px} from {profile.min_px} to {profile.max_px}"
            )
        found.append((width, height))
    return tuple(dict.fromkeys(found))


def _asked(options: CalibrateOptions, most: int) -> tuple[int, ...]:
    is_usual = options.steps == _USUAL_STEPS
    text = _QUICK_STEPS if options.is_quick and is_usual else options.steps
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 2 <= int(part) <= most for part in parts):
        raise ConfigError(
            f"--steps {text}: write whole numbers from 2 to {most} with commas between"
        )
    return tuple(sorted({int(part) for part in parts}))


def _setting(
    options: CalibrateOptions, pool: PoolConfig, profile: ModelProfile, num_images: int
) -> Setting:
    offered = profile.max_steps_by_sampler
    given = options.sampler or profile.default_sampler
    sampler = next((name for name in offered if name == given), None)
    if sampler is None:
        raise ConfigError(f"--sampler {given}: this model offers {', '.join(offered)}")
    guidance = options.guidance
    return Setting(
        model=profile.model,
        sampler=sampler,
        guidance_scale=profile.default_guidance_scale if guidance is None else guidance,
        prompts=_prompts(options, pool, num_images),
        batch_size=min(_BATCH, num_images),
        embeds_guidance=profile.guidance == "embedded",
    )


def _prompts(options: CalibrateOptions, pool: PoolConfig, num_images: int) -> tuple[str, ...]:
    if options.prompts is not None:
        return prompts_in(options.prompts)
    if pool.model not in BUILTIN_MODELS:
        return USUAL_PROMPTS
    # of four, two easy and two hard ones: each half has as many of either
    count = 2 * -(-num_images // 2)
    easy, hard = suite_prompts("easy", count), suite_prompts("hard", count)
    fours = zip(easy[::2], easy[1::2], hard[::2], hard[1::2], strict=True)
    return tuple(prompt.caption for prompt in chain.from_iterable(fours))


def denoiser_hash(folder: Path) -> str:
    """Return the hash of the weights that a built-in model's table was measured with."""
    hashes = folder_hashes(folder)
    [found] = [
        digest
        for name, digest in hashes.items()
        if name.startswith(("unet/", "transformer/")) and name.endswith(".safetensors")
    ]
    return found
