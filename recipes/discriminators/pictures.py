"""The pictures that discriminators are trained on, made once per run and read by the classifier."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from ray_cluster.models.builtin import builtin_sampling, weights_folder
from ray_cluster.models.picture_reader import to_reading_size
from ray_cluster.quality.classifier import Reading, load_classifier, read_pictures
from ray_cluster.quality.render import render
from recipes.batches import Captioned, draw_captioned
from recipes.figures.evaluate import load_pipeline
from recipes.recipe import Recipe
from recipes.runs import TrainingRun
from recipes.trainer import step_seed

LIGHT, HEAVY = "shapes-sd-light", "shapes-sd"
Source = Literal["light", "heavy", "render"]
_SOURCES: tuple[Source, ...] = ("light", "heavy", "render")
_BATCH = 32


@dataclass(frozen=True)
class Example:
    """A picture [3, H, W] as uint8, of the size that discriminators read, and what it is of."""

    pixels: Tensor
    captioned: Captioned
    reading: Reading
    source: Source

    @property
    def picture(self) -> Tensor:
        """Pixels in 0..1."""
        return self.pixels.float() / 255


def make_examples(run: TrainingRun) -> dict[tuple[int, int], list[Example]]:
    """Return all examples by height and width as read; what the run's folder lacks is made."""
    studio = _Studio(run)
    classifier = load_classifier()
    found: dict[tuple[int, int], list[Example]] = {}
    sizes = [(w, h) for w, h, count in run.recipe.pictures.sizes for _ in range(count)]
    for index, (width, height) in enumerate(sizes):
        drawn = _draw_captions(run.recipe, index)
        path = run.folder.path / "pictures" / f"{index:03}.safetensors"
        if not path.is_file():
            _save(studio.made(drawn, index, width=width, height=height), path)
        stored = load_file(path)
        for source in _SOURCES:
            pixels = stored[source]
            parts = [read_pictures(classifier, part.float() / 255) for part in pixels.split(_BATCH)]
            readings = [reading for part in parts for reading in part]
            found.setdefault((pixels.shape[2], pixels.shape[3]), []).extend(
                Example(*one, source) for one in zip(pixels, drawn[source], readings, strict=True)
            )
    return found


def _draw_captions(recipe: Recipe, index: int) -> dict[Source, list[Captioned]]:
    rng = random.Random(step_seed(recipe.seed, "pictures", index))
    options = recipe.pictures
    counts = zip(_SOURCES, (options.light, options.heavy, options.renders), strict=True)
    return {
        source: [draw_captioned(rng, options.captions) for _ in range(count)]
        for source, count in counts
    }


def _save(pictures: dict[Source, Tensor], path: Path) -> None:
    """Write a set; a kill leaves all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({str(name): one.contiguous() for name, one in pictures.items()}, part)
    os.replace(part, path)


class _Studio:
    """Makes sets of pictures; the pipelines are loaded when they are first needed."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._pipelines: dict[str, Any] = {}

    def made(
        self, drawn: dict[Source, list[Captioned]], index: int, *, width: int, height: int
    ) -> dict[Source, Tensor]:
        """Return the pictures [N, 3, h, w] of a set, as small as they are read."""
        seed = step_seed(self._run.recipe.seed, "noise of pictures", index)
        scenes = [one.scene for one in drawn["render"]]
        jitter = self._run.recipe.jitter
        rendered = render(scenes, width=width, height=height, jitter=jitter, seed=seed)
        steps = {"light": 2, "heavy": self._run.recipe.pictures.heavy_steps}
        captions: dict[Source, list[str]] = {
            source: [one.caption for one in found] for source, found in drawn.items()
        }
        size = {"width": width, "height": height}
        made: dict[Source, Tensor] = {
            "light": self._drawn(LIGHT, captions["light"], seed, steps["light"], **size),
            "heavy": self._drawn(HEAVY, captions["heavy"], seed + 1, steps["heavy"], **size),
            "render": self._coded(rendered),
        }
        return {source: to_bytes(to_reading_size(one)) for source, one in made.items()}

    def _drawn(
        self, name: str, captions: Sequence[str], seed: int, steps: int, *, width: int, height: int
    ) -> Tensor:
        sampling = builtin_sampling(name)
        assert sampling is not None
        generator = torch.Generator().manual_seed(seed)
        parts = [
            self._pipeline(name)(
                captions[start : start + _BATCH],
                width=width,
                height=height,
                num_inference_steps=steps,
                guidance_scale=sampling.guidance_scale,
                generator=generator,
                output_type="pt",
            ).images.float()
            for start in range(0, len(captions), _BATCH)
        ]
        return torch.cat(parts)

    def _coded(self, pictures: Tensor) -> Tensor:
        codec = self._pipeline(LIGHT).vae
        with torch.no_grad():
            parts = [
                codec.decode(codec.encode(part * 2 - 1).latents).sample
                for part in pictures.split(_BATCH)
            ]
        return (torch.cat(parts) / 2 + 0.5).clamp(0, 1)

    def _pipeline(self, name: str) -> Any:
        if name not in self._pipelines:
            pipeline: DiffusionPipeline = load_pipeline(weights_folder() / name)
            pipeline.set_progress_bar_config(disable=True)
            self._pipelines[name] = pipeline
        return self._pipelines[name]


def to_bytes(pixels: Tensor) -> Tensor:
    """Return pixels in 0..1 as uint8, as images are coded."""
    return (pixels.clamp(0, 1) * 255).round().byte()
