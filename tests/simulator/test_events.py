"""Virtual time runs in order and only forwards."""

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.simulator.events import EventQueue


@given(st.lists(st.integers(0, 5), max_size=30))
def test_events_happen_by_instant_and_those_of_one_instant_as_they_were_asked_for(
    instants: list[int],
) -> None:
    events = EventQueue()
    seen: list[tuple[float, int]] = []

    def note(number: int) -> None:
        seen.append((events.now_s, number))

    for number, instant in enumerate(instants):
        events.at(instant, partial(note, number))
    events.run()
    assert seen == sorted((float(instant), number) for number, instant in enumerate(instants))


@given(st.lists(st.integers(0, 5), max_size=20), st.lists(st.integers(0, 5), max_size=20))
def test_many_instants_at_once_are_as_if_they_had_been_asked_for_one_by_one(
    many: list[int], others: list[int]
) -> None:
    def seen(*, at_once: bool) -> list[tuple[float, str]]:
        events, happened = EventQueue(), list[tuple[float, str]]()

        def note(what: str) -> None:
            happened.append((events.now_s, what))
            # what an event asks for at its own instant comes after all that was asked for before
            events.after(0, lambda: happened.append((events.now_s, f"after {what}")))

        events.at(2, lambda: note("before"))
        if at_once:
            events.at_each(many, lambda number: note(f"{number}"))
        else:
            for number, instant in enumerate(many):
                events.at(instant, partial(note, f"{number}"))
        for number, instant in enumerate(others):
            events.at(instant, partial(note, f"other {number}"))
        events.run()
        return happened

    assert seen(at_once=True) == seen(at_once=False)


def test_what_is_called_off_does_not_happen_and_moves_no_clock() -> None:
    events, seen = EventQueue(), []
    late = events.at(9, lambda: seen.append("late"))
    events.at(4, late.call_off)
    events.run()
    assert seen == []
    assert events.now_s == 4
    late.call_off()


def test_an_event_may_ask_for_more_and_what_is_past_is_now() -> None:
    events, seen = EventQueue(), []

    def first() -> None:
        events.at(1, lambda: seen.append(events.now_s))
        events.after(2, lambda: seen.append(events()))

    events.at(3, first)
    events.run(until_s=4)
    assert seen == [3.0]
    assert events.now_s == 4
    events.run()
    assert seen == [3.0, 5.0]


@pytest.mark.parametrize("instant", [math.nan, math.inf, -math.inf])
def test_an_instant_is_a_finite_number(instant: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        EventQueue().at(instant, lambda: None)
    events = EventQueue()
    with pytest.raises(ValueError, match="finite"):
        events.at_each([1.0, instant], lambda _: pytest.fail("none is scheduled"))
    events.run()
