"""Slices of slow tests cover every module once, and end in time without a signal from outside."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.slices import End, Slice

MODULES = [f"tests/folder/test_{number}.py" for number in range(200)]
MARKS = (set(), {"slow"}, {"ray"}, {"hypothesis"}, {"ray", "slow"})


def item(module: str, *marks: str) -> pytest.Item:
    """A test of a module, with marks."""
    name = SimpleNamespace(
        nodeid=f"{module}::test", get_closest_marker=lambda mark: mark if mark in marks else None
    )
    return cast(pytest.Item, name)


@pytest.fixture
def own_signal() -> Iterator[None]:
    """The signal is another's where this run has an end of its own."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_each_round_of_slices_has_every_slow_and_property_test_once() -> None:
    items = [item(module, *marks) for module in MODULES for marks in MARKS]
    rare = {one.nodeid for one in items if any(map(one.get_closest_marker, ("slow", "hypothesis")))}
    parts = []
    for first in (0, 1230):
        taken = []
        for number in range(first, first + 10):
            some = list(items)
            dropped: list[pytest.Item] = []
            hook = SimpleNamespace(pytest_deselected=lambda items, to=dropped: to.extend(items))
            config: Any = SimpleNamespace(hook=hook)
            Slice(f"{number}/10").pytest_collection_modifyitems(config, some)
            assert len(some) + len(dropped) == len(items)
            assert 5 * 3 < len(some) < 40 * 3, "of 200 modules some 20 each, with three tests"
            taken.append(some)
        assert sum(map(len, taken)) == 3 * len(MODULES)
        assert {one.nodeid for some in taken for one in some} == rare
        parts.append([{one.nodeid for one in some} for some in taken])
    assert parts[0] != parts[1], "each round is cut otherwise"


@pytest.mark.usefixtures("own_signal")
def test_what_has_not_begun_at_the_end_is_skipped_by_name() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"not run, 0 minutes are over: m\.py::test"):
        next(iter(End(0.0).pytest_runtest_setup(item("m.py"))))
    assert next(iter(End(1.0).pytest_runtest_setup(item("m.py")))) is None


@pytest.mark.usefixtures("own_signal")
@pytest.mark.parametrize("marks", [(), ("asyncio",)], ids=["function", "coroutine"])
def test_a_function_that_runs_at_the_end_is_cut_off_and_a_coroutine_is_not(
    marks: tuple[str, ...],
) -> None:
    end, is_cut = End(0.5 / 60), False
    running = iter(end.pytest_runtest_call(item("running.py", *marks)))
    started_s = time.monotonic()
    try:
        next(running)
        time.sleep(30 if not marks else 1)
    except pytest.skip.Exception as cut:
        is_cut = "running.py::test" in str(cut)
    assert is_cut is not bool(marks)
    assert time.monotonic() - started_s < 20
    with pytest.raises(StopIteration):
        next(running)


@pytest.mark.usefixtures("own_signal")
def test_a_test_that_is_done_before_the_end_is_not_cut_off() -> None:
    done = iter(End(0.5 / 60).pytest_runtest_call(item("done.py")))
    is_cut = False
    try:
        next(done)
        assert next(done, None) is None
        time.sleep(1)
    except pytest.skip.Exception:
        is_cut = True
    assert not is_cut
