"""Encodes and decodes images in processes of their own.

Encoding a 1024 px png takes about 0.1 s of CPU; in the engine's process that would stop a
denoising step (InstGenIE, section 4.3). And a hostile file can end a process: it must not be the
engine's or a gateway's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.imaging.controlnet_maps import ControlMap, MapOrder
from ray_cluster.imaging.decoding import not_decodable
from ray_cluster.imaging.edit_images import EditPixels, ImageFacts, MaskFacts, Paste
from ray_cluster.imaging.encoder import Pixels
from ray_cluster.imaging.processes import coder_tasks
from ray_cluster.imaging.processes.coder_pool import CoderPool, Job, usual_num_processes
from ray_cluster.imaging.processes.worker_process import Message
from ray_cluster.policies.edits import SizePx
from ray_cluster.requests import Edit, OutputSpec

T = TypeVar("T")
Source = bytes | Callable[[], bytes]
"""An image's file, or what fetches it when it is the job's turn: until then it takes no memory."""

# the longest known takes four seconds: a webp of 64 megapixels
MAX_CHECK_S = 30.0
# a detector's network is loaded first
MAX_JOB_S = 60.0
# of files that wait to be decoded
MAX_WAITING_BYTES = 256 << 20
# with two, the results of one client do not wait for those of another
_NUM_WRITERS = 2


class ImageCoder:
    """Codes images in processes of its own, which import numpy and Pillow; what is larger, with the
    first job that needs it.

    Images that clients sent are decoded in other processes than those that encode results: whatever
    a file does, no result waits for it. Each process starts when it is needed. Of several, one
    client never has all (:class:`.fair_queue.FairQueue`); it is the last argument of each method.

    A job whose process dies is run once more, in a fresh process; one that takes too long is not.
    What the files of clients may take is in :mod:`.allowance`. The processes end with this one,
    however it ends: they read its pipe until that is closed. What a job is given must not change
    meanwhile.

    Args:
        num_readers: files that are decoded at the same time; None for as many as the machine has
            use for.
        max_waiting_bytes: what the files may hold that wait or are decoded, which clients share;
            above it methods raise :class:`.fair_queue.QueueFull`. None for no bound.
    """

    def __init__(
        self,
        num_readers: int | None = None,
        *,
        max_waiting_bytes: int | None = MAX_WAITING_BYTES,
    ) -> None:
        self._readers = CoderPool(num_readers or usual_num_processes(), max_waiting_bytes)
        self._writers = CoderPool(_NUM_WRITERS, None)

    @property
    def process_ids(self) -> list[int]:
        """Ids of the live coder processes, for reports and tests."""
        return self._readers.process_ids + self._writers.process_ids

    def submit(
        self,
        pixels: Pixels,
        spec: OutputSpec,
        recipe: Mapping[str, str],
        paste: Paste | None = None,
        client: str = "",
    ) -> Future[bytes]:
        """Have an image encoded; see :func:`.encoder.encode_image`.

        The future raises :class:`RequestFailed` with stage ``coding`` if that fails.

        Args:
            paste: of an edit; see :func:`.templates.finished`.
        """
        message = partial(coder_tasks.encoding, pixels, spec, recipe, paste)
        if_deadly, result_of = _not_encoded(spec), coder_tasks.encoded_of
        return self._writers.submit(Job(client, 0, message, result_of, MAX_JOB_S, if_deadly))

    def enlarge(
        self,
        png: bytes,
        factor: int,
        spec: OutputSpec,
        recipe: Mapping[str, str],
        client: str = "",
    ) -> Future[bytes]:
        """Have a finished image enlarged and encoded; see :func:`.enlarging.enlarged`.

        The future raises :class:`RequestFailed` with stage ``coding`` if that fails.
        """
        message = partial(coder_tasks.enlarging, png, factor, spec, recipe)
        if_deadly, result_of = _not_encoded(spec), coder_tasks.encoded_of
        return self._writers.submit(Job(client, len(png), message, result_of, MAX_JOB_S, if_deadly))

    def image_facts(
        self, data: Source, param: str, max_pixels: int, client: str = ""
    ) -> Future[ImageFacts]:
        """Have an image decoded; see :func:`.templates.image_facts`.

        The future raises :class:`InvalidRequest` also for an image of which the process dies, or
        that takes too long; and whatever fetching the file raises.
        """
        check, result_of = coder_tasks.image_check, coder_tasks.image_facts_of
        return self._check(
            data, lambda file: check(file, param, max_pixels), result_of, param, client
        )

    def mask_facts(
        self, data: Source, param: str, max_pixels: int, client: str = ""
    ) -> Future[MaskFacts]:
        """Have a mask decoded, likewise; see :func:`.templates.mask_facts`."""
        check, result_of = coder_tasks.mask_check, coder_tasks.mask_facts_of
        return self._check(
            data, lambda file: check(file, param, max_pixels), result_of, param, client
        )

    def control_map(
        self, data: Source, order: MapOrder, max_pixels: int, client: str = ""
    ) -> Future[ControlMap]:
        """Have the map of an image made, likewise; see :func:`.control_maps.control_map`."""
        return self._check(
            data,
            lambda file: coder_tasks.map_making(file, order, max_pixels),
            coder_tasks.map_of,
            order.param,
            client,
            MAX_JOB_S,
        )

    def edit_pixels(
        self, image: bytes, mask: bytes | None, edit: Edit, work_px: SizePx, client: str = ""
    ) -> Future[EditPixels]:
        """Have the images of an edit decoded; see :func:`.templates.edit_pixels`.

        The future raises :class:`RequestFailed` with stage ``coding`` if the process dies of them.
        """
        message = partial(coder_tasks.edit_decoding, image, mask, edit, work_px)
        num_bytes, result_of = len(image) + len(mask or b""), coder_tasks.edit_pixels_of
        return self._readers.submit(
            Job(client, num_bytes, message, result_of, MAX_JOB_S, _not_decoded())
        )

    def close(self) -> None:
        """Finish what was submitted and end the processes; harmless a second time."""
        self._readers.close()
        self._writers.close()

    def __enter__(self) -> ImageCoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(
        self,
        data: Source,
        message_of: Callable[[bytes], Message],
        result_of: Callable[[Message], T],
        param: str,
        client: str,
        max_s: float = MAX_CHECK_S,
    ) -> Future[T]:
        num_bytes = len(data) if isinstance(data, bytes) else 0

        job = Job(
            client,
            num_bytes,
            lambda: message_of(loaded(data)),
            result_of,
            max_s,
            _deadly(param),
        )
        return self._readers.submit(job)


def loaded(data: Source) -> bytes:
    """Return the file, fetched if it is not here."""
    return data if isinstance(data, bytes) else data()


def _not_encoded(spec: OutputSpec) -> RequestFailed:
    return RequestFailed(
        f"the image was made, but the process that turns it into a {spec.image_format} ended at "
        "it. Send the request again, with the same seed for the same image; if that fails too, ask "
        "for another output_format or a smaller size, and tell the operator: the machine may be "
        "out of memory.",
        "coding",
    )


def _not_decoded() -> RequestFailed:
    return RequestFailed(
        "the process that decodes the images of the edit ended at them. Send the request again; "
        "if that fails too, send smaller images, and tell the operator: the machine may be out of "
        "memory.",
        "coding",
    )


def _deadly(param: str) -> InvalidRequest:
    return not_decodable(
        param,
        "decoding it takes more time than an image of its size may, or ends the process that does "
        "it (is the machine out of memory?)",
    )
