"""ControlNet residuals: where they are added, when they are asked for, and what excludes them.

The truth is diffusers' own UNet with residuals given to it, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_cluster.engine.controlnets.residuals import Arrived, NoResiduals, StepPart
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.step.executor import Residuals
from ray_cluster.engine.step.mixed_step import StepSources, compute_step
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.step.step_call import Held
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.engine.unet.grids import as_rows
from ray_cluster.errors import ModelUnsupported
from ray_cluster.policies.steps.reuse import ReuseSchedule
from tests.engine.conftest import Zoo
from tests.engine.dits import dit_request
from tests.engine.harness import (
    CALL_TOLERANCE,
    CONTROL_FACTOR,
    RUN_TOLERANCE,
    EngineRun,
    all_rows,
    difference,
    drive,
    request,
    start_all,
)
from tests.engine.local_residuals import LocalResiduals
from tests.engine.two_steps import SCALE, StepRow, batch_of

SIZES_PX = ((64, 64), (96, 96), (64, 128), (64, 64))
# of the last request there are none
CONTROLLED = ("r0", "r1", "r2")
_STRENGTH = 0.3


def shapes(model: LoadedModel, height: int, width: int) -> list[tuple[int, int, int]]:
    """Channels, height and width of every skip connection and of the middle."""
    config: Any = model.executor._model.config  # type: ignore[attr-defined]
    channels, layers = config.block_out_channels, config.layers_per_block
    found = [(channels[0], height, width)]
    for index, width_of in enumerate(channels):
        found += [(width_of, height, width)] * layers
        if index < len(channels) - 1:
            height, width = -(-height // 2), -(-width // 2)
            found.append((width_of, height, width))
    return [*found, found[-1]]


class Control:
    """Random residuals of every request, the same in all of its steps.

    They stand in for ControlNets: of each request one set for the unconditional row, one for the
    other.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.of = cache(self._of)
        self.num_computed = 0

    def _of(self, request_id: str, height: int, width: int) -> list[Tensor]:
        """Return ``[2, C, h, w]`` for every skip connection, and the middle."""
        generator = torch.Generator().manual_seed(int(request_id[1:]))
        return [
            _STRENGTH * torch.randn((2, *shape), generator=generator)
            for shape in shapes(self._model, height, width)
        ]

    def source(self) -> LocalResiduals:
        return LocalResiduals(self.compute, self.adds_to)

    def adds_to(self, state: RequestState) -> bool:
        return state.request.request_id in CONTROLLED

    def compute(self, part: StepPart) -> Residuals:
        self.num_computed += 1
        layout = part.batch.layout
        images = []
        for request_index, is_last in zip(layout.row_request, layout.is_conditional, strict=True):
            state = part.states[request_index]
            own = self.of(state.request.request_id, *state.latents.shape[1:])
            strength = float(self.adds_to(state))
            images.append([strength * one[int(is_last)][None] for one in own])
        flat = [torch.cat([as_rows(one) for one in parts]) for parts in zip(*images, strict=True)]
        return Residuals(tuple(flat[:-1]), flat[-1])


@pytest.fixture(scope="module")
def control(zoo: Zoo) -> Control:
    return Control(zoo.model("sd"))


def states_of(model: LoadedModel, **changes: Any) -> list[RequestState]:
    """Guided ones and one without; none of the sizes has but one kind."""
    requests = [
        request(
            f"r{index}",
            width_px=width,
            height_px=height,
            seed=index,
            prompt="red " * (index + 1),
            guidance_scale=1.0 if index == 1 else SCALE,
            num_steps=2,
        )
        for index, (height, width) in enumerate(SIZES_PX)
    ]
    return start_all(model, requests, **changes)


def engine_with(model: LoadedModel, residuals: Any, layout: Any, executor: Any) -> StepEngine:
    return StepEngine(
        executor or model.executor,
        all_rows,
        model.tables,
        lambda: 0.0,
        layout=lambda _sizes: layout,
        sources=StepSources(residuals=residuals),
    )


def run(
    model: LoadedModel,
    residuals: Any,
    states: Sequence[RequestState],
    *,
    layout: str = "mixed",
    executor: Any = None,
) -> EngineRun:
    return drive(engine_with(model, residuals, layout, executor), {0: states})


def held(model: LoadedModel, states: Sequence[RequestState]) -> list[Held]:
    table = model.tables.table("ddim", 2, (64, 64))
    return [Held(state, table, 0) for state in states]


class Noting:
    """An executor that notes the predictions of its calls, and the order of halves."""

    def __init__(self, inner: Any, calls: list[str] | None = None) -> None:
        self.num_conditions = inner.num_conditions
        self.device, self.num_levels = inner.device, inner.num_levels
        self.num_outer, self.patch_multiple = inner.num_outer, inner.patch_multiple
        self.prepare, self._inner = inner.prepare, inner
        self.calls = [] if calls is None else calls
        self.predictions: list[Tensor] = []

    def encode_half(self, batch: Any) -> Any:
        self.calls.append("encode")
        return self._inner.encode_half(batch)

    def decode_half(self, encoded: Any, residuals: Residuals | None = None) -> Tensor:
        self.calls.append("decode")
        found: Tensor = self._inner.decode_half(encoded, residuals)
        self.predictions.append(found)
        return found


@torch.inference_mode()
def truth(zoo: Zoo, control: Control, part: StepPart, index: int) -> Tensor:
    """What diffusers' UNet predicts for a request of a batch, ``[C, h, w]``."""
    unet: Any = zoo.reference("sd").pipeline.unet
    state, layout = part.states[index], part.batch.layout
    owned, size = state.conditioning, state.latents.shape[1:]
    latents = part.batch.latents.split(layout.request_tokens)[index]
    image = latents.unflatten(0, size).permute(2, 0, 1)[None]
    own = control.of(state.request.request_id, *size)

    def predict(embeds: Tensor, row: int) -> Tensor:
        more = [one[row][None] * control.adds_to(state) for one in own]
        found: Tensor = unet(
            image,
            part.batch.timesteps[index],
            embeds[None],
            down_block_additional_residuals=more[:-1],
            mid_block_additional_residual=more[-1],
        ).sample[0]
        return found

    found = predict(owned.prompt_embeds, 1)
    if owned.negative_embeds is None:
        return found
    blank = predict(owned.negative_embeds, 0)
    return blank + SCALE * (found - blank)


@pytest.mark.parametrize("layout", ["mixed", "grouped"])
def test_every_row_is_diffusers_with_its_residuals(zoo: Zoo, control: Control, layout: Any) -> None:
    model = zoo.model("sd")
    parts: list[StepPart] = []

    def compute(part: StepPart) -> Residuals:
        parts.append(part)
        return control.compute(part)

    executor: Any = Noting(model.executor)
    sources = StepSources(residuals=LocalResiduals(compute, control.adds_to))
    with torch.inference_mode():
        compute_step(held(model, states_of(model)), executor, lambda _sizes: layout, sources)
    assert len(parts) == (1 if layout == "mixed" else 3)
    for part, prediction in zip(parts, executor.predictions, strict=True):
        # the source adds nothing of its own
        given = control.compute(part)
        assert torch.equal(prediction, directly(model, part, given))
        # a ControlNet elsewhere may compute in another number format than the model
        double = Residuals(tuple(one.double() for one in given.down), given.mid.double())
        assert torch.equal(prediction, directly(model, part, double))
        sizes = part.batch.layout.request_tokens
        found, bare = prediction.split(sizes), directly(model, part, None).split(sizes)
        for index, state in enumerate(part.states):
            expected = truth(zoo, control, part, index).permute(1, 2, 0).flatten(0, 1)
            assert difference(found[index], expected) <= (2 * SCALE - 1) * CALL_TOLERANCE
            if control.adds_to(state):
                assert difference(bare[index], expected) >= CONTROL_FACTOR * CALL_TOLERANCE


@torch.inference_mode()
def directly(model: LoadedModel, part: StepPart, residuals: Residuals | None) -> Tensor:
    return model.executor.decode_half(model.executor.encode_half(part.batch), residuals)


@dataclass
class Recording:
    """A source that notes when it is called."""

    inner: LocalResiduals
    calls: list[str] = field(default_factory=list)

    def adds_to(self, state: RequestState) -> bool:
        return self.inner.adds_to(state)

    def is_ready(self, state: RequestState) -> bool:
        return self.inner.is_ready(state)

    def took_step(self, state: RequestState) -> None:
        self.inner.took_step(state)

    def drop(self, state: RequestState) -> None:
        self.inner.drop(state)

    def begin(self, parts: Sequence[StepPart]) -> Any:
        self.calls.append(f"begin {len(parts)}")
        pending: Any = self.inner.begin(parts)
        outer = self

        class Pending:
            def of(self, index: int) -> Arrived:
                outer.calls.append(f"residuals {index}")
                found: Arrived = pending.of(index)
                return found

        return Pending()


def test_services_are_asked_before_the_first_halves_and_heard_between_the_halves(
    zoo: Zoo, control: Control
) -> None:
    model = zoo.model("sd")
    source = Recording(control.source())
    executor = Noting(model.executor, source.calls)
    assert not run(model, source, states_of(model), layout="grouped", executor=executor).failed
    later = [call for index in range(3) for call in (f"residuals {index}", "decode")]
    assert source.calls == ["begin 3", *["encode"] * 3, *later] * 2


def test_without_residuals_each_calls_halves_follow_each_other(zoo: Zoo) -> None:
    model = zoo.model("sd")
    executor = Noting(model.executor)
    run(model, NoResiduals(), states_of(model), layout="grouped", executor=executor)
    assert executor.calls == ["encode", "decode"] * 6


def test_nothing_is_computed_in_a_step_of_requests_without_residuals(
    zoo: Zoo, control: Control
) -> None:
    model = zoo.model("sd")
    before = control.num_computed
    without = run(model, control.source(), states_of(model)[3:])
    assert control.num_computed == before
    run(model, control.source(), states_of(model)[:1])
    assert control.num_computed == before + 2
    plain = run(model, NoResiduals(), states_of(model)[3:])
    assert torch.equal(without.latents("r3"), plain.latents("r3"))


def test_residuals_reach_images_whose_matrices_have_rows_to_spare(
    zoo: Zoo, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.model("sd")
    results = []
    for rounds in (False, True):
        monkeypatch.setattr(model.executor._encoder, "_rounds", rounds)
        results.append(run(model, control.source(), states_of(model)))
    for request_id in results[0].finished:
        gap = difference(*(one.latents(request_id) for one in results))
        assert gap <= RUN_TOLERANCE


# --- what is refused ---

REUSE = ReuseSchedule(num_outer=2, interval=2)


def test_a_request_with_both_reuse_and_residuals_is_refused(zoo: Zoo, control: Control) -> None:
    model = zoo.model("sd")
    engine = engine_with(model, control.source(), "mixed", None)
    both, *_, other = states_of(model, reuse=REUSE)
    with pytest.raises(ValueError, match="'r0' has a reuse schedule and ControlNet residuals"):
        engine.add(both)
    engine.add(other)
    assert len(engine) == 1


def test_a_model_call_with_both_is_refused_before_any_work(zoo: Zoo, control: Control) -> None:
    model = zoo.model("sd")
    source = Recording(control.source())
    executor: Any = Noting(model.executor, source.calls)
    rows = held(model, [states_of(model)[0], states_of(model, reuse=REUSE)[3]])
    with pytest.raises(ValueError, match="'r0' has ControlNet residuals and 'r3' a reuse"):
        compute_step(rows, executor, lambda _sizes: "mixed", StepSources(residuals=source))
    assert source.calls == []
    assert all(row.prepared is None for row in rows)


def test_an_executor_refuses_them_too(zoo: Zoo) -> None:
    executor: Any = zoo.model("sd").executor
    [state] = states_of(zoo.model("sd"))[:1]
    owned = state.conditioning
    with torch.inference_mode():
        row = StepRow(executor.prepare(owned), owned.is_guided, 2, [state.latents])
        half = executor.encode_half(batch_of(executor, [row], 0))
        with pytest.raises(ValueError, match="reuse activations"):
            executor.decode_half(half, Residuals(half.skips, half.hidden))


def test_residuals_of_another_number_of_skip_connections_are_refused(
    zoo: Zoo, control: Control
) -> None:
    model = zoo.model("sd")

    def fewer(part: StepPart) -> Residuals:
        whole = control.compute(part)
        return Residuals(whole.down[:-1], whole.mid)

    done = run(model, LocalResiduals(fewer, control.adds_to), states_of(model)[:1])
    assert "residuals for 5 skip connections; the model has 6" in str(done.failed["r0"].error)


def test_rows_that_reuse_and_rows_with_residuals_step_apart(zoo: Zoo, control: Control) -> None:
    """In one engine, in the same steps; both come to what they come to alone."""
    model = zoo.model("sd")

    def states() -> list[RequestState]:
        return [*states_of(model)[:3], states_of(model, reuse=REUSE)[3]]

    together = run(model, control.source(), states())
    assert together.batch_sizes == [4, 4]
    assert not together.failed
    for index in range(4):
        request_id = f"r{index}"
        alone = run(model, control.source(), [states()[index]]).latents(request_id)
        assert difference(together.latents(request_id), alone) <= RUN_TOLERANCE


def test_diffusion_transformers_take_none(zoo: Zoo) -> None:
    model = zoo.model("sd3")
    nothing = Residuals((), torch.zeros(0, 0))
    source = LocalResiduals(lambda _part: nothing, lambda _state: True)
    table = model.tables.table("flow_match_euler", 4, (64, 64))
    rows = [Held(state, table, 0) for state in start_all(model, [dit_request()])]
    with (
        torch.inference_mode(),
        pytest.raises(ModelUnsupported, match="ControlNets of diffusion transformers"),
    ):
        compute_step(rows, model.executor, lambda _s: "mixed", StepSources(residuals=source))
