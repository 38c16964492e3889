"""Start-up without collections: the collector comes back, and leaves alone what was there."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ray_cluster.process.gc_freeze import uncollected


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Its state is put back."""
    was_enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_as_it_was_also_after_an_error(is_enabled: bool) -> None:
    (gc.enable if is_enabled else gc.disable)()
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled() == is_enabled
    with pytest.raises(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled() == is_enabled


def test_what_was_made_is_not_looked_at_again_and_later_garbage_is_collected() -> None:
    with uncollected():
        made: list[object] = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= len(made)
    seen = {id(one) for one in gc.get_objects()}
    assert not seen & {id(one) for one in made}
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1
