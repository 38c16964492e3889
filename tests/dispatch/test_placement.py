"""The core leases by what is resident, counts who was passed over, and keeps to the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings

from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.policies.types import MOST_PASSES, lora_resident
from ray_cluster.requests import AddOns, BlobRef, Edit, LoraUse
from tests.dispatch.test_admission_view import CountingMachine
from tests.fakes import finished, image_request, poll_of, registration

KINDS = ((), ("a",), ("b",), ("a", "b"))


def loras(*names: str) -> AddOns:
    return AddOns(loras=tuple(map(LoraUse, names)))


class ResidentMachine(CountingMachine):
    """The random lives of the core, with requests that need LoRAs and replicas that have some."""

    def add_ons_of(self, request_id: str) -> AddOns:
        return loras(*KINDS[int(request_id[1:]) % len(KINDS)])

    def residents_of(self, replica_id: str) -> tuple[str, ...]:
        return (lora_resident("b" if replica_id == "r1" else "a"),)

    def check_order(self, given: Sequence[str], waiting: Sequence[str]) -> None:
        left = list(waiting)
        for request_id in given:
            place = left.index(request_id)
            for earlier in left[:place]:
                self.passes[earlier] += 1
                assert self.passes[earlier] <= MOST_PASSES
                assert self.requests[earlier].add_ons.loras
                assert self.keys[earlier][0] == self.keys[request_id][0]
            left.pop(place)


TestResidentMachine = ResidentMachine.TestCase
TestResidentMachine.settings = settings(stateful_step_count=40)


@pytest.fixture
def core() -> DispatchCore:
    """Two replicas for one request each; "r" has LoRA a, "s" has b."""
    core = DispatchCore(config=DispatchConfig(), limits=LimitsConfig(), epoch=1)
    for name, lora in (("r", "a"), ("s", "b")):
        comes = registration(name, max_in_flight=1)
        core.register(replace(comes, residents=(lora_resident(lora),)), 0.0)
    return core


def offer(core: DispatchCore, *kinds: str) -> None:
    """Have requests wait: each is named for its LoRA, and later ones have later deadlines."""
    for number, kind in enumerate(kinds):
        request = image_request(kind, add_ons=loras(kind[0]), slo_s=1000.0 + number)
        assert core.offer([request], 1.0, client=None).accepted


def leased(core: DispatchCore, replica_id: str) -> str:
    """What a free replica gets; it is done at once."""
    (lease,) = core.poll(poll_of(replica_id, 1), 1.0).leases
    core.report(replica_id, [finished(lease)], 1.0)
    return lease.request.request_id


def test_a_replica_leases_what_it_has_the_adapters_for(core: DispatchCore) -> None:
    offer(core, "b1", "b2", "a1", "a2")
    assert [leased(core, "r") for _ in range(3)] == ["a1", "a2", "b1"]
    assert leased(core, "s") == "b2"


def test_a_request_is_passed_over_only_so_often(core: DispatchCore) -> None:
    offer(core, "b", *(f"a{n}" for n in range(MOST_PASSES + 1)))
    assert [leased(core, "r") for _ in range(MOST_PASSES)] == [f"a{n}" for n in range(MOST_PASSES)]
    assert leased(core, "r") == "b"


def test_a_poll_says_what_has_come_or_gone_since(core: DispatchCore) -> None:
    offer(core, "b1", "b2", "a1", "a2", "a3")
    core.poll(poll_of("r", 0), 1.0)
    assert leased(core, "r") == "a1"
    core.poll(replace(poll_of("r", 0), residents=(lora_resident("c"), lora_resident("b"))), 1.0)
    assert leased(core, "r") == "b1"
    # nobody has anything of LoRA a any more
    core.poll(replace(poll_of("r", 0), residents=()), 1.0)
    assert leased(core, "s") == "b2"


def test_what_a_replica_holds_counts_as_there(core: DispatchCore) -> None:
    for name in ("r", "s"):
        core.poll(replace(poll_of(name, 0), residents=()), 1.0)
    offer(core, "b1", "b2")
    core.offer([image_request("plain", slo_s=2000.0)], 1.0, client=None)
    (held,) = core.poll(poll_of("s", 1), 1.0).leases
    assert held.request.request_id == "b1"
    # the other one fetches b for it
    assert leased(core, "r") == "plain"
    core.offer([image_request("plain", slo_s=2000.0)], 1.0, client=None)
    core.report("s", [finished(held)], 1.0)
    # it has not said that b is still there
    assert leased(core, "r") == "b2"


def test_who_is_gone_has_nothing(core: DispatchCore) -> None:
    offer(core, "b1", "a1")
    core.unregister("s", 1.0)
    assert leased(core, "r") == "b1"


def test_predictions_know_who_may_be_leased_first(core: DispatchCore) -> None:
    core.offer([image_request("long", num_steps=1000)], 1.0, client=None)
    assert len(core.poll(poll_of("s", 1), 1.0).leases) == 1
    # their only slots: one is taken for long, and the other one is free now
    core.poll(poll_of("r", 1), 1.0)
    offer(core, "b", "a1", "a2")

    def predicted_s(now_s: float) -> dict[str, float]:
        ids = ("b", "a1", "a2")
        found = core.progress(ids, now_s, predicts="anew")
        return {name: one.predicted_s or 0.0 for name, one in zip(ids, found, strict=True) if one}

    first_s = predicted_s(1.0)
    assert sorted(first_s, key=first_s.__getitem__) == ["a1", "a2", "b"]
    core.poll(replace(poll_of("r", 0), residents=()), 1.0)
    # what was predicted answers for a moment
    assert predicted_s(1.1) == pytest.approx({name: one - 0.1 for name, one in first_s.items()})
    second_s = predicted_s(1.3)
    assert sorted(second_s, key=second_s.__getitem__) == ["b", "a1", "a2"]


def test_who_has_the_adapter_of_the_first_request_is_asked_first(core: DispatchCore) -> None:
    for name in ("r", "s"):
        core.poll(poll_of(name, 1), 1.0)
    offer(core, "b")
    assert list(core.takers("m", 1.0)) == ["s", "r"]
    core.abort(["b"])
    offer(core, "c")
    assert list(core.takers("m", 1.0)) == ["r", "s"]


def test_a_policy_sees_the_add_ons_and_the_edit_of_a_request() -> None:
    edit = Edit(BlobRef("ab" * 32, 9), (64, 64), 20, mask_ratio=0.25)
    request = image_request(add_ons=loras("x", "y"), edit=edit)
    view = request.view(arrival_s=0.0, deadline_s=1.0)
    assert (view.num_inputs, view.mask_ratio, view.num_passes) == (1, 0.25, 0)
    # nothing is kept of a template yet: no replica spares anything, and none is waited for
    assert view.needs == (lora_resident("x"), lora_resident("y"))
    assert view.spared_pixels == 0
    assert view.encoded_pixels == 64 * 64
    assert replace(view, steps_done=1).encoded_pixels == 0
    plain = image_request().view(arrival_s=0.0, deadline_s=1.0)
    assert (plain.needs, plain.template, plain.mask_ratio, plain.spared_pixels) == (
        (),
        None,
        1.0,
        0,
    )
