"""The documentation names what the code has, and its links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_cluster.api.advice import REFUSED
from ray_cluster.api.input.schemas import ImageEditRequest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), target


@pytest.mark.parametrize("name", ["architecture.md", "engine.md", "../CONTRIBUTING.md"])
def test_every_source_file_that_a_page_names_exists(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    folders = [ROOT, ROOT / "ray_cluster", ROOT / "ray_cluster" / "engine"]
    for path in re.findall(r"`([\w*/]+\.py)(?:`|:)", text):
        # a name without its folder is found by nobody
        assert any((folder / path).is_file() for folder in folders), path


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_api_page_has_every_field_of_a_request() -> None:
    rows = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.+?) \|", API, re.MULTILINE))))
    assert {*ImageEditRequest.model_fields, "image", "mask"} <= rows
    for name in REFUSED:
        assert f"`{name}`" in API


SOURCES = [*sorted((ROOT / "ray_cluster/api").rglob("*.py")), ROOT / "ray_cluster/errors.py"]
TREES = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]


def code_positions() -> dict[str, int]:
    """Return where functions and classes of the API take a `code`, by their names."""
    found = {}
    for node in (node for tree in TREES for node in ast.walk(tree)):
        is_class = isinstance(node, ast.ClassDef)
        for one in node.body if is_class else [node]:
            if isinstance(one, ast.FunctionDef) and (not is_class or one.name == "__init__"):
                names = [arg.arg for arg in one.args.args][is_class:]
                if "code" in names + [arg.arg for arg in one.args.kwonlyargs]:
                    found[node.name] = names.index("code") if "code" in names else -1
    return found


def error_codes() -> Iterator[str]:
    """Yield every code that the API's sources give an error."""
    positions = code_positions()
    for node in (node for tree in TREES for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            position = positions.get(node.func.id)
            given = [one.value for one in node.keywords if one.arg == "code"]
            if position is not None and 0 <= position < len(node.args):
                given.append(node.args[position])
            for part in (part for one in given for part in ast.walk(one)):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_the_api_page_has_every_error() -> None:
    table = API[API.index("## Errors") :]
    codes = {code for code in error_codes() if re.fullmatch(r"[a-z]+(_[a-z]+)+", code)}
    assert len(codes) > 30
    assert [code for code in sorted(codes) if f"`{code}`" not in table] == []
