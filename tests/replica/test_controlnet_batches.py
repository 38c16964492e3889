"""The most urgent rows first, each client's apart, and a failing one fails alone."""

from __future__ import annotations

import pytest

from ray_cluster.errors import DeviceBroken
from ray_cluster.replica.controlnet.batches import Answer, ControlNetBatches, WaitingRow
from ray_cluster.replica.controlnet.metrics import ControlNetServerMetrics
from tests.replica.controlnet_bank import NAME, RandomBank, ask_of, expected, is_same


class Setup:
    def __init__(self, bank: RandomBank, max_batch: int = 8) -> None:
        self.bank = bank
        self.metrics = ControlNetServerMetrics(NAME)
        self.batches = ControlNetBatches(
            NAME, bank, max_batch=max_batch, clock=lambda: 0.0, metrics=self.metrics
        )

    def open(self, client: int, seed: int, key: str = "") -> None:
        ask = ask_of(seed)
        self.batches.open(client, key or ask.key, ask.conditioning, ask.map)

    def step(
        self, client: int, seed: int, *, due_s: float = 0.0, timestep: float = 1000, key: str = ""
    ) -> None:
        ask = ask_of(seed)
        row = WaitingRow(client, seed, key or ask.key, ask.latents, timestep, due_s)
        self.batches.step([row])


def _names(answers: list[Answer]) -> list[tuple[int, int]]:
    return [(one.row.client, one.row.call) for one in answers]


def test_the_most_urgent_rows_are_computed_first_whoever_asks() -> None:
    setup = Setup(RandomBank(), max_batch=3)
    for client, seed, due_s in ((1, 1, 9.0), (2, 2, -5.0), (1, 3, 2.0), (2, 4, 1.0), (1, 5, 0.0)):
        setup.open(client, seed)
        setup.step(client, seed, due_s=due_s)
    assert _names(setup.batches.compute()) == [(2, 2), (1, 5), (2, 4)]
    assert _names(setup.batches.compute()) == [(1, 3), (1, 1)]
    assert not setup.batches
    assert [len(one) for one in setup.bank.batches] == [3, 2]


def test_the_same_key_of_two_clients_means_two_requests() -> None:
    setup = Setup(RandomBank())
    for client in (1, 2):
        setup.open(client, client, "same")
        setup.step(client, client, key="same")
    answers = setup.batches.compute()
    for one in answers:
        assert one.residuals is not None
        assert is_same(one.residuals, expected(ask_of(one.row.client)))
    setup.batches.close(1, "same")
    setup.step(1, 1, key="same")
    setup.step(2, 2, key="same")
    found = {one.row.client: one for one in setup.batches.compute()}
    assert (found[1].residuals, found[1].refusal) == (None, None)
    assert found[2].residuals is not None


def test_a_client_that_leaves_takes_its_rows_and_keys_along() -> None:
    setup = Setup(RandomBank())
    for client in (1, 2):
        setup.open(client, client)
        setup.step(client, client)
    setup.batches.leave(1)
    assert _names(setup.batches.compute()) == [(2, 2)]
    assert not setup.bank.knows(f"1:{ask_of(1).key}")
    assert setup.bank.knows(f"2:{ask_of(2).key}")


def test_one_row_that_fails_fails_alone() -> None:
    setup = Setup(RandomBank())
    for seed in range(5):
        setup.open(1, seed)
        setup.step(1, seed, timestep=-1 if seed == 3 else 1000)
    answers = {one.row.call: one for one in setup.batches.compute()}
    assert "ValueError: a timestep below 0" in str(answers[3].refusal)
    for seed in (0, 1, 2, 4):
        residuals = answers[seed].residuals
        assert residuals is not None
        assert is_same(residuals, expected(ask_of(seed)))


def test_a_request_that_cannot_be_opened_is_refused_until_it_is_opened_again() -> None:
    setup = Setup(RandomBank())
    ask = ask_of(1)
    wrong = type(ask.conditioning)(ask.conditioning.prompt_embeds * float("nan"))
    setup.batches.open(1, ask.key, wrong, ask.map)
    setup.step(1, 1)
    (answer,) = setup.batches.compute()
    assert "a prompt that is none" in str(answer.refusal)
    setup.open(1, 1)
    setup.step(1, 1)
    (answer,) = setup.batches.compute()
    assert answer.residuals is not None


def test_what_is_dropped_is_unknown_and_a_lost_device_ends_it() -> None:
    setup = Setup(RandomBank(max_kept=1))
    for seed in (1, 2):
        setup.open(1, seed)
        setup.step(1, seed)
    answers = {one.row.call: one for one in setup.batches.compute()}
    assert (answers[1].residuals, answers[1].refusal) == (None, None)
    assert answers[2].residuals is not None
    values = {
        labels: value
        for family in setup.metrics.snapshot()
        for (name, labels), value in family.samples.items()
        if name == "ray_cluster_control_rows_total"
    }
    assert {dict(labels)["result"]: value for labels, value in values.items()} == {
        "unknown": 1,
        "computed": 1,
    }

    def lost(_rows: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    setup.bank.compute = lost  # type: ignore[method-assign, assignment]
    setup.step(1, 2)
    with pytest.raises(DeviceBroken):
        setup.batches.compute()
