"""Requests that add low-rank products to layers, in one batch with others and with none.

The truth is diffusers' own model with those products merged into its weights, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_cluster.engine.adapters.deltas import RowDeltas
from ray_cluster.engine.device.cuda_graphs import GraphedExecutor
from ray_cluster.engine.models import packed_weights
from ray_cluster.engine.models.denoisers import build_executor
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.errors import ModelUnsupported
from ray_cluster.policies.steps.reuse import ActivePatches
from tests.engine.conftest import DITS, Zoo
from tests.engine.dits import DiTReference, dit_request
from tests.engine.harness import (
    CALL_TOLERANCE,
    CONTROL_FACTOR,
    call_model,
    difference,
    drive,
    engine_of,
    load,
    pool,
    request,
    start_all,
)
from tests.engine.low_rank import Adapter
from tests.engine.two_steps import SCALE, StepRow, batch_of, predict_batch

Record = Callable[[str, object], None]

MODELS = ("sd", "sdxl", "sd3", "sd35", "flux")
# the adapter of each row, with its size, and whether it has guidance; neighbours share one
ROWS: tuple[tuple[int | None, tuple[int, int], float], ...] = (
    (0, (64, 64), 3.0),
    (None, (64, 64), 1.0),
    (1, (64, 64), 3.0),
    (1, (96, 96), 1.0),
    (0, (96, 96), 3.0),
    (None, (64, 128), 3.0),
    (2, (64, 128), 1.0),
)
RANKS = (4, 2, 7)
# of what SD3 makes of the prompts in its last block, nobody asks
UNUSED = {"transformer_blocks.2.attn.add_q_proj"}


class Rows:
    """The rows of one model call."""

    def __init__(self, model: LoadedModel, name: str) -> None:
        make = dit_request if name in DITS else request
        self.requests = [
            make(
                f"r{index}",
                prompt="red " * (index + 1),
                width_px=size[0],
                height_px=size[1],
                guidance_scale=scale,
            )
            for index, (_, size, scale) in enumerate(ROWS)
        ]
        self.states = start_all(model, self.requests)
        generator = torch.Generator().manual_seed(0)
        self.latents = [
            torch.randn(state.latents.shape, generator=generator) for state in self.states
        ]
        self.timesteps = torch.linspace(5, 995, len(ROWS)).round()

    def run(
        self, executor: Any, deltas: Sequence[Any] = (), count: int = len(ROWS)
    ) -> list[Tensor]:
        """Call a model for the first rows."""
        return call_model(
            executor,
            self.latents[:count],
            self.timesteps[:count],
            [state.conditioning for state in self.states[:count]],
            [one.guidance_scale for one in self.requests[:count]],
            deltas,
        )

    def error(self, index: int, found: Tensor, expected: Tensor) -> float:
        """How far a prediction is off, as one of its model rows."""
        is_guided = self.states[index].conditioning.is_guided
        scale = self.requests[index].guidance_scale
        return difference(found, expected) / (2 * scale - 1 if is_guided else 1.0)


class Adapted:
    """A model with three adapters for all of its layers, and what diffusers makes of each row."""

    def __init__(self, zoo: Zoo, name: str) -> None:
        self.reference, self.model = zoo.reference(name), zoo.model(name)
        self.rows = Rows(self.model, name)
        self.part = "transformer" if name in DITS else "unet"
        self.original: nn.Module = getattr(self.reference.pipeline, self.part)
        self.adapters = [
            Adapter.random(self.original, rank, seed) for seed, rank in enumerate(RANKS)
        ]
        self.expected = [self._expected(index) for index in range(len(ROWS))]

    def deltas(self, executor: Any) -> list[Any]:
        """Those of each row."""
        bound = [executor.bind(one.deltas) for one in self.adapters]
        return [None if which is None else bound[which] for which, _, _ in ROWS]

    def known(self, executor: Any) -> list[Any]:
        """The same, of factors that the engine knows and may put together."""
        bound = [executor.bind(one.factors) for one in self.adapters]
        return [None if which is None else bound[which] for which, _, _ in ROWS]

    def errors(self, found: Sequence[Tensor]) -> list[float]:
        pairs = enumerate(zip(found, self.expected, strict=True))
        return [self.rows.error(index, *pair) for index, pair in pairs]

    @torch.inference_mode()
    def _expected(self, index: int) -> Tensor:
        which = ROWS[index][0]
        owned = self.rows.states[index].conditioning
        merged = self.original if which is None else self.adapters[which].merged(self.original)
        pipeline = self.reference.pipeline
        setattr(pipeline, self.part, merged)
        try:
            scale = self.rows.requests[index].guidance_scale
            found = self._predict(index, owned, negative=False)
            if owned.is_guided:
                blank = self._predict(index, owned, negative=True)
                found = blank + scale * (found - blank)
            return found
        finally:
            setattr(pipeline, self.part, self.original)

    def _predict(self, index: int, owned: Conditioning, *, negative: bool) -> Tensor:
        rows, prefix = self.rows, "negative" if negative else "prompt"
        embeds = getattr(owned, f"{prefix}_embeds")
        pooled = owned.negative_pooled_embeds if negative else owned.pooled_embeds
        latents, timestep = rows.latents[index], rows.timesteps[index]
        if isinstance(self.reference, DiTReference):
            scale = rows.requests[index].guidance_scale
            return self.reference.predict(latents, timestep, (embeds, pooled), scale)
        added = None
        if pooled is not None:
            assert owned.time_ids is not None
            added = {"text_embeds": pooled[None], "time_ids": owned.time_ids[None]}
        unet = self.reference.pipeline.unet
        found: Tensor = unet(latents[None], timestep, embeds[None], added_cond_kwargs=added).sample
        return found[0]


@pytest.fixture(scope="module")
def adapted(zoo: Zoo) -> Callable[[str], Adapted]:
    return cache(lambda name: Adapted(zoo, name))


@pytest.mark.parametrize("name", MODELS)
def test_every_row_is_diffusers_with_its_own_weights_merged(
    adapted: Callable[[str], Adapted], name: str, record: Record
) -> None:
    subject = adapted(name)
    executor = subject.model.executor
    errors = subject.errors(subject.rows.run(executor, subject.deltas(executor)))
    record(f"merged {name}", max(errors))
    assert max(errors) <= CALL_TOLERANCE
    # without its deltas, or with another row's, a row is far away
    bare = subject.errors(subject.rows.run(executor))
    owned = subject.deltas(executor)
    swapped = subject.errors(subject.rows.run(executor, owned[1:] + owned[:1]))
    for index, (which, _, _) in enumerate(ROWS):
        if which is not None:
            assert bare[index] >= CONTROL_FACTOR * CALL_TOLERANCE
        if which != ROWS[(index + 1) % len(ROWS)][0]:
            assert swapped[index] >= CONTROL_FACTOR * CALL_TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_products_that_are_put_together_are_those_one_by_one(
    adapted: Callable[[str], Adapted], name: str, record: Record
) -> None:
    """In the first steps of these rows, and in further ones, for which factors are stacked."""
    subject = adapted(name)
    executor = subject.model.executor
    owned = subject.known(executor)
    for step in range(4):
        errors = subject.errors(subject.rows.run(executor, owned))
        record(f"together {name}, step {step}", max(errors))
        assert max(errors) <= CALL_TOLERANCE
    swapped = subject.errors(subject.rows.run(executor, owned[1:] + owned[:1]))
    assert max(swapped) >= CONTROL_FACTOR * CALL_TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_rows_without_deltas_are_what_they_are_in_a_batch_without_any(
    adapted: Callable[[str], Adapted], name: str
) -> None:
    subject = adapted(name)
    executor = subject.model.executor
    before = subject.rows.run(executor)
    after = subject.rows.run(executor, subject.deltas(executor))
    for index, (which, _, _) in enumerate(ROWS):
        assert torch.equal(before[index], after[index]) is (which is None)


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_layers_that_are_not_packed_do_the_same(
    adapted: Callable[[str], Adapted], zoo: Zoo, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_weights, "can_pack", lambda _weight: False)
    executor = load(pool(zoo.folder(name), defaults={"size": "64x64"})).executor
    subject = adapted(name)
    found = subject.rows.run(executor, subject.deltas(executor))
    assert max(subject.errors(found)) <= CALL_TOLERANCE


@pytest.mark.parametrize(
    "name",
    # a run for each of its many layers, of the kinds that sd has
    [pytest.param(name, marks=pytest.mark.slow) if name == "sdxl" else name for name in MODELS],
)
def test_each_layers_delta_is_seen(
    adapted: Callable[[str], Adapted], name: str, record: Record
) -> None:
    """So that none hides behind those of all others: a row, by itself, lacks one at a time.

    Queries hardly matter in a random model, so the factor is not that of other controls.
    """
    subject = adapted(name)
    executor, deltas = subject.model.executor, subject.adapters[0].deltas
    gaps = {}
    for lacking in deltas.keys() - UNUSED:
        rest = {path: one for path, one in deltas.items() if path != lacking}
        [found] = subject.rows.run(executor, [executor.bind(rest)], count=1)
        gaps[lacking] = subject.rows.error(0, found, subject.expected[0])
    least = min(gaps, key=gaps.__getitem__)
    record(f"least of {len(gaps)}: {least}", gaps[least])
    assert gaps[least] >= 10 * CALL_TOLERANCE


def test_a_path_that_names_no_layer_is_refused(zoo: Zoo) -> None:
    executor = zoo.model("sd").executor
    given = dict.fromkeys(["conv_in", "mid_block.nothing", "mid_block"], lambda inputs: inputs)
    with pytest.raises(ModelUnsupported, match=r"2 of 3 deltas .*'mid_block.nothing'"):
        executor.bind(given)


def test_an_engine_steps_requests_with_deltas_and_without(
    adapted: Callable[[str], Adapted], zoo: Zoo
) -> None:
    subject = adapted("sd")
    model, executor = subject.model, subject.model.executor
    merged = build_executor(
        subject.adapters[0].merged(subject.original), vae_scale_factor=4, device=executor.device
    )
    requests = [request(f"r{index}", seed=index, num_steps=3) for index in range(3)]
    engine = engine_of(model)
    for index, state in enumerate(start_all(model, requests)):
        engine.add(state, executor.bind(subject.adapters[0].deltas) if index == 1 else None)
    run = drive(engine, {0: []})
    for index, one in enumerate(requests):
        alone = engine_of(model, executor=merged if index == 1 else None)
        expected = drive(alone, {0: start_all(model, [one])}).latents(one.request_id)
        assert difference(run.latents(one.request_id), expected) <= 1e-4


def test_a_graph_never_runs_for_a_batch_with_deltas(adapted: Callable[[str], Adapted]) -> None:
    subject = adapted("sd")
    captured: list[bool] = []

    def capture(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        captured.append(True)
        return run(), lambda: None

    graphed = GraphedExecutor(subject.model.executor, capture=capture)
    owned = subject.deltas(subject.model.executor)
    assert max(subject.errors(subject.rows.run(graphed, owned))) <= CALL_TOLERANCE
    assert not captured
    subject.rows.run(graphed)
    assert captured


@pytest.mark.parametrize("by_patch", [False, True])
@pytest.mark.parametrize("name", ["sd", "sd35", "flux"])
def test_rows_that_reuse_have_deltas_too(
    adapted: Callable[[str], Adapted], zoo: Zoo, name: str, by_patch: bool
) -> None:
    subject = adapted(name)
    executor: Any = subject.model.executor
    patches = ActivePatches(4, (True, False, False, True) * 4)
    plan = ((0, 1, True), (1, 1, by_patch), (None, None, False), (2, None, False))

    def row_of(one: Any, which: int | None, cut: int | None, *, partial: bool) -> StepRow:
        owned = subject.rows.states[0].conditioning
        shape, generator = subject.rows.latents[0].shape, torch.Generator().manual_seed(cut or 7)
        latents = [torch.randn(shape, generator=generator) for _ in range(2)]
        deltas = None
        if one is executor and which is not None:
            deltas = executor.bind(subject.adapters[which].deltas)
        prepared = one.prepare(owned, deltas)
        active = patches if partial and by_patch else None
        return StepRow(prepared, owned.is_guided, cut, latents, active=active, deltas=deltas)

    def second_step(one: Any, rows: list[StepRow]) -> list[Tensor]:
        predict_batch(one, rows, batch_of(one, rows, 0))
        return predict_batch(one, rows, batch_of(one, rows, 1))

    with torch.inference_mode():
        rows = [row_of(executor, which, cut, partial=part) for which, cut, part in plan]
        found = second_step(executor, rows)
        for index, (which, cut, part) in enumerate(plan):
            merged: Any = subject.original
            adapter = Adapter({}) if which is None else subject.adapters[which]
            merged = build_executor(
                adapter.merged(merged), vae_scale_factor=4, device=executor.device
            )
            [expected] = second_step(merged, [row_of(merged, which, cut, partial=part)])
            assert difference(found[index], expected) <= (2 * SCALE - 1) * CALL_TOLERANCE


def test_spans_are_cut_and_joined() -> None:
    one, other = ({nn.Linear(1, 1): torch.neg} for _ in range(2))
    deltas = RowDeltas.of([None, one, one, other, None, other])
    assert deltas is not None
    assert [span.rows for span in deltas.spans] == [slice(1, 3), slice(3, 4), slice(5, 6)]
    rows = deltas.spread([2, 3, 1, 4, 5, 1])
    assert [span.rows for span in rows.spans] == [slice(2, 6), slice(6, 10), slice(15, 16)]
    part = rows.within(slice(4, 12))
    assert part is not None
    assert [span.rows for span in part.spans] == [slice(0, 2), slice(2, 6)]
    assert rows.within(slice(10, 15)) is None
    (layer,) = other
    runs = [(run, own is not None) for run, own in rows.runs(layer, 20)]
    expected = [(0, 6, False), (6, 10, True), (10, 15, False), (15, 16, True), (16, 20, False)]
    assert runs == [(slice(first, last), has) for first, last, has in expected]
    assert RowDeltas.of([None, None]) is None
