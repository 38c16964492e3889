"""One training loop for every model of the family: step, average, checkpoint, pause, stop, resume.

A stage's loss is a function of the step's index alone: its data are drawn from a seed made of the
recipe's seed, the stage's name and the index. So a resumed run takes exactly the steps that an
unbroken run takes.
"""

import fcntl
import hashlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from torch import Tensor, nn

from ray_cluster.errors import ConfigError
from recipes.recipe_parts import Optimisation

logger = logging.getLogger(__name__)

LogValue = float | int | str


def step_seed(seed: int, stage: str, index: int) -> int:
    """Derive one step's seed, of 63 bits, from the recipe's seed, the stage and the index."""
    digest = hashlib.blake2b(f"{seed}/{stage}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Trainer:
    """A model with its optimiser, its averaged weights and its place in the schedule.

    Args:
        name: of the stage; names its files.
        model: trained in place.
        loss: scalar loss of the step with this index.
        options: the optimisation's numbers.
    """

    def __init__(
        self, name: str, model: nn.Module, loss: Callable[[int], Tensor], options: Optimisation
    ) -> None:
        self.name = name
        self.model = model
        self.options = options
        self.index = 0
        self.total = options.steps
        self._loss = loss
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimiser = torch.optim.AdamW(
            self._parameters,
            lr=options.rate,
            betas=(0.9, options.beta2),
            weight_decay=options.weight_decay,
            fused=True,
        )
        self._average = [p.detach().clone() for p in self._parameters] if options.ema else []

    @property
    def is_finished(self) -> bool:
        """Whether all steps, the decay included, have been taken."""
        return self.index >= self.total

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        warm = min(1.0, (self.index + 1) / max(1, self.options.warmup_steps))
        cool = min(1.0, (self.total - self.index) / max(1, self.options.decay_steps))
        return self.options.rate * warm * cool

    def begin_decay(self) -> None:
        """End after one decay from here, unless the end is already nearer."""
        self.total = min(self.total, self.index + self.options.decay_steps)

    def step(self) -> float:
        """Take one step and return its loss."""
        for group in self._optimiser.param_groups:
            group["lr"] = self.rate
        loss = self._loss(self.index)
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, self.options.clip)
        self._optimiser.step()
        if self._average:
            # a short average at first, which lengthens to the recipe's
            keep = min(self.options.ema, (1 + self.index) / (10 + self.index))
            weights = [p.detach() for p in self._parameters]
            torch._foreach_lerp_(self._average, weights, 1 - keep)
        self.index += 1
        return float(loss.detach())

    def use_average(self) -> None:
        """Put the averaged weights into the model, to use it; training can't go on from there."""
        if self._average:
            self._copy_in(self._average)

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {
            "index": self.index,
            "total": self.total,
            "parameters": [p.detach() for p in self._parameters],
            "average": self._average,
            "optimiser": self._optimiser.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` returned."""
        self.index, self.total = int(state["index"]), min(self.total, int(state["total"]))
        self._copy_in(state["parameters"])
        for mine, saved in zip(self._average, state["average"], strict=True):
            mine.copy_(saved)
        self._optimiser.load_state_dict(state["optimiser"])

    def _copy_in(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)


@dataclass(frozen=True)
class RunFolder:
    """A run's working folder: checkpoints, logs, and the files PAUSE and FINISH that steer it."""

    path: Path
    checkpoint_seconds: float = 60.0
    log_steps: int = 25

    def checkpoint(self, stage: str) -> Path:
        """Where a stage's newest checkpoint lies."""
        return self.path / f"{stage}.pt"

    def save(self, trainer: Trainer) -> None:
        """Write the checkpoint so that a kill at any moment leaves the old or the new one."""
        target = self.checkpoint(trainer.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".pt.part")
        torch.save(trainer.state(), unfinished)
        os.replace(unfinished, target)

    def restore(self, trainer: Trainer) -> bool:
        """Load the newest checkpoint into the trainer, if there is one."""
        state = self._load(trainer.name)
        if state is not None:
            trainer.restore(state)
        return state is not None

    def index(self, stage: str) -> int:
        """Steps that a stage's newest checkpoint has taken; 0 if there is none."""
        state = self._load(stage)
        return 0 if state is None else int(state["index"])

    def _load(self, stage: str) -> dict[str, Any] | None:
        source = self.checkpoint(stage)
        if not source.is_file():
            return None
        try:
            # mapped: only what is used is read
            state = torch.load(source, weights_only=True, mmap=True, map_location="cpu")
        except (RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            raise ConfigError(
                f"the checkpoint {source} is damaged ({type(error).__name__}); delete it to start "
                "its stage again"
            ) from None
        return cast(dict[str, Any], state)

    @contextmanager
    def locked(self, stage: str) -> Iterator[None]:
        """Keep others from training the stage here; ConfigError if somebody does."""
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / f"{stage}.lock").open("a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    f"another training works at the stage {stage!r} in {self.path}; wait for it, "
                    "or give this one a folder of its own with --out"
                ) from None
            yield

    def log(self, trainer: Trainer, **values: LogValue) -> None:
        """Add one line to the stage's JSONL log."""
        line = json.dumps({"stage": trainer.name, "step": trainer.index, **values})
        with (self.path / f"{trainer.name}.jsonl").open("a", encoding="utf-8") as log:
            log.write(line + "\n")

    def wait_while_paused(self, stop: threading.Event) -> None:
        """Wait until the file PAUSE is gone or the run is to stop."""
        if self.is_paused:
            logger.info("paused: remove the file PAUSE from %s to go on", self.path)
        while self.is_paused and not stop.is_set():
            stop.wait(2.0)

    @property
    def is_paused(self) -> bool:
        """Whether the file PAUSE asks for no more steps."""
        return (self.path / "PAUSE").exists()

    @property
    def should_finish(self) -> bool:
        """Whether the file FINISH asks for the decay to begin."""
        return (self.path / "FINISH").exists()


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, so that a run checkpoints and ends by itself."""
    stop = threading.Event()
    kinds = (signal.SIGTERM, signal.SIGINT)
    old = {kind: signal.signal(kind, lambda *_: stop.set()) for kind in kinds}
    try:
        yield stop
    finally:
        for kind, handler in old.items():
            signal.signal(kind, handler)


def run_stage(
    trainer: Trainer,
    folder: RunFolder,
    stop: threading.Event,
    *,
    deadline: float | None = None,
    now: Callable[[], float] = time.monotonic,
) -> bool:
    """Train until the schedule's end, a stop or the deadline (when the decay begins).

    Returns:
        Whether the stage is finished; a stopped one continues at the next call.
    """
    with folder.locked(trainer.name):
        folder.restore(trainer)
        saved_at, cpu_start, losses = now(), time.process_time(), list[float]()

        def log() -> None:
            mean, cpu = sum(losses) / len(losses), time.process_time() - cpu_start
            folder.log(trainer, loss=mean, rate=trainer.rate, cpu_seconds=cpu, time=time.time())
            logger.info("%s step %d/%d loss %.4f", trainer.name, trainer.index, trainer.total, mean)
            losses.clear()

        while not trainer.is_finished and not stop.is_set():
            if folder.is_paused:
                folder.save(trainer)
                folder.wait_while_paused(stop)
            if folder.should_finish or (deadline is not None and now() > deadline):
                trainer.begin_decay()
            losses.append(trainer.step())
            if trainer.index % folder.log_steps == 0:
                log()
            if now() - saved_at > folder.checkpoint_seconds:
                folder.save(trainer)
                saved_at = now()
        if losses:
            log()
        folder.save(trainer)
        return trainer.is_finished
