"""Loads discriminators."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from ray_cluster.engine.models.whole_models import first_line, load_whole
from ray_cluster.engine.scorers.checks import check_scorer, resolve_scorer
from ray_cluster.engine.scorers.clip import ClipScorer
from ray_cluster.engine.scorers.image_classifier import ImageClassifierScorer
from ray_cluster.engine.scorers.scorer import CalibratedScorer, RawScorer
from ray_cluster.engine.scorers.shapes import ShapesScorer
from ray_cluster.errors import ConfigError, ModelUnsupported
from ray_cluster.models.builtin import discriminator_folder
from ray_cluster.models.discriminators import load_discriminator
from ray_cluster.models.json_files import INCOMPLETE, head_of, read_object
from ray_cluster.models.local import scorer_digest

_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model")
_CLASSIFIER = "ForImageClassification"
_SHOWN = 5


class UncalibratedScorer(NamedTuple):
    """A discriminator without its calibration.

    Attributes:
        sha256: digest of its files.
    """

    raw: RawScorer
    sha256: str


def load_scorer(
    model: str, device: torch.device, *, calibration: str | None = None
) -> CalibratedScorer:
    """Load a discriminator with its calibration.

    Args:
        model: a built-in discriminator, or a folder or hub id of a CLIP-type model or an image
            classifier.
        calibration: folder with a ``calibration.json``; the model's own by default.

    Raises:
        ConfigError: there is no such model, a file is missing or damaged, or it is not calibrated.
        ModelUnsupported: it is neither a CLIP-type model nor an image classifier.
    """
    found = check_scorer(model, calibration=calibration)
    return CalibratedScorer(load_uncalibrated(model, device, label=found.label).raw, found)


def load_uncalibrated(
    model: str, device: torch.device, *, label: str | None = None
) -> UncalibratedScorer:
    """Load a discriminator that is to be calibrated.

    Args:
        model: as of :func:`load_scorer`.
        label: of an image classifier, which says that an image is right.

    Raises:
        ConfigError, ModelUnsupported: see :func:`load_scorer`.
    """
    folder = resolve_scorer(model)
    raw: RawScorer
    if discriminator_folder(model) is not None:
        raw = ShapesScorer(load_discriminator(folder, device), device)
    elif _class_name(folder).endswith(_CLASSIFIER):
        raw = _load_classifier(folder, device, label)
    else:
        raw = _load_clip(folder, device)
    return UncalibratedScorer(raw, scorer_digest(folder))


def _class_name(folder: Path) -> str:
    """Return the class that a folder's model is of, as its configuration says."""
    named = read_object(folder / "config.json").get("architectures")
    if not (isinstance(named, list) and named and isinstance(named[0], str)):
        raise ConfigError(
            f"{folder / 'config.json'} does not name the model's class (architectures); download "
            "it again"
        )
    return named[0]


def _load_clip(folder: Path, device: torch.device) -> ClipScorer:
    name = _class_name(folder)
    kind = getattr(transformers, name, None)
    if not (hasattr(kind, "get_text_features") and hasattr(kind, "get_image_features")):
        raise ModelUnsupported(
            f"{folder.name} is a {name}: a discriminator is a CLIP-type model, with text and image "
            f"embeddings (CLIPModel, SiglipModel), or an image classifier (...{_CLASSIFIER})"
        )
    model = load_whole(folder, name, torch.float32)
    vocabularies = [folder / one for one in _VOCABULARIES if (folder / one).is_file()]
    if not vocabularies:
        # the library would make an empty tokenizer
        raise ConfigError(f"{folder} has no tokenizer ({', '.join(_VOCABULARIES)}): {INCOMPLETE}")
    for path in vocabularies:
        head_of(path)
    return ClipScorer(
        model.to(device),
        _part(transformers.AutoTokenizer, folder),
        _part(transformers.AutoImageProcessor, folder),
        max_tokens=int(model.config.text_config.max_position_embeddings),
    )


def _load_classifier(
    folder: Path, device: torch.device, label: str | None
) -> ImageClassifierScorer:
    model = load_whole(folder, _class_name(folder), torch.float32)
    labels = {str(name): int(index) for index, name in model.config.id2label.items()}
    if label not in labels:
        shown = ", ".join(list(labels)[:_SHOWN])
        more = f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else ""
        raise ConfigError(
            f"{folder.name}: the label that says that an image is right is {label!r}; give one of "
            f"{shown}{more} with: ray-cluster models calibrate-cascade CONFIG --label LABEL"
        )
    processor = _part(transformers.AutoImageProcessor, folder)
    return ImageClassifierScorer(model.to(device), processor, label_index=labels[label])


def _part(kind: Any, folder: Path) -> Any:
    """Return a tokenizer or an image processor of a folder."""
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    # the tokenizers library raises Exception itself for a damaged file
    except Exception as error:
        what = kind.__name__.removeprefix("Auto")
        raise ConfigError(
            f"{folder} has no usable {what} ({first_line(error)}): {INCOMPLETE}"
        ) from error
