"""The reference suite: the fixed prompts and hints that all models are measured on.

Its seed was fixed before any model was evaluated. Scenes are drawn uniformly over all attribute
values, the held-out combinations included.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ray_cluster.quality.captions import write_caption
from ray_cluster.quality.render import HINT_JITTER, Placed, place
from ray_cluster.quality.scenes import (
    LAYOUTS,
    Scene,
    omit_all_details,
    sample_several,
    sample_single,
)

SUITE_SEED = 7001
# of the prompts that discriminators are calibrated on: not the suite's
CALIBRATION_SEED = 7101
Kind = Literal["easy", "hard", "bare", "hinted"]
_KINDS: tuple[Kind, ...] = ("easy", "hard", "bare", "hinted")
_HARD_LAYOUTS = tuple(layout for layout in LAYOUTS if sum(map(len, layout)) >= 3)


@dataclass(frozen=True)
class SuitePrompt:
    """One prompt: what is to be seen, the words for it, and its place in the suite."""

    kind: Kind
    index: int
    scene: Scene

    @property
    def caption(self) -> str:
        """The prompt's text."""
        return write_caption(self.scene)

    def noise_seed(self, repeat: int = 0) -> int:
        """The seed of the picture's noise, another one for every repeat."""
        return (repeat * 1000 + _KINDS.index(self.kind)) * 1_000_000 + self.index


def suite_prompts(kind: Kind, count: int, *, seed: int = SUITE_SEED) -> Sequence[SuitePrompt]:
    """The first prompts of a kind.

    Easy ones name one object with all its attributes, hard ones three or four by their relations,
    bare ones the shape and colour of one object and nothing else, hinted ones one to four objects.
    More prompts begin with fewer.
    """
    rng = random.Random(f"{seed}/{kind}")
    return [SuitePrompt(kind, index, _draw(kind, rng)) for index in range(count)]


def place_hinted(prompts: Sequence[SuitePrompt], *, width: int, height: int) -> Placed:
    """Where the objects of hinted prompts stand: more freely than captions say."""
    scenes = [prompt.scene for prompt in prompts]
    return place(scenes, width=width, height=height, jitter=HINT_JITTER, seed=SUITE_SEED)


def bare(prompt: SuitePrompt, *, names_background: bool = False) -> SuitePrompt:
    """The same prompt without sizes and places, which a hint shows.

    Args:
        names_background: for hints that don't show it.
    """
    scene = omit_all_details(prompt.scene)
    if names_background:
        scene = replace(scene, background=prompt.scene.background)
    return replace(prompt, scene=scene)


def _draw(kind: Kind, rng: random.Random) -> Scene:
    match kind:
        case "easy":
            return sample_single(rng)
        case "hard":
            return sample_several(rng, _HARD_LAYOUTS)
        case "bare":
            return omit_all_details(sample_single(rng))
        case "hinted":
            return sample_single(rng) if rng.random() < 0.5 else sample_several(rng)
