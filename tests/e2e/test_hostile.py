"""What nobody should send to a real port: no 5xx, nothing left behind, and no growth."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.wild_calls import WildCalls
from tests.e2e.service import API_KEY, HEADERS, Service, image_request
from tests.e2e.sockets import answers, connect, head, post, statuses, trickle

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

FRONT = ("ray::ServeReplica:front:Gateway", "ray::ServeReplica:front:Dispatcher")
GOOD = json.dumps(image_request(size="32x32", num_inference_steps=1, guidance_scale=1.0)).encode()
IDLE_CONNECTIONS = 200
MAX_GROWTH_MIB = 60.0


def front(service: Service) -> dict[int, float]:
    """The gateways' and the dispatcher's memory (PSS) in MiB, by process id."""
    return {
        process.pid: process.memory_full_info().pss / 2**20
        for name in FRONT
        for process in service.processes(name, may_be_busy=True)
    }


def gauges(service: Service) -> dict[str, float]:
    """Sum of each of the gauges that tell of what is in the system."""
    text = httpx.get(f"{service.url}/metrics", timeout=60).text
    names = ("ray_cluster_waiting_images", "ray_cluster_leased_images", "ray_cluster_open_jobs")
    found = dict.fromkeys(names, 0.0)
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in found:
            found[name] += float(line.rpartition(" ")[2])
    return found


@pytest.fixture(scope="module", autouse=True)
def front_survives(service: Service) -> Iterator[None]:
    """After all of it: the same processes, hardly larger, with nothing in the system."""
    before = front(service)
    assert len(before) == 3, "two gateways and a dispatcher"
    yield
    deadline_s = time.monotonic() + 60
    while any(gauges(service).values()):
        assert time.monotonic() < deadline_s, gauges(service)
        time.sleep(0.5)
    after = front(service)
    assert after.keys() == before.keys(), "a process has died"
    for pid, mib in after.items():
        logger.warning("PSS of process %d: %.0f MiB before, %.0f after", pid, before[pid], mib)
        assert mib - before[pid] < MAX_GROWTH_MIB


def refused(found: list[int], *expected: int) -> None:
    """A refusal, or a connection that was closed without a word."""
    assert all(400 <= status < 500 for status in found), found
    assert not expected or set(found) <= set(expected), found


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_strange_calls_get_no_5xx_of_rays_proxy_either(service: Service, count: int) -> None:
    # a word that this model does not know makes a 500, as it has to
    calls = WildCalls(count, without=("prompt", "negative_prompt"))
    for _ in range(count):
        call = calls.next([], [])
        given = {name for name, _ in call.headers}
        more = {"host": "x", "authorization": f"Bearer {API_KEY}"}
        found = answers(service, call.wire(*(one for one in more.items() if one[0] not in given)))
        assert found, call
        assert all(200 <= status < 500 for status in found), (found, call)
    # the proxy reads it before any code of ours
    assert answers(service, post(GOOD, X_Request_ID="\udcff")) == [200]


def served(service: Service) -> None:
    """A usual call is still answered, and soon."""
    reply = httpx.post(
        f"{service.url}/v1/images/generations",
        content=GOOD,
        headers=HEADERS | {"Content-Type": "application/json"},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text


def fields(text: str) -> bytes:
    return b'{"prompt": "a red circle", ' + text.encode() + b"}"


BODIES = {
    "not utf-8": (b'{"prompt": "\xff\xfe"}', 400),
    "utf-16": ('{"prompt": "a"}'.encode("utf-16"), 400),
    "nothing": (b"", 400),
    "null bytes": (b"\x00" * 1000, 400),
    "100,000 brackets": (b"[" * 100_000, 400),
    "100,000 objects": (b'{"a":' * 100_000, 400),
    "nan": (fields('"guidance_scale": NaN'), 400),
    "infinity": (fields('"slo_s": Infinity'), 400),
    "minus infinity": (fields('"slo_s": -Infinity'), 400),
    "1e999": (fields('"guidance_scale": 1e999'), 400),
    "1e999 as a seed": (fields('"seed": 1e999'), 400),
    "duplicate keys": (fields('"seed": 1, "seed": 2'), 400),
    "huge seed": (fields('"seed": ' + "9" * 4000), 400),
    "seed of many digits": (fields('"seed": ' + "9" * 100_000), 400),
    "seed of 2**63": (fields(f'"seed": {2**63}'), 400),
    "huge n": (fields('"n": ' + "9" * 300), 400),
    "negative steps": (fields('"num_inference_steps": -1'), 400),
    "huge size": (fields('"size": "999999x999999"'), 400),
    "null byte in a prompt": (b'{"prompt": "a red\\u0000 circle"}', 400),
    "lone surrogate": (b'{"prompt": "\\ud800 circle"}', 400),
    "lone surrogate as a name": (b'{"prompt": "a", "\\udfff": 1}', 400),
    "prompt of a million": (b'{"prompt": "' + b"a" * 1_000_000 + b'"}', 400),
    "over the limit": (b'{"prompt": "' + b"a" * 1_100_000 + b'"}', 413),
    "20 MiB": (b'{"prompt": "' + b"a" * (20 << 20) + b'"}', 413),
}


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/jobs"])
@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_refused(service: Service, name: str, path: str) -> None:
    body, status = BODIES[name]
    found = answers(service, post(body, path))
    # who sends on after the answer may find the connection closed
    assert found == [status] or (status == 413 and found == []), found


def test_control_characters_in_a_prompt_are_only_text(service: Service) -> None:
    body = json.dumps(json.loads(GOOD) | {"prompt": "a red\x01 circle\x1b\u202e\ufeff"}).encode()
    for path, status in (("/v1/images/generations", 200), ("/v1/jobs", 202)):
        assert answers(service, post(body, path)) == [status]


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "text/plain",
        "multipart/form-data; boundary=x",
        "application/json; charset=utf-16",
        "application/x-www-form-urlencoded",
        "application/json\x01",
        "ÿ",
        "a" * 5000,
    ],
)
def test_a_wrong_content_type_is_refused(service: Service, content_type: str) -> None:
    refused(answers(service, post(GOOD, Content_Type=content_type)), 400, 415)


@pytest.mark.parametrize("key", ["", " ", "\xe9" * 10, "k" * 256, "k" * 60_000, "a\x07b", "\x00"])
def test_a_garbage_idempotency_key_is_refused(service: Service, key: str) -> None:
    row = ("Idempotency-Key", key)
    data = head(
        "POST",
        "/v1/jobs",
        [("Content-Type", "application/json"), ("Connection", "close"), row],
        length=len(GOOD),
    )
    refused(answers(service, data + GOOD))


@pytest.mark.parametrize("last", ["", "\xff\xfe", "9" * 10_000, "running.-1.-1.-1", "..", "\x01"])
def test_a_garbage_last_event_id_is_no_error(service: Service, last: str) -> None:
    reply = httpx.post(
        f"{service.url}/v1/jobs",
        content=GOOD,
        headers=HEADERS | {"Content-Type": "application/json"},
        timeout=60,
    )
    path = f"/v1/jobs/{reply.json()['id']}/events"
    data = head("GET", path, [("Last-Event-ID", last), ("Connection", "close")])
    found = answers(service, data)
    assert found in ([200], [400], [431], []), found


@pytest.mark.parametrize(
    "headers",
    [
        [(f"X-{number}", "v") for number in range(5000)],
        [("X-Long", "v" * 200_000)],
        [("X" * 100_000, "v")],
        [("Content-Length", "-1")],
        [("Content-Length", "1e3")],
        [("Content-Length", "9" * 40)],
        [("Content-Length", "5"), ("Content-Length", "6")],
        [("Content-Length", "5"), ("Transfer-Encoding", "chunked")],
        [("Transfer-Encoding", "gzip")],
        [("Expect", "nonsense")],
        [("X-Request-ID", "\x01\xff" * 100)],
        [("Host", "a" * 10_000), ("Host", "b")],
        [("Upgrade", "websocket"), ("Connection", "Upgrade")],
    ],
    ids=lambda rows: f"{len(rows)} {rows[0][0][:20]} {rows[0][1][:10]!r}",
)
def test_bad_headers_are_no_error(service: Service, headers: list[tuple[str, str]]) -> None:
    data = head("POST", "/v1/jobs", [("Connection", "close"), *headers]) + b"0\r\n\r\n"
    refused(answers(service, data, half_close=True))


@pytest.mark.parametrize(
    "line",
    [
        "BREW /v1/jobs",
        "get /healthz",
        "PROPFIND /v1/jobs",
        "TRACE /",
        "DELETE /v1/models",
        "CONNECT x:1",
        "GET",
        "GET /%00",
        "GET //",
        "GET /../../etc/passwd",
        "GET *",
        "\x16\x03",
        "GET /v1/files/..%2f..%2fetc%2fpasswd",
        "GET /v1/files/%00.png",
        "GET /v1/jobs/%ff%fe",
        "GET /v1/jobs/%00",
        "DELETE /v1/jobs/%00",
        "GET /v1/jobs/%00/events",
        "GET /v1/models/%F0%9F%A6%93",
        f"GET /{'a' * 60000}",
        f"GET /{'a/' * 3000}",
        "GET /v1/jobs?limit=" + "9" * 3000,
        "GET /v1/jobs?limit=-1",
        "GET /v1/jobs?limit=NaN",
        "GET /v1/jobs?state=%00",
        "GET /v1/jobs?after=" + "a" * 3000,
    ],
)
def test_an_absurd_request_line_is_refused(service: Service, line: str) -> None:
    method, _, path = line.partition(" ")
    refused(answers(service, head(method, path, [("Connection", "close")]), half_close=True))


@pytest.mark.parametrize("after", ["%00", "%ff", "a", "'", "%F0%9F%A6%93", "job-%0d%0a"])
def test_a_garbage_cursor_is_refused_by_name(service: Service, after: str) -> None:
    reply = httpx.get(f"{service.url}/v1/jobs?after={after}", headers=HEADERS, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "after")


def test_truncated_bodies_are_given_up(service: Service) -> None:
    for _ in range(10):
        data = post(GOOD)
        with connect(service) as connection:
            connection.sendall(data[: len(data) - 20])
        refused(answers(service, data[: len(data) - 20], half_close=True))
    served(service)


def test_a_client_of_a_byte_at_a_time_is_served(service: Service) -> None:
    assert trickle(service, post(GOOD), every_s=0.005) == [200]


def test_a_client_that_closes_its_half_leaves_nothing(service: Service) -> None:
    for _ in range(5):
        found = answers(service, post(GOOD), half_close=True)
        assert found in ([200], [])


def test_pipelined_calls_are_answered_in_order(service: Service) -> None:
    data = head("GET", "/healthz") + head("GET", "/nothing") + head("GET", "/v1/models")
    data += head("GET", "/healthz", [("Connection", "close")])
    assert answers(service, data) == [200, 404, 200, 200]


def test_idle_connections_do_not_keep_others_out(service: Service) -> None:
    idle: list[socket.socket] = []
    try:
        for number in range(IDLE_CONNECTIONS):
            connection = connect(service)
            idle.append(connection)
            # half of them stop in the middle of a head
            if number % 2:
                connection.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        served(service)
    finally:
        for connection in idle:
            connection.close()


def test_streams_that_nobody_reads_end_with_their_job(service: Service) -> None:
    body: dict[str, Any] = json.loads(GOOD) | {"num_inference_steps": 20}
    ids = [
        httpx.post(f"{service.url}/v1/jobs", json=body, headers=HEADERS, timeout=60).json()["id"]
        for _ in range(4)
    ]
    connections = [connect(service) for _ in ids]
    for connection, job_id in zip(connections, ids, strict=True):
        connection.sendall(head("GET", f"/v1/jobs/{job_id}/events", [("Connection", "close")]))
    for connection in connections[2:]:
        connection.close()
    assert [statuses(connection) for connection in connections[:2]] == [[200], [200]]
    for connection in connections[:2]:
        connection.close()
