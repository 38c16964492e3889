"""Makes the pictures of docs/page.md anew: ``python -m tests.page.pictures``; takes a minute."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Page, expect

from tests.cell.local_service import LocalService, running_locally
from tests.e2e.service import API_KEY
from tests.keys import bearer
from tests.page.browsing import MADE, browsing, looking, make
from tests.page.cell import OVERRIDES

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
# points of the cell's history come every ten seconds
SOME_POINTS_MS = 45_000
TEMPLATE = "a large red circle left of a large green star on a white background"
EDITED = "a large red circle left of a large blue square on a white background"


def keep(page: Page, name: str) -> None:
    file = FOLDER / f"page-{name}.png"
    # flat colours: a palette takes a quarter of the bytes
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    shot.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        file, optimize=True
    )
    print(f"{file.name}: {file.stat().st_size:,} bytes")  # noqa: T201


def of_make(page: Page) -> None:
    make(page, TEMPLATE, seed="7", size="128x128")
    expect(page.locator(MADE)).to_be_visible()
    prompt = "a large yellow cross in the center on a navy background"
    make(page, prompt, num_inference_steps="300", size="128x128")
    expect(page.locator("figure.preview img")).to_have_count(1)
    expect(page.locator(".estimate")).to_be_visible()
    page.evaluate("scrollTo(0, 0)")
    keep(page, "make")
    page.get_by_role("button", name="Cancel").click()


def of_edit(page: Page) -> None:
    page.get_by_role("button", name="Edit it").last.click()
    form = page.locator("#edit")
    form.get_by_text("A rectangle by numbers").click()
    for name, value in {"left": "68", "top": "16", "width": "56", "height": "96"}.items():
        form.get_by_label(f"Rectangle: {name}").fill(value)
    form.get_by_role("button", name="Add", exact=True).click()
    form.get_by_text("A rectangle by numbers").click()
    form.get_by_label("Prompt").fill(EDITED)
    form.get_by_role("button", name="Edit", exact=True).click()
    expect(page.locator(f"#edited {MADE}")).to_be_visible()
    page.get_by_role("button", name="Compare").click()
    page.evaluate("scrollTo(0, 0)")
    keep(page, "edit")


def of_cell(page: Page, service: LocalService) -> None:
    page.get_by_role("link", name="Cell").click()
    body = {"prompt": EDITED, "n": 10, "num_inference_steps": 200, "size": "128x128"}
    for slo_s in (30, 120):
        httpx.post(f"{service.url}/v1/jobs", json=body | {"slo_s": slo_s}, headers=bearer(API_KEY))
    page.wait_for_timeout(SOME_POINTS_MS)
    keep(page, "cell")


def main() -> None:
    with (
        browsing() as browser,
        tempfile.TemporaryDirectory() as folder,
        running_locally(Path(folder), **OVERRIDES) as service,
    ):
        with looking(browser, service.url, key=API_KEY, viewport=DESKTOP) as page:
            of_make(page)
            of_edit(page)
            of_cell(page, service)
        phone = looking(browser, service.url, key=API_KEY, viewport=PHONE, color_scheme="dark")
        with phone as page:
            page.locator("#make").get_by_label("Prompt").fill(TEMPLATE)
            keep(page, "phone")


if __name__ == "__main__":
    main()
