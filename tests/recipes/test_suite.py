"""The reference suite is fixed, covers what it says, and its hints and masks fit its scenes."""

import hashlib

import pytest
import torch

from ray_cluster.quality.distances import edge_agreement, find_edges
from ray_cluster.quality.render import COLOUR_RGB, object_distance, paint
from ray_cluster.quality.scenes import COLOURS, has_held_out_object
from ray_cluster.quality.suite import (
    Kind,
    bare,
    place_hinted,
    suite_prompts,
)
from recipes.networks.controlnet import edge_map, layout_map

# changed prompts would make every figure of every card another one
DIGESTS = {
    "easy": "d338efde170ee323",
    "hard": "080416ea91c4ee49",
    "bare": "f5b6711199211131",
    "hinted": "ecfe449804034e8f",
}


@pytest.mark.parametrize("kind", DIGESTS)
def test_prompts_are_fixed(kind: Kind) -> None:
    text = "\n".join(prompt.caption for prompt in suite_prompts(kind, 1000))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[kind]


def test_longer_lists_begin_with_shorter_ones_and_no_noise_is_used_twice() -> None:
    easy, hard, least = (suite_prompts(kind, 1000) for kind in ("easy", "hard", "bare"))
    assert suite_prompts("hard", 10) == hard[:10]
    assert {len(prompt.scene.objects) for prompt in hard} == {3, 4}
    assert 0.15 < sum(has_held_out_object(prompt.scene) for prompt in easy) / 1000 < 0.25
    seeds = {p.noise_seed(r) for prompts in (easy, hard, least) for p in prompts for r in range(3)}
    assert len(seeds) == 9000


def test_hints_show_where_objects_are() -> None:
    prompts = suite_prompts("hinted", 12)
    placed = place_hinted(prompts, width=64, height=96)
    pictures = paint(placed, width=64, height=96)
    edges = edge_map(pictures)
    assert edges.shape == pictures.shape
    assert edges.unique().tolist() == [0, 1]
    blocks = layout_map(placed, width=64, height=96)
    inside = object_distance(placed, width=64, height=96) < 0
    for row, prompt in enumerate(prompts):
        assert "background" not in bare(prompt).caption
        named = bare(prompt, names_background=True).caption
        assert named == f"{bare(prompt).caption} on a {prompt.scene.background} background"
        for index, thing in enumerate(prompt.scene.objects):
            colour = torch.tensor(COLOUR_RGB[thing.colour])
            assert int(placed.colour[row, index]) == COLOURS.index(thing.colour)
            assert torch.equal(blocks[row, :, inside[row, index]].unique(dim=1)[:, 0], colour)
    assert (blocks.sum(1) == 0).float().mean() > 0.5


def test_edges_agree_with_themselves_and_with_neighbours_only() -> None:
    pictures = paint(
        place_hinted(suite_prompts("hinted", 4), width=64, height=64), width=64, height=64
    )
    edges = find_edges(pictures)
    assert torch.equal(edge_agreement(edges, edges), torch.ones(4))
    assert edge_agreement(edges, edges.roll(1, 2)).min() > 0.95
    line = torch.zeros(1, 16, 16, dtype=torch.bool)
    line[:, :, 4] = True
    assert edge_agreement(line, line.roll(1, 2), tolerance=0) == 0
    assert edge_agreement(line, line.roll(2, 2)) == 0
    nothing = torch.zeros_like(line)
    assert edge_agreement(nothing, nothing) == 1
    assert edge_agreement(nothing, line) == 0
