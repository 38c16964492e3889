"""What an image of the light model costs beside one of the heavy model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from benchmarks.settings import Report, Settings
from benchmarks.stats import paired_ratio, summarise
from benchmarks.stopwatch import in_turns
from benchmarks.verdicts import at_most
from ray_cluster.models.builtin import weights_folder
from ray_cluster.quality.suite import suite_prompts
from recipes.figures.evaluate import load_pipeline, options_for

HEAVY, LIGHT = "shapes-sd", "shapes-sd-light"
_PX = 64
_AIM_PERCENT = 12.5


def measure(settings: Settings, report: Report) -> dict[str, Any]:
    """Make images with both models in turns, and compare them pair by pair."""
    report(0.0, "loading both models")
    ways = {name: _image_maker(name) for name in (LIGHT, HEAVY)}
    in_turns(ways, 1)
    report(0.2, "images of both models")
    costs = in_turns(ways, settings.family_rounds)
    light, heavy = ([1e3 * one.cpu_s for one in costs[name]] for name in ways)
    ratio = paired_ratio(light, heavy)
    share, low, high = (100 * x for x in (ratio.median, *ratio.ci95))
    aim = at_most("light model's image over the heavy's", _AIM_PERCENT, share, (low, high), "%")
    row = {
        "light_ms": summarise(light).as_dict(),
        "heavy_ms": summarise(heavy).as_dict(),
        "light_over_heavy": ratio.as_dict(),
    }
    return {
        "what": f"an image of {LIGHT} and of {HEAVY} with the sampling of its card, {_PX} px, text "
        "to pixels in the plain pipeline, batch 1, CPU time of one thread",
        "tables": {"both models": [row]},
        "aims": [aim.as_dict()],
    }


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
