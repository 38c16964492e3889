"""Measures whether a folder, in diffusers' own pipeline, draws what prompts say.

The prompts are the reference suite's, no picture is dropped, and our own classifier reads them.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from rich.progress import track
from safetensors import SafetensorError
from torch import Tensor

from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import builtin_sampling
from ray_cluster.quality.classifier import AttributeClassifier, load_classifier, read_pictures
from ray_cluster.quality.distances import FrechetDistance, frechet_distance
from ray_cluster.quality.render import Jitter, render
from ray_cluster.quality.scenes import Scene, has_held_out_object
from ray_cluster.quality.suite import SUITE_SEED, Kind, SuitePrompt, suite_prompts
from recipes.figures.scoring import COLUMNS, Drawn, Figures, Rows, Share, count_shares


@dataclass(frozen=True)
class EvaluationOptions:
    """What is generated.

    Attributes:
        prompts: of the easy and of the hard ones at 64 x 64, each drawn `repeats` times.
        prompts_elsewhere: easy ones, for the square sizes and for the others.
        prompts_bare: of the form "a red circle".
        repeats: how many times, with other noise.
        steps: of denoising.
        guidance: scale of classifier-free guidance.
        seed: of the prompts.
        batch: pictures made at a time.
        squares: sizes that the first `prompts_elsewhere` are spread over evenly.
        oblongs: sizes (width, height) that the second are spread over.
    """

    prompts: int = 334
    prompts_elsewhere: int = 1000
    prompts_bare: int = 300
    repeats: int = 3
    steps: int = 20
    guidance: float = 2.0
    seed: int = SUITE_SEED
    batch: int = 20
    squares: tuple[tuple[int, int], ...] = ((128, 128),)
    oblongs: tuple[tuple[int, int], ...] = ((96, 64), (64, 96), (128, 64), (64, 128))


def options_for(model: str) -> EvaluationOptions:
    """The options that a built-in model's card was measured with; those of shapes-sd for others."""
    sampling = builtin_sampling(model)
    if sampling is None:
        return EvaluationOptions()
    return EvaluationOptions(steps=sampling.num_steps, guidance=sampling.guidance_scale)


@dataclass(frozen=True)
class Evaluation(Figures):
    """Everything measured.

    Attributes:
        options: what was generated.
        groups: the shares per attribute, by the group's name.
        frechet: Fréchet distances to renders of the same prompts, by the group's name.
    """

    options: EvaluationOptions
    groups: dict[str, dict[str, Share]]
    frechet: dict[str, FrechetDistance]

    def as_json(self) -> str:
        """The figures as JSON, with intervals."""
        groups = {
            group: {
                name: {"right": s.right, "total": s.total, "share": s.value, "interval": s.interval}
                for name, s in shares.items()
            }
            for group, shares in self.groups.items()
        }
        frechet = {group: asdict(distance) for group, distance in self.frechet.items()}
        whole = {"options": asdict(self.options), "groups": groups, "frechet": frechet}
        return json.dumps(whole, indent=1) + "\n"

    def all_rows(self) -> list[Rows]:
        """See :class:`Figures`."""
        return [self._shares(), self._distances()]

    def _shares(self) -> Rows:
        rows = [
            [group, str(shares["all"].total), *(str(shares[name]) for name in COLUMNS)]
            for group, shares in self.groups.items()
        ]
        return Rows(["prompts", "pictures", *COLUMNS], rows)

    def _distances(self) -> Rows:
        rows = [
            [name, str(one.pictures), f"{one.value:.2f}", f"{one.floor:.2f}"]
            for name, one in self.frechet.items()
        ]
        return Rows(
            ["prompts", "pictures", "Fréchet distance to renders", "of renders to renders"], rows
        )


class Painter:
    """A diffusers pipeline that draws the suite's prompts, and the classifier that reads them.

    Attributes:
        constants: further arguments of every call of the pipeline.
    """

    def __init__(self, pipeline: DiffusionPipeline, options: EvaluationOptions) -> None:
        pipeline.set_progress_bar_config(disable=True)
        self.pipeline: Any = pipeline
        self.options = options
        self.constants: dict[str, object] = {}
        self.classifier: AttributeClassifier = load_classifier()

    def draw_repeatedly(
        self, prompts: Sequence[SuitePrompt], *, width: int, height: int, **inputs: Tensor
    ) -> list[Drawn]:
        """Generate and read `repeats` pictures per prompt, all prompts before any is repeated."""
        repeats = [
            self.draw(prompts, width=width, height=height, repeat=repeat, **inputs)
            for repeat in range(self.options.repeats)
        ]
        return [one for part in repeats for one in part]

    def draw(
        self,
        prompts: Sequence[SuitePrompt],
        *,
        width: int,
        height: int,
        repeat: int = 0,
        **inputs: Tensor,
    ) -> list[Drawn]:
        """Generate and read one picture per prompt.

        `inputs` are further inputs of the pipeline, [B, ...], one per prompt.
        """
        drawn: list[Drawn] = []
        starts = range(0, len(prompts), self.options.batch)
        label = f"{width} x {height}"
        for start in track(starts, label, transient=True):
            part = prompts[start : start + self.options.batch]
            generators = [torch.Generator().manual_seed(p.noise_seed(repeat)) for p in part]
            output = self.pipeline(
                [prompt.caption for prompt in part],
                width=width,
                height=height,
                num_inference_steps=self.options.steps,
                guidance_scale=self.options.guidance,
                generator=generators,
                output_type="pt",
                **{name: rows[start : start + len(part)] for name, rows in inputs.items()},
                **self.constants,
            )
            pixels: Tensor = output.images.float().cpu()
            readings = read_pictures(self.classifier, pixels)
            drawn += [
                Drawn(prompt.scene, picture, reading)
                for prompt, picture, reading in zip(part, pixels, readings, strict=True)
            ]
        return drawn


def load_pipeline(folder: Path) -> DiffusionPipeline:
    """Load a folder in diffusers' plain pipeline.

    Stable Diffusion 3's takes None for the T5 encoder that these folders do not have.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    try:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        wanted = ("text_encoder_3", "tokenizer_3")
        absent = {name: None for name in wanted if index.get(name, [""])[0] is None}
        return DiffusionPipeline.from_pretrained(folder, **absent)
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError, SafetensorError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"cannot load the model in {folder}: {first}") from None


def evaluate(
    folder: Path, *, options: EvaluationOptions | None = None, report: Path | None = None
) -> Evaluation:
    """Measure a folder with diffusers' plain pipeline and our classifier.

    Args:
        folder: in diffusers' layout.
        options: numbers and seeds.
        report: where to write `evaluation.json` and `contact-sheet.png`; nowhere by default.
    """
    options = options or EvaluationOptions()
    if options.prompts * options.repeats < 2:
        raise ConfigError("a model is measured on two pictures or more; give more prompts")
    painter = Painter(load_pipeline(folder), options)
    groups: dict[str, dict[str, Share]] = {}
    frechet: dict[str, FrechetDistance] = {}
    sheets: list[list[Drawn]] = []
    for kind in ("easy", "hard"):
        prompts = _prompts(kind, options.prompts, options)
        drawn = painter.draw_repeatedly(prompts, width=64, height=64)
        groups |= _groups(kind, drawn)
        frechet[kind] = _frechet_to_renders(painter.classifier, drawn)
        sheets.append(drawn[:32])
    for name, sizes in (("square", options.squares), ("oblong", options.oblongs)):
        groups |= _measure_elsewhere(painter, name, sizes)
    bare = painter.draw(_prompts("bare", options.prompts_bare, options), width=64, height=64)
    groups["bare prompts"] = count_shares(bare)
    evaluation = Evaluation(options, groups, frechet)
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
        (report / "evaluation.json").write_text(evaluation.as_json(), encoding="utf-8")
        pictures = [one.pixels for sheet in sheets for one in sheet]
        contact_sheet(pictures).save(report / "contact-sheet.png")
    return evaluation


def contact_sheet(pictures: Sequence[Tensor], columns: int = 16) -> Image.Image:
    """Tile pictures [3, H, W] of one size in rows, in their order, good and bad alike."""
    pixels = torch.stack(list(pictures))
    rows = math.ceil(len(pixels) / columns)
    blank = torch.ones(rows * columns - len(pixels), *pixels.shape[1:])
    tiles = torch.cat([pixels, blank]).unflatten(0, (rows, columns))
    # [rows, columns, 3, H, W] -> [rows * H, columns * W, 3]
    sheet = tiles.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    return Image.fromarray((sheet * 255).round().byte().numpy())


def _prompts(kind: Kind, count: int, options: EvaluationOptions) -> Sequence[SuitePrompt]:
    return suite_prompts(kind, count, seed=options.seed)


def _groups(kind: str, drawn: Sequence[Drawn]) -> dict[str, dict[str, Share]]:
    chosen: dict[str, Callable[[Scene], bool] | None] = {
        kind: None,
        f"{kind}, seen combinations": lambda scene: not has_held_out_object(scene),
        f"{kind}, held-out combinations": has_held_out_object,
    }
    return {name: count_shares(drawn, test) for name, test in chosen.items()}


def _measure_elsewhere(
    painter: Painter, name: str, sizes: Sequence[tuple[int, int]]
) -> dict[str, dict[str, Share]]:
    """Easy prompts spread over sizes: shares by size, and of all of them if there are several."""
    groups: dict[str, dict[str, Share]] = {}
    everywhere: list[Drawn] = []
    prompts = _prompts("easy", painter.options.prompts_elsewhere, painter.options)
    for index, (width, height) in enumerate(sizes):
        part = painter.draw(prompts[index :: len(sizes)], width=width, height=height)
        groups[f"{width} x {height}"] = count_shares(part)
        everywhere += part
    return {**groups, f"{name} together": count_shares(everywhere)} if len(sizes) > 1 else groups


def _frechet_to_renders(classifier: AttributeClassifier, drawn: Sequence[Drawn]) -> FrechetDistance:
    height, width = drawn[0].pixels.shape[-2:]
    scenes = [one.scene for one in drawn]
    real, more = (
        render(scenes, width=width, height=height, jitter=Jitter(), seed=seed) for seed in (1, 2)
    )
    return frechet_distance(classifier, torch.stack([one.pixels for one in drawn]), real, more)
