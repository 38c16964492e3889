"""Tables of the built-in and the served models."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from rich import box
from rich.table import Table

from ray_cluster.cli.remote_service import RemoteService
from ray_cluster.config.loading import load_config
from ray_cluster.models.builtin import builtin_kinds, weights_folder

_CARD = "README.md"
_LICENCE = re.compile(r"[Ll]icen[cs]e[:d]?\s+(?:under\s+)?\W*([A-Za-z]+-[\w.-]*\w)")
_NO_PROSE = ("#", "```", "!", "|", "-", "<")


def builtin_table() -> Table:
    """Return the models that ship with the package."""
    table = Table("built-in", "what", "licence", "card", box=box.SIMPLE)
    table.caption = f"folders in {weights_folder()}"
    table.caption_justify = "left"
    for name, kind in builtin_kinds().items():
        folder = weights_folder() / name
        table.add_row(name, f"{kind}, {_size(folder)}", *card_lines(folder))
    return table


def served_table(url: str, api_key: str | None) -> Table:
    """Return what a service has ready."""
    with RemoteService.at(url, api_key, load_config()) as service:
        served = service.models()
    table = Table("served", "family", "default size", "sides", "samplers", box=box.SIMPLE)
    for model in served:
        table.add_row(
            model.id,
            model.family,
            model.default_size,
            f"{model.min_px} to {model.max_px} px in steps of {model.size_multiple_px}",
            ", ".join(model.max_steps_by_sampler),
        )
    return table


def card_lines(folder: Path) -> tuple[str, str]:
    """Return the licence and the first sentence of a model card; dashes where there is none."""
    card = folder / _CARD
    if not card.is_file():
        return "-", "-"
    text = card.read_text(encoding="utf-8")
    head: object = None
    if text.startswith("---\n"):
        front, _, text = text.removeprefix("---\n").partition("\n---")
        head = yaml.safe_load(front)
    stated = _LICENCE.search(text)
    licence = stated.group(1) if stated else "-"
    if isinstance(head, dict) and "license" in head:
        licence = str(head["license"])
    paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
    prose = (part for part in paragraphs if part and not part.startswith(_NO_PROSE))
    return licence, next(prose, "-").partition(". ")[0]


def _size(folder: Path) -> str:
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{num_bytes / 1e6:.1f} MB"
