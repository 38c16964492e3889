"""The models that ship with the package, by name."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

# what a pool can serve
BUILTIN_MODELS = ("shapes-sd", "shapes-sd-light", "shapes-sd3")
# what tells whether their images are right: by prompt and image, or by the image alone
BUILTIN_DISCRIMINATORS = ("shapes-discriminator", "shapes-real-or-generated")
BUILTIN_CONTROLNETS = ("shapes-sd-edges", "shapes-sd-layout")
# what else may lie beside them, once it is trained, and what it is
BUILTIN_PARTS = {
    **dict.fromkeys(BUILTIN_CONTROLNETS, "ControlNet"),
    "outline": "LoRA",
    "pastel": "LoRA",
    "texture": "LoRA",
    "attribute-classifier": "quality meter",
    **dict.fromkeys(BUILTIN_DISCRIMINATORS, "discriminator"),
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a model is sampled where nobody says otherwise."""

    num_steps: int
    guidance_scale: float


# the guidance of shapes-sd was chosen among 1.5, 2 and 3 on other prompts than its card's
_USUAL = Sampling(20, 2.0)
_SAMPLING = {"shapes-sd-light": Sampling(2, 1.0)}


def builtin_sampling(name: str) -> Sampling | None:
    """Return how a built-in model's card was measured, or None if the name is not one."""
    return _SAMPLING.get(name, _USUAL) if name in {*BUILTIN_MODELS, *BUILTIN_PARTS} else None


def builtin_folder(name: str) -> Path | None:
    """Return the diffusers folder of a built-in model, or None if the name is not one."""
    return weights_folder() / name if name in BUILTIN_MODELS else None


def discriminator_folder(name: str) -> Path | None:
    """Return the folder of a built-in discriminator, or None if the name is not one."""
    return weights_folder() / name if name in BUILTIN_DISCRIMINATORS else None


def controlnet_folder(name: str) -> Path | None:
    """Return the folder of a built-in ControlNet, or None if the name is not one."""
    return weights_folder() / name if name in BUILTIN_CONTROLNETS else None


def builtin_kinds() -> dict[str, str]:
    """Return everything that ships with the package, by name, and what it is."""
    named = {**dict.fromkeys(BUILTIN_MODELS, "model"), **BUILTIN_PARTS}
    return {name: kind for name, kind in named.items() if (weights_folder() / name).is_dir()}


def weights_folder() -> Path:
    """Return the folder of the committed weights."""
    return Path(str(resources.files("ray_cluster.models") / "weights"))
