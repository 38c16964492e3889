"""Small hand-written stand-ins and builders that tests share."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings import Settings, settings_of
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.imaging.controlnet_maps import ControlMap, MapOrder, control_map
from ray_cluster.imaging.edit_images import ImageFacts, MaskFacts, image_facts, mask_facts
from ray_cluster.imaging.processes.image_coder import Source, loaded
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.policies.types import Offer, ReplicaView, RequestView, StepCost
from ray_cluster.protocol.cell_view import CellView
from ray_cluster.protocol.controller import PlanReport, RoundMode
from ray_cluster.protocol.jobs import Creation, Job, JobPage, JobQuery, JobView
from ray_cluster.protocol.leases import Failed, Finished, Lease, Poll, Registration
from ray_cluster.protocol.loras import Lora, LoraAdded, LoraLookup, LoraStatus
from ray_cluster.protocol.outcomes import Completed, ImageUpdate, Outcome, Submission
from ray_cluster.protocol.settings import GatewaySettings, gateway_settings
from ray_cluster.requests import (
    Failure,
    ImageRequest,
    ImageResult,
    ModelProfile,
    PromptTokenizer,
    Timing,
)
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import InputStore
from tests.fake_loras import FakeLoras

T = TypeVar("T")

STEP_COST = StepCost(fixed_s=0.1, per_megapixel_s=1.0)


class FakeClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> float:
        assert seconds >= 0
        self.now_s += seconds
        return self.now_s


class _InstantSelector(selectors.SelectSelector):
    """Instead of sleeping until the next timer, lets the loop's clock jump there."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("the loop would sleep forever: nothing is left that could wake it")
        if not ready and timeout:
            self.clock.advance(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only in timers, and then at once."""

    def __init__(self) -> None:
        selector = _InstantSelector()
        self._clock = selector.clock
        super().__init__(selector)

    def time(self) -> float:
        return self._clock.now_s

    def stand_still(self, seconds: float) -> None:
        """Let time pass in which nothing runs, as when the process is stopped."""
        self._clock.advance(seconds)


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def image_request(request_id: str = "a", model: str = "m", **changes: Any) -> ImageRequest:
    """A small request: 10 steps of 64 x 64 without guidance."""
    values: dict[str, Any] = {
        "prompt": "a red circle",
        "width_px": 64,
        "height_px": 64,
        "num_steps": 10,
        "guidance_scale": 1.0,
        "sampler": "ddim",
        "seed": 0,
    }
    return ImageRequest(request_id=request_id, model=model, **{**values, **changes})


def request_view(request_id: str = "a", model: str = "m", **changes: Any) -> RequestView:
    """A megapixel request with 10 steps, without guidance, due a minute after 0."""
    values: dict[str, Any] = {
        "width_px": 1000,
        "height_px": 1000,
        "num_steps": 10,
        "uses_guidance": False,
        "priority": 0,
        "arrival_s": 0.0,
        "deadline_s": 60.0,
    }
    return RequestView(request_id=request_id, model=model, **{**values, **changes})


def replica_view(replica_id: str = "r", model: str = "m", **changes: Any) -> ReplicaView:
    """An idle replica with room for 4 requests, 2 per batch."""
    values: dict[str, Any] = {
        "max_in_flight": 4,
        "max_batch": 2,
        "step_cost": STEP_COST,
        "num_free": 4,
    }
    return ReplicaView(replica_id=replica_id, model=model, **{**values, **changes})


def model_profile(model: str = "m") -> ModelProfile:
    return ModelProfile(
        model=model,
        family="sd",
        size_multiple_px=8,
        min_px=32,
        max_px=256,
        default_width_px=64,
        default_height_px=64,
        default_num_steps=10,
        default_guidance_scale=3.0,
        default_sampler="ddim",
        max_steps_by_sampler={"ddim": 100},
        max_prompt_tokens=77,
        created_s=0,
    )


def registration(
    replica_id: str = "r", model: str = "m", max_in_flight: int = 4, max_batch: int = 2
) -> Registration:
    return Registration(replica_id, model_profile(model), max_in_flight, max_batch, STEP_COST)


def poll_of(
    replica_id: str = "r",
    num_free: int = 4,
    steps_done_by_id: Mapping[str, int] | None = None,
    epoch: int = 1,
) -> Poll:
    return Poll(replica_id, epoch, num_free, steps_done_by_id or {})


def finished(lease: Lease) -> Finished:
    """The event with which a replica ends a lease well."""
    request_id = lease.request.request_id
    result = ImageResult(request_id, b"pixels", "png", Timing(), 6)
    return Finished(request_id, lease.fence, result)


def failed(lease: Lease) -> Failed:
    """The event with which a replica ends a lease with an error."""
    request_id = lease.request.request_id
    return Failed(request_id, lease.fence, Failure(request_id, "error", "out of luck", "denoise"))


def completed(request: ImageRequest, data: bytes = b"coded pixels") -> Completed:
    """What a client gets for a request that took 1.5 s of 60."""
    timing = Timing(queue_s=0.25, encode_s=0.25, denoise_s=0.75, decode_s=0.25)
    image_format, num_bytes = request.output.image_format, len(data)
    data = b"" if request.output.is_stored else data
    result = ImageResult(request.request_id, data, image_format, timing, num_bytes)
    slo_s = request.slo_s or 60.0
    return Completed(request.request_id, result, request.num_steps, slo_s, 1.5, attempts=1)


def some_settings(**sections: Any) -> Settings:
    """Settings of one pool, "shapes", with these sections of the configuration."""
    pools = [{"name": "shapes", "model": "shapes-sd"}]
    return settings_of(ClusterConfig.model_validate({"pools": pools} | sections))


def settings_for(config: ClusterConfig) -> CurrentSettings:
    """What a gateway of that configuration goes by."""
    return CurrentSettings(gateway_settings(settings_of(config)))


def memory_results() -> BlobStore:
    """A result store in this process."""
    return BlobStore("memory://results")


class PlainChecks:
    """Checks the images of calls as the coder's processes do, in a thread of this one."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1)

    def image_facts(
        self, data: Source, param: str, max_pixels: int, client: str
    ) -> Future[ImageFacts]:
        return self._threads.submit(lambda: image_facts(loaded(data), param, max_pixels))

    def mask_facts(
        self, data: Source, param: str, max_pixels: int, client: str
    ) -> Future[MaskFacts]:
        return self._threads.submit(lambda: mask_facts(loaded(data), param, max_pixels))

    def control_map(
        self, data: Source, order: MapOrder, max_pixels: int, client: str
    ) -> Future[ControlMap]:
        return self._threads.submit(lambda: control_map(loaded(data), order, max_pixels))


def sent_images(url: str = "memory://inputs") -> SentImages:
    """The images of calls, in this process."""
    return SentImages(InputStore.open(url, grace_s=3600.0), PlainChecks())


class FakeDispatcherClient:
    """Stands in for the dispatcher of a gateway: accepts and finishes everything at once.

    Attributes:
        offers: answers to the next offers; the last one stays.
        outcome: makes the outcome of a request; None lets its client wait.
        down: whether every call finds no dispatcher.
        news: the settings that the next call for some gets.
        max_wait_s: seconds that a wait without outcomes takes at most.
        undeployed_models: models in the settings that nobody has deployed.
        registry: of LoRAs.
        plan: the controller's.
    """

    def __init__(self, *profiles: ModelProfile) -> None:
        self.profiles = {profile.model: profile for profile in profiles or (model_profile(),)}
        self.offers = [Offer(accepted=True)]
        self.outcome: Callable[[ImageRequest], Outcome | None] = completed
        self.down = False
        self.news: asyncio.Queue[GatewaySettings] = asyncio.Queue()
        self.seen_versions: list[str] = []
        self.max_wait_s = 60.0
        self.undeployed_models: tuple[str, ...] = ()
        self.registry = FakeLoras()
        self.plan = PlanReport(is_enabled=False)
        self.offered: list[tuple[ImageRequest, ...]] = []
        self.aborted: list[str] = []
        self.num_waits = 0
        self.tokenizers: tuple[PromptTokenizer, ...] = ()
        self.num_tokenizer_calls = 0
        self._accepted: dict[str, ImageRequest] = {}

    async def submit(
        self, requests: Sequence[ImageRequest], client: str, wait_s: float
    ) -> Submission:
        self._check()
        self.offered.append(tuple(requests))
        offer = self.offers.pop(0) if len(self.offers) > 1 else self.offers[0]
        if offer.accepted or offer.reason == "duplicate_id":
            self._accepted.update({request.request_id: request for request in requests})
        if not offer.accepted:
            return Submission(offer)
        return Submission(offer, await self.wait([one.request_id for one in requests], wait_s))

    async def estimate(self, requests: Sequence[ImageRequest], client: str) -> Offer:
        self._check()
        return self.offers[0]

    async def view(self, after_s: float) -> CellView:
        self._check()
        return CellView(1.0, {}, (), (), (), (), (), ())

    async def wait(self, request_ids: Sequence[str], wait_s: float) -> dict[str, Outcome]:
        self._check()
        self.num_waits += 1
        made = {key: self.outcome(self._accepted[key]) for key in request_ids}
        found = {key: outcome for key, outcome in made.items() if outcome is not None}
        if not found:
            await asyncio.sleep(min(wait_s, self.max_wait_s))
        return found

    async def watch(self, request_id: str, seen: int, wait_s: float) -> ImageUpdate:
        return ImageUpdate((await self.wait([request_id], wait_s)).get(request_id))

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._check()
        self.aborted += request_ids

    async def create_job(self, job: Job) -> Creation:
        raise AssertionError("jobs have a fake of their own: tests.jobs.jobs_cell.Cell")

    async def job(self, client: str, job_id: str, wait_s: float = 0.0) -> JobView | None:
        self._check()
        return None

    async def job_change(
        self, client: str, job_id: str, seen: str, wait_s: float
    ) -> JobView | None:
        self._check()
        return None

    async def jobs(self, query: JobQuery) -> JobPage:
        self._check()
        return JobPage((), has_more=False)

    async def cancel_job(self, client: str, job_id: str) -> JobView | None:
        self._check()
        return None

    async def metrics(self, process_id: str, own: Snapshot) -> Snapshot:
        self._check()
        return own

    async def report_metrics(self, process_id: str, own: Snapshot) -> None:
        self._check()
        self.told = own

    async def warnings(self) -> tuple[str, ...]:
        return ()

    async def starting(self) -> tuple[str, ...]:
        return ()

    async def undeployed(self) -> tuple[str, ...]:
        return self.undeployed_models

    async def settings(self, process_id: str, seen: str, wait_s: float) -> GatewaySettings | None:
        self._check()
        self.seen_versions.append(seen)
        return await self.news.get()

    async def models(self) -> dict[str, ModelProfile]:
        self._check()
        return self.profiles

    async def prompt_tokenizers(self, model: str) -> tuple[PromptTokenizer, ...]:
        self._check()
        self.num_tokenizer_calls += 1
        return self.tokenizers

    async def plan_report(self) -> PlanReport:
        self._check()
        return self.plan

    async def pause_plan(self, is_paused: bool) -> PlanReport:
        self._check()
        mode: RoundMode = "paused" if is_paused else "applied"
        self.plan = replace(self.plan, mode=mode)
        return self.plan

    async def add_lora(self, lora: Lora) -> LoraAdded:
        self._check()
        return await self.registry.add_lora(lora)

    async def loras(self, after: str, limit: int) -> tuple[LoraStatus, ...]:
        self._check()
        return await self.registry.loras(after, limit)

    async def find_loras(self, names: tuple[str, ...]) -> LoraLookup:
        self._check()
        return await self.registry.find_loras(names)

    async def remove_lora(self, name: str) -> LoraStatus | None:
        self._check()
        return await self.registry.remove_lora(name)

    def _check(self) -> None:
        if self.down:
            raise DispatcherUnavailable("no dispatcher")
