"""Measures ControlNets and LoRAs on the large model: the same prompts with and without them."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from diffusers import (
    ControlNetModel,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
)
from torch import Tensor

from ray_cluster.quality.distances import edge_agreement, find_edges
from ray_cluster.quality.render import paint
from ray_cluster.quality.scenes import STYLES
from ray_cluster.quality.suite import bare, place_hinted, suite_prompts
from recipes.figures.evaluate import EvaluationOptions, Painter, contact_sheet
from recipes.figures.scoring import Figures, Rows, Share, count_shares
from recipes.networks.controlnet import hint_pictures

_SHOWN = 16


@dataclass(frozen=True)
class Mean:
    """A mean with its 95 % interval, and the least value of the best 95 %."""

    value: float
    low: float
    high: float
    fifth_percentile: float
    total: int

    @classmethod
    def of(cls, values: Tensor) -> "Mean":
        """The mean of values [N]."""
        spread = 1.96 * float(values.std()) / math.sqrt(len(values))
        mean = float(values.mean())
        return cls(mean, mean - spread, mean + spread, float(values.quantile(0.05)), len(values))

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}-{self.high:.3f})"


@dataclass(frozen=True)
class PartEvaluation(Figures):
    """What was measured with a part and without it, by the measure's name."""

    options: EvaluationOptions
    with_part: dict[str, Mean | Share]
    without: dict[str, Mean | Share]

    def as_json(self) -> str:
        """The figures as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def all_rows(self) -> list[Rows]:
        """See :class:`Figures`."""
        rows = [
            [name, str(value.total), str(value), str(self.without[name])]
            for name, value in self.with_part.items()
        ]
        return [Rows(["measure", "of", "with", "without"], rows)]


def evaluate_controlnet(
    folder: Path, base: Path, kind: str, *, options: EvaluationOptions, report: Path | None = None
) -> PartEvaluation:
    """Measure a ControlNet in diffusers' plain pipeline, at full scale and at none.

    The prompts name shapes, colours and relations only, and the background where the hint does not
    show it; hints tell where things stand.

    Args:
        folder: of the ControlNet.
        base: of the model it was trained on.
        kind: "edges" or "layout".
        options: numbers and seeds.
        report: where to write `evaluation.json` and `contact-sheet.png`; nowhere by default.
    """
    control = ControlNetModel.from_pretrained(folder)
    pipeline = StableDiffusionControlNetPipeline.from_pretrained(base, controlnet=control)
    painter = Painter(pipeline, options)
    prompts = suite_prompts("hinted", options.prompts, seed=options.seed)
    placed = place_hinted(prompts, width=64, height=64)
    wanted = paint(placed, width=64, height=64)
    hints = hint_pictures(kind, wanted, placed)
    edges = find_edges(wanted).repeat(options.repeats, 1, 1)
    figures: list[dict[str, Mean | Share]] = []
    pictures: list[Tensor] = []
    for scale in (1.0, 0.0):
        painter.constants = {"controlnet_conditioning_scale": scale}
        # blocks show no background, and its edges count like all others
        short = [bare(prompt, names_background=kind == "layout") for prompt in prompts]
        drawn = painter.draw_repeatedly(short, width=64, height=64, image=hints)
        # the hint shows the whole scene
        full = [
            replace(one, scene=prompts[index % len(prompts)].scene)
            for index, one in enumerate(drawn)
        ]
        pixels = torch.stack([one.pixels for one in drawn])
        agreement = edge_agreement(find_edges(pixels), edges)
        shares = count_shares(full)
        measured: dict[str, Mean | Share] = {
            "edge agreement (F1 within 1 px)": Mean.of(agreement),
            **{name: shares[name] for name in ("shape", "colour", "size", "position")},
        }
        figures.append(measured)
        pictures += list(pixels[:_SHOWN])
    evaluation = PartEvaluation(options, *figures)
    _write(evaluation, [*hints[:_SHOWN], *pictures], report)
    return evaluation


def evaluate_lora(
    folder: Path, base: Path, style: str, *, options: EvaluationOptions, report: Path | None = None
) -> PartEvaluation:
    """Measure a LoRA in diffusers' plain pipeline, loaded and not.

    Half of the prompts are easy ones, half are hard ones. `style` counts the pictures that are read
    as the LoRA's style with it, and as plain without it; the rest is counted as for models.

    Args:
        folder: of the LoRA.
        base: of the model it was trained on.
        style: what it teaches.
        options: numbers and seeds.
        report: where to write `evaluation.json` and `contact-sheet.png`; nowhere by default.
    """
    count = options.prompts // 2
    prompts = [
        prompt
        for kind in ("easy", "hard")
        for prompt in suite_prompts(kind, count, seed=options.seed)
    ]
    figures: list[dict[str, Mean | Share]] = []
    pictures: list[Tensor] = []
    for wanted in (style, STYLES[0]):
        pipeline = StableDiffusionPipeline.from_pretrained(base)
        if wanted == style:
            pipeline.load_lora_weights(folder)
        drawn = Painter(pipeline, options).draw_repeatedly(prompts, width=64, height=64)
        right = sum(one.reading.style == wanted for one in drawn)
        shares = count_shares(drawn)
        figures.append({"style": Share(right, len(drawn)), **shares})
        shown = [*drawn[: _SHOWN // 2], *drawn[count : count + _SHOWN // 2]]
        pictures += [one.pixels for one in shown]
    evaluation = PartEvaluation(options, *figures)
    _write(evaluation, pictures, report)
    return evaluation


def _write(evaluation: PartEvaluation, pictures: Sequence[Tensor], report: Path | None) -> None:
    if report is not None:
        report.mkdir(parents=True, exist_ok=True)
        (report / "evaluation.json").write_text(evaluation.as_json(), encoding="utf-8")
        contact_sheet(pictures).save(report / "contact-sheet.png")
