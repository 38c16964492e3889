"""What an image of the light model costs beside one of the heavy model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from benchmarks.figures import scaled
from benchmarks.harness import Case, Study, ratio
from ray_cluster.models.builtin import weights_folder
from ray_cluster.quality.suite import suite_prompts
from recipes.figures.evaluate import load_pipeline, options_for

HEAVY, LIGHT = "shapes-sd", "shapes-sd-light"
_PX = 64
_AIM_PERCENT = 12.5


def measure(study: Study) -> None:
    """Make images with both models in turns, and compare them pair by pair."""
    study.found["what"] = (
        f"an image of {LIGHT} and of {HEAVY} with the sampling of its card, {_PX} px, text to "
        "pixels in the plain pipeline, batch 1, CPU time of one thread"
    )
    ways = {name: _image_maker(name) for name in (HEAVY, LIGHT)}
    rows = study.compare("both models", Case({}, ways, study.pick(25, 3)))
    share = scaled(ratio(rows, LIGHT, HEAVY), 100)
    study.at_most("light model's image over the heavy's", _AIM_PERCENT, share, "%")


def _image_maker(name: str) -> Callable[[], None]:
    """Return a call that makes the image of the next prompt."""
    options, prompts, numbers = options_for(name), suite_prompts("easy", 100), count()
    pipeline: Any = load_pipeline(weights_folder() / name)
    pipeline.set_progress_bar_config(disable=True)

    def make() -> None:
        number = next(numbers)
        pipeline(
            prompts[number % len(prompts)].caption,
            width=_PX,
            height=_PX,
            num_inference_steps=options.steps,
            guidance_scale=options.guidance,
            generator=torch.Generator().manual_seed(number),
            output_type="np",
        )

    return make
