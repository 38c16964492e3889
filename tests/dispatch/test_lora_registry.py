"""The registry of LoRAs: names, limits, and what names are like others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.config.validation_errors import likeness_to
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.loras.loras import Loras
from ray_cluster.dispatch.loras.names import NearNames
from tests.dispatch.lora_store import CONFIG, FACTS, bare_core, lora, with_loras
from tests.fakes import finished, poll_of, registration


@pytest.fixture
def core() -> DispatchCore:
    """A core with one replica and two LoRAs."""
    return bare_core()


def test_ten_thousand_are_listed_by_name_and_found_by_near_ones(core: DispatchCore) -> None:
    for number in range(10_000 - 2):
        assert core.loras.add(lora(f"style-{number:05}")).refused is None
    assert core.loras.add(lora("one-more")).refused == "too_many"
    first = core.loras.page("", 3)
    assert [one.lora.name for one in first] == ["outline", "pastel", "style-00000"]
    # each names its nodes: the rest comes with another call
    assert len(core.loras.page("pastel", 20_000)) == 250
    found = core.loras.lookup(["pastle", "pastel", "outlines"])
    assert list(found.found) == ["pastel"]
    # a call is refused for the first of them
    assert found.near == {"pastle": ("pastel",), "outlines": ()}


@pytest.mark.parametrize("is_old_first", [True, False])
def test_a_removed_one_is_restored_beside_the_next_of_its_name(is_old_first: bool) -> None:
    core = DispatchCore(config=CONFIG, limits=LimitsConfig(), epoch=1, configured=("m",))
    core.register(registration(), 0.0)
    # as many as there may be by now, and more
    core.loras.apply(LorasConfig(max_loras=0))
    rows = [(lora("pastel", lora_id="id-new"), False), (lora("pastel"), True)]
    for one, is_removed in reversed(rows) if is_old_first else rows:
        core.loras.restore(one, FACTS, is_removed=is_removed)
    assert core.loras.lookup(["pastel"]).found["pastel"].lora.lora_id == "id-new"
    core.offer([with_loras("a", "pastel")], 0.0)
    (lease,) = core.poll(poll_of(), 0.0).leases
    assert [one.lora.lora_id for one in lease.loras] == ["id-pastel"]
    core.report("r", [finished(lease)], 1.0)
    assert core.loras.take_gone() == ["id-pastel"]


def test_the_same_one_twice_is_no_error_and_another_is(core: DispatchCore) -> None:
    same = core.loras.add(lora("pastel", lora_id="new", added_s=5.0))
    assert same.refused is None
    assert same.status is not None
    assert same.status.lora.lora_id == "id-pastel"
    assert core.loras.add(lora("pastel", owner="other")).refused is None
    assert core.loras.add(lora("pastel", source="builtin:outline")).refused == "exists"


def test_of_two_of_one_name_the_later_one_is_restored() -> None:
    # a write that had failed, as its caller was told, was done all the same
    loras = Loras(lambda _base: "")
    for lora_id, added_s in (("id-late", 2.0), ("id-early", 1.0)):
        loras.restore(lora("pastel", lora_id=lora_id, added_s=added_s), None, is_removed=False)
    assert loras.id_of("pastel") == "id-late"
    assert len(loras) == len(loras.page("", 10)) == 1
    loras.drop_removed()
    assert loras.take_gone() == ["id-early"]


def test_what_is_reserved_counts_and_is_not_seen() -> None:
    loras = Loras(lambda _base: "")
    loras.apply(LorasConfig(max_loras=1))
    first, second = lora("pastel"), lora("outline")
    assert loras.reserve(first) is None
    assert not loras.page("", 10)
    refused = loras.reserve(second)
    assert refused is not None
    assert (refused.refused, refused.reason) == ("too_many", "1")
    loras.release(first)
    assert loras.reserve(second) is None
    assert loras.keep(second).is_new
    assert loras.remove("id-outline") is not None
    assert loras.reserve(first) is None


def test_no_client_registers_more_than_its_share_nor_pins_it() -> None:
    loras = Loras(lambda _base: "")
    loras.apply(LorasConfig(max_loras=20, max_pinned=8, client_share=0.25))
    alice = [lora(f"a{n}", owner="alice", is_pinned=n < 3) for n in range(7)]
    said = [loras.add(one).refused for one in alice]
    assert said == [None, None, "too_many_own_pinned", None, None, None, "too_many_own"]
    # others, and the settings, have room
    assert loras.add(lora("b", owner="bob", is_pinned=True)).refused is None
    assert loras.add(lora("c", is_pinned=True)).refused is None
    more = [loras.add(lora(f"p{n}", is_pinned=True)).refused for n in range(5)]
    assert more == [None, None, None, None, "too_many_pinned"]
    # what she removes makes room for her
    assert loras.remove("id-a0") is not None
    assert loras.add(lora("again", owner="alice", is_pinned=True)).refused is None
    assert loras.add(lora("more", owner="alice")).refused == "too_many_own"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("pastle", "pastel"),
        ("astel", "pastel"),
        ("PASTEL", "pastel"),
        ("pastel-style", "pastel"),
        ("watercolor-v2", "watercolour-v2"),
        ("zzz", None),
        ("", None),
        ("\u0130" * 64, None),
    ],
)
def test_slips_of_the_pen_are_found_among_many(given: str, meant: str | None) -> None:
    names = NearNames()
    for name in ("pastel", "watercolour-v2", *(f"style-{n:04}" for n in range(1000))):
        names.add(name)
    assert names.near(given)[:1] == (() if meant is None else (meant,))
    for name in ("pastel", "watercolour-v2"):
        names.remove(name)
    assert meant not in names.near(given)


def test_a_name_is_compared_with_few_however_many_there_are() -> None:
    num_compared: Counter[str] = Counter()

    def counting(given: str) -> Callable[[str], float]:
        measure = likeness_to(given)

        def counted(other: str) -> float:
            num_compared[given] += 1
            return measure(other)

        return counted

    names = NearNames(counting)
    for number in range(10_000):
        names.add((f"a-style-of-{number:06}-" + "abcdefghij" * 6)[:64])
    for number in range(100):
        given = (f"a-stile-of-{number:06}-" + "abcdefghij" * 100)[:1000]
        assert len(names.near(given)) == 3
    assert max(num_compared.values()) <= 24
    # no longer than a name can be
    assert max(map(len, num_compared)) == 64
