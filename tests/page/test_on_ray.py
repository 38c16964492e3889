"""The page before a real service: an image, an edit of it, and the cell that made them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.service import API_KEY, Service, running
from tests.page.browsing import MADE, looking, make

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

# from opening the page to the first image, on a service that has made none
FIRST_IMAGE_S = 15.0


@pytest.fixture(scope="module")
def service(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    more = {"cascades": [], "discriminators": [], "loras": {"num_stores": 0}}
    with running(tmp_path_factory.mktemp("page-on-ray"), **more) as one:
        yield one


def test_a_person_makes_an_image_edits_it_and_looks_at_the_cell(
    service: Service, browser: Browser
) -> None:
    begun_s = time.monotonic()
    with looking(browser, service.url, key=API_KEY) as page:
        make(page, "a large red circle in the center on a black background")
        expect(page.locator(MADE)).to_be_visible()
        page.locator("#made figure img").evaluate("one => one.decode()")
        took_s = time.monotonic() - begun_s
        assert took_s < FIRST_IMAGE_S, took_s
        page.get_by_role("button", name="Edit it").click()
        # once it is there
        expect(page.locator("#edit canvas").first).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Shift+ArrowRight")
        page.keyboard.press("Enter")
        page.locator("#edit").get_by_label("Prompt").fill("a large blue square")
        page.get_by_role("button", name="Edit", exact=True).click()
        expect(page.locator(f"#edited {MADE}")).to_be_visible()
        page.get_by_role("link", name="Jobs").click()
        expect(page.locator("#jobs-list rc-run[data-state=completed]")).to_have_count(2)
        page.get_by_role("link", name="Cell").click()
        row = page.get_by_role("row", name="shapes-sd model")
        expect(row.locator(".replica")).to_have_count(2)
