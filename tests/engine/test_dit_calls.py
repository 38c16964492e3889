"""One call of a diffusion transformer over images of all sizes is what each gets alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_cluster.engine.batch.spans import Span, Spans
from ray_cluster.engine.dit.attention import AttendAtOnce, attend_by_length
from ray_cluster.errors import ModelUnsupported
from tests.engine.conftest import Zoo
from tests.engine.dits import DiTReference, MixedCall
from tests.engine.harness import CALL_TOLERANCE, CONTROL_FACTOR, difference, load, pool

Record = Callable[[str, object], None]


def test_one_call_over_a_mixed_batch_equals_the_transformer_row_by_row(
    zoo: Zoo, dit: str, record: Record
) -> None:
    model, reference = zoo.model(dit), zoo.reference(dit)
    call = MixedCall.of(model)
    found = call.run(model)
    error = max(call.errors(found, call.expected(reference)))
    record("call", error)
    assert error <= CALL_TOLERANCE
    assert min(float(one.std()) for one in found) > 1e-2


@pytest.mark.parametrize(("name", "dtype"), [("sd35", "bfloat16"), ("flux", "float16")])
def test_in_half_precision_it_is_as_near_to_the_truth_as_the_transformer(
    zoo: Zoo, name: str, dtype: str, record: Record
) -> None:
    call, reference = MixedCall.of(zoo.model(name), count=5), zoo.reference(name)
    folder, half = zoo.folder(name), getattr(torch, dtype)
    model = load(pool(folder, dtype=dtype, defaults={"size": "64x64"}))
    their_model = DiTReference(folder, half)
    truth, cast = call.expected(reference), call.cast(half)
    ours = max(call.errors(cast.run(model), truth))
    theirs = max(call.errors(cast.expected(their_model), truth))
    record(f"ours {dtype}", ours)
    record(f"diffusers {dtype}", theirs)
    assert ours <= 1.5 * theirs


def test_only_guided_requests_of_models_guided_by_rows_take_two(zoo: Zoo, dit: str) -> None:
    by_rows = zoo.model(dit).profile.guidance == "rows"
    call = MixedCall.of(zoo.model(dit), count=3)
    assert [one.is_guided for one in call.conditionings] == [False, by_rows, by_rows]


def test_a_changed_neighbour_changes_nothing(zoo: Zoo, dit: str, record: Record) -> None:
    """Neighbours of the same size and of others; what is changed itself does change."""
    model = zoo.model(dit)
    call = MixedCall.of(model)
    before = call.run(model)
    call.latents[5] = call.latents[5] + 1
    call.timesteps[1] += 100
    call.conditionings[2] = call.conditionings[7]
    call.scales[2] = call.scales[7]
    after = call.run(model)
    changed = (1, 2, 5)
    errors = [difference(*pair) for pair in zip(before, after, strict=True)]
    others = max(error for index, error in enumerate(errors) if index not in changed)
    record("isolation", others)
    assert others <= CALL_TOLERANCE
    assert min(errors[index] for index in changed) >= CONTROL_FACTOR * CALL_TOLERANCE


def test_other_guidance_of_a_distilled_model_shows(zoo: Zoo, record: Record) -> None:
    model = zoo.model("flux")
    call = MixedCall.of(model)
    call.scales[0] = 1.5
    found = call.run(model)
    call.scales[0] = 1.0
    error = call.errors(found, call.expected(zoo.reference("flux")))[0]
    record("control", error)
    assert error >= CONTROL_FACTOR * CALL_TOLERANCE


# each error in both architectures; the attention that is SD3.5's alone
WRONGS = [(name, one) for name in ("sd3", "flux") for one in ("timestep", "prompt", "positions")]
WRONGS += [(name, "attention") for name in ("sd3", "sd35", "flux")]


@pytest.mark.parametrize(("dit", "wrong"), WRONGS)
def test_what_is_computed_wrongly_shows(
    zoo: Zoo, dit: str, wrong: str, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    model = zoo.model(dit)
    call = MixedCall.of(model)
    right = replace(call, timesteps=call.timesteps.clone(), conditionings=[*call.conditionings])
    _spoil(call, wrong, model.executor, monkeypatch)
    # images of a size have neighbours in attention only if there are several
    affected = {"prompt": (1, 4), "attention": (0, 5)}.get(wrong, range(8))
    errors = right.errors(call.run(model), right.expected(zoo.reference(dit)))
    error = min(errors[index] for index in affected)
    record("control", error)
    assert error >= CONTROL_FACTOR * CALL_TOLERANCE


def _spoil(call: MixedCall, wrong: str, executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lean = executor._lean
    if wrong == "timestep":
        call.timesteps = call.timesteps + 20
    elif wrong == "prompt":
        call.conditionings[1], call.conditionings[4] = call.conditionings[4], call.conditionings[1]
    elif wrong == "attention":
        across = f"{type(executor).__module__}.start_attention"
        monkeypatch.setattr(across, lambda _kind: _attend_across_images)
    elif hasattr(lean, "_positions"):
        monkeypatch.setattr(lean, "rotary", lambda packing, device: None)
    else:
        monkeypatch.setattr(lean._embed, "cropped_pos_embed", _from_the_corner(lean._embed))


def _attend_across_images(
    query: Tensor, key: Tensor, value: Tensor, spans: Spans, key_spans: Spans
) -> Tensor:
    assert spans == key_spans
    joined = (Span(slice(0, 1), span.rows, span.num_images * span.length) for span in spans)
    return attend_by_length(query, key, value, *[tuple(joined)] * 2)


def _from_the_corner(embed: Any) -> Callable[[int, int], Tensor]:
    side = embed.pos_embed_max_size

    def crop(height: int, width: int) -> Tensor:
        table = embed.pos_embed.reshape(1, side, side, -1)
        return table[:, : height // embed.patch_size, : width // embed.patch_size].flatten(1, 2)

    return crop


def test_attention_at_once_is_attention_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for PyTorch's own, which runs on GPUs only; the cuts are what is tested."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    calls = []

    def stand_in(
        query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, *most: int
    ) -> Tensor:
        assert ends.dtype == torch.int32
        calls.append((ends.tolist(), key_ends.tolist(), most))
        queries, keys = (
            tuple(Span(slice(0, 1), slice(*pair), pair[1] - pair[0]) for pair in pairwise(own))
            for own in (ends.tolist(), key_ends.tolist())
        )
        return attend_by_length(query, key, value, queries, keys).view(query.shape)

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    spans = (Span(slice(0, 2), slice(0, 10), 5), Span(slice(2, 3), slice(10, 17), 7))
    query, key, value = torch.randn(3, 17, 2, 8)
    attend = AttendAtOnce()
    found = attend(query, key, value, spans, spans)
    assert calls == [([0, 5, 10, 17], [0, 5, 10, 17], (7, 7))]
    # a second attention of other sequences in the same step (SD3.5), then the first one's again
    others = (Span(slice(0, 3), slice(0, 12), 4),)
    attend(query[:12], key[:12], value[:12], others, others)
    attend(query, key, value, spans, spans)
    assert [ends for ends, _, _ in calls[1:]] == [[0, 4, 8, 12], [0, 5, 10, 17]]
    assert difference(found, attend_by_length(query, key, value, spans, spans)) <= 1e-6
    # some of the tokens attend to all of them
    some = (Span(slice(0, 2), slice(0, 6), 3), Span(slice(2, 3), slice(6, 8), 2))
    found = attend(query[:8], key, value, some, spans)
    assert calls[-1] == ([0, 3, 6, 8], [0, 5, 10, 17], (3, 7))
    assert difference(found, attend_by_length(query[:8], key, value, some, spans)) <= 1e-6


def test_residuals_are_refused(zoo: Zoo) -> None:
    executor = zoo.model("sd3").executor
    with pytest.raises(ModelUnsupported, match="ControlNets"):
        executor.decode_half(None, residuals=object())  # type: ignore[arg-type]
