"""The page's files: which there are, with which headers, and that no name leads out of them."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pytest

from ray_cluster.api.routes import page
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.http import HttpConfig
from tests.api.checks import check_error
from tests.api.conftest import app_of, http_of
from tests.fakes import FakeDispatcherClient

FOLDER = Path(page.__file__).resolve().parents[2] / "page"
MOST_BYTES, MOST_LINES = 150_000, 3_000
# what modules import and the index names
_NAMED = re.compile(r"""(?:from |import |import\()"(\.{1,2}/[^"]+)"|(?:href|src)="(page/[^"]+)\"""")


def parts() -> list[Path]:
    return sorted(one for one in FOLDER.rglob("*") if one.is_file())


async def test_all_files_are_served_with_strict_headers_and_answer_a_second_visit_in_a_line(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    async with http_of(app_of(fake, config)) as http:
        names = ["/", *(f"/page/{one.relative_to(FOLDER)}" for one in parts())]
        for name in names:
            reply = await http.get(name)
            assert reply.status_code == 200, name
            policy = reply.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            again = await http.get(name, headers={"If-None-Match": reply.headers["ETag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert (await http.head(name)).status_code == 200
        assert (await http.get("/")).headers["Content-Type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize(
    "name",
    [
        "../pyproject.toml",
        "../api/app.py",
        "base/../../errors.py",
        "/etc/passwd",
        "base",
        "",
        "app.js/",
        "APP.JS",
        "app.js\0.css",
    ],
)
async def test_a_name_is_never_a_path(
    fake: FakeDispatcherClient, config: ClusterConfig, name: str
) -> None:
    async with http_of(app_of(fake, config)) as http:
        for written in (quote(name), quote(name, safe="")):
            check_error(await http.get(f"/page/{written}"), 404, code="unknown_url")


async def test_one_key_takes_the_page_away(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    without = config.model_copy(update={"http": HttpConfig(page=False)})
    async with http_of(app_of(fake, without)) as http:
        for path in ("/", "/page/app.js"):
            check_error(await http.get(path), 404, code="unknown_url")


def test_every_file_that_is_named_is_there_and_every_file_is_named() -> None:
    named = {FOLDER / "index.html"}
    for one in parts():
        for near, below in _NAMED.findall(one.read_text()):
            target = (one.parent / near) if near else FOLDER / below.removeprefix("page/")
            assert target.is_file(), f"{one.name} names {near or below}"
            named.add(target.resolve())
    assert set(parts()) == named


def test_the_page_is_small_and_asks_nothing_of_the_web() -> None:
    texts = {one: one.read_text() for one in parts()}
    assert sum(len(text.encode()) for text in texts.values()) <= MOST_BYTES
    code = [text for one, text in texts.items() if one.suffix in {".js", ".css"}]
    assert sum(text.count("\n") for text in code) <= MOST_LINES
    for one, text in texts.items():
        # the name of SVG's elements is written like an address
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), one.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
