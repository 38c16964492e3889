"""Reads model cards and their figures back."""

import json
from pathlib import Path

from recipes.figures.card import CARD


def card_hashes(folder: Path) -> dict[str, str]:
    """The hashes that the card states."""
    text = (folder / CARD).read_text(encoding="utf-8")
    table = text.partition("| file | SHA-256 |")[2].splitlines()
    rows = [line.strip("| ").split(" | ") for line in table if line.startswith("| `")]
    return {name.strip("`"): digest.strip("`") for name, digest in rows}


def stated_shares(folder: Path) -> dict[str, dict[str, float]]:
    """The committed shares, by group and column."""
    groups = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["groups"]
    return {
        group: {name: float(share["share"]) for name, share in shares.items()}
        for group, shares in groups.items()
    }
