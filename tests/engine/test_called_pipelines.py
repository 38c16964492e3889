"""Pipelines that are called as they are: what is known of them, their calls, and their ends."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.batch.step_costs import StepCosts
from ray_cluster.engine.files.folders import is_called
from ray_cluster.engine.pipelines.classes import PipelineFacts, pipeline_facts
from ray_cluster.engine.pipelines.loading import CalledPipeline, inspect_pipeline, load_pipeline
from ray_cluster.engine.pipelines.measuring import check_largest, measured_cost
from ray_cluster.engine.pipelines.runner import CallRunner
from ray_cluster.engine.stages.events import Broken, Decoded, RunnerEvent, Stepped
from ray_cluster.errors import ConfigError, InvalidRequest, MemoryRefused, ModelUnsupported
from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.requests import ImageRequest
from tests.engine.random_families import FAMILIES
from tests.engine.random_models import save_sd
from tests.engine.random_pipelines import save_pixart, save_qwen

PATIENCE_S = 60.0
# those of which folders are made by `random_pipelines`
ELSEWHERE = {
    *("AuraFlowPipeline", "Flux2KleinPipeline", "PixArtSigmaPipeline"),
    *("QwenImageEditPipeline", "QwenImageEditPlusPipeline", "QwenImagePipeline", "SanaPipeline"),
    "ZImagePipeline",
}
# their second rows have a weight of their own, which is 0 where guidance is off
OFF_AT_ZERO = {"Krea2Pipeline", "ZImageOmniPipeline", "ZImagePipeline"}


def pool_of(folder: Path, **fields: Any) -> PoolConfig:
    defaults = {"size": "64x64", "num_inference_steps": 4}
    given = {"name": "p", "model": str(folder), "max_px": 96, "defaults": defaults}
    return PoolConfig(**given | fields)


def wanted(name: str, **fields: Any) -> ImageRequest:
    given: dict[str, Any] = {
        "model": "p",
        "prompt": "a red circle",
        "negative_prompt": None,
        "width_px": 64,
        "height_px": 64,
        "num_steps": 4,
        "guidance_scale": 3.0,
        "sampler": "dpmpp_2m",
        "seed": 1,
    }
    return ImageRequest(request_id=name, **given | fields)


@pytest.fixture(scope="module")
def pixart(tmp_path_factory: pytest.TempPathFactory) -> CalledPipeline:
    return load_pipeline(pool_of(save_pixart(tmp_path_factory.mktemp("pixart") / "model")))


def accepted() -> dict[str, PipelineFacts]:
    """Every pipeline of the installed diffusers that calls can run."""
    found = {}
    for name in dir(diffusers):
        if name.endswith("Pipeline"):
            try:
                found[name] = pipeline_facts(name, {})
            except (ModelUnsupported, RuntimeError):
                continue
    return found


def test_guidance_means_the_same_of_every_pipeline_that_is_accepted() -> None:
    """By the source of each: a later diffusers that adds one of another kind fails here."""
    found = accepted()
    assert set(found) == {*FAMILIES, *ELSEWHERE}
    off_at_zero = {
        name
        for name, facts in found.items()
        if "return self._guidance_scale > 0" in inspect.getsource(facts.kind)
    }
    assert off_at_zero == {name for name, one in found.items() if one.guidance.offset}
    assert off_at_zero == OFF_AT_ZERO
    for name, facts in found.items():
        argument = facts.guidance.argument
        assert argument is None or argument in facts.defaults, name
        # two rows without a negative prompt of the caller's
        source, has_rows = inspect.getsource(facts.kind), "_guidance_scale > 1"
        if "negative_prompt" not in facts.defaults and has_rows in source:
            assert facts.guidance.kind == "empty", name


@pytest.mark.parametrize(
    ("name", "default", "kind"),
    [
        ("QwenImagePipeline", 4.0, "rows"),
        ("ZImagePipeline", 6.0, "rows"),
        ("PixArtSigmaPipeline", 4.5, "rows"),
        ("Flux2Pipeline", 4.0, "embedded"),
        ("Flux2KleinPipeline", 4.0, "empty"),
        ("Flux2KleinKVPipeline", 1.0, "none"),
    ],
)
def test_defaults_are_those_of_the_pipelines(name: str, default: float, kind: str) -> None:
    facts = pipeline_facts(name, {})
    assert (facts.default_scale, facts.guidance.kind) == (default, kind)


def test_a_distilled_model_has_no_guidance() -> None:
    assert pipeline_facts("Flux2KleinPipeline", {"is_distilled": True}).guidance.kind == "none"


@pytest.mark.parametrize(
    "name", ["QwenImageEditInpaintPipeline", "WanPipeline", "FluxFillPipeline", "NoSuchPipeline"]
)
def test_what_makes_no_image_from_text_is_refused(name: str) -> None:
    with pytest.raises(ModelUnsupported, match=name):
        pipeline_facts(name, {})


def test_settings_of_steps_are_refused(tmp_path: Path) -> None:
    folder = save_pixart(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"defaults.sampler cannot be set.*PixArtSigmaPipeline"):
        is_called(pool_of(folder, defaults={"sampler": "ddim"}))
    with pytest.raises(ValidationError, match="ranks cannot be set with engine: diffusers"):
        pool_of(folder, engine="diffusers", ranks=2)
    assert not is_called(pool_of(folder, engine="steps"))


@pytest.mark.parametrize(("save", "most"), [(save_pixart, 999), (save_qwen, 20_000)])
def test_calls_have_no_more_steps_than_a_noise_schedule(
    save: Callable[[Path], Path], most: int, tmp_path: Path
) -> None:
    pool = pool_of(save(tmp_path / "model"), max_num_inference_steps=20_000)
    assert list(inspect_pipeline(pool).profile.max_steps_by_sampler.values()) == [most]


def test_a_covered_folder_is_called_where_the_pool_says_so(tmp_path: Path) -> None:
    folder = save_sd(tmp_path / "model", zero_snr=False)
    assert not is_called(pool_of(folder))
    assert is_called(pool_of(folder, engine="diffusers"))
    model = load_pipeline(pool_of(folder, engine="diffusers"))
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    alone = pipeline(
        "a red circle",
        width=64,
        height=64,
        num_inference_steps=4,
        guidance_scale=3.0,
        generator=torch.Generator("cpu").manual_seed(1),
    ).images[0]
    assert np.array_equal(model.make(wanted("a"), lambda: None), np.asarray(alone))


def test_weights_without_room_are_refused_before_they_are_read(tmp_path: Path) -> None:
    pool = pool_of(save_qwen(tmp_path / "model"), memory_gib=0.001)
    # by the commands that plan it, and by a replica
    for read in (inspect_pipeline, load_pipeline):
        with pytest.raises(MemoryRefused, match="raise memory_gib"):
            read(pool)


def test_a_size_that_the_pipeline_does_not_make_is_found_at_the_start(
    pixart: CalledPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_largest(pixart)
    # no multiple of the eight pixels that it checks itself
    monkeypatch.setattr(pixart, "profile", replace(pixart.profile, size_multiple_px=1, max_px=97))
    with pytest.raises(ConfigError, match="97x97, fails"):
        check_largest(pixart)


@pytest.mark.parametrize("callback", [None, "callback"])
def test_the_first_calls_price_pixels_and_steps(callback: Any, pixart: CalledPipeline) -> None:
    cost = measured_cost(with_callback(pixart, callback), time.monotonic)
    unguided = wanted("a", num_steps=40, guidance_scale=1.0)
    work = work_of([unguided.view(arrival_s=0.0, deadline_s=1.0, steps_done=0)])
    calls_s = []
    for _ in range(3):
        began_s = time.monotonic()
        pixart.make(unguided, lambda: None)
        calls_s.append(time.monotonic() - began_s)
    took_s = min(calls_s)
    assert cost.per_megapixel_s > 0
    # whatever else the machine does
    assert 0.05 < 40 * step_s(cost, work) / took_s < 5


def with_callback(model: CalledPipeline, callback: Any) -> CalledPipeline:
    """The same pipeline, as one that calls back so."""
    other = object.__new__(CalledPipeline)
    other.__dict__ = model.__dict__ | {"facts": replace(model.facts, callback=callback)}
    return other


class Calls:
    """A started runner, and its events but for steps."""

    def __init__(self, model: CalledPipeline) -> None:
        self.runner = CallRunner(model, StepCosts(clock=time.monotonic), clock=time.monotonic)
        self.events: Queue[RunnerEvent] = Queue()
        self.num_steps = 0
        self.runner.start(self._note)

    def _note(self, event: RunnerEvent) -> None:
        if isinstance(event, Stepped):
            self.num_steps += 1
        else:
            self.events.put(event)

    def submit(self, request: ImageRequest, in_s: float = 60.0) -> None:
        self.runner.submit(request, deadline_s=time.monotonic() + in_s)

    def made(self) -> Decoded:
        event = self.events.get(timeout=PATIENCE_S)
        assert isinstance(event, Decoded), event
        return event

    def wait_for_step(self, request_id: str, steps: int = 2) -> None:
        wait_until(lambda: self.runner.steps_done_by_id.get(request_id, 0) >= steps)


def wait_until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s, "it does not come"
        time.sleep(0.002)


@pytest.fixture
def calls(pixart: CalledPipeline) -> Iterator[Calls]:
    calls = Calls(pixart)
    yield calls
    calls.runner.stop()


LONG = 20_000


def test_a_call_that_is_broken_off_leaves_nothing_behind(
    calls: Calls, pixart: CalledPipeline
) -> None:
    """The solver of several steps would go on with another image's."""
    expected = pixart.make(wanted("a"), lambda: None)
    calls.submit(wanted("long", num_steps=LONG))
    calls.wait_for_step("long")
    calls.submit(wanted("a"))
    assert calls.runner.abort("long")
    assert np.array_equal(calls.made().pixels, expected)
    assert calls.events.empty()


def test_a_preempted_call_begins_anew(calls: Calls, pixart: CalledPipeline) -> None:
    request = wanted("a", num_steps=50)
    calls.submit(wanted("first", num_steps=LONG))
    calls.wait_for_step("first")
    calls.submit(request)
    for name in ("first", "a"):
        exported = calls.runner.export(name).result()
        assert exported is not None
        assert (exported.request.request_id, exported.state) == (name, None)
    assert calls.runner.export("a").result() is None
    assert calls.runner.steps_done_by_id == {}
    calls.submit(request)
    assert np.array_equal(calls.made().pixels, pixart.make(request, lambda: None))


def test_what_is_wrong_with_one_request_is_its_own(calls: Calls) -> None:
    calls.submit(wanted("bad", width_px=60))
    calls.submit(wanted("long", prompt="x" * 400))
    calls.submit(wanted("good"))
    found = {}
    for _ in range(3):
        event = calls.events.get(timeout=PATIENCE_S)
        assert isinstance(event, Broken | Decoded)
        found[event.request.request_id] = event
    bad, long = found["bad"], found["long"]
    assert isinstance(bad, Broken)
    assert "divisible by 8" in str(bad.error)
    assert isinstance(long, Broken)
    assert isinstance(long.error, InvalidRequest)
    assert isinstance(found["good"], Decoded)


def test_the_most_urgent_is_next(calls: Calls) -> None:
    calls.submit(wanted("now", num_steps=100))
    calls.wait_for_step("now", 1)
    calls.submit(wanted("later"), in_s=500)
    calls.submit(wanted("soon"), in_s=60)
    names = [calls.made().request.request_id for _ in range(3)]
    assert names == ["now", "soon", "later"]


def test_without_callbacks_a_call_ends_when_it_is_through(pixart: CalledPipeline) -> None:
    calls = Calls(with_callback(pixart, None))
    try:
        calls.submit(wanted("gone", num_steps=200))
        wait_until(lambda: not calls.runner._waiting)
        assert calls.runner.abort("gone")
        calls.submit(wanted("a"))
        made = calls.made()
        assert np.array_equal(made.pixels, pixart.make(wanted("a"), lambda: None))
        assert made.timing.denoise_s > 0
        # one for each call, the one of no use among them
        assert calls.num_steps == 2
    finally:
        calls.runner.stop()
