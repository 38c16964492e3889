"""Replicas with a real model merge the LoRAs of their images, and keep nobody waiting for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.models.loading import LoadedModel, start_states
from ray_cluster.engine.step.step_engine import StepEngine
from ray_cluster.protocol.loras import Lora
from ray_cluster.replica.denoise.lora_shelf import LoraShelf
from ray_cluster.requests import AddOns, ImageRequest, LoraUse
from tests.engine.harness import all_rows, load, pool, request
from tests.engine.lora_sets import random_set
from tests.engine.random_models import save_sd
from tests.engine.staged import StagedModel
from tests.replica.setup import (
    Link,
    Replica,
    check_image,
    new_service,
    new_worker,
    offer,
    outcomes,
    until,
)

SEEDS = {"a": 0, "b": 1}


class Subject:
    """Models of one folder, one for each worker, and the image that every request is to come to."""

    def __init__(self, folder: Path) -> None:
        save_sd(folder)
        self.pipeline = DiffusionPipeline.from_pretrained(folder)
        self.models = [StagedModel(load(pool(folder))) for _ in range(2)]
        self._reference = load(pool(folder))

    def open_set(self, model: LoadedModel, files: Sequence[tuple[Path, float]]) -> AdapterSet:
        [(path, scale)] = files
        return random_set(model, self.pipeline, seed=SEEDS[path.name], scale=scale)

    @torch.inference_mode()
    def pixels(self, requests: Sequence[ImageRequest]) -> dict[str, Any]:
        """Images without any merging."""
        model, found = self._reference, {}
        engine = StepEngine(model.executor, all_rows, model.tables, time.monotonic)
        for one in requests:
            uses = one.add_ons.loras
            own = None
            if uses:
                own = self.open_set(model, [(Path(uses[0].lora_id), uses[0].scale)])
            [state] = start_states(model, [one], now_s=0.0)
            engine.add(state, own and own.denoiser)
            while len(engine):
                engine.step()
            found[one.request_id] = model.decoder.decode([state.latents])[0]
        return found


class Folder:
    """Has every LoRA."""

    def path_of(self, lora_id: str) -> Path:
        return Path(lora_id)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("merging") / "sd")


@asynccontextmanager
async def replicas(
    subject: Subject, coder: Any, count: int
) -> AsyncIterator[tuple[Link, list[Replica]]]:
    link = Link(new_service())
    for name in SEEDS:
        link.service.loras.add(Lora(name, name, "m", f"builtin:{name}"))
    workers = []
    for number, model in enumerate(subject.models[:count]):
        folder: Any = Folder()
        shelf = LoraShelf(model.inner, folder, max_bytes=1 << 30, open_set=subject.open_set)
        workers.append(new_worker(model, link, coder, f"r{number}", loras=shelf))
    for worker in workers:
        worker.start()
    try:
        yield link, workers
    finally:
        for worker in workers:
            await worker.drain()
            # the model is that of the next test
            worker.skill._runner._engine.weights.unmerge()
        await link.service.close()


def of_set(name: str, number: int, num_steps: int = 20) -> ImageRequest:
    uses = (LoraUse(name, 1.0, name),) if name else ()
    return request(
        f"{name or 'plain'}{number}", num_steps=num_steps, seed=number, add_ons=AddOns(loras=uses)
    )


async def merged_with_a(link: Link, requests: Sequence[ImageRequest]) -> list[str]:
    """Offer the requests; return the replicas that report a merge, as soon as one does."""
    await offer(link.service, requests)

    def merged() -> list[str]:
        return [name for name, poll in link.last_poll.items() if poll.merged == "a@1.0"]

    await until(merged, "a merge")
    return merged()


def value_of(link: Link, name: str) -> float:
    """The value of a metric in the last poll."""
    families = link.last_poll["r0"].metrics or ()
    [found] = [
        value
        for family in families
        for (sample, _), value in family.samples.items()
        if sample == name
    ]
    return found


@pytest.mark.slow
async def test_one_replica_merges_and_gives_way_to_others(subject: Subject, coder: Any) -> None:
    first = [of_set("a", number, 240) for number in range(2)]
    others = [of_set("b", 1, 4), of_set("", 2, 4), of_set("a", 9, 4)]
    expected = subject.pixels([*first, *others])
    async with replicas(subject, coder, 1) as (link, [worker]):
        merger = worker.skill._runner.merger
        assert merger is not None
        assert await merged_with_a(link, first) == ["r0"]
        # as it was reported with the poll that names the set
        assert value_of(link, "ray_cluster_merged_loras") == 1
        assert value_of(link, "ray_cluster_lora_merges_total") >= 1
        await offer(link.service, others)
        ended = await outcomes(link.service, others[:2])
        # they did not wait until the many steps of the first ones were over
        left = link.service.progress([one.request_id for one in first], predicts="no")
        assert None not in left
        ended |= await outcomes(link.service, [*first, others[2]])
        for one in ended.values():
            check_image(one, expected)
        assert merger.num_unmerges >= 1


async def test_beside_a_merged_replica_another_one_makes_the_others(
    subject: Subject, coder: Any
) -> None:
    first = [of_set("a", number, 60) for number in range(4)]
    others = [of_set("b", number, 4) for number in range(3)] + [of_set("", 7, 4)]
    expected = subject.pixels([*first, *others])
    async with replicas(subject, coder, 2) as (link, _):
        merged = await merged_with_a(link, first)
        await offer(link.service, others)
        ended = await outcomes(link.service, [*others, *first])
        for one in ended.values():
            check_image(one, expected)
    assert merged


async def test_an_idle_merged_replica_takes_others_at_once(subject: Subject, coder: Any) -> None:
    first, other = [of_set("a", number, 40) for number in range(2)], of_set("", 5, 4)
    expected = subject.pixels([*first, other])
    async with replicas(subject, coder, 1) as (link, [worker]):
        await offer(link.service, first)
        ended = await outcomes(link.service, first)
        await until(lambda: link.last_poll["r0"].merged, "a merge")
        await asyncio.sleep(0)
        await offer(link.service, [other])
        ended |= await outcomes(link.service, [other])
        for one in ended.values():
            check_image(one, expected)
        assert worker.skill._runner.merger is not None
        assert worker.skill._runner.merger.merged == ""
