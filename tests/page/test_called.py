"""A model that diffusers runs call by call, and that looks at several pictures, on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, expect

from tests.cell.local_service import running_locally
from tests.e2e.service import API_KEY
from tests.engine.random_pipelines import save_klein
from tests.page.browsing import MADE, looking, make
from tests.page.cell import OVERRIDES

pytestmark = [pytest.mark.xdist_group("local"), pytest.mark.slow, pytest.mark.timeout(300)]


def test_images_are_made_and_edited_without_previews(browser: Browser, tmp_path: Path) -> None:
    defaults = {"size": "64x64", "num_inference_steps": 4}
    model = str(save_klein(tmp_path / "klein"))
    pool = {"name": "klein", "model": model, "max_px": 128, "defaults": defaults}
    more = OVERRIDES | {"pools": [pool], "controlnets": []}
    files = [tmp_path / f"{name}.png" for name in ("red", "blue")]
    for path in files:
        Image.new("RGB", (96, 96), path.stem).save(path)
    with (
        running_locally(tmp_path / "cell", **more) as service,
        looking(browser, service.url, key=API_KEY) as page,
    ):
        make(page, "a red circle")
        expect(page.locator(f"#made {MADE}")).to_be_visible()
        page.get_by_role("link", name="Edit").click()
        page.locator("#edit input[type=file]").first.set_input_files(files)
        expect(page.locator("#edit li img")).to_have_count(2)
        page.locator("#edit").get_by_label("Prompt").fill("both")
        page.get_by_role("button", name="Edit", exact=True).click()
        expect(page.locator(f"#edited {MADE}")).to_be_visible()
