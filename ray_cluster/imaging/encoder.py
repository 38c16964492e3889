"""Pixels to files, in processes of their own, and the recipe that a png carries.

A recipe is one text chunk per value, keyword ``ray_cluster:<name>``: any viewer of png text shows
it. Latin-1 values are ``tEXt`` chunks, others (a prompt in Chinese) ``iTXt`` chunks in UTF-8.

Coding one 1024 px png takes about 0.1 s of CPU; in the engine's process that would stop a
denoising step (InstGenIE, section 4.3).
"""

from __future__ import annotations

import io
import json
import logging
import queue
import struct
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict
from types import TracebackType
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
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encode_image(pixels: Pixels, spec: OutputSpec, recipe: Mapping[str, str]) -> bytes:
    """Return the coded image.

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
        try:
            value.encode("latin-1")
        except UnicodeEncodeError:
            info.add_itxt(KEY_PREFIX + name, value)
        else:
            info.add_text(KEY_PREFIX + name, value)
    return info


def read_recipe(data: bytes) -> dict[str, str]:
    """Return the recipe that a png of this service carries.

    Raises:
        InvalidRequest: not a png, damaged before its pixels, or without a recipe.
    """
    recipe = {}
    for kind, content in _png_chunks(data):
        if kind in {b"tEXt", b"iTXt"}:
            name, value = _text(kind, content)
            if name.startswith(KEY_PREFIX):
                recipe[name.removeprefix(KEY_PREFIX)] = value
    if not recipe:
        raise _unreadable(
            "carries no recipe of ray-cluster: it was made elsewhere, with 'metadata: false', "
            "or saved again by a program that drops text chunks"
        )
    return recipe


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield type and content of the chunks before the pixels."""
    if not data.startswith(_PNG_SIGNATURE):
        raise _unreadable("is not a png, the only format that carries a recipe")
    position = len(_PNG_SIGNATURE)
    while True:
        if position + 12 > len(data):
            raise _unreadable(f"is truncated: it ends at byte {len(data)}, before any pixels")
        (length,) = struct.unpack_from("!I", data, position)
        kind = data[position + 4 : position + 8]
        if kind in {b"IDAT", b"IEND"}:
            return
        end = position + 8 + length
        if end + 4 > len(data):
            raise _unreadable(f"is truncated: the chunk at byte {position} is not whole")
        (checksum,) = struct.unpack_from("!I", data, end)
        if zlib.crc32(data[position + 4 : end]) != checksum:
            raise _unreadable(f"is damaged: the chunk at byte {position} has a wrong checksum")
        yield kind, data[position + 8 : end]
        position = end + 4


def _text(kind: bytes, content: bytes) -> tuple[str, str]:
    """Return keyword and value; no keyword for a text that this service never writes."""
    keyword, _, rest = content.partition(b"\0")
    name = keyword.decode("latin-1")
    if kind == b"tEXt":
        return name, rest.decode("latin-1")
    # iTXt: compression flag and method, then language and translated keyword, each with a NUL
    if rest[:2] != b"\0\0" or rest.count(b"\0") < 4:
        return "", ""
    return name, rest[2:].split(b"\0", 2)[2].decode("utf-8", "replace")


def _unreadable(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The image {reason}.", "image", "no_recipe")


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
