"""A group beside whatever else a service has: pools of one rank, LoRAs, upscalers, previews."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, cycle
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from diffusers import SD3Transformer2DModel
from safetensors.torch import save_file
from transformers import CLIPTextModelWithProjection

from ray_cluster.models.builtin import weights_folder
from tests.cell.local_service import LocalService, running_locally
from tests.cell.test_groups import rank_pids
from tests.e2e.jobs import create, ends_of, images_in, look
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import HEADERS, image_request
from tests.e2e.service import images as images_of
from tests.engine.harness import PIXEL_TOLERANCE
from tests.engine.random_loras import ATTENTION, pairs, peft_keys

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("local"),
    pytest.mark.timeout(300),
]

POOL = {"model": "shapes-sd3", "max_batch": 1, "max_in_flight": 1}
LORAS = ("lora0", "lora1")
NUM_STEPS, NUM_LONG = 12, 60
MOST_TRIES = 6
REUSE = {"steps": NUM_STEPS, "reuse": "outer1-every3", "cost": 0.5, "ssim": 0.95}
FIDELITY = {
    "sampler": "flow_match_euler",
    "max_guidance_scale": 10.0,
    "steps": [{"asked": NUM_STEPS, "balanced": 8, "fast": 5, "balanced_reuse": REUSE}],
}


def saved_lora(folder: Path, name: str, seed: int) -> Path:
    """Write a LoRA with random factors; the second one has none for the text encoder."""
    model = weights_folder() / "shapes-sd3"
    transformer = SD3Transformer2DModel.from_pretrained(model / "transformer")
    tensors = peft_keys("transformer", pairs(transformer, ATTENTION, 2 + seed, seed, 0.5))
    if seed == 0:
        encoder = CLIPTextModelWithProjection.from_pretrained(model / "text_encoder")
        layers = pairs(encoder, ("q_proj", "fc1"), 2, seed, 0.5)
        tensors |= peft_keys("text_encoder", layers)
    file = folder / f"{name}.safetensors"
    save_file(tensors, file)
    return file


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    """A group and a pool of one rank under one name, and each under its own."""
    folder = tmp_path_factory.mktemp("combined")
    registered = [
        {"name": f"{name}-{base}", "base": base, "source": str(saved_lora(folder, name, index))}
        for index, name in enumerate(LORAS)
        for base in ("group", "one")
    ]
    pools = [
        {"name": "both-group", "served_as": "both", "ranks": 2, "fidelity": FIDELITY, **POOL},
        {"name": "both-one", "served_as": "both", **POOL},
        {"name": "group", "model": "shapes-sd3", "ranks": 2},
        {"name": "one", "model": "shapes-sd3", "fidelity": FIDELITY},
    ]
    more: dict[str, Any] = {"pools": pools, "cascades": [], "discriminators": []}
    more |= {"upscalers": [{"name": "big"}]}
    more["loras"] = {"folder": str(folder / "loras"), "sources": [str(folder)]}
    more["loras"]["registered"] = registered
    with running_locally(folder, **more) as service:
        yield service


def send(service: LocalService, seed: int, **fields: Any) -> httpx.Response:
    body = image_request(seed=seed, **fields)
    url = f"{service.url}/v1/images/generations"
    return httpx.post(url, json=body, headers=HEADERS, timeout=120)


def sent_in_time(service: LocalService, seed: int, **fields: Any) -> httpx.Response:
    """Call with the first deadline that can be kept on a machine of whatever speed."""
    for slo_s in (1, 2, 4, 8, 16):
        reply = send(service, seed, **fields, slo_s=slo_s, when_late="refuse")
        if reply.status_code == 200:
            break
    return reply


def made(service: LocalService, seed: int, **fields: Any) -> dict[str, Any]:
    reply = send(service, seed, **fields)
    assert reply.status_code == 200, reply.text
    [found] = reply.json()["data"]
    return dict(found)


def image_of(found: Mapping[str, Any]) -> bytes:
    return base64.b64decode(found["b64_json"])


def as_on_one_rank(service: LocalService, seed: int, found: bytes, **fields: Any) -> bool:
    expected = image_of(made(service, seed, **fields | {"model": "one"}))
    return pixels_differ(found, expected) <= PIXEL_TOLERANCE


def until(condition: Callable[[], object], what: str, *, patience_s: float = 60.0) -> None:
    end_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain until {what}"
        time.sleep(0.02)


def job_of(service: LocalService, job_id: str) -> dict[str, Any]:
    reply = look(service, f"/v1/jobs/{job_id}")
    assert reply is not None
    return dict(reply.json())


def cancel(service: LocalService, job_id: str) -> None:
    url = f"{service.url}/v1/jobs/{job_id}"
    assert httpx.delete(url, headers=HEADERS, timeout=10).status_code == 200


def events(
    caplog: pytest.LogCaptureFixture, job_id: str, name: str = "work_started"
) -> list[tuple[str, int]]:
    """Return on which workers a job's image began or went on, and with how many steps done."""
    return [
        (one["replica"], one["steps_done"])
        for one in (getattr(one, "ray_cluster_fields", {}) for one in caplog.records)
        if one.get("job_id") == job_id and one["event"] == name
    ]


def returned(caplog: pytest.LogCaptureFixture, job_id: str) -> bool:
    return bool(events(caplog, job_id, "work_returned"))


def moved(service: LocalService, caplog: pytest.LogCaptureFixture, slos_s: Sequence[int]) -> str:
    """Have an image preempted on one pool and go on on the other; return where.

    Two images take a slot each. An urgent one gets the slot of either, most often of that with the
    later deadline; that one goes on in the slot of the other, which is cancelled.
    """
    fields = {"model": "both", "size": "128x128", "num_inference_steps": NUM_LONG}
    jobs = [create(service, 5, **fields, slo_s=slo_s) for slo_s in slos_s]
    until(lambda: all(job_of(service, one)["step"] for one in jobs), "both step")
    urgent = {"model": "both", "size": "64x64", "num_inference_steps": 20}
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(sent_in_time, service, 6, **urgent)
        until(lambda: call.done() or any(returned(caplog, one) for one in jobs), "one is preempted")
        patient, other = sorted(jobs, key=lambda one: returned(caplog, one), reverse=True)
        cancel(service, other)
        [job] = ends_of(service, [patient])
        assert as_on_one_rank(service, 6, images_of(call.result())[0], **urgent)
    [(first, _), (there, steps_done)] = events(caplog, patient)
    assert {first, there} == {"both-group-0", "both-one-0"}
    assert 0 < steps_done < NUM_LONG
    on_group = steps_done if there == "both-one-0" else NUM_LONG - steps_done
    assert sum(job["data"][0]["steps_by_degree"].values()) == on_group
    assert as_on_one_rank(service, 5, images_in(service, [job])[5], **fields)
    return there


def test_one_queue_feeds_both_and_what_is_preempted_on_one_goes_on_on_the_other(
    service: LocalService, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray_cluster")
    orders, seen = cycle([(600, 300), (300, 600)]), set[str]()
    for _ in range(MOST_TRIES):
        seen.add(moved(service, caplog, next(orders)))
        if len(seen) == 2:
            return
    pytest.fail(f"all were moved to {seen}")


def test_loras_beside_each_other_are_those_of_one_rank(service: LocalService) -> None:
    def wanted(model: str) -> list[dict[str, Any]]:
        names = ([], *([one] for one in LORAS), LORAS)
        return [{"loras": [{"name": f"{one}-{model}"} for one in some]} for some in names]

    def all_of(model: str) -> list[bytes]:
        with ThreadPoolExecutor(8) as pool:
            calls = [
                pool.submit(made, service, seed, model=model, num_inference_steps=8, **fields)
                for fields in wanted(model)
                for seed in range(2)
            ]
            return [image_of(one.result()) for one in calls]

    found, expected = all_of("group"), all_of("one")
    differences = [pixels_differ(*pair) for pair in zip(found, expected, strict=True)]
    assert max(differences) <= PIXEL_TOLERANCE, differences
    for seed in range(2):
        different = combinations(found[seed::2], 2)
        assert min(pixels_differ(*pair) for pair in different) > 20


def previews(service: LocalService, model: str) -> list[bytes]:
    fields = {"stream": True, "partial_images": 3, "num_inference_steps": 12}
    lines = send(service, 7, model=model, **fields).text.splitlines()
    events = [json.loads(one.removeprefix("data: ")) for one in lines if one.startswith("data: {")]
    kinds = [one["type"].removeprefix("image_generation.") for one in events]
    assert kinds == ["partial_image"] * 3 + ["completed"]
    return [base64.b64decode(one["b64_json"]) for one in events]


def test_previews_are_those_of_one_rank(service: LocalService) -> None:
    found, expected = previews(service, "group"), previews(service, "one")
    for pair in zip(found, expected, strict=True):
        assert pixels_differ(*pair) <= PIXEL_TOLERANCE


def test_enlarged_images_say_on_how_many_ranks_they_were_made(service: LocalService) -> None:
    fields = {"model": "group", "num_inference_steps": 6, "upscale": 2}
    found = made(service, 8, **fields)
    [job] = ends_of(service, [create(service, 8, **fields)])
    for one in (found, job["data"][0]):
        assert sum(one["steps_by_degree"].values()) == 6
    assert "steps_by_degree" not in made(service, 8, **fields | {"model": "one"})


def test_a_job_cancelled_within_a_step_ends_at_once_and_others_go_on(service: LocalService) -> None:
    fields = {"model": "group", "size": "128x128", "num_inference_steps": NUM_STEPS}
    more = ({"num_inference_steps": 100}, {}, {})
    jobs = [create(service, seed, **fields | own) for seed, own in enumerate(more)]
    until(lambda: job_of(service, jobs[0])["step"], "it steps")
    stopped = [psutil.Process(pid) for pid in rank_pids()]
    for one in stopped:
        one.suspend()
    try:
        cancel(service, jobs[0])
        until(lambda: job_of(service, jobs[0])["state"] == "cancelled", "it ends", patience_s=1)
    finally:
        for one in stopped:
            one.resume()
    images = images_in(service, ends_of(service, jobs[1:]))
    assert all(as_on_one_rank(service, seed, images[seed], **fields) for seed in (1, 2))


def test_fewer_steps_are_the_same_wherever_they_are_taken(service: LocalService) -> None:
    """A group reuses nothing of a step: a model that has one is not offered with reuse."""
    fields = {"num_inference_steps": NUM_STEPS, "fidelity": "balanced"}
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(made, service, 3, model="both", **fields) for _ in range(4)]
        found = [one.result() for one in calls]
    assert {"steps_by_degree" in one for one in found} == {True, False}
    assert {one["num_inference_steps"] for one in found} == {8}
    plain = image_of(made(service, 3, model="one", num_inference_steps=8))
    assert max(pixels_differ(plain, image_of(one)) for one in found) <= PIXEL_TOLERANCE
    assert made(service, 3, model="one", **fields)["fidelity"]["steps_reused"] > 0
