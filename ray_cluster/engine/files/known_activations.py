"""What the activations of the built-in models take, written down beforehand.

Counting them takes seconds, of every replica that starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ray_cluster.models.builtin import builtin_folder
from ray_cluster.models.json_files import read_object


def written_down(model: str) -> Path:
    """Return the file of a built-in model."""
    return Path(str(resources.files("ray_cluster.models") / "activation_data" / f"{model}.json"))


@dataclass(frozen=True, slots=True)
class KnownActivations:
    """Counts of activations in float32.

    Attributes:
        by_key: bytes by part of a model, latent size and what is done with it.
    """

    by_key: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> KnownActivations:
        """Return what is written down of a model: nothing of one that is not built in."""
        path = written_down(folder.name)
        return cls(read_object(path) if folder == builtin_folder(folder.name) else {})

    def found(
        self,
        what: str,
        config: Mapping[str, Any],
        latent_hw: tuple[int, int],
        dtype: torch.dtype,
        count: Callable[[], int],
    ) -> int:
        """Return a count, and keep it if it is in float32.

        Args:
            config: of the part that it is of; the same configuration takes the same.
            count: called where it is not known.
        """
        if dtype is not torch.float32:
            return count()
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
        key = f"{digest}, {latent_hw[1]}x{latent_hw[0]}: {what}"
        if key not in self.by_key:
            self.by_key[key] = count()
        return self.by_key[key]
