"""Edits against kill -9, and the images that they need against the sweep."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.edit_templates import Template
from tests.e2e.jobs import (
    create,
    ends_of,
    growth,
    images_in,
    images_of,
    kill_one,
    look,
    scrape,
    states_of,
    wait_for_replicas,
    wait_until_whole,
)
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import HEADERS, Service, running, storage_in
from tests.e2e.settings import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

SEED = 5
# of a replica of the service
MAX_IN_FLIGHT = 8


class Busiest:
    """Kills the replica that has worked most for a while."""

    def __init__(self, service: Service) -> None:
        self._before = {one: self._cpu_s(one) for one in service.replicas()}

    @staticmethod
    def _cpu_s(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    def kill(self) -> None:
        max(self._before, key=lambda one: self._cpu_s(one) - self._before[one]).kill()


def start_edit(service: Service, seed: int, template: Template, **fields: Any) -> str:
    return create(service, seed, **template.fields, **fields)


def is_idle(service: Service) -> bool:
    """Whether both replicas of the model are there, and have nothing to do."""
    free = scrape(service).values("free_places", model="shapes-sd")
    return free == [MAX_IN_FLIGHT] * 2


def has_ended(service: Service, job_id: str) -> bool:
    reply = look(service, f"/v1/jobs/{job_id}")
    return reply is not None and reply.json()["state"] == "completed"


def killed_in_between(service: Service, job_id: str) -> dict[str, Any]:
    """Kill the replica of an edit once its state is in the store; return the job at its end."""
    busiest = Busiest(service)
    wait_for(
        lambda: states_of(service).get(SEED, 0) > 0 or has_ended(service, job_id),
        "a state of the edit",
    )
    busiest.kill()
    [job] = ends_of(service, [job_id])
    return job


def test_an_edit_of_a_killed_replica_goes_on_from_its_state_bit_for_bit(service: Service) -> None:
    """The other replica reads the template anew, and pastes back as the first would have."""
    template = Template.of(SEED, side_px=128)
    # long enough to be killed in between; alone, so that sums are made in the same order
    fields = {"num_inference_steps": 200, "strength": 0.8, "feather_px": 4}
    wait_for(lambda: is_idle(service), "idle replicas")
    undisturbed = images_of(service, [start_edit(service, SEED, template, **fields)])
    assert template.is_kept_in(undisturbed[SEED])
    for _ in range(5):
        wait_for(lambda: is_idle(service) and SEED not in states_of(service), "idle replicas")
        before = scrape(service)
        job = killed_in_between(service, start_edit(service, SEED, template, **fields))
        # it may have ended before its replica was killed, on a machine that stood still
        if job["attempts"] > 1:
            break
    else:
        pytest.fail("the edit ended before its replica was killed, five times")
    assert images_in(service, [job]) == undisturbed
    wait_until_whole(service)
    after = scrape(service)
    assert growth(before, after, "resumed_images_total") == 1
    assert growth(before, after, "resumed_steps_total") > 0


def test_edits_outlive_a_killed_dispatcher_and_end_once(service: Service) -> None:
    templates = {seed: Template.of(seed) for seed in range(20, 26)}
    strengths = {seed: (1.0, 0.6)[seed % 2] for seed in templates}

    def start() -> list[str]:
        return [
            start_edit(service, seed, one, strength=strengths[seed], num_inference_steps=40)
            for seed, one in templates.items()
        ]

    undisturbed = images_of(service, start())
    job_ids = start()
    kill_one(service, "dispatcher")()
    ended = ends_of(service, job_ids)
    found = images_in(service, ended)
    assert found.keys() == templates.keys()
    for seed, template in templates.items():
        assert pixels_differ(found[seed], undisturbed[seed]) <= 1
        assert template.is_kept_in(found[seed])
    wait_until_whole(service)
    # ends are final: nobody has begun one of them again
    reply = look(service, f"/v1/jobs?limit={len(job_ids)}")
    assert reply is not None
    listed = {job["id"]: job for job in reply.json()["data"]}
    assert listed.keys() == set(job_ids)
    assert all(job["state"] == "completed" for job in listed.values())
    assert [listed[job["id"]]["finished"] for job in ended] == [job["finished"] for job in ended]


def inputs_in(folder: Path) -> set[Path]:
    return set((folder / "store" / "inputs").glob("*.?"))


def age(paths: Collection[Path], grace_s: float) -> set[str]:
    """Make inputs as old as a sweep deletes them; return the names that they have then."""
    now_s = time.time()
    generation = int(now_s // grace_s - 2) % 3
    names = set()
    for path in paths:
        aged = path.rename(path.with_suffix(f".{generation}"))
        os.utime(aged, (now_s - 2 * grace_s, now_s - 2 * grace_s))
        names.add(aged.name)
    return names


@pytest.mark.timeout(900)
def test_inputs_are_swept_and_never_while_an_open_job_needs_them(tmp_path: Path) -> None:
    """A dispatcher sweeps as soon as it knows the open jobs of the one before it."""
    # a period that has just begun: at its end nothing is swept
    grace_s = time.time() / (time.time() // 3000 + 0.01)
    storage = storage_in(tmp_path) | {"inputs_grace_s": grace_s}
    with running(tmp_path, storage=storage) as service:
        wait_for_replicas(service)
        ended, needed = Template.of(6), Template.of(7, side_px=128)
        images_of(service, [start_edit(service, 6, ended, num_inference_steps=4)])
        unneeded = inputs_in(tmp_path)
        assert len(unneeded) == 2
        job_id = start_edit(service, 7, needed, num_inference_steps=300, n=8)
        kept = inputs_in(tmp_path) - unneeded
        assert len(kept) == 2
        age(unneeded, grace_s)
        kept_names = age(kept, grace_s)
        kill_one(service, "dispatcher")()
        wait_for(lambda: len(inputs_in(tmp_path)) < 4, "a sweep", 120)
        wait_for(lambda: len(inputs_in(tmp_path)) == 2, "the end of the sweep", 10)
        reply = look(service, f"/v1/jobs/{job_id}")
        assert reply is not None
        assert reply.json()["state"] in {"queued", "running"}, "it was to be open all the time"
        assert {path.name for path in inputs_in(tmp_path)} == kept_names
        [job] = ends_of(service, [job_id])
        assert len(job["data"]) == 8
        for image in job["data"]:
            data = httpx.get(image["url"], headers=HEADERS, timeout=60).content
            assert needed.is_kept_in(data)
        wait_for(lambda: not inputs_in(tmp_path), "the next sweep", 120)
