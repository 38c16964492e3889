"""Images of several sizes in one batch: whoever comes, goes or changes, each is as if alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_cluster.engine.batch.token_layout import (
    Composition,
    KeptLayouts,
    Segment,
    SizeGroup,
    composition_of,
    layout_of,
)
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.engine.unet import parts
from ray_cluster.requests import SAMPLER_NAMES, ImageRequest
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    CALL_TOLERANCE,
    CONTROL_FACTOR,
    RUN_TOLERANCE,
    all_rows,
    call_model,
    difference,
    drive,
    request,
    run_alone,
    start,
    start_all,
)
from tests.engine.reusing import Visit, visits
from tests.examples import a_few

Record = Callable[[str, object], None]
SIZES_PX = ((64, 64), (96, 96), (128, 128), (64, 128), (128, 64))


class Alone:
    """What a model makes of requests that are alone, each made once."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._made = cache(lambda one: run_alone(model, one))

    def __call__(self, one: ImageRequest) -> Tensor:
        made: Tensor = self._made(replace(one, request_id="alone"))
        return made


@pytest.fixture(scope="module")
def alone(zoo: Zoo) -> Alone:
    return Alone(zoo.model("sd"))


def engine_with(model: LoadedModel, layout: Any = None) -> StepEngine:
    return StepEngine(model.executor, all_rows, model.tables, lambda: 0.0, layout=layout)


@a_few  # each is a run of a model
@given(visits(SIZES_PX, samplers=SAMPLER_NAMES), st.sampled_from(["mixed", "grouped"]))
def test_whoever_comes_and_goes_every_image_is_as_if_alone(
    zoo: Zoo, alone: Alone, some: list[Visit], layout: str
) -> None:
    model = zoo.model("sd")
    joining: dict[int, list[Any]] = {}
    leaving: dict[int, list[str]] = {}
    for visit in some:
        joining.setdefault(visit.joins, []).append(start(model, visit.one))
        if visit.stays is not None:
            leaving.setdefault(visit.joins + visit.stays, []).append(visit.one.request_id)
    run = drive(engine_with(model, lambda _sizes: layout), joining, leaving)
    assert not run.failed
    for visit in some:
        steps = visit.one.num_steps
        if visit.stays is None or visit.stays > steps:
            found = run.latents(visit.one.request_id)
            assert difference(found, alone(visit.one)) <= RUN_TOLERANCE


@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_a_changed_neighbour_of_another_size_changes_nothing(
    zoo: Zoo, family: str, record: Record
) -> None:
    executor, states = zoo.model(family).executor, start_all(zoo.model(family), kinds())
    latents = [torch.randn(state.latents.shape) for state in states]
    timesteps = torch.linspace(1, 999, len(states)).round()
    given_all = [state.conditioning for state in states]
    scales = [state.request.guidance_scale for state in states]
    before = call_model(executor, latents, timesteps, given_all, scales)
    for changed in range(len(states)):
        others = [one * 50 if i == changed else one for i, one in enumerate(latents)]
        times = timesteps.clone()
        times[changed] = 500.0
        after = call_model(executor, others, times, given_all, scales)
        gaps = [difference(*pair) for pair in zip(before, after, strict=True)]
        record(f"neighbour {changed}", max(gaps[:changed] + gaps[changed + 1 :]))
        assert gaps.pop(changed) >= CONTROL_FACTOR * CALL_TOLERANCE
        assert max(gaps) <= CALL_TOLERANCE


def kinds() -> list[ImageRequest]:
    """One request of each size, guided and not."""
    return [
        request(f"r{i}", width_px=width, height_px=height, seed=i, guidance_scale=1.0 + 2 * (i % 2))
        for i, (width, height) in enumerate(SIZES_PX)
    ]


def largest_gap(zoo: Zoo) -> float:
    """How far a mixed call of the model is from calls of one image each."""
    model = zoo.model("shapes")
    states = start_all(model, kinds() * 1)
    generator = torch.Generator().manual_seed(0)
    latents = [torch.randn(state.latents.shape, generator=generator) for state in states] * 2
    timesteps = torch.linspace(1, 999, len(latents)).round()
    given_all = [state.conditioning for state in states] * 2
    scales = [1.0] * len(latents)
    together = call_model(model.executor, latents, timesteps, given_all, scales)
    apart = [
        call_model(model.executor, [one], timesteps[i : i + 1], [given_all[i]], [1.0])[0]
        for i, one in enumerate(latents)
    ]
    return max(difference(*pair) for pair in zip(together, apart, strict=True))


def test_a_mixed_call_is_that_of_each_image_alone(zoo: Zoo) -> None:
    assert largest_gap(zoo) <= CALL_TOLERANCE


def test_attention_over_all_images_of_a_size_would_show(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = parts.Attention._attend

    def attend_across(self: Any, query: Tensor, keys_values: Tensor) -> Tensor:
        """Attention whose keys are those of all images of the size."""
        return attend(self, query.flatten(0, 1)[None], keys_values.flatten(0, 1)[None])

    monkeypatch.setattr(parts.Attention, "_attend", attend_across)
    assert largest_gap(zoo) >= CONTROL_FACTOR * CALL_TOLERANCE


def test_norms_over_all_images_of_a_size_would_show(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_all(self: Any, images: Tensor, segment: Segment) -> Tensor:
        assert len(images) == segment.num_images
        joint = images.transpose(0, 1).flatten(1, 2)[None]
        normed: Tensor = self._norm(joint)
        back = normed[0].unflatten(1, images.shape[:1] + images.shape[2:3]).transpose(0, 1)
        return torch.nn.functional.silu(back) if self._activates else back

    monkeypatch.setattr(parts.Normalise, "__call__", of_all)
    assert largest_gap(zoo) >= CONTROL_FACTOR * CALL_TOLERANCE


sizes = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.booleans()), min_size=1, max_size=12
)


@given(sizes, st.integers(1, 3))
def test_a_layout_has_every_pixel_of_every_row_once(
    some: list[tuple[int, int, bool]], num_levels: int
) -> None:
    composition, order = composition_of(some)
    layout = layout_of(composition, num_levels)
    assert sorted(order) == list(range(len(some)))
    ordered = [some[index] for index in order]
    assert layout.request_tokens == tuple(height * width for height, width, _ in ordered)
    assert len(layout.row_request) == len(some) + sum(guided for _, _, guided in some)
    for depth, level in enumerate(layout.levels):
        assert level.segments[0].tokens.start == level.segments[0].images.start == 0
        pairs = zip(level.segments, level.segments[1:], strict=False)
        assert all(one.tokens.stop == other.tokens.start for one, other in pairs)
        assert level.segments[-1].tokens.stop == level.num_tokens
        assert level.segments[-1].images.stop == len(layout.row_request)
        for segment, group in zip(level.segments, composition, strict=True):
            assert segment.height == -(-group.height // 2**depth)
            rows = segment.tokens.stop - segment.tokens.start
            assert rows == segment.num_images * segment.height * segment.width
    cpu = torch.device("cpu")
    unguided = [not guided for _, _, guided in ordered]
    owner = layout.request_of_token(cpu)
    assert owner.tolist() == sorted(owner.tolist())
    kept = layout.conditional_tokens(cpu) == layout.unconditional_tokens(cpu)
    assert kept.tolist() == [unguided[request] for request in owner.tolist()]
    both = torch.cat([layout.conditional_tokens(cpu), layout.unconditional_tokens(cpu)[~kept]])
    assert sorted(both.tolist()) == list(range(layout.levels[0].num_tokens))


def test_layouts_are_kept_within_a_number_of_bytes() -> None:
    def composition(height: int) -> Composition:
        return ((SizeGroup(height, 10, 0, 1)),)

    num_bytes = layout_of(composition(1), 1).table_bytes
    cpu = torch.device("cpu")
    made = layout_of(composition(1), 1)
    tables = (made.request_of_token, made.conditional_tokens, made.unconditional_tokens)
    rows = made.request_of_row(cpu)
    assert num_bytes == sum(table(cpu).nbytes for table in tables) + rows.nbytes
    kept = KeptLayouts(5 * num_bytes)
    one, two = kept.of(composition(1), 1), kept.of(composition(2), 1)
    assert kept.of(composition(1), 1) is one
    # a third that is too large for all three: the one that was not asked for goes
    kept.of(composition(3), 1)
    assert kept.of(composition(1), 1) is one
    assert kept.of(composition(2), 1) is not two
    large = kept.of(composition(1000), 1)
    assert kept.of(composition(1000), 1) is large
