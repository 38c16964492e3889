"""LoRAs, detectors and several pictures, chosen on the page."""

from __future__ import annotations

import io

import httpx
import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import Browser, Route, expect

from tests.cell.local_service import LocalService
from tests.e2e.service import API_KEY
from tests.keys import bearer
from tests.page.browsing import MADE, looking, make

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RED = "a large red circle in the center on a black background"


def circle(colour: str) -> bytes:
    picture, file = Image.new("RGB", (96, 64)), io.BytesIO()
    ImageDraw.Draw(picture).ellipse((16, 8, 64, 56), fill=colour)
    picture.save(file, "PNG")
    return file.getvalue()


def latest(service: LocalService) -> dict[str, object]:
    page = httpx.get(f"{service.url}/v1/jobs?limit=1", headers=bearer(API_KEY)).json()
    found: dict[str, object] = page["data"][0]
    return found


def test_a_lora_has_the_weight_of_its_slider_and_comes_back_with_the_recipe(
    service: LocalService, browser: Browser
) -> None:
    with looking(browser, service.url, key=API_KEY) as page:
        loras = page.locator("#make").get_by_role("group", name="LoRAs")
        loras.get_by_label("To add").select_option("pastel")
        loras.get_by_role("button", name="Add").click()
        loras.get_by_label("Weight").fill("0.5")
        make(page, RED)
        expect(page.locator(MADE)).to_be_visible()
        assert latest(service)["loras"] == [{"name": "pastel", "scale": 0.5}]
        loras.get_by_role("button", name="Remove").click()
        page.get_by_role("button", name="Same again").click()
        expect(loras.get_by_label("Weight")).to_have_value("0.5")


def test_a_detector_makes_the_map_that_is_shown(service: LocalService, browser: Browser) -> None:
    with looking(browser, service.url, key=API_KEY) as page:
        nets = page.locator("#make").get_by_role("group", name="ControlNets")
        nets.get_by_role("button", name="Add").click()
        nets.locator("input[type=file]").set_input_files(
            {"name": "circle.png", "mimeType": "image/png", "buffer": circle("red")}
        )
        expect(nets).to_contain_text("This map will be followed")
        nets.get_by_label("Detector").select_option("canny")
        # of the size of the image to be made, and no more of that of the picture
        expect(nets.get_by_role("img")).to_have_js_property("naturalWidth", 64)
        make(page, RED)
        expect(page.locator(MADE)).to_be_visible()


def test_several_pictures_are_sent_where_a_model_takes_so_many(
    service: LocalService, browser: Browser
) -> None:
    files = [
        {"name": f"{colour}.png", "mimeType": "image/png", "buffer": circle(colour)}
        for colour in ("red", "blue", "green")
    ]

    def two(route: Route) -> None:
        cards = route.fetch().json()["data"]
        route.fulfill(json={"data": [one | {"max_input_images": 2} for one in cards]})

    with looking(browser, f"{service.url}/#edit", key=API_KEY, expected=("status of 400",)) as page:
        form = page.locator("#edit")
        form.locator("input[type=file]").set_input_files(files)
        expect(form.locator(".error")).to_contain_text("This model takes one picture")
        page.context.route("**/v1/models", two)
        page.reload()
        expect(form).to_be_visible()
        form.locator("input[type=file]").set_input_files(files[:1])
        form.locator("input[type=file]").set_input_files(files[1:])
        expect(form.locator(".error")).to_contain_text("2 pictures at most")
        expect(form.locator(".thumbs img")).to_have_count(2)
        form.get_by_label("Prompt").fill("both")
        form.get_by_role("button", name="Edit", exact=True).click()
        # the service knows better
        expect(form.locator(".error")).to_contain_text("holds 2 images; shapes-sd takes 1")
