"""Requests with ControlNets, in one batch with others and with none, make diffusers' images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from ray_cluster.engine.controlnets.asks import ControlNetAsk, RowResiduals
from ray_cluster.engine.controlnets.checks import check_base, controlnet_config
from ray_cluster.engine.controlnets.local import LocalControlNets
from ray_cluster.errors import ModelUnsupported
from ray_cluster.requests import AddOns
from tests.engine.conftest import Zoo
from tests.engine.controlled import CASES, PIPELINES, Subject, engine_with
from tests.engine.harness import (
    CONTROL_FACTOR,
    RUN_TOLERANCE,
    difference,
)

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def subjects(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    return cache(lambda name: Subject(zoo, name, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("layout", ["mixed", "grouped"])
@pytest.mark.parametrize("name", PIPELINES)
def test_every_request_of_a_batch_is_diffusers_with_its_own_controlnets(
    subjects: Callable[[str], Subject], name: str, layout: str, record: Record
) -> None:
    subject = subjects(name)
    errors = subject.errors(LocalControlNets(subject.banks()), layout=layout)
    record("worst", max(errors))
    assert max(errors) <= RUN_TOLERANCE, errors


@pytest.mark.parametrize("name", PIPELINES)
def test_so_is_each_alone(subjects: Callable[[str], Subject], name: str) -> None:
    subject = subjects(name)
    controls = LocalControlNets(subject.banks())
    for place in range(len(CASES)):
        (error,) = subject.errors(controls, [place])
        assert error <= RUN_TOLERANCE, place


def test_what_a_full_bank_drops_is_made_anew(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    banks = subject.banks(max_bytes=1)
    assert max(subject.errors(LocalControlNets(banks))) <= RUN_TOLERANCE
    assert all(len(bank) <= 1 for bank in banks.values())


def test_requests_that_have_left_are_not_kept(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    banks = subject.banks()
    subject.errors(LocalControlNets(banks))
    assert [len(bank) for bank in banks.values()] == [0, 0, 0]


# --- what must not pass ---


@dataclass
class Wrong:
    """Changes what is asked, or what is answered."""

    inner: LocalControlNets
    asked: Callable[[Sequence[ControlNetAsk]], Sequence[ControlNetAsk]] = lambda asks: asks
    answered: Callable[[list[Any]], list[Any]] = lambda found: found

    def ask(self, asks: Sequence[ControlNetAsk]) -> Sequence[Future[RowResiduals]]:
        return self.answered(list(self.inner.ask(self.asked(asks))))

    def forget(self, key: str) -> None:
        self.inner.forget(key)

    def usual_s(self, _name: str) -> float:
        return 0.0


class Stale:
    """Answers each step with the residuals of the one before."""

    def __init__(self) -> None:
        self._last: list[Any] = []

    def __call__(self, found: list[Any]) -> list[Any]:
        last, self._last = self._last, found
        return last if len(last) == len(found) else found


CONTROLS: dict[str, dict[str, Callable[[], Any]]] = {
    "an earlier step's residuals": {"answered": Stale},
    "another row's residuals": {"answered": lambda: lambda found: found[::-1]},
    "another map": {
        "asked": lambda: lambda asks: [replace(one, map=255 - one.map) for one in asks]
    },
    "a wrong timestep": {
        "asked": lambda: lambda asks: [replace(one, timestep=one.timestep / 2) for one in asks]
    },
}


@pytest.mark.parametrize("wrong", CONTROLS)
def test_a_mistake_is_seen(subjects: Callable[[str], Subject], wrong: str) -> None:
    """Two rows of one size, so that what is either's fits the other."""
    subject = subjects("sd15")
    changes = {name: make() for name, make in CONTROLS[wrong].items()}
    errors = subject.errors(Wrong(LocalControlNets(subject.banks()), **changes), [0, 3])
    assert max(errors) >= CONTROL_FACTOR * RUN_TOLERANCE


def test_without_residuals_the_images_are_others(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    for index in (0, 1, 3, 4, 5):
        plain = replace(subject.requests[index], add_ons=AddOns())
        bare = subject.reference._latents([plain])[0]
        assert difference(bare, subject.expected[index]) >= CONTROL_FACTOR * RUN_TOLERANCE


# --- what is refused ---


def test_a_row_without_its_maps_is_refused(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    engine = engine_with(subject, LocalControlNets({}))
    [state] = subject.states([0])
    with pytest.raises(ValueError, match="'r0' has 1 ControlNets and 0 maps"):
        engine.add(replace(state, maps=()))


def test_a_culprit_fails_alone(subjects: Callable[[str], Subject]) -> None:
    subject = subjects("sd15")
    controls = LocalControlNets(subject.banks())
    engine = engine_with(subject, controls)
    with torch.inference_mode():
        good, bad = subject.states([0, 5])
        bad.maps = (torch.zeros(8, 8, 3, dtype=torch.uint8), bad.maps[1])
        engine.add(good)
        engine.add(bad)
        failed = []
        while len(engine):
            failed += engine.step().failed
    assert [row.state.request.request_id for row in failed] == ["r5"]
    assert difference(good.latents, subject.expected[0]) <= RUN_TOLERANCE


def test_what_could_not_be_asked_is_asked_again(subjects: Callable[[str], Subject]) -> None:
    """A step that fails before its ControlNets are asked is tried in halves, never without them."""
    subject = subjects("sd15")
    controls = Wrong(LocalControlNets(subject.banks()), asked=FailsOnce())
    assert max(subject.errors(controls)) <= RUN_TOLERANCE


class FailsOnce:
    """Has no memory the first time."""

    def __init__(self) -> None:
        self._has_failed = False

    def __call__(self, asks: Sequence[ControlNetAsk]) -> Sequence[ControlNetAsk]:
        if not self._has_failed:
            self._has_failed = True
            raise RuntimeError("out of memory")
        return asks


def test_controlnets_of_other_models_are_refused(
    subjects: Callable[[str], Subject], zoo: Zoo
) -> None:
    config = controlnet_config(subjects("sd15").paths[0])
    unet = dict(zoo.reference("sd15").pipeline.unet.config) | {
        "_class_name": "UNet2DConditionModel"
    }
    check_base("edges", config, "m", unet, 4)
    with pytest.raises(ModelUnsupported, match=r"edges .* base m: maps scaled down by 4 against"):
        check_base("edges", config, "m", unet, 8)
    other = unet | {"block_out_channels": (32, 64)}
    with pytest.raises(ModelUnsupported, match="block_out_channels"):
        check_base("edges", config, "m", other, 4)
    with pytest.raises(ModelUnsupported, match="no UNet"):
        check_base("edges", config, "m", {"_class_name": "FluxTransformer2DModel"}, 4)
