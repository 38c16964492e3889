"""The models that ship with the package, by name."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

BUILTIN_MODELS = ("shapes-sd",)


def builtin_folder(name: str) -> Path | None:
    """Return the diffusers folder of a built-in model, or None if the name is not one."""
    return weights_folder() / name if name in BUILTIN_MODELS else None


def weights_folder() -> Path:
    """Return the folder of the committed weights."""
    return Path(str(resources.files("ray_cluster.reference_models") / "weights"))
