"""Whole pipelines behind an ``EngineRunner``: planned and taken memory, and stages at once."""

from __future__ import annotations

import copy
import queue
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.figures import summarise
from benchmarks.gpu.record import Record, Section
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.steps import time_cell
from benchmarks.gpu.subject import free_memory

if TYPE_CHECKING:
    from ray_cluster.engine.models.loading import LoadedModel
    from ray_cluster.engine.stages.events import RunnerEvent
    from ray_cluster.engine.stages.runner import EngineRunner

_GIB = 2**30
# denoising steps of a request: many while nothing else is to happen, few for much to encode and
# decode
_LONG, _SHORT = 40, 4
_PATIENCE_S = 120.0


def run_whole(settings: Settings, record: Record) -> None:
    """Measure each pipeline; of the first one also its stages and its decoding."""
    for index, name in enumerate(settings.wholes):
        with (
            record.section(f"{name}, memory", 0.5) as section,
            tempfile.TemporaryDirectory(prefix="whole-") as folder,
        ):
            if not (find_spec("pydantic") and find_spec("yaml")):
                section.leave_out("whole pipelines", "loading one needs pydantic and PyYAML")
                continue
            with _served(settings, name, Path(folder), section) as runs:
                if index == 0:
                    with record.section(f"{name}, stages at once", 0.5) as stages:
                        measure_stages(settings, runs, stages)
                    with record.section(f"{name}, decoding", 0.2) as decoding:
                        measure_decoding(settings, runs.model, decoding)
        free_memory(settings.device)


@contextmanager
def _served(settings: Settings, name: str, folder: Path, section: Section) -> Iterator[Runs]:
    """Load a pipeline as a replica does, compare its memory with the plan, and lend its runner."""
    # need pydantic, which a machine that only measures may not have
    from benchmarks.gpu.folders import save_whole
    from ray_cluster.config.sections.pools import DefaultsConfig, PoolConfig
    from ray_cluster.engine.models.loading import load_model
    from ray_cluster.engine.stages.building import build_runner
    from ray_cluster.engine.stages.warmup import prepare_threads, warm_up

    section.found["what"] = (
        "a pipeline with weights of zeros, loaded and warmed up as in a replica, then twice the "
        "largest batch that its plan allows: the plan, and the most that PyTorch's allocator had"
    )
    is_cuda = settings.device.type == "cuda"
    pool = PoolConfig(
        name=name,
        model=str(save_whole(folder, settings.family(name), is_tiny=settings.is_tiny)),
        device=settings.device.type,
        num_gpus=1.0 if is_cuda else 0.0,
        max_px=max(settings.default_px),
        defaults=DefaultsConfig(size="{}x{}".format(*settings.default_px)),
    )
    prepare_threads(pool.num_threads)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    model = load_model(pool)
    loaded_bytes = torch.cuda.memory_allocated() if is_cuda else 0
    runner = build_runner(model, pool, clock=time.monotonic)
    warm_up(runner.model, max_batch=pool.max_batch, clock=time.monotonic, call=runner.call)
    runs = Runs(runner, settings)
    try:
        plan, batch = model.memory, model.max_batch_by_size[settings.default_px]
        runs.set_batch(batch)
        runs.make(2 * batch, num_steps=_SHORT, in_flight=2 * batch)
        found = {"explanation": plan.explanation, "batch": batch}
        planned = {"weights": plan.weights_bytes, "peak": plan.peak_bytes}
        found |= {f"planned_{key}_gib": number / _GIB for key, number in planned.items()}
        section.table("memory").append(found)
        if is_cuda:
            free, total = torch.cuda.mem_get_info()
            taken = {
                "loaded": loaded_bytes,
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                "of_the_card": total - free,
            }
            found |= {f"{key}_gib": number / _GIB for key, number in taken.items()}
            if taken["reserved"] > plan.peak_bytes:
                section.fail(f"{name}: more memory was reserved than the plan counts")
        else:
            section.leave_out("memory taken", "PyTorch counts it on CUDA alone")
        yield runs
    finally:
        runner.stop()


class Runs:
    """Has a runner make images, and notes when steps are taken.

    Attributes:
        steps: of each: its requests, and the milliseconds it took.
        first_step_ms: of each request, from its submission to the end of its first step.
    """

    def __init__(self, runner: EngineRunner, settings: Settings) -> None:
        self.model: LoadedModel = runner.model
        self.batch = 1
        self.steps: list[tuple[int, float]] = []
        self.first_step_ms: list[float] = []
        self._runner, self._size = runner, settings.default_px
        self._submitted_s: dict[str, float] = {}
        self._ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._number = 0
        runner.start(self._note)

    def set_batch(self, most: int) -> None:
        """Set how many images step together at most."""
        self.batch = self._runner.set_max_batch(most)

    def make(self, count: int, *, num_steps: int, in_flight: int) -> None:
        """Make so many images, at most ``in_flight`` at a time; what was noted is forgotten."""
        self.steps, self.first_step_ms = [], []
        for _ in range(min(count, in_flight)):
            self._submit(num_steps)
        for done in range(count):
            if (error := self._ends.get(timeout=_PATIENCE_S)) is not None:
                raise error
            if done + in_flight < count:
                self._submit(num_steps)

    def _submit(self, num_steps: int) -> None:
        from ray_cluster.requests import ImageRequest

        self._number += 1
        request = ImageRequest(
            request_id=f"r{self._number}",
            model=self.model.profile.model,
            prompt="a circle",
            width_px=self._size[0],
            height_px=self._size[1],
            num_steps=num_steps,
            guidance_scale=self.model.profile.default_guidance_scale,
            sampler=self.model.profile.default_sampler,
            seed=self._number,
        )
        self._submitted_s[request.request_id] = time.monotonic()
        self._runner.submit(request, deadline_s=time.monotonic() + _PATIENCE_S)

    def _note(self, event: RunnerEvent) -> None:
        from ray_cluster.engine.stages.events import Broken, Decoded, Died, Stepped

        match event:
            case Stepped(report):
                now_s = time.monotonic()
                self.steps.append((len(report.stepped), 1e3 * report.duration_s))
                for name in report.stepped:
                    if (since_s := self._submitted_s.pop(name, None)) is not None:
                        self.first_step_ms.append(1e3 * (now_s - since_s))
            case Decoded():
                self._ends.put(None)
            case Broken(error=error) | Died(error=error):
                self._ends.put(error)


def measure_stages(settings: Settings, runs: Runs, section: Section) -> None:
    """Compare steps of long requests with steps of as many rows of short ones.

    Of short ones some are encoded and decoded during almost every step.
    """
    section.found["what"] = (
        "steps of as many images, of 40 steps each and of 4: how much encoding and decoding in "
        "threads and streams of their own slow them down; and from a submission to the end of its "
        "first step, with nothing else to do and among these"
    )
    batch = min(settings.batches[-1], runs.batch)
    runs.set_batch(batch)
    ms: dict[str, list[float]] = {"alone": [], "beside encodes and decodes": []}
    alone, beside = ms.values()
    idle_ms: deque[float] = deque()
    busy_ms: deque[float] = deque()
    for _ in range(settings.sampling.fewest_rounds):
        runs.make(1, num_steps=_SHORT, in_flight=1)
        idle_ms += runs.first_step_ms
        runs.make(2 * batch, num_steps=_LONG, in_flight=2 * batch)
        alone += [step_ms for count, step_ms in runs.steps if count == batch]
        runs.make(10 * batch, num_steps=_SHORT, in_flight=2 * batch)
        beside += [step_ms for count, step_ms in runs.steps if count == batch]
        busy_ms += runs.first_step_ms
    found = {name: summarise(taken) for name, taken in ms.items()}
    section.table("steps").extend(
        {"steps": name, "batch": batch, "ms": one} for name, one in found.items()
    )
    whole, slowed = found.values()
    section.table("inflation").append({"step_over_alone": slowed["median"] / whole["median"]})
    section.table("to the end of the first step").extend(
        {"when": when, "ms": summarise(list(taken))}
        for when, taken in (("idle", idle_ms), ("busy", busy_ms))
    )


@torch.inference_mode()
def measure_decoding(settings: Settings, model: LoadedModel, section: Section) -> None:
    """Compare the autoencoder in the memory format that is chosen with channels first."""
    from ray_cluster.engine.stages.autoencoder import ImageDecoder

    section.found["what"] = "an image decoded, latents to bytes on the host"
    assert isinstance(model.decoder, ImageDecoder), "it is of this process"
    vae = copy.deepcopy(model.decoder._vae)
    for part in vae.modules():
        if isinstance(part, torch.nn.Conv2d):
            part.weight.data = part.weight.data.contiguous()
    shape, device = model.executor.latent_shape(*settings.default_px), model.executor.device
    latents = [torch.zeros(shape, device=device)]
    ways = {
        "channels first": partial(ImageDecoder(vae, device).decode, latents),
        "as it is loaded": partial(model.decoder.decode, latents),
    }
    about = {"size_px": list(settings.default_px)}
    rows, _ = time_cell(settings, section, about, lambda: dict(ways), num_left=1, is_exact=True)
    section.table("decoding").extend(rows)
