"""Measures whether the exported folder, in diffusers' own pipeline, draws what prompts say.

The prompts come from a committed seed, no picture is dropped, and our own classifier reads them.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ray_cluster.quality.classifier import (
    AttributeClassifier,
    Reading,
    load_classifier,
    read_pictures,
)
from ray_cluster.reference_models.captions import write_caption
from ray_cluster.reference_models.export import SHAPES_SD
from ray_cluster.reference_models.scenes import (
    Scene,
    has_held_out_object,
    omit_all_details,
    sample_single,
)

ATTRIBUTES = ("shape", "colour", "background", "size", "position")


@dataclass(frozen=True)
class EvaluationOptions:
    """What is generated; the guidance was chosen among 1.5, 2 and 3 with seed 6001."""

    prompts: int = 500
    prompts_elsewhere: int = 200
    # of the form "a red circle"
    prompts_bare: int = 100
    seed: int = 7001
    steps: int = 20
    guidance: float = 2.0
    batch: int = 20
    # the sizes that `prompts_elsewhere` are spread over evenly, as (width, height)
    elsewhere: tuple[tuple[int, int], ...] = (
        (96, 96),
        (128, 128),
        (96, 64),
        (64, 96),
        (128, 64),
        (64, 128),
    )


@dataclass(frozen=True)
class Share:
    """A share of right answers with its 95 % Wilson interval."""

    right: int
    total: int

    @property
    def value(self) -> float:
        """The share itself; 0 of 0 is 0."""
        return self.right / max(1, self.total)

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end of the 95 % interval."""
        n, z = max(1, self.total), 1.96
        middle = (self.value + z * z / (2 * n)) / (1 + z * z / n)
        spread = (
            z / (1 + z * z / n) * math.sqrt(self.value * (1 - self.value) / n + z * z / (4 * n * n))
        )
        return max(0.0, middle - spread), min(1.0, middle + spread)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.1f} ({100 * low:.1f}-{100 * high:.1f})"


@dataclass(frozen=True)
class Drawn:
    """One prompt's scene, the picture's size, the picture [3, H, W] in 0..1 and its reading."""

    scene: Scene
    pixels: Tensor
    reading: Reading

    @property
    def right(self) -> dict[str, bool]:
        """For every attribute, whether it is as the prompt says, or shown if left open."""
        thing = self.scene.objects[0]
        asked = {
            "shape": thing.shape,
            "colour": thing.colour,
            "background": self.scene.background,
            "size": thing.size,
            "position": thing.position,
        }
        shown = {name: getattr(self.reading, name) for name in ATTRIBUTES}
        return {
            name: value is not None and asked[name] in (None, value)
            for name, value in shown.items()
        }


@dataclass(frozen=True)
class Evaluation:
    """Everything measured; `groups` maps a group's name to the shares per attribute."""

    options: EvaluationOptions
    groups: dict[str, dict[str, Share]]

    def as_json(self) -> str:
        """The figures as JSON, with intervals."""
        groups = {
            group: {
                name: {"right": s.right, "total": s.total, "share": s.value, "interval": s.interval}
                for name, s in shares.items()
            }
            for group, shares in self.groups.items()
        }
        return json.dumps({"options": asdict(self.options), "groups": groups}, indent=1) + "\n"


def draw_prompts(
    pipeline: StableDiffusionPipeline,
    classifier: AttributeClassifier,
    scenes: Sequence[Scene],
    options: EvaluationOptions,
    *,
    width: int,
    height: int,
) -> list[Drawn]:
    """Generate and read one picture per scene, from noise seeded by its place in the list."""
    drawn: list[Drawn] = []
    starts = range(0, len(scenes), options.batch)
    for start in track(starts, f"{width} x {height}", transient=True):
        part = scenes[start : start + options.batch]
        seeds = [options.seed * 10_000 + start + i for i in range(len(part))]
        output = pipeline(
            [write_caption(scene) for scene in part],
            width=width,
            height=height,
            num_inference_steps=options.steps,
            guidance_scale=options.guidance,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            output_type="pt",
        )
        pixels: Tensor = output.images.float()
        readings = read_pictures(classifier, pixels)
        drawn += [Drawn(s, p, r) for s, p, r in zip(part, pixels, readings, strict=True)]
    return drawn


def evaluate(
    folder: Path = SHAPES_SD,
    *,
    options: EvaluationOptions | None = None,
    report: Path | None = None,
) -> Evaluation:
    """Measure a folder with plain `StableDiffusionPipeline` and our classifier.

    Args:
        folder: in diffusers' layout.
        options: numbers and seed.
        report: where to write `evaluation.json` and `contact-sheet.png`; nowhere by default.
    """
    options = options or EvaluationOptions()
    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    classifier, rng = load_classifier(), random.Random(options.seed)
    scenes = [sample_single(rng) for _ in range(options.prompts)]
    drawn = draw_prompts(pipeline, classifier, scenes, options, width=64, height=64)
    groups = {
        "64 x 64": _shares(drawn),
        "64 x 64, seen combinations": _shares(drawn, lambda scene: not has_held_out_object(scene)),
        "64 x 64, held-out combinations": _shares(drawn, has_held_out_object),
        "64 x 64, large": _shares(drawn, lambda scene: scene.objects[0].size == "large"),
        "64 x 64, small": _shares(drawn, lambda scene: scene.objects[0].size == "small"),
    }
    groups |= _measure_elsewhere(pipeline, classifier, options, rng)
    bare = [omit_all_details(sample_single(rng)) for _ in range(options.prompts_bare)]
    groups["64 x 64, bare prompts"] = _shares(
        draw_prompts(pipeline, classifier, bare, options, width=64, height=64)
    )
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
        evaluation_json = Evaluation(options, groups).as_json()
        (report / "evaluation.json").write_text(evaluation_json, encoding="utf-8")
        contact_sheet(drawn[:64]).save(report / "contact-sheet.png")
    return Evaluation(options, groups)


def _measure_elsewhere(
    pipeline: StableDiffusionPipeline,
    classifier: AttributeClassifier,
    options: EvaluationOptions,
    rng: random.Random,
) -> dict[str, dict[str, Share]]:
    groups: dict[str, dict[str, Share]] = {}
    everywhere: list[Drawn] = []
    for index, (width, height) in enumerate(options.elsewhere):
        count = len(range(index, options.prompts_elsewhere, len(options.elsewhere)))
        scenes = [sample_single(rng) for _ in range(count)]
        part = draw_prompts(pipeline, classifier, scenes, options, width=width, height=height)
        groups[f"{width} x {height}"] = _shares(part)
        everywhere += part
    return {**groups, "other sizes together": _shares(everywhere)}


def print_evaluation(evaluation: Evaluation, console: Console | None = None) -> None:
    """Print the shares in percent as a table, one row per group."""
    table = Table("group", "n", *ATTRIBUTES, "all five")
    for group, shares in evaluation.groups.items():
        columns = [str(shares[name]) for name in (*ATTRIBUTES, "all five")]
        table.add_row(group, str(shares["shape"].total), *columns)
    (console or Console(width=160)).print(table)


def contact_sheet(drawn: Sequence[Drawn], columns: int = 16) -> Image.Image:
    """Tile pictures of one size in rows, in their order, good and bad alike."""
    pixels = torch.stack([one.pixels for one in drawn])
    rows = math.ceil(len(drawn) / columns)
    blank = torch.ones(rows * columns - len(drawn), *pixels.shape[1:])
    tiles = torch.cat([pixels, blank]).unflatten(0, (rows, columns))
    # [rows, columns, 3, H, W] -> [rows * H, columns * W, 3]
    sheet = tiles.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    return Image.fromarray((sheet * 255).round().byte().numpy())


def _shares(
    drawn: Sequence[Drawn], chosen: Callable[[Scene], bool] | None = None
) -> dict[str, Share]:
    kept = [one.right for one in drawn if chosen is None or chosen(one.scene)]
    shares = {name: Share(sum(right[name] for right in kept), len(kept)) for name in ATTRIBUTES}
    return {**shares, "all five": Share(sum(all(right.values()) for right in kept), len(kept))}
