"""What a model's training took, stage by stage, kept beside its weights as `training.json`."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ray_cluster.training.recipe import Recipe
from ray_cluster.training.recipe_parts import SizeBucket
from ray_cluster.training.runs import TrainingRun
from ray_cluster.training.stages import MODEL_STAGES

_FILE = "training.json"


@dataclass(frozen=True)
class StageRecord:
    """One stage's share of a training: steps, examples seen, CPU time in minutes, its seed."""

    stage: str
    steps: int
    examples: int
    cpu_minutes: float
    seed: int
    device: str


def write_training(model: str, run: TrainingRun, folder: Path) -> None:
    """Write the records of a model's stages to a folder; those of untrained stages are the base's.

    Raises:
        FileNotFoundError: a stage was trained neither here nor in the base.
    """
    base = {} if run.base is None else {one.stage: one for one in read_training(run.base)}
    records: list[StageRecord] = []
    for stage in MODEL_STAGES[model]:
        steps = run.folder.index(stage.name)
        if steps:
            examples = round(steps * _BATCHES[stage.name](run.recipe))
            minutes = cpu_seconds(run.folder.path, stage.name) / 60
            records.append(
                StageRecord(stage.name, steps, examples, minutes, run.recipe.seed, run.device.type)
            )
        elif stage.name in base:
            records.append(base[stage.name])
        else:
            raise FileNotFoundError(f"no stage {stage.name!r} in {run.folder.path}; train it")
    text = json.dumps([asdict(record) for record in records], indent=1) + "\n"
    (folder / _FILE).write_text(text, encoding="utf-8")


def read_training(folder: Path) -> list[StageRecord]:
    """Read a folder's records; none if it has no file of them."""
    path = folder / _FILE
    if not path.is_file():
        return []
    return [StageRecord(**record) for record in json.loads(path.read_text(encoding="utf-8"))]


def cpu_seconds(run: Path, stage: str) -> float:
    """Add up a stage's CPU time from its log, whose clock starts anew with every process."""
    total, last = 0.0, 0.0
    for line in (run / f"{stage}.jsonl").read_text(encoding="utf-8").splitlines():
        clock = float(json.loads(line)["cpu_seconds"])
        total += clock - last if clock >= last else clock
        last = clock
    return total


def mean_batch(buckets: tuple[SizeBucket, ...]) -> float:
    """Pictures per step, averaged over the buckets' shares."""
    return sum(b.batch * b.share for b in buckets) / sum(b.share for b in buckets)


# examples per step, by stage
_BATCHES: dict[str, Callable[[Recipe], float]] = {
    "classifier": lambda recipe: mean_batch(recipe.classifier.buckets),
    "text": lambda recipe: float(recipe.text.optimisation.batch),
    "codec": lambda recipe: mean_batch(recipe.codec.buckets),
    "denoiser": lambda recipe: mean_batch(recipe.denoiser.first.buckets),
    "refinement": lambda recipe: mean_batch(recipe.denoiser.second.buckets),
    "light": lambda recipe: mean_batch(recipe.light.first.buckets),
    "light-refinement": lambda recipe: mean_batch(recipe.light.second.buckets),
    "edges": lambda recipe: mean_batch(recipe.edges.phase.buckets),
    "layout": lambda recipe: mean_batch(recipe.layout.phase.buckets),
    "outline": lambda recipe: mean_batch(recipe.outline.phase.buckets),
    "pastel": lambda recipe: mean_batch(recipe.pastel.phase.buckets),
    "texture": lambda recipe: mean_batch(recipe.texture.phase.buckets),
    "codec16": lambda recipe: mean_batch(recipe.transformer.codec.buckets),
    "transformer": lambda recipe: mean_batch(recipe.transformer.first.buckets),
    "transformer-refinement": lambda recipe: mean_batch(recipe.transformer.second.buckets),
}
