"""Writes the model cards, with measured quality and file hashes."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open

from ray_cluster.quality.scenes import STYLES
from ray_cluster.training.card_tables import markdown_table
from ray_cluster.training.card_texts import card_text
from ray_cluster.training.evaluate import options_for
from ray_cluster.training.recipe import Recipe
from ray_cluster.training.recipe_parts import DenoiserPhase, SizeBucket
from ray_cluster.training.training_log import read_training

CARD = "README.md"
_HASHED = (".json", ".safetensors")


def folder_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every configuration and weight file, by path within the folder."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in _HASHED)
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def card_hashes(folder: Path) -> dict[str, str]:
    """Read back the hashes that the card states."""
    text = (folder / CARD).read_text(encoding="utf-8")
    table = text.partition("| file | SHA-256 |")[2].splitlines()
    rows = [line.strip("| ").split(" | ") for line in table if line.startswith("| `")]
    return {name.strip("`"): digest.strip("`") for name, digest in rows}


def write_card(name: str, tables: str, folder: Path) -> Path:
    """Write a card beside the weights, with tables of figures, and return its path."""
    recipe, options = Recipe(), options_for(name)
    phases = _phases(name, recipe)
    facts = {
        "name": name,
        "compute": _compute_table(folder),
        "tables": tables,
        "hashes": _hash_table(folder),
        "options": options,
        "phases": _phase_table(phases) if phases else "",
        "millions": f"{_count_parameters(folder) / 1e6:.2f}",
        "recipe": recipe,
    }
    card = card_text(name).format(**facts)
    path = folder / CARD
    path.write_text(card, encoding="utf-8")
    return path


def _phases(model: str, recipe: Recipe) -> dict[str, DenoiserPhase]:
    denoiser = recipe.denoiser
    known: dict[str, dict[str, DenoiserPhase]] = {
        "shapes-sd": {"denoiser": denoiser.first, "refinement": denoiser.second},
        "shapes-sd-light": {"light": recipe.light.first, "light-refinement": recipe.light.second},
        "shapes-sd-edges": {"edges": recipe.edges.phase},
        "shapes-sd-layout": {"layout": recipe.layout.phase},
        **{style: {style: getattr(recipe, style).phase} for style in STYLES[1:]},
        "shapes-sd3": {
            "transformer": recipe.transformer.first,
            "transformer-refinement": recipe.transformer.second,
        },
    }
    return known.get(model, {})


def _phase_table(phases: dict[str, DenoiserPhase]) -> str:
    mixes = [phase.captions for phase in phases.values()]
    shares: dict[str, Sequence[float]] = {
        "scenes of one object, the rest two to four": [mix.single_share for mix in mixes],
        'captions without any detail, like "a red circle"': [mix.bare_share for mix in mixes],
        "other captions that may leave out details": [mix.omit_share for mix in mixes],
        "empty captions": [phase.caption_drop for phase in phases.values()],
        "pictures that are not 64 x 64": [_other_share(phase.buckets) for phase in phases.values()],
    }
    rows = [[name, *(f"{value:.0%}" for value in values)] for name, values in shares.items()]
    return markdown_table(["share of", *phases], rows)


def _other_share(buckets: tuple[SizeBucket, ...]) -> float:
    other = sum(b.batch * b.share for b in buckets if (b.width, b.height) != (64, 64))
    return other / sum(b.batch * b.share for b in buckets)


def _compute_table(folder: Path) -> str:
    rows = [
        [
            one.stage,
            str(one.seed),
            str(one.steps),
            f"{one.examples / 1000:.0f} k",
            f"{one.cpu_minutes:.0f}",
            one.device,
        ]
        for one in read_training(folder)
    ]
    return markdown_table(["stage", "seed", "steps", "examples", "CPU minutes", "device"], rows)


def _count_parameters(folder: Path) -> int:
    """Parameters of a folder's denoiser or part, from the shapes in its files."""
    for place in ("unet", "transformer", "."):
        files = list((folder / place).glob("*.safetensors"))
        if files:
            return sum(_count_file(file) for file in files)
    raise FileNotFoundError(f"{folder} has no weights")


def _count_file(file: Path) -> int:
    with safe_open(file, "pt") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
    return sum(math.prod(shape) for shape in shapes)


def _hash_table(folder: Path) -> str:
    rows = [[f"`{name}`", f"`{digest}`"] for name, digest in folder_hashes(folder).items()]
    return markdown_table(["file", "SHA-256"], rows)


def stated_shares(folder: Path) -> dict[str, dict[str, float]]:
    """The committed shares of a folder, by group and column."""
    groups = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["groups"]
    return {
        group: {name: float(share["share"]) for name, share in shares.items()}
        for group, shares in groups.items()
    }
