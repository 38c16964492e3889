"""Settings change in a running service under load: no call fails and no process is replaced."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.service import API_KEY, Service, running
from tests.e2e.settings import (
    DRAFT,
    Clients,
    Document,
    all_run,
    call,
    identities,
    is_admitted,
    is_answered,
    serve_file,
    settings_command,
    wait_for,
)

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

NEXT_KEY = "the-next-key"


@pytest.fixture
def document(service: Service) -> Iterator[Document]:
    one = Document(service)
    try:
        yield one
    finally:
        one.restore()
        wait_for(is_admitted(service, NEXT_KEY, 401), "the old settings")


def warnings_of(service: Service) -> str:
    reply = httpx.get(f"{service.url}/readyz", timeout=30)
    assert reply.status_code == 200, reply.text
    return " ".join(reply.json()["warnings"])


def change_keys(service: Service, document: Document) -> float:
    """Add a key, then take it away again; return the seconds until both were in force."""
    assert call(service, key=NEXT_KEY).status_code == 401
    document.edit(lambda content: content["http"].update(api_keys=[API_KEY, NEXT_KEY]))
    took_s = wait_for(is_admitted(service, NEXT_KEY), "the new key")
    document.edit(lambda content: content["http"].update(api_keys=[API_KEY]))
    return took_s + wait_for(is_admitted(service, NEXT_KEY, 401), "the key's end")


def change_limits(service: Service, document: Document) -> None:
    document.edit(lambda content: content["limits"].update(max_images_per_request=1))
    wait_for(is_answered(service, 400, n=2), "the lower limit")
    document.edit(lambda content: content["limits"].update(max_images_per_request=10))
    wait_for(lambda: call(service, n=2).status_code == 200, "the higher limit")


def break_the_file(service: Service, document: Document) -> None:
    good = document.path.read_text()
    document.write(f"{good}\nlimitz: 1\n")
    wait_for(lambda: "limitz" in warnings_of(service), "a warning")
    assert call(service).status_code == 200
    document.write(good)
    wait_for(lambda: "limitz" not in warnings_of(service), "the warning's end")


def shown_by_all(service: Service, document: Document) -> str:
    """Return what ``settings show`` says once every process has what is in force.

    ``apply`` waits for those that the dispatcher knows; on a busy machine it knows one again only a
    while later.
    """
    shown = ""
    num_processes = 2 + document.num_replicas()

    def have_it() -> bool:
        nonlocal shown
        shown = settings_command(service, "show")
        version = shown.split()[2].rstrip(",")
        return shown.count(f": {version}") == num_processes

    wait_for(have_it, f"{num_processes} processes with the settings")
    return shown


def caps_of_first(shown: str) -> list[str]:
    """What ``settings show`` says of the replicas of the first pool."""
    return re.findall(r" of shapes-sd: \w+, (.*)$", shown, re.MULTILINE)


def add_a_pool(service: Service, document: Document) -> None:
    """Lower the caps in the same document."""
    wanted = document.path.with_name("wanted.yaml")
    content = document.content()
    content["pools"][0].update(max_batch=2, max_in_flight=4)
    content["pools"].append(DRAFT)
    wanted.write_text(yaml.safe_dump(content))
    assert "applied by 2 gateway(s) and " in settings_command(service, "apply", wanted)
    assert document.path.read_text() == wanted.read_text()
    assert call(service, model="draft").status_code == 200
    shown = shown_by_all(service, document)
    assert caps_of_first(shown) == ["max_batch 2, max_in_flight 4"] * 2
    assert shown.count(" of draft: ") == 1
    assert API_KEY not in shown


def remove_it(service: Service, document: Document) -> None:
    wanted = document.path.with_name("wanted.yaml")
    content = document.content()
    content["pools"] = [pool for pool in content["pools"] if pool != DRAFT]
    content["pools"][0].update(max_batch=8, max_in_flight=8)
    wanted.write_text(yaml.safe_dump(content))
    said = settings_command(service, "apply", wanted)
    assert "applied by 2 gateway(s) and " in said
    assert "pool draft: stopped" in said
    assert caps_of_first(shown_by_all(service, document)) == ["max_batch 8, max_in_flight 8"] * 2
    wait_for(is_answered(service, 404, model="draft"), "the model's end")


@contextmanager
def undisturbed(service: Service) -> Iterator[None]:
    """Have clients call meanwhile: no call fails, and no process is another one afterwards."""
    before, clients = identities(service), Clients(service, 2)
    assert all(before.values())
    started_s = time.monotonic()
    with clients.running():
        yield
    took_s = time.monotonic() - started_s
    logger.warning("%d calls within %.0f s of changes", clients.num_calls, took_s)
    assert clients.failed == []
    assert clients.num_calls > 0
    assert identities(service) == before


def test_settings_change_under_load_without_a_failed_call_or_a_new_process(
    service: Service, document: Document
) -> None:
    with undisturbed(service):
        took_s = change_keys(service, document)
        change_limits(service, document)
        break_the_file(service, document)
    logger.warning("a key came and went in %.1f s", took_s)


@pytest.mark.slow
def test_a_pool_comes_and_goes_under_load_without_a_failed_call_or_another_new_process(
    service: Service, document: Document
) -> None:
    with undisturbed(service):
        add_a_pool(service, document)
        remove_it(service, document)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_clients_notice_nothing_of_many_changes(service: Service, document: Document) -> None:
    before, clients = identities(service), Clients(service, 32)
    changes = {
        "limits": ("max_queued_images", lambda number: 200 + number),
        "dispatch": ("poll_s", lambda number: 0.5 + number % 3 / 2),
        "storage": ("retention_s", lambda number: 1e6 + number),
    }
    document.edit(lambda content: content["limits"].update(max_queued_images=200))
    wait_for(is_admitted(service, API_KEY), "a higher bound")
    time.sleep(3)
    with clients.running():
        for number in range(20):
            section, (key, value) = list(changes.items())[number % 3]
            caps = {"max_batch": 1 + number % 8, "max_in_flight": 8}
            keys = [API_KEY, f"{NEXT_KEY}-{number}"]

            def change(content: dict[str, Any]) -> None:
                content.setdefault(section, {})[key] = value(number)  # noqa: B023
                content["pools"][0].update(caps)  # noqa: B023
                content["http"].update(api_keys=keys)  # noqa: B023

            document.edit(change)
            wait_for(is_admitted(service, keys[1]), "the next key")
    logger.warning("%d calls of 32 clients over 20 changes", clients.num_calls)
    assert clients.failed == []
    assert identities(service) == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deploying_again_after_a_change_of_settings_replaces_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as service:
        document = Document(service)

        def deploy() -> None:
            text = serve_file(service)
            reply = httpx.put(
                f"{service.dashboard_url}/api/serve/applications/", json=text, timeout=60
            )
            assert reply.status_code == 200, reply.text
            wait_for(lambda: all_run(service), "all applications")

        # by Serve's own file from here on: this once everything is new
        deploy()
        wait_for(service.is_ready, "the service")
        before = identities(service)
        document.edit(lambda content: content["http"].update(api_keys=[API_KEY, NEXT_KEY]))
        document.edit(lambda content: content["pools"][0].update(max_batch=3))
        deploy()
        time.sleep(5)
        assert identities(service) == before
        wait_for(is_admitted(service, NEXT_KEY), "the new key")
        # a new pool adds an application and touches no other
        document.edit(lambda content: content["pools"].append(DRAFT))
        deploy()
        wait_for(lambda: call(service, model="draft").status_code == 200, "the new pool")
        assert identities(service) == before
