"""Writes what is said of weights beside them: `training.json` and the figures of the model card.

A card's text is written by hand; its tables are between `<!-- begin NAME -->` and
`<!-- end NAME -->`, and are replaced.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from ray_cluster.models.builtin import weights_folder
from ray_cluster.models.weight_files import folder_hashes
from recipes.figures.scoring import markdown_table
from recipes.recipe import DenoiserPhase, Recipe, TextRecipe
from recipes.recipe_parts import SizeBucket
from recipes.runs import TrainingRun
from recipes.stages import MODEL_STAGES, StageOptions

CARD = "README.md"
_TRAINING = "training.json"


@dataclass(frozen=True)
class StageRecord:
    """What one stage of a training took."""

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
            examples = round(steps * _mean_batch(stage.options(run.recipe)))
            minutes = _cpu_seconds(run.folder.path, stage.name) / 60
            records.append(
                StageRecord(stage.name, steps, examples, minutes, run.recipe.seed, run.device.type)
            )
        elif stage.name in base:
            records.append(base[stage.name])
        else:
            raise FileNotFoundError(f"no stage {stage.name!r} in {run.folder.path}; train it")
    text = json.dumps([asdict(record) for record in records], indent=1) + "\n"
    (folder / _TRAINING).write_text(text, encoding="utf-8")


def read_training(folder: Path) -> list[StageRecord]:
    """Read a folder's records; none if it has no file of them."""
    path = folder / _TRAINING
    if not path.is_file():
        return []
    return [StageRecord(**record) for record in json.loads(path.read_text(encoding="utf-8"))]


def _cpu_seconds(run: Path, stage: str) -> float:
    """Add up a stage's CPU time from its log, whose clock starts at 0 with every process."""
    total, last = 0.0, 0.0
    for line in (run / f"{stage}.jsonl").read_text(encoding="utf-8").splitlines():
        clock = float(json.loads(line)["cpu_seconds"])
        total += clock - last if clock >= last else clock
        last = clock
    return total


def _mean_batch(options: StageOptions) -> float:
    """Examples per step, averaged over the buckets' shares."""
    if isinstance(options, TextRecipe):
        return options.optimisation.batch
    buckets = options.buckets
    return sum(b.batch * b.share for b in buckets) / sum(b.share for b in buckets)


def write_card(name: str, tables: str, folder: Path) -> Path:
    """Write the card of a built-in model beside weights, with new figures, and return its path.

    Args:
        name: whose card in the package gives the words.
        tables: what was measured.
        folder: of the weights.

    Raises:
        ValueError: the package's card lacks a part.
    """
    text = (weights_folder() / name / CARD).read_text(encoding="utf-8")
    data, recipe = [], Recipe()
    for stage in MODEL_STAGES[name]:
        options = stage.options(recipe)
        if isinstance(options, DenoiserPhase):
            data.append((stage.name, options))
    parts = {"training": _training_table(folder), "quality": tables, "files": _hash_table(folder)}
    if data:
        parts["data"] = _data_table(dict(data))
    for part, content in parts.items():
        begin, end = f"<!-- begin {part} -->", f"<!-- end {part} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the card of {name} has no lines {begin!r} and {end!r}; add them")
        text = f"{before}{begin}\n{content}\n{end}{after}"
    path = folder / CARD
    path.write_text(text, encoding="utf-8")
    return path


def _data_table(phases: dict[str, DenoiserPhase]) -> str:
    mixes = [phase.captions for phase in phases.values()]
    shares = {
        "scenes of one object, the rest two to four": [mix.single_share for mix in mixes],
        'captions without any detail, like "a red circle"': [mix.bare_share for mix in mixes],
        "other captions that may leave out details": [mix.omit_share for mix in mixes],
        "empty captions": [phase.caption_drop for phase in phases.values()],
        "pictures that are not 64 x 64": [_other_share(phase.buckets) for phase in phases.values()],
    }
    rows = [[name, *(f"{value:.0%}" for value in values)] for name, values in shares.items()]
    return markdown_table(["share of", *phases], rows)


def _other_share(buckets: tuple[SizeBucket, ...]) -> float:
    other = sum(b.batch * b.share for b in buckets if (b.width, b.height) != (64, 64))
    return other / sum(b.batch * b.share for b in buckets)


def _training_table(folder: Path) -> str:
    rows = [
        [
            one.stage,
            str(one.seed),
            str(one.steps),
            f"{one.examples / 1000:.0f} k",
            f"{one.cpu_minutes:.0f}",
            one.device,
        ]
        for one in read_training(folder)
    ]
    return markdown_table(["stage", "seed", "steps", "examples", "CPU minutes", "device"], rows)


def _hash_table(folder: Path) -> str:
    rows = [[f"`{name}`", f"`{digest}`"] for name, digest in folder_hashes(folder).items()]
    return markdown_table(["file", "SHA-256"], rows)
