"""Detectors: what makes of an image the map that a ControlNet follows.

The built-in ones need numpy and OpenCV. The others are controlnet-aux's, an optional extra, with
weights from a local folder: nothing is ever downloaded. Large libraries are imported where a
detector runs, in a coder process.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_cluster.errors import InvalidRequest

Pixels = npt.NDArray[np.uint8]

# of Canny's hysteresis: what the maps were made with that shapes-sd-edges was trained on
_CANNY_LOW, _CANNY_HIGH = 60, 140
# darker ones are strokes
_STROKE_BELOW = 128
# shortest side at which controlnet-aux's networks find anything
_LEAST_SIDE_PX = 512
_EXTRA = "preprocessors"
# what a library that lacks a part, or a damaged file, raises
_LOAD_ERRORS: tuple[type[Exception], ...] = (
    ImportError,
    AttributeError,
    RuntimeError,
    OSError,
    ValueError,
    LookupError,
    EOFError,
    pickle.UnpicklingError,
)


@dataclass(frozen=True, slots=True)
class _Network:
    """A detector of controlnet-aux.

    Attributes:
        kind: name of its class.
        files: its weights, as the repository ``lllyasviel/Annotators`` names them.
    """

    kind: str
    files: tuple[str, ...]


_NETWORKS: Mapping[str, _Network] = {
    "hed": _Network("HEDdetector", ("ControlNetHED.pth",)),
    "lineart": _Network("LineartDetector", ("sk_model.pth", "sk_model2.pth")),
    "lineart_anime": _Network("LineartAnimeDetector", ("netG.pth",)),
    "midas": _Network("MidasDetector", ("dpt_hybrid-midas-501f0c75.pt",)),
    "mlsd": _Network("MLSDdetector", ("mlsd_large_512_fp32.pth",)),
    "normalbae": _Network("NormalBaeDetector", ("scannet.pt",)),
    "openpose": _Network(
        "OpenposeDetector", ("body_pose_model.pth", "hand_pose_model.pth", "facenet.pth")
    ),
    "pidinet": _Network("PidiNetDetector", ("table5_pidinet.pth",)),
}


def canny_edges(pixels: Pixels) -> npt.NDArray[np.bool_]:
    """Return Canny's edges ``[H, W]`` of ``[H, W, 3]`` uint8."""
    import cv2

    try:
        found = cv2.Canny(np.ascontiguousarray(pixels), _CANNY_LOW, _CANNY_HIGH)
    except cv2.error as error:
        # the one thing that goes wrong with pixels; of a kind that ends a coder process
        raise MemoryError(str(error)) from error
    edges: npt.NDArray[np.bool_] = found > 0
    return edges


def _canny(pixels: Pixels) -> Pixels:
    return _in_three_channels(canny_edges(pixels))


def _scribble(pixels: Pixels) -> Pixels:
    # the weights of brightness that Pillow and OpenCV have
    weights = np.array([0.299, 0.587, 0.114], np.float32)
    is_stroke = np.empty(pixels.shape[:2], np.bool_)
    # row by row: as floats, an image takes five times its size
    for row, is_set in zip(pixels, is_stroke, strict=True):
        is_set[:] = row.astype(np.float32) @ weights < _STROKE_BELOW
    return _in_three_channels(is_stroke)


def _in_three_channels(is_set: npt.NDArray[np.bool_]) -> Pixels:
    return np.repeat(is_set.astype(np.uint8)[..., None] * np.uint8(255), 3, axis=2)


_BUILT_IN: Mapping[str, Callable[[Pixels], Pixels]] = {
    "none": lambda pixels: pixels,
    "canny": _canny,
    "invert": lambda pixels: 255 - pixels,
    "scribble": _scribble,
}
BUILT_IN_NAMES = tuple(_BUILT_IN)
DETECTOR_NAMES = (*BUILT_IN_NAMES, *_NETWORKS)


@dataclass(frozen=True, slots=True)
class Detectors:
    """The detectors of a service.

    Attributes:
        folder: where the weights of controlnet-aux's are; empty for a service without them.
    """

    folder: str = ""

    def available(self) -> tuple[str, ...]:
        """Return the names of those that can be used here."""
        return (*_BUILT_IN, *(name for name in _NETWORKS if not self._lacks(name)))

    def check(self, name: str, param: str) -> None:
        """Refuse a known detector that cannot be used here, without loading anything.

        Raises:
            InvalidRequest: it says what is missing; it names ``param``.
        """
        if name not in _BUILT_IN and (missing := self._lacks(name)):
            raise unavailable(name, missing, param)

    def detect(self, pixels: Pixels, name: str, param: str) -> Pixels:
        """Return the map ``[H, W, 3]`` uint8 of an image of that shape.

        Raises:
            InvalidRequest: as :meth:`check`; or the detector cannot be loaded, or it fails.
        """
        if (built_in := _BUILT_IN.get(name)) is not None:
            return built_in(pixels)
        self.check(name, param)
        try:
            found = _loaded(name, self.folder)(pixels, **_sides(pixels), output_type="np")
        except _LOAD_ERRORS as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise unavailable(
                name, f"controlnet-aux does not work here: {reason}", param
            ) from error
        return np.ascontiguousarray(found, dtype=np.uint8)

    def _lacks(self, name: str) -> str:
        """Return what a detector of controlnet-aux lacks here; nothing if it has all."""
        if find_spec("controlnet_aux") is None:
            return f"the service lacks controlnet-aux: pip install 'ray-cluster[{_EXTRA}]'"
        if not self.folder:
            return "the configuration has no preprocessors.folder, the folder of its weights"
        absent = [one for one in _NETWORKS[name].files if not (Path(self.folder) / one).is_file()]
        if absent:
            return f"preprocessors.folder ({self.folder}) lacks {', '.join(absent)}"
        return ""


def unavailable(name: str, why: str, param: str) -> InvalidRequest:
    """Return the error for a detector that there is, but not here."""
    return InvalidRequest(
        f"The parameter {param!r} is {name!r}, which this service cannot run: {why}. Choose one "
        "that GET /v1/controlnets lists in 'detectors', or tell the operator.",
        param,
        "detector_unavailable",
    )


def _sides(pixels: Pixels) -> dict[str, int]:
    side = max(_LEAST_SIDE_PX, min(pixels.shape[:2]))
    return {"detect_resolution": side, "image_resolution": side}


@lru_cache(maxsize=2)
def _loaded(name: str, folder: str) -> Any:
    # importing it imports torchvision, which raises RuntimeError beside another build's torch
    library = importlib.import_module("controlnet_aux")
    return getattr(library, _NETWORKS[name].kind).from_pretrained(folder)
