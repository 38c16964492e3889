"""The jobs endpoints over a real dispatcher's services, with a replica of nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from ray_cluster.config.loading import ClusterConfig
from tests.api.checks import check_error
from tests.api.conftest import app_of, http_of
from tests.jobs.jobs_cell import JobsCell, Replica, until

BODY = {"prompt": "a red circle", "seed": 7}


@pytest.fixture
async def calls(cell: JobsCell, replica: Replica, config: ClusterConfig) -> AsyncIterator[Any]:
    app = app_of(cell, config, results=cell.results)
    async with http_of(app) as client:
        yield client


async def ended(calls: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    for _ in range(1000):
        found: dict[str, Any] = (await calls.get(f"/v1/jobs/{job_id}")).json()
        if found["finished"] is not None:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("the job does not end")


async def test_a_job_from_its_call_to_its_images(
    calls: httpx.AsyncClient, replica: Replica
) -> None:
    reply = await calls.post("/v1/jobs", json={**BODY, "n": 2, "slo_s": 30})
    assert reply.status_code == 202
    job = reply.json()
    assert reply.headers["location"] == f"http://gateway/v1/jobs/{job['id']}"
    assert (job["state"], job["step"], job["num_steps"]) == ("queued", 0, 20)
    assert (job["queue_position"], job["n"], job["size"]) == (0, 2, "64x64")
    assert job["predicted_finish"] > job["created"]
    assert job["deadline"] == {"slo_s": 30, "met": None}
    assert (job["data"], job["error"], job["finished"]) == ([], None, None)
    first, second = sorted((await replica.poll()).values(), key=lambda one: one.request.seed)
    replica.steps_done = 4
    await replica.poll()
    job = (await calls.get(f"/v1/jobs/{job['id']}")).json()
    assert (job["state"], job["step"], job["queue_position"]) == ("running", 8, None)
    await replica.finish(first, b"one")
    await replica.finish(second, b"two!")
    job = await ended(calls, job["id"])
    assert (job["state"], job["step"], job["attempts"]) == ("completed", 20, 2)
    assert job["deadline"]["met"] is True
    assert [(one["seed"], one["num_bytes"]) for one in job["data"]] == [(7, 3), (8, 4)]
    image = await calls.get(job["data"][1]["url"])
    assert (image.status_code, image.content) == (200, b"two!")
    assert image.headers["content-type"] == "image/png"
    assert "immutable" in image.headers["cache-control"]
    url, etag = job["data"][1]["url"], image.headers["etag"]
    for given in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = await calls.get(url, headers={"If-None-Match": given})
        assert (again.status_code, again.content) == (304, b"")
    assert (await calls.get(url, headers={"If-None-Match": '"other"'})).status_code == 200
    head = await calls.head(url)
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(image.content)))


async def test_the_same_key_names_the_same_job(calls: httpx.AsyncClient, replica: Replica) -> None:
    key = {"Idempotency-Key": "order 66"}
    first = await calls.post("/v1/jobs", json=BODY, headers=key)
    # the order of names in a body says nothing
    second = await calls.post("/v1/jobs", json=dict(reversed(BODY.items())), headers=key)
    assert (first.status_code, second.status_code) == (202, 200)
    assert first.json()["id"] == second.json()["id"]
    # and null is absent
    third = await calls.post("/v1/jobs", json=BODY | {"user": None, "loras": None}, headers=key)
    assert third.json()["id"] == first.json()["id"]
    other = await calls.post("/v1/jobs", json={**BODY, "seed": 8}, headers=key)
    check_error(other, 422, code="idempotency_key_reused", param="Idempotency-Key")
    assert len(await replica.poll()) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "ä"])
async def test_a_key_out_of_bounds_is_refused(calls: httpx.AsyncClient, key: str) -> None:
    headers = {"Idempotency-Key": key.encode()}
    reply = await calls.post("/v1/jobs", json=BODY, headers=headers)  # type: ignore[arg-type]
    check_error(reply, 400, param="Idempotency-Key")


async def test_a_keyed_image_call_is_a_job_that_outlives_its_connection(
    calls: httpx.AsyncClient, replica: Replica
) -> None:
    key = {"Idempotency-Key": "k"}
    leaves = asyncio.create_task(
        calls.post("/v1/images/generations", json={**BODY, "n": 2}, headers=key)
    )
    await until(lambda: replica.cell.core.num_waiting == 2)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    for lease in list((await replica.poll()).values()):
        await replica.finish(lease, lease.request.request_id.encode())
    reply = await calls.post("/v1/images/generations", json={**BODY, "n": 2}, headers=key)
    assert reply.status_code == 200
    assert [one["seed"] for one in reply.json()["data"]] == [7, 8]
    assert all(one["b64_json"] for one in reply.json()["data"])
    again = await calls.post("/v1/images/generations", json={**BODY, "n": 2}, headers=key)
    assert again.json()["data"] == reply.json()["data"]
    listed = (await calls.get("/v1/jobs")).json()["data"]
    assert [one["state"] for one in listed] == ["completed"]


async def test_a_keyed_call_whose_images_are_forgotten_says_so(
    calls: httpx.AsyncClient, replica: Replica
) -> None:
    async def call() -> httpx.Response:
        key = {"Idempotency-Key": "k"}
        return await calls.post("/v1/images/generations", json=BODY, headers=key)

    first = asyncio.create_task(call())
    await until(lambda: replica.cell.core.num_waiting == 1)
    (lease,) = (await replica.poll()).values()
    await replica.finish(lease, b"image")
    assert (await first).status_code == 200
    replica.cell.results.delete([lease.request.file_id])
    check_error(await call(), 410, code="images_forgotten")


async def test_what_was_stored_for_a_call_without_a_reply_is_deleted(
    calls: httpx.AsyncClient, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_cluster.api.routes.files.LATE_WRITE_S", 0.05)
    results = replica.cell.results
    is_written, delete, deleted_s = threading.Event(), results.delete, []

    def delete_once_written(names: Sequence[str]) -> None:
        # however long the abort takes on a busy machine
        deleted_s.append(time.monotonic())
        assert is_written.wait(60)
        delete(names)

    monkeypatch.setattr(results, "delete", delete_once_written)
    body = {**BODY, "n": 2, "response_format": "url"}
    leaves = asyncio.create_task(calls.post("/v1/images/generations", json=body))
    await until(lambda: replica.cell.core.num_waiting == 2)
    first, second = (await replica.poll()).values()
    await replica.finish(first, b"in time")
    left_s = time.monotonic()
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    # the replica was about to write it when it heard of the abort
    results.put(second.request.file_id, b"late")
    is_written.set()
    await until(lambda: not list(results.entries()))
    assert len(deleted_s) == 1
    assert deleted_s[0] - left_s >= 0.05


async def test_an_attached_call_may_ask_for_links(
    calls: httpx.AsyncClient, replica: Replica
) -> None:
    call = asyncio.create_task(
        calls.post("/v1/images/generations", json={**BODY, "response_format": "url"})
    )
    await until(lambda: replica.cell.core.num_waiting == 1)
    (lease,) = (await replica.poll()).values()
    await replica.finish(lease, b"image")
    data = (await call).json()["data"]
    assert data[0].keys() == {"url", "seed", "num_inference_steps", "fidelity", "timing"}
    assert (await calls.get(data[0]["url"])).content == b"image"
    assert (await calls.get("/v1/jobs")).json()["data"] == []


async def test_a_job_is_made_with_fewer_steps_where_that_is_allowed_and_needed(
    calls: httpx.AsyncClient, replica: Replica
) -> None:
    first = (await calls.post("/v1/jobs", json=BODY)).json()
    whole_s = first["predicted_finish"] - first["created"]
    # however long the calls themselves take, it is too short for all steps
    slo_s = 0.5 * whole_s
    body = {**BODY, "slo_s": slo_s, "min_inference_steps": 3}
    job = (await calls.post("/v1/jobs", json=body)).json()
    assert 3 <= job["num_steps"] < first["num_steps"] == 10
    assert [one.num_steps for one in replica.cell.store.unfinished()[1].requests] == [
        job["num_steps"]
    ]
    leases = {lease.request.slo_s: lease for lease in (await replica.poll()).values()}
    assert leases[slo_s].request.num_steps == job["num_steps"]
    await replica.finish(leases[slo_s], b"short")
    told = job["fidelity"]
    assert (told["got"], told["steps_asked"], told["steps_computed"]) == (
        None,
        10,
        job["num_steps"],
    )
    job = await ended(calls, job["id"])
    [image] = job["data"]
    assert (image["num_inference_steps"], image["fidelity"]) == (job["num_steps"], told)
    last = (await calls.get(f"/v1/jobs/{job['id']}/events")).text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["data"][0]["fidelity"] == told


async def test_an_attached_call_says_with_how_few_steps_its_images_were_made(
    calls: httpx.AsyncClient, replica: Replica
) -> None:
    body = {**BODY, "slo_s": 1e-3, "min_inference_steps": 4, "n": 2}
    call = asyncio.create_task(calls.post("/v1/images/generations", json=body))
    await until(lambda: replica.cell.core.num_waiting == 2)
    for lease in list((await replica.poll()).values()):
        await replica.finish(lease, b"image")
    assert [one["num_inference_steps"] for one in (await call).json()["data"]] == [4, 4]


async def test_cancelling(calls: httpx.AsyncClient, replica: Replica) -> None:
    job = (await calls.post("/v1/jobs", json=BODY)).json()
    reply = await calls.delete(f"/v1/jobs/{job['id']}")
    assert (reply.status_code, reply.json()["state"]) == (200, "cancelled")
    assert reply.json()["deadline"]["met"] is False
    assert await replica.poll() == {}
    assert (await calls.delete(f"/v1/jobs/{job['id']}")).json() == reply.json()
    keyed = {"Idempotency-Key": "k"}
    job = (await calls.post("/v1/jobs", json=BODY, headers=keyed)).json()
    await calls.delete(f"/v1/jobs/{job['id']}")
    refused = await calls.post("/v1/images/generations", json=BODY, headers=keyed)
    check_error(refused, 409, code="job_cancelled")


async def test_a_failed_job_tells_why(calls: httpx.AsyncClient, replica: Replica) -> None:
    job = (await calls.post("/v1/jobs", json=BODY)).json()
    (lease,) = (await replica.poll()).values()
    await replica.fail(lease)
    job = await ended(calls, job["id"])
    assert (job["state"], job["error"]["code"]) == ("failed", "model_error")
    assert "out of luck" in job["error"]["message"]
    assert job["data"] == []


async def test_who_comes_back_to_a_failed_job_with_its_key_is_not_told_to_try_again(
    calls: httpx.AsyncClient, replica: Replica
) -> None:
    keyed = {"Idempotency-Key": "k"}
    job = (await calls.post("/v1/jobs", json=BODY, headers=keyed)).json()
    (lease,) = (await replica.poll()).values()
    await replica.fail(lease, "storing")
    await ended(calls, job["id"])
    refused = await calls.post("/v1/images/generations", json=BODY, headers=keyed)
    check_error(refused, 503, code="result_store_unavailable")
    assert refused.headers["x-should-retry"] == "false"
    assert "new Idempotency-Key" in refused.json()["error"]["message"]


async def test_pages(calls: httpx.AsyncClient, replica: Replica) -> None:
    ids = [(await calls.post("/v1/jobs", json=BODY)).json()["id"] for _ in range(5)]
    first = (await calls.get("/v1/jobs", params={"limit": 2})).json()
    assert [one["id"] for one in first["data"]] == [ids[4], ids[3]]
    assert (first["has_more"], first["first_id"], first["last_id"]) == (True, ids[4], ids[3])
    rest = (await calls.get("/v1/jobs", params={"limit": 9, "after": ids[3]})).json()
    assert [one["id"] for one in rest["data"]] == [ids[2], ids[1], ids[0]]
    assert rest["has_more"] is False
    none = (await calls.get("/v1/jobs", params={"state": "failed"})).json()
    assert (none["data"], none["first_id"], none["last_id"]) == ([], None, None)
    last = (await calls.get("/v1/jobs", params={"after": ids[0]})).json()
    assert (last["data"], last["has_more"]) == ([], False)
    for unknown in ("unknown", ids[0][:-1] + ("0" if ids[0][-1] != "0" else "1")):
        missing = await calls.get("/v1/jobs", params={"after": unknown})
        check_error(missing, 404, code="job_not_found", param="after")
    for wrong in ({"limit": 0}, {"limit": 101}, {"state": "happy"}, {"status": "failed"}):
        check_error(await calls.get("/v1/jobs", params=wrong), 400, param=next(iter(wrong)))
    for limit, said in (("abc", "a whole number"), ("101", "at most 100"), ("", "a whole")):
        answer = await calls.get("/v1/jobs", params={"limit": limit})
        assert f"must be {said}" in answer.json()["error"]["message"]
        assert f"given {limit!r}" in answer.json()["error"]["message"]
    twice = await calls.get("/v1/jobs?limit=2&limit=3")
    check_error(twice, 400, param="limit")


async def test_jobs_belong_to_their_key(
    cell: JobsCell, replica: Replica, config: ClusterConfig
) -> None:
    locked = ClusterConfig.model_validate(
        {**config.model_dump(), "http": {"api_keys": ["alice-key", "bob-key"]}}
    )
    transport = httpx.ASGITransport(app_of(cell, locked, results=cell.results))
    alice, bob = ({"Authorization": f"Bearer {name}-key"} for name in ("alice", "bob"))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as calls:
        job = (await calls.post("/v1/jobs", json=BODY, headers=alice)).json()
        kept = cell.store.get(job["id"])
        assert kept is not None
        # its replica, too, reads no images but those that this client has sent
        assert kept.client == kept.requests[0].owner == hashlib.sha256(b"alice-key").hexdigest()
        path = f"/v1/jobs/{job['id']}"
        assert (await calls.get(path, headers=alice)).status_code == 200
        check_error(await calls.get(path, headers=bob), 404, code="job_not_found")
        check_error(await calls.delete(path, headers=bob), 404, code="job_not_found")
        assert (await calls.get("/v1/jobs", headers=bob)).json()["data"] == []
        check_error(await calls.get("/v1/jobs"), 401)


async def test_what_is_wrong_is_named(calls: httpx.AsyncClient) -> None:
    wrong = {"prompt": "a", "response_format": "b64_json"}
    check_error(await calls.post("/v1/jobs", json=wrong), 400, param="response_format")
    check_error(await calls.post("/v1/jobs", json={"prompt": ""}), 400, param="prompt")
    check_error(await calls.get("/v1/jobs/nothing"), 404, code="job_not_found")
    for name in ("nothing", "img-0.png", "..%2Fjobs.db", f"img-{'0' * 32}.exe"):
        check_error(await calls.get(f"/v1/files/{name}"), 404)
    check_error(await calls.get(f"/v1/files/img-{'0' * 32}.png"), 404, code="file_not_found")
