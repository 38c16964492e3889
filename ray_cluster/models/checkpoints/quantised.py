"""Components of a folder with quantised weights: what loads them, and whether it is there."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from ray_cluster.errors import ModelUnsupported
from ray_cluster.models.json_files import read_object
from ray_cluster.models.weight_files import components

# by the method that a config.json names: the package to install, and the name it is imported by
_PACKAGES: Mapping[str, tuple[str, str]] = {
    "auto-round": ("auto-round", "auto_round"),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes"),
    "modelopt": ("nvidia-modelopt", "modelopt"),
    "quanto": ("optimum-quanto", "optimum"),
    "sdnq": ("sdnq", "sdnq"),
    "torchao": ("torchao", "torchao"),
}
_ON_GPUS = ("bitsandbytes", "modelopt")


def quantised_components(folder: Path) -> dict[str, str]:
    """Return the methods by which components are quantised, by their names.

    Raises:
        ConfigError: a config.json is damaged.
    """
    found = {}
    for one in components(folder):
        if one.has_weights:
            given = read_object(folder / one.name / "config.json").get("quantization_config")
            if given:
                found[one.name] = str(given.get("quant_method"))
    return found


def check_quantised(folder: Path, device: str) -> None:
    """Refuse quantised components that diffusers cannot load here.

    Raises:
        ModelUnsupported: it names the package that is missing, or what else is.
    """
    for name, method in quantised_components(folder).items():
        what = f"{folder.name}: {name} has weights quantised by {method}"
        if method not in _PACKAGES:
            raise ModelUnsupported(f"{what}, which is not covered: {', '.join(_PACKAGES)} are")
        package, module = _PACKAGES[method]
        if importlib.util.find_spec(module) is None:
            raise ModelUnsupported(f"{what}, and {package} is not installed: pip install {package}")
        if method in _ON_GPUS and device == "cpu":
            raise ModelUnsupported(f"{what}, which runs on GPUs alone: set device: cuda")
