"""Texts, names and files that would be more than that in a careless page."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Browser, Page, Route, expect

from tests.cell.local_service import LocalService
from tests.e2e.service import API_KEY
from tests.keys import bearer
from tests.page.browsing import MADE, looking, make

pytestmark = pytest.mark.slow

MARKUP = "\"><img src=x onerror=alert(1)><script>alert(2)</script>{{7*7}}'--"
SVG = b"""<svg xmlns="http://www.w3.org/2000/svg" width="64" height="64" onload="alert(3)">
<script>alert(4)</script><image href="https://example.com/x.png"/></svg>"""

EVIL = "https://example.com/img-0123456789abcdef0123456789abcdef.png"
JOB: dict[str, Any] = {
    **dict.fromkeys(("id", "model", "prompt"), MARKUP),
    "state": "completed",
    "created": 1,
    "finished": 2,
    "size": MARKUP,
    "n": 2,
    "step": 1,
    "num_steps": 1,
    "queue_position": None,
    "predicted_finish": None,
    "warnings": [MARKUP],
    "error": {"message": MARKUP},
    "previews": [],
    "deadline": {"slo_s": 1, "met": True},
    "data": [
        {"url": url, "seed": 1, "num_inference_steps": 1} for url in ("javascript:alert(6)", EVIL)
    ],
}
CELL: dict[str, Any] = {
    "object": "cell",
    "at": 1,
    "warnings": [MARKUP],
    "loras": [MARKUP],
    "models": [{"id": MARKUP, "kind": MARKUP, "waiting": 1, "running": 0, "replicas": []}],
    "queue": [{"id": MARKUP, "model": MARKUP, "in_s": 1}],
    "plan": {"state": MARKUP, "latest": {"pools": [{"pool": MARKUP, "reason": MARKUP}]}},
}


def check_harmless(page: Page) -> None:
    assert page.locator("img[src=x]").count() == 0
    assert page.locator("body script").count() == 0
    assert page.locator("a[href^='javascript:']").count() == 0


def as_json(page: Page, path: str, content: Any) -> None:
    def answer(route: Route) -> None:
        route.fulfill(json=content)

    page.context.route(path, answer)


def test_a_prompt_is_text_wherever_it_is_shown(service: LocalService, browser: Browser) -> None:
    with looking(browser, service.url, key=API_KEY) as page:
        make(page, MARKUP)
        expect(page.locator(MADE)).to_be_visible()
        expect(page.locator("rc-run h3")).to_have_text(MARKUP)
        page.get_by_role("button", name="As Python").click()
        check_harmless(page)
        page.keyboard.press("Escape")
        page.get_by_role("link", name="Jobs").click()
        expect(page.locator("#jobs-list h3").first).to_have_text(MARKUP)
        check_harmless(page)


def test_a_recipe_is_text(service: LocalService, browser: Browser) -> None:
    info = PngInfo()
    recipe = {
        "prompt": MARKUP,
        "model": MARKUP,
        "size": "javascript:alert(5)",
        "seed": "1e400",
        "sampler": MARKUP,
        "loras": json.dumps([{"name": MARKUP, "scale": {"toString": 1}}, None, 3]),
        "controlnets": json.dumps([{"name": MARKUP}]),
    }
    for name, value in recipe.items():
        info.add_text(f"ray_cluster:{name}", value)
    info.add_itxt("ray_cluster:negative_prompt", f"{MARKUP} é", "", "")
    info.add_text("ray_cluster:__proto__", '{"polluted": true}')
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG", pnginfo=info)
    with looking(browser, service.url, key=API_KEY) as page:
        for content in (file.getvalue(), file.getvalue()[:90], b"\x89PNG\r\n\x1a\n" + b"\xff" * 64):
            page.locator("#make input[type=file]").set_input_files(
                {"name": f"{MARKUP}.png", "mimeType": "image/png", "buffer": content}
            )
            expect(page.locator("#make .error")).not_to_be_empty()
        page.locator("#make input[type=file]").set_input_files(
            {"name": "x.png", "mimeType": "image/png", "buffer": file.getvalue()}
        )
        expect(page.locator("#make [name=prompt]")).to_have_value(MARKUP)
        expect(page.locator("#make [name=model]")).to_have_value("shapes-sd")
        check_harmless(page)
        assert page.evaluate("({}).polluted") is None


def test_a_drawing_with_scripts_is_no_picture_to_edit(
    service: LocalService, browser: Browser
) -> None:
    with looking(browser, f"{service.url}/#edit", key=API_KEY) as page:
        for name in (f"{MARKUP}.svg", "x.png"):
            page.locator("#edit input[type=file]").set_input_files(
                {"name": name, "mimeType": "image/svg+xml", "buffer": SVG}
            )
            expect(page.locator("#edit .error")).to_contain_text("cannot read the file")
        check_harmless(page)


def test_names_and_addresses_of_a_hostile_service_are_text(
    service: LocalService, browser: Browser
) -> None:
    with looking(browser, service.url, key=API_KEY) as page:
        card = page.evaluate(
            "async (headers) => (await (await fetch('v1/models', {headers})).json())",
            bearer(API_KEY),
        )["data"][0]
        hostile = {**card, "id": MARKUP, "controlnets": [MARKUP], "default_size": "64x64"}
        lora = {"id": f"{MARKUP}:{MARKUP}", "parent": MARKUP}
        as_json(page, "**/v1/models", {"data": [hostile, lora]})
        nets = [{"name": MARKUP, "bases": [MARKUP], "description": MARKUP}]
        as_json(page, "**/v1/controlnets", {"data": nets, "detectors": [MARKUP]})
        as_json(page, "**/v1/jobs?*", {"data": [JOB], "last_id": None, "has_more": False})
        page.context.route("**/v1/files/img-*", lambda route: route.fulfill(body=SVG))
        body = f"event: cell\ndata: {json.dumps(CELL)}\n\n"
        page.context.route(
            "**/v1/cell/events",
            lambda route: route.fulfill(content_type="text/event-stream", body=body),
        )
        page.reload()
        for group in ("LoRAs", "ControlNets"):
            page.locator("#make").get_by_role("group", name=group).get_by_role(
                "button", name="Add"
            ).click()
        check_harmless(page)
        page.get_by_role("link", name="Jobs").click()
        expect(page.locator("#jobs-list h3")).to_have_text(MARKUP)
        check_harmless(page)
        page.get_by_role("link", name="Cell").click()
        expect(page.locator("#section-cell td").first).to_have_text(MARKUP)
        check_harmless(page)
