"""What the running service tells of itself: its log files, and its metrics as Ray has them."""

from __future__ import annotations

import json
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.service import HEADERS, RAY_METRICS_S, Service, image_request

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def generate(service: Service, request_id: str) -> None:
    reply = httpx.post(
        f"{service.url}/v1/images/generations",
        json=image_request(num_inference_steps=4),
        headers=HEADERS | {"X-Request-ID": request_id},
        timeout=120,
    )
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-request-id"] == request_id


def told_of(service: Service, request_id: str) -> set[tuple[str, str]]:
    """Return which processes have written which events of a call."""
    lines = [
        json.loads(line)
        for found in service.serve_logs().values()
        for line in found
        # the last line of a file may be half written
        if request_id in line and line.endswith("}")
    ]
    return {
        (line["deployment"], line["event"])
        for line in lines
        if line.get("request_id") == request_id and "event" in line
    }


def test_a_call_is_followed_through_the_log_files_of_three_processes(service: Service) -> None:
    generate(service, "call-of-the-log-test")
    wanted = {
        ("Gateway", "call_answered"),
        ("Dispatcher", "image_accepted"),
        ("Dispatcher", "image_leased"),
        ("Dispatcher", "image_completed"),
        ("BaseModel", "work_started"),
        ("BaseModel", "work_finished"),
    }
    # lines are written a moment later
    deadline_s = time.monotonic() + 60
    while (told := told_of(service, "call-of-the-log-test")) != wanted:
        assert time.monotonic() < deadline_s, told
        time.sleep(0.2)
    files = service.serve_logs()
    # each line of each file, Serve's own proxies and controller included
    for found in files.values():
        for line in found:
            assert isinstance(json.loads(line), dict)
    assert not any("red circle" in line for found in files.values() for line in found)
    # the terminal hears nothing of it
    assert "image_" not in service.log.read_text()


def test_ray_hears_of_our_images(service: Service) -> None:
    generate(service, "call-that-ray-hears-of")
    images = ("ray_cluster_images_total", frozenset({("event", "completed")}))
    deadline_s = time.monotonic() + 60
    while scrape(service.ray_metrics_url).get(images, 0.0) < 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.5)


@pytest.mark.slow
def test_ray_has_each_number_of_ours_exactly_once(service: Service) -> None:
    lost = what_ray_never_heard(service)
    # and those that Ray alone remembers
    gone = set(scrape(service.ray_metrics_url))
    for index in range(3):
        generate(service, f"call-{index}-of-the-metrics-test")
    missing = httpx.post(f"{service.url}/v1/images/generations", json={}, headers=HEADERS)
    assert missing.status_code == 400
    deadline_s = time.monotonic() + 90
    while True:
        ours, rays = both(service)
        counts = counted(ours)
        different = {
            key: (value, rays.get(in_ray(key)))
            for key, value in counts.items()
            if rays.get(in_ray(key), 0.0) != pytest.approx(value - lost.get(key, 0.0))
        }
        if not different:
            break
        assert time.monotonic() < deadline_s, different
        time.sleep(2)
    images = ("ray_cluster_images_total", frozenset({("event", "completed")}))
    assert counts[images] >= 3
    assert {name for name, _ in counts} >= {
        "ray_cluster_http_requests_total",
        "ray_cluster_http_request_seconds_bucket",
        "ray_cluster_step_seconds_sum",
        "ray_cluster_step_batch_images_count",
    }
    for name in ("ray_cluster_leased_images", "ray_cluster_free_places"):
        gauges = {key: value for key, value in ours.items() if key[0] == name}
        # two of the heavy model, one of the light one, a discriminator
        assert len(gauges) == 4
        assert {key: rays.get(key) for key in gauges} == gauges
    assert not any(name.startswith("ray_ray_") for name, _ in rays)
    # the other way round: nothing of ours in Ray but what we say
    known = {in_ray(key) for key in ours}
    names = {name for name, _ in known}
    assert {key for key in rays if key[0] in names and key not in known} <= gone


def both(service: Service) -> tuple[dict[Sample, float], dict[Sample, float]]:
    """Our metrics, then Ray's: what comes in between is Ray's lead, and only health checks come."""
    return scrape(f"{service.url}/metrics"), scrape(service.ray_metrics_url)


def counted(ours: dict[Sample, float]) -> dict[Sample, float]:
    return {
        key: value
        for key, value in ours.items()
        if key[0].endswith(("_total", "_count", "_bucket", "_sum"))
        and value > 0
        # looking at it changes it
        and ("route", "/metrics") not in key[1]
    }


def what_ray_never_heard(service: Service) -> dict[Sample, float]:
    """The last counts of processes that other tests have killed; Ray's are late by an interval."""
    last: dict[Sample, float] | None = None
    deadline_s = time.monotonic() + 90
    while True:
        ours, rays = both(service)
        lost = {key: value - rays.get(in_ray(key), 0.0) for key, value in counted(ours).items()}
        if lost == pytest.approx(last):
            return lost
        assert time.monotonic() < deadline_s, "Ray's numbers never come to rest"
        last = lost
        time.sleep(2.5 * RAY_METRICS_S)


Sample = tuple[str, frozenset[tuple[str, str]]]


def in_ray(key: Sample) -> Sample:
    """What Ray calls one of our samples: each that grows is a counter there."""
    name, labels = key
    return (f"{name}_total" if name.endswith(("_count", "_bucket", "_sum")) else name), labels


def scrape(url: str) -> dict[Sample, float]:
    """The samples of an endpoint, added up over what Ray says of the process."""
    found: dict[Sample, float] = {}
    reply = httpx.get(url, timeout=30)
    assert reply.status_code == 200
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            # Ray's own labels begin with a capital letter or with the name of their library
            ours = {
                key: value
                for key, value in sample.labels.items()
                if key.islower() and not key.startswith("otel_")
            }
            labels = frozenset(ours.items())
            found[sample.name, labels] = found.get((sample.name, labels), 0.0) + sample.value
    return found
