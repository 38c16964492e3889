"""What a person does on the page, in a real browser on a cell."""

from __future__ import annotations

import ast
import base64
import io
import json
import shlex
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect

from ray_cluster.policies.edits import Box, SizeBounds, SizePx, edit_geometry
from tests.cell.local_service import LocalService
from tests.e2e.service import API_KEY
from tests.keys import bearer
from tests.page.browsing import MADE, below_images, looking, make, picture_of
from tests.page.cell import USE_KEY

RED = "a large red circle in the center on a black background"
NO_KEY = "status of 401"
# what a screen reader would call by its kind alone
UNNAMED = """[...document.querySelectorAll('input, select, textarea, canvas, button, svg, img')]
    .filter((one) => !one.labels?.length && !one.hasAttribute('aria-label') && !one.textContent
        && !one.alt).map((one) => one.outerHTML)"""


def pixels(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def generated(service: LocalService, prompt: str, **fields: Any) -> bytes:
    body = {"prompt": prompt, "seed": 7, **fields}
    reply = httpx.post(
        f"{service.url}/v1/images/generations", json=body, headers=bearer(API_KEY), timeout=60
    )
    assert reply.status_code == 200, reply.text
    return base64.b64decode(reply.json()["data"][0]["b64_json"])


def create(service: LocalService, **body: Any) -> str:
    reply = httpx.post(f"{service.url}/v1/jobs", json=body, headers=bearer(API_KEY))
    assert reply.status_code == 202, reply.text
    return str(reply.json()["id"])


def open_section(page: Page, name: str) -> None:
    page.get_by_role("link", name=name, exact=True).click()


def test_a_key_is_asked_for_once_and_kept_for_the_tab_alone(
    service: LocalService, browser: Browser
) -> None:
    with looking(browser, service.url, expected=(NO_KEY,)) as page:
        box = page.get_by_role("dialog")
        expect(box).to_contain_text("No API key given")
        refused = "The API key is not valid"
        for key, said in (("wrong", refused), ("kéy 🔑", refused), (f" {USE_KEY} ", "")):
            page.locator("#key input").fill(key)
            page.keyboard.press("Enter")
            if said:
                expect(box).to_contain_text(said)
        expect(page.locator("#make")).to_be_visible()
        page.reload()
        expect(page.locator("#make")).to_be_visible()
        kept = page.evaluate("[document.cookie, localStorage.length, sessionStorage.length]")
        assert kept == ["", 0, 1]
        page.get_by_role("button", name="Forget the key").click()
        expect(box).to_contain_text("No API key given")
        assert page.evaluate("sessionStorage.length") == 0


def test_an_image_grows_and_is_made_again_bit_for_bit(
    service: LocalService, browser: Browser, tmp_path: Path
) -> None:
    with looking(browser, service.url, key=API_KEY) as page:
        make(page, RED, seed="7", num_inference_steps="40", size="other", width="64", height="96")
        expect(page.locator("rc-run")).to_contain_text("of 40, done in about")
        expect(page.locator("figure.preview img").first).to_be_visible()
        expect(page.locator(MADE)).to_contain_text("seed 7 · 40 steps")
        first = picture_of(page, "figure img")
        assert np.array_equal(
            pixels(first), pixels(generated(service, RED, num_inference_steps=40, size="64x96"))
        )
        with page.expect_download() as kept:
            page.get_by_role("link", name="Download").click()
        assert kept.value.suggested_filename == "shapes-sd-7.png"
        file = tmp_path / "kept.png"
        kept.value.save_as(file)
        # its recipe fills the form of a page that has not made it
        page.reload()
        expect(page.locator("#make")).to_be_visible()
        page.locator("#make input[type=file]").set_input_files(file)
        expect(page.locator("#make [name=prompt]")).to_have_value(RED)
        page.get_by_role("button", name="Make", exact=True).click()
        expect(page.locator(MADE)).to_contain_text("seed 7 · 40 steps")
        assert np.array_equal(pixels(picture_of(page, "figure img")), pixels(first))


def test_the_same_call_for_a_terminal_and_a_program(
    service: LocalService, browser: Browser
) -> None:
    prompt = 'it\'s a "red" circle\\n $HOME `id` é'
    with looking(browser, service.url, key=API_KEY) as page:
        make(page, prompt, seed="3", guidance_scale="1.5")
        page.get_by_role("button", name="As curl").click()
        words = shlex.split(page.locator("dialog pre").inner_text())
        body = json.loads(words[words.index("-d") + 1])
        assert body["prompt"] == prompt
        assert (body["seed"], body["guidance_scale"]) == (3, 1.5)
        page.get_by_role("button", name="Close").click()
        page.get_by_role("button", name="As Python").click()
        program = page.locator("dialog pre").inner_text()
        assert API_KEY not in program
        texts = {one.value for one in ast.walk(ast.parse(program)) if isinstance(one, ast.Constant)}
        assert {prompt, 1.5, 3} <= texts


def test_a_drawn_map_is_followed(service: LocalService, browser: Browser) -> None:
    with looking(browser, service.url, key=API_KEY) as page:
        nets = page.locator("#make").get_by_role("group", name="ControlNets")
        nets.get_by_role("button", name="Add").click()
        make(page, RED)
        expect(page.locator("#make .error")).to_contain_text("Give edges a map")
        nets.get_by_role("button", name="Draw").click()
        for key in ("ArrowLeft", "Enter", "Shift+ArrowRight", "Shift+ArrowDown", "Enter"):
            page.keyboard.press(key)
        page.get_by_role("button", name="Use it").click()
        expect(nets).to_contain_text("This map will be followed")
        page.get_by_role("button", name="Make", exact=True).click()
        expect(page.locator(MADE)).to_be_visible()
    job = httpx.get(f"{service.url}/v1/jobs?limit=1", headers=bearer(API_KEY)).json()["data"][0]
    assert [one["name"] for one in job["controlnets"]] == ["edges"]


def test_an_edit_changes_what_is_painted_and_nothing_else(
    service: LocalService, browser: Browser
) -> None:
    template = generated(service, "a large red circle on a white background", size="128x128")
    with looking(browser, f"{service.url}/#edit", key=API_KEY) as page:
        form = page.locator("#edit")
        form.locator("input[type=file]").set_input_files(
            {"name": "<img src=x onerror=alert(1)>.png", "mimeType": "", "buffer": template}
        )
        form.get_by_text("A rectangle by numbers").click()
        for name, value in {"left": "64", "top": "0", "width": "64", "height": "128"}.items():
            form.get_by_label(f"Rectangle: {name}").fill(value)
        form.get_by_role("button", name="Add", exact=True).click()
        form.get_by_role("button", name="Undo").click()
        form.get_by_role("button", name="Redo").click()
        with page.expect_download() as kept:
            form.get_by_role("button", name="Save the mask").click()
        assert kept.value.suggested_filename == "mask.png"
        mask = np.asarray(Image.open(kept.value.path()).getchannel("A"))
        assert mask.shape == (128, 128)
        assert (mask[:, :64] == 255).all()
        assert (mask[:, 64:] == 0).all()
        form.get_by_label("Prompt").fill("a large blue square on a white background")
        form.get_by_role("button", name="Edit", exact=True).click()
        expect(page.locator(f"#edited {MADE}")).to_be_visible()
        edited = pixels(picture_of(page, "#edited figure img"))
        assert np.array_equal(edited[:, :64], pixels(template)[:, :64])
        assert not np.array_equal(edited[:, 64:], pixels(template)[:, 64:])
        page.get_by_role("button", name="Compare").click()
        page.get_by_label("How much of the picture before is shown").press("ArrowLeft")
        page.get_by_role("button", name="Difference").click()
        differing = (edited != pixels(template)).any(2).mean()
        expect(page.locator("rc-compare")).to_contain_text(f"{100 * differing:.1f} % of the pixels")


def test_operators_watch_the_cell_and_others_are_told_why_not(
    service: LocalService, browser: Browser
) -> None:
    with looking(browser, f"{service.url}/#cell", key=API_KEY) as page:
        row = page.get_by_role("row", name="shapes-sd")
        expect(row).to_contain_text("0 images, batches of 8")
        mine = [create(service, prompt=RED, n=4, num_inference_steps=400) for _ in range(2)]
        expect(row.locator("progress")).to_have_count(8)
        page.locator("#cell-models").focus()
        # two events later
        page.wait_for_timeout(2500)
        assert page.evaluate("document.activeElement.id") == "cell-models"
        for job_id in mine:
            httpx.delete(f"{service.url}/v1/jobs/{job_id}", headers=bearer(API_KEY))
        expect(row).to_contain_text("0 images, batches of 8")
        expect(page.locator(".panel", has_text="Queue").get_by_role("img").first).to_be_visible()
    with looking(browser, f"{service.url}/#cell", key=USE_KEY, expected=("status of 403",)) as page:
        expect(page.locator("#section-cell")).to_contain_text("that takes the role operate")


def test_what_a_call_would_get_is_said_before_it_is_made(
    service: LocalService, browser: Browser
) -> None:
    with looking(browser, service.url, key=API_KEY) as page:
        form, asked = page.locator("#make"), list[str]()
        page.on("request", lambda one: asked.append(one.url))

        def count() -> int:
            return len([one for one in asked if one.endswith("/estimate")])

        form.get_by_label("Prompt").press_sequentially(RED, delay=5)
        expect(form.locator(".estimate")).to_contain_text("with 20 steps")
        num_asked, answered_s = count(), time.monotonic()
        assert num_asked <= 2
        # for five seconds an answer holds for other words, too
        form.get_by_label("Prompt").press_sequentially(", blue", delay=5)
        page.wait_for_timeout(1000)
        assert count() == num_asked or time.monotonic() > answered_s + 4
        form.get_by_label("Seed").fill("7")
        form.locator("summary").click()
        form.get_by_label("Steps").fill("30")
        expect(form.locator(".estimate")).to_contain_text("with 30 steps")


def test_sizes_and_crops_are_those_of_the_service(service: LocalService, browser: Browser) -> None:
    rng = np.random.default_rng(7)
    cases = list[tuple[Box, SizePx, SizeBounds]]()
    for _ in range(300):
        width, height = (int(one) for one in rng.integers(16, 400, 2))
        left, top = int(rng.integers(0, width)), int(rng.integers(0, height))
        box = Box(left, top, int(rng.integers(1, width - left + 1)), height - top)
        multiple = int(rng.choice([8, 16]))
        native = (multiple * int(rng.integers(4, 9)), multiple * int(rng.integers(4, 9)))
        cases.append((box, (width, height), SizeBounds(multiple, 32, 256, native)))
    sent = [
        {
            "box": [box.left_px, box.top_px, box.width_px, box.height_px],
            "size": size,
            "card": {
                "default_size": "{}x{}".format(*bounds.native_px),
                "size_multiple_px": bounds.multiple_px,
                "min_px": bounds.lowest_px - 3,
                "max_px": bounds.highest_px + 5,
            },
        }
        for box, size, bounds in cases
    ]
    with looking(browser, service.url, key=API_KEY) as page:
        crops, sizes = page.evaluate(
            """async (cases) => {
              const { cropOf } = await import("./page/edit/crop.js");
              const { sizesOf } = await import("./page/base/models.js");
              return [cases.map((one) => cropOf(one.box, one.size, one.card)),
                      cases.map((one) => sizesOf(one.card))];
            }""",
            sent,
        )
    for (box, size, bounds), crop, offered in zip(cases, crops, sizes, strict=True):
        window = edit_geometry(size, bounds, crop_to=box).window or Box(0, 0, *size)
        assert crop == [window.left_px, window.top_px, window.width_px, window.height_px]
        sides = [int(side) for one in offered for side in one.split("x")]
        assert all(32 <= one <= 256 and one % bounds.multiple_px == 0 for one in sides)


def test_jobs_survive_a_reload_and_can_be_cancelled(
    service: LocalService, browser: Browser
) -> None:
    with looking(browser, service.url, key=API_KEY) as page:
        make(page, RED, n="2", num_inference_steps="400")
        expect(page.locator("rc-run")).to_contain_text("of 800")
        open_section(page, "Jobs")
        page.reload()
        mine = page.locator("#jobs-list rc-run").first
        expect(mine).to_contain_text("of 800")
        mine.get_by_role("button", name="Cancel").click()
        expect(mine.locator(".state")).to_have_text("cancelled")
        page.get_by_label("Show").select_option("completed")
        expect(page.locator("#jobs-list rc-run[data-state=cancelled]")).to_have_count(0)


def test_below_a_path_of_a_proxy_that_says_nothing_of_it(
    service: LocalService, browser: Browser, tmp_path: Path
) -> None:
    with (
        below_images(tmp_path, service.url) as url,
        looking(browser, url, key=API_KEY) as page,
    ):
        make(page, RED)
        expect(page.locator(MADE)).to_be_visible()
        image = page.locator("figure img").first
        assert str(image.get_attribute("src")).startswith(f"{url}v1/files/img-")
        assert image.evaluate("one => one.decode().then(() => one.naturalWidth)") == 64


@pytest.mark.parametrize("width", [360, 1600])
def test_no_section_is_wider_than_the_screen(
    service: LocalService, browser: Browser, width: int
) -> None:
    viewport = {"width": width, "height": 800}
    with looking(browser, service.url, key=API_KEY, viewport=viewport) as page:
        make(page, RED)
        # on a phone it would stand below the form, where nobody looks
        expect(page.locator("rc-run")).to_be_in_viewport()
        for name in ("Make", "Edit", "Jobs", "Cell"):
            open_section(page, name)
            expect(page.locator(f"#section-{name.lower()}")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.title() == f"{name} · ray-cluster"
        assert page.evaluate(UNNAMED) == []


def test_scripts_in_the_page_and_markup_from_texts_are_forbidden(
    service: LocalService, browser: Browser
) -> None:
    with looking(browser, service.url, key=API_KEY, expected=("TrustedHTML",)) as page:
        expect(page.locator("#make")).to_be_visible()
        broken = page.evaluate(
            """() => { try { document.body.innerHTML = '<b>bold</b>'; return ''; }
            catch (error) { return error.name; } }"""
        )
        assert broken == "TypeError"
