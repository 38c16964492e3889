"""A browser that looks at the page, and what of it must never happen."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.cell.test_loras import until
from tests.e2e.service import free_ports
from tests.helm.test_ingress import is_open

PATIENCE_MS = 30_000
MADE = "figure:not(.preview) figcaption"
NGINX = """
worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/error.log; {user}
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    location /images/ {{
      proxy_pass {upstream}/; proxy_http_version 1.1; proxy_buffering off;
      proxy_set_header Host $http_host; proxy_set_header Connection "";
    }}
  }}
}}
"""


@contextmanager
def browsing() -> Iterator[Browser]:
    """Chromium, without anything from the web."""
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("chromium is not installed (Debian's package chromium)")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        expect.set_options(timeout=PATIENCE_MS)
        yield browser
        browser.close()


@contextmanager
def looking(
    browser: Browser, url: str, *, key: str = "", expected: tuple[str, ...] = (), **options: Any
) -> Iterator[Page]:
    """The page at a URL; it has met no error, broken no policy and left the site for nothing.

    Args:
        key: stored as if it had been given; empty to be asked for it.
        expected: parts of what the console says of what is tried.
        options: of the tab.
    """
    context = browser.new_context(reduced_motion="reduce", **options)
    context.set_default_timeout(PATIENCE_MS)
    origin = re.sub(r"(https?://[^/]+).*", r"\1", url)
    problems: list[str] = []

    def said(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and not any(
            one in message.text for one in expected
        ):
            problems.append(f"{message.text} ({message.location.get('url')})")

    def asked(request: Request) -> None:
        if not request.url.startswith((origin, "blob:", "data:")):
            problems.append(f"it asks for {request.url}")

    page = context.new_page()
    page.on("console", said)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", asked)
    page.on("dialog", lambda box: (problems.append(f"a script says {box.message}"), box.dismiss()))
    page.add_init_script(
        "addEventListener('securitypolicyviolation', "
        "(e) => console.error(`broken: ${e.violatedDirective}`))"
    )
    if key:
        store = "sessionStorage.setItem(`ray-cluster key of ${location.pathname}`, key)"
        page.add_init_script(f"if (!window.opener) {{ const key = '{key}'; {store}; }}")
    page.goto(url)
    if key:
        expect(page.locator("main")).to_be_visible()
    yield page
    assert not problems, problems
    context.close()


def make(page: Page, prompt: str, **fields: str) -> None:
    """Fill in the form of images from text, and send it."""
    form = page.locator("#make")
    form.get_by_label("Prompt").fill(prompt)
    for name, value in fields.items():
        field = form.locator(f"[name={name}]")
        if field.evaluate("one => one.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.evaluate("one => one.closest('details')?.setAttribute('open', '')")
            field.fill(value)
    form.get_by_role("button", name="Make", exact=True).click()


def picture_of(page: Page, selector: str) -> bytes:
    """The bytes behind an image."""
    url = page.locator(selector).first.get_attribute("src")
    assert url is not None
    reply = httpx.get(url)
    assert reply.status_code == 200
    return reply.content


@contextmanager
def below_images(folder: Path, upstream: str) -> Iterator[str]:
    """An nginx that serves what is upstream below ``/images/``, and says nothing of it."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed (Debian's package nginx-light)")
    [port] = free_ports(1)
    user = "user root;" if Path("/").owner() == Path.home().owner() else ""
    text = NGINX.format(folder=folder, port=port, upstream=upstream, user=user)
    (folder / "nginx.conf").write_text(text)
    log = folder / "error.log"
    server = subprocess.Popen(["nginx", "-p", folder, "-c", folder / "nginx.conf", "-e", log])
    try:
        until(lambda: is_open(port), "nginx")
        yield f"http://127.0.0.1:{port}/images/"
    finally:
        server.terminate()
        server.wait(10)
