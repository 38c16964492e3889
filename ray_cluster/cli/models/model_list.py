"""What ``models list`` prints: the built-in models, and those that a service has ready."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ray_cluster.cli.remote.remote_service import RemoteService
from ray_cluster.config.loading import load_config
from ray_cluster.models.builtin import builtin_kinds, weights_folder

_CARD = "README.md"
_LICENCE = re.compile(r"[Ll]icen[cs]e[:d]?\s+(?:under\s+)?\W*([A-Za-z]+-[\w.-]*\w)")
_NO_PROSE = ("#", "```", "!", "|", "-", "<")


def print_builtin(console: Console) -> None:
    """Print what ships with the package: a line and a sentence each."""
    for name, kind in builtin_kinds().items():
        folder = weights_folder() / name
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        licence, sentence = card_lines(folder)
        _print(console, name, f"{kind:<14} {num_bytes / 1e6:4.1f} MB  {licence}", sentence)
    console.print(f"\nfolders in {weights_folder()}", markup=False, soft_wrap=False)


def print_served(console: Console, url: str, api_key: str | None) -> None:
    """Print what a service has ready."""
    with RemoteService.at(url, api_key, load_config()) as service:
        served = service.models()
    console.print(f"\nserved at {service.base}", markup=False)
    for model in served:
        more = f"samplers: {', '.join(model.max_steps_by_sampler)}; engine: {model.engine}"
        _print(
            console,
            model.id,
            f"{model.family}, {model.default_size} unless a call says otherwise",
            f"sides of {model.min_px} to {model.max_px} px in steps of {model.size_multiple_px}; "
            f"{more}; images of an edit: at most {model.max_input_images}",
        )


def _print(console: Console, name: str, facts: str, sentence: str) -> None:
    console.print(Text.assemble((f"{name:<24}", "bold"), f" {facts}"), soft_wrap=False)
    console.print(Padding(Text(sentence), (0, 0, 0, 2), expand=False), soft_wrap=False)


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


def fetch_models(console: Console, path: Path) -> None:
    """Download the models of a configuration, one after the other, and print where they are."""
    from ray_cluster.engine.controlnets.checks import resolve_controlnet
    from ray_cluster.engine.files.folders import resolve_folder
    from ray_cluster.engine.scorers.checks import resolve_scorer

    config = load_config(path)
    found: dict[str, Callable[[], Path]] = {
        one.model: partial(resolve_folder, *one.files) for one in config.pools
    }
    found |= {one.model: partial(resolve_scorer, one.model) for one in config.discriminators}
    found |= {one.model: partial(resolve_controlnet, one.model) for one in config.controlnets}
    for model, resolve in found.items():
        console.print(f"{model}: {resolve()}", markup=False, soft_wrap=True)
