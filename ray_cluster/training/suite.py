"""The reference suite: the fixed prompts, sizes, hints and edits that all models are judged on.

The seed is that of the first evaluation of `shapes-sd`, and older than all other models; nothing
was chosen by what it draws. Scenes are drawn uniformly over all attribute values, the held-out
combinations included.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ray_cluster.quality.render import ANCHOR_OFFSET, HINT_JITTER, Placed, pixel_grid, place
from ray_cluster.quality.scenes import (
    LAYOUTS,
    POSITIONS,
    Scene,
    omit_all_details,
    sample_object,
    sample_several,
    sample_single,
)
from ray_cluster.training.captions import write_caption

SUITE_SEED = 7001
Kind = Literal["easy", "hard", "bare", "hinted", "edited"]
_KINDS: tuple[Kind, ...] = ("easy", "hard", "bare", "hinted", "edited")
_HARD_LAYOUTS = tuple(layout for layout in LAYOUTS if sum(map(len, layout)) >= 3)
# half a side of an edit's square mask, in shorter sides of the picture
_MASK_REACH = 0.26


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


@dataclass(frozen=True)
class SuiteEdit:
    """An edit: in a picture of `before`, the masked object is to become another one.

    Attributes:
        prompt: of the whole picture afterwards.
        before: the scene to start from.
        changed: which object it is.
    """

    prompt: SuitePrompt
    before: Scene
    changed: int

    def mask(self, *, width: int, height: int) -> Tensor:
        """1 where the picture may change, 0 elsewhere, [1, H, W]: a square around the object."""
        position = self.before.objects[self.changed].position
        assert position is not None
        row, column = divmod(POSITIONS.index(position), 3)
        short = min(width, height)
        anchor = torch.tensor([(column - 1) * width, (row - 1) * height]) * ANCHOR_OFFSET / short
        offset = (pixel_grid(width, height) - anchor).abs().amax(-1)
        return (offset < _MASK_REACH).float()[None]


def suite_prompts(kind: Kind, count: int, *, seed: int = SUITE_SEED) -> Sequence[SuitePrompt]:
    """The first prompts of a kind.

    Easy ones name one object with all its attributes, hard ones three or four by their relations,
    bare ones the shape and colour of one object and nothing else, hinted ones one to four objects.
    More prompts begin with fewer.

    Raises:
        ValueError: the kind is that of edits.
    """
    rng = random.Random(f"{seed}/{kind}")
    return [SuitePrompt(kind, index, _draw(kind, rng)) for index in range(count)]


def suite_edits(count: int, *, seed: int = SUITE_SEED) -> Sequence[SuiteEdit]:
    """The first edits: one of two to four objects becomes another one at the same place."""
    rng = random.Random(f"{seed}/edited")
    edits: list[SuiteEdit] = []
    for index in range(count):
        before = sample_several(rng)
        changed = rng.randrange(len(before.objects))
        old = before.objects[changed]
        new = old
        while new.shape == old.shape or new.colour == old.colour:
            new = sample_object(rng, old.position)
        objects = tuple(
            new if place == changed else thing for place, thing in enumerate(before.objects)
        )
        prompt = SuitePrompt("edited", index, replace(before, objects=objects))
        edits.append(SuiteEdit(prompt, before, changed))
    return edits


def place_hinted(prompts: Sequence[SuitePrompt], *, width: int, height: int) -> Placed:
    """Where the objects of hinted prompts stand: further from their anchors than captions say."""
    scenes = [prompt.scene for prompt in prompts]
    return place(scenes, width=width, height=height, jitter=HINT_JITTER, seed=SUITE_SEED)


def bare(prompt: SuitePrompt, *, names_background: bool = False) -> SuitePrompt:
    """The same prompt without sizes and places, which a hint has to tell.

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
        case "edited":
            raise ValueError("an edit starts from another scene: take `suite_edits`")
