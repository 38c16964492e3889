"""Encodes pixels as files, in processes of their own, with a recipe in each png.

A recipe is one text chunk per value, keyword ``ray_cluster:<name>``: any viewer of png text shows
it. Encoding a 1024 px png takes about 0.1 s of CPU; in the engine's process that would stop a
denoising step (InstGenIE, section 4.3).
"""

from __future__ import annotations

import io
import json
import logging
import queue
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.imaging.worker_process import CoderProcess, ProcessDied
from ray_cluster.requests import OutputSpec

logger = logging.getLogger(__name__)

Pixels = npt.NDArray[np.uint8]

KEY_PREFIX = "ray_cluster:"
# half the time of Pillow's 6 for 13 % more bytes (measured at 1024 px)
PNG_COMPRESS_LEVEL = 2
# from here on jpeg keeps colour at full resolution
FULL_CHROMA_QUALITY = 90

# the second one in a fresh process: the first may have died of an earlier image
_ATTEMPTS = 2


def encode_image(pixels: Pixels, spec: OutputSpec, recipe: Mapping[str, str]) -> bytes:
    """Return the encoded image.

    Args:
        pixels: ``[H, W, 3]`` uint8.
        spec: container, quality (jpeg and webp), and whether a png carries the recipe.
        recipe: values by name, as text; a name has at most 67 Latin-1 characters.

    Raises:
        ValueError: the pixels are of another shape or type, or too large for the container.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"pixels must be uint8 [H, W, 3]; given {pixels.dtype} {list(pixels.shape)}"
        )
    return _save(Image.fromarray(pixels), spec, recipe)


def _save(image: Image.Image, spec: OutputSpec, recipe: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    quality = 100 if spec.compression is None else spec.compression
    match spec.image_format:
        case "png":
            info = _png_info(recipe) if spec.metadata else None
            image.save(buffer, "PNG", pnginfo=info, compress_level=PNG_COMPRESS_LEVEL)
        case "jpeg":
            chroma = "4:4:4" if quality >= FULL_CHROMA_QUALITY else "4:2:0"
            image.save(buffer, "JPEG", quality=quality, subsampling=chroma)
        case "webp":
            image.save(buffer, "WEBP", quality=quality)
    return buffer.getvalue()


def _png_info(recipe: Mapping[str, str]) -> PngInfo:
    info = PngInfo()
    for name, value in recipe.items():
        # tEXt for Latin-1, else iTXt in UTF-8
        info.add_text(KEY_PREFIX + name, value)
    return info


def read_recipe(data: bytes) -> dict[str, str]:
    """Return the recipe that a png of this service carries.

    Raises:
        InvalidRequest: not a png, damaged before its pixels, or without a recipe.
    """
    try:
        texts = Image.open(io.BytesIO(data), formats=["PNG"]).info
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequest(
            "The image is not a png, the only format that carries a recipe, or it is damaged or "
            "truncated.",
            "image",
            "no_recipe",
        ) from error
    recipe = {
        name.removeprefix(KEY_PREFIX): str(value)
        for name, value in texts.items()
        if isinstance(name, str) and name.startswith(KEY_PREFIX)
    }
    if not recipe:
        raise InvalidRequest(
            "The image carries no recipe of ray-cluster: it was made elsewhere, with 'metadata: "
            "false', or saved again by a program that drops text chunks.",
            "image",
            "no_recipe",
        )
    return recipe


def code_task(header: dict[str, Any], payload: bytes) -> bytes:
    """Run one job in a coder process; the counterpart of :meth:`ImageCoder.submit`."""
    pixels = np.frombuffer(payload, dtype=header["dtype"]).reshape(header["shape"])
    return encode_image(pixels, OutputSpec(**header["spec"]), header["recipe"])


class ImageCoder:
    """Codes images in processes of its own, which import numpy and Pillow and nothing larger.

    An image whose process dies is coded once more, in a fresh process. The processes end with this
    one, however it ends: they read its pipe until that is closed.

    Args:
        num_processes: images coded at the same time.
    """

    def __init__(self, num_processes: int = 1) -> None:
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="image-coder")
        self._idle: queue.SimpleQueue[CoderProcess] = queue.SimpleQueue()
        self._processes = [_start() for _ in range(num_processes)]
        for process in self._processes:
            self._idle.put(process)

    @property
    def process_ids(self) -> list[int]:
        """Ids of the live coder processes, for reports and tests."""
        return [process.pid for process in self._processes]

    def submit(self, pixels: Pixels, spec: OutputSpec, recipe: Mapping[str, str]) -> Future[bytes]:
        """Have an image coded; see :func:`encode_image`. The pixels must not change meanwhile.

        The future raises :class:`RequestFailed` with stage ``coding`` if that fails.
        """
        # what it writes to the log names the image of whoever called
        context = copy_context()
        return self._threads.submit(context.run, self._code, pixels, spec, recipe)

    def close(self) -> None:
        """Finish what was submitted and end the processes; harmless a second time."""
        self._threads.shutdown(wait=True)
        for process in self._processes:
            process.close()
        self._processes.clear()

    def __enter__(self) -> ImageCoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _code(self, pixels: Pixels, spec: OutputSpec, recipe: Mapping[str, str]) -> bytes:
        header = {
            "dtype": pixels.dtype.str,
            "shape": pixels.shape,
            "spec": asdict(spec),
            "recipe": dict(recipe),
        }
        job = json.dumps(header).encode(), np.ascontiguousarray(pixels).tobytes()
        process = self._idle.get()
        try:
            for _attempt in range(_ATTEMPTS):
                try:
                    return process.run(*job)
                except ProcessDied as error:
                    logger.warning("a %s was not coded: %s", spec.image_format, error)
                    process = self._replace(process)
        finally:
            self._idle.put(process)
        raise RequestFailed(
            f"the image was made, but the process that turns it into a {spec.image_format} ended "
            f"{_ATTEMPTS} times at it. Send the request again, with the same seed for the same "
            "image; if that fails too, ask for another output_format or a smaller size, and tell "
            "the operator: the machine may be out of memory.",
            "coding",
        )

    def _replace(self, process: CoderProcess) -> CoderProcess:
        process.close()
        successor = _start()
        self._processes[self._processes.index(process)] = successor
        return successor


def _start() -> CoderProcess:
    return CoderProcess("ray_cluster.imaging.encoder", "code_task")
