"""What an image of the light model costs beside one of the heavy model."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.settings import Report, Settings
from benchmarks.stats import paired_ratio, summarise
from benchmarks.stopwatch import in_turns
from ray_cluster.models.builtin import weights_folder
from ray_cluster.training.evaluate import load_pipeline, options_for
from ray_cluster.training.suite import suite_prompts

HEAVY, LIGHT = "shapes-sd", "shapes-sd-light"
_PX = 64


class ImageMaker:
    """A model in its plain pipeline, with the sampling of its card, one image a call."""

    def __init__(self, name: str) -> None:
        options = options_for(name)
        self.sampling = f"{options.steps} steps, guidance {options.guidance:g}"
        self._options = options
        self._pipeline: Any = load_pipeline(weights_folder() / name)
        self._pipeline.set_progress_bar_config(disable=True)
        self._prompts = suite_prompts("easy", 100)
        self._made = 0

    def __call__(self) -> None:
        """Make the image of the next prompt, from text to pixels."""
        prompt = self._prompts[self._made % len(self._prompts)]
        self._made += 1
        self._pipeline(
            prompt.caption,
            width=_PX,
            height=_PX,
            num_inference_steps=self._options.steps,
            guidance_scale=self._options.guidance,
            generator=torch.Generator().manual_seed(self._made),
            output_type="np",
        )


def measure_family(settings: Settings, report: Report) -> dict[str, Any]:
    """Make images with both models in turns, and compare them pair by pair."""
    report(0.0, "loading both models")
    light, heavy = ImageMaker(LIGHT), ImageMaker(HEAVY)
    for maker in (light, heavy):
        maker()
    report(0.2, "images of both models")
    light_s, heavy_s = in_turns(light, heavy, settings.family_pairs)
    return {
        "what": f"one image of {_PX} px from text to pixels in the plain pipeline, batch 1, one "
        f"thread, CPU time, in pairs: {LIGHT} ({light.sampling}), {HEAVY} ({heavy.sampling})",
        "light_s": summarise(light_s).as_dict(),
        "heavy_s": summarise(heavy_s).as_dict(),
        "ratio": paired_ratio(light_s, heavy_s).as_dict(),
    }
