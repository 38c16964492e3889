"""Encodes and decodes images in processes of their own.

Encoding a 1024 px png takes about 0.1 s of CPU; in the engine's process that would stop a
denoising step (InstGenIE, section 4.3). And a hostile file can end a process: it must not be the
engine's or a gateway's.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.imaging import coder_tasks
from ray_cluster.imaging.control_maps import ControlMap, MapOrder
from ray_cluster.imaging.decoding import not_decodable
from ray_cluster.imaging.encoder import Pixels
from ray_cluster.imaging.templates import EditPixels, ImageFacts, MaskFacts, Paste
from ray_cluster.imaging.worker_process import CoderProcess, JobTooLong, Message, ProcessDied
from ray_cluster.policies.edits import SizePx
from ray_cluster.requests import Edit, OutputSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

# the second one in a fresh process: the first may have died of an earlier image
_ATTEMPTS = 2
# the longest known takes four seconds: a jpeg of a hundred scans
MAX_JOB_S = 60.0


class ImageCoder:
    """Codes images in processes of its own, which import numpy and Pillow; what is larger, with the
    first job that needs it.

    A job whose process dies is run once more, in a fresh process; one that takes longer than
    :data:`MAX_JOB_S` is not. The processes end with this one, however it ends: they read its pipe
    until that is closed. What a job is given must not change meanwhile.

    Args:
        num_processes: jobs run at the same time.
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

    def submit(
        self,
        pixels: Pixels,
        spec: OutputSpec,
        recipe: Mapping[str, str],
        paste: Paste | None = None,
    ) -> Future[bytes]:
        """Have an image encoded; see :func:`.encoder.encode_image`.

        The future raises :class:`RequestFailed` with stage ``coding`` if that fails.

        Args:
            paste: of an edit; see :func:`.templates.finished`.
        """
        job = partial(coder_tasks.encoding, pixels, spec, recipe, paste)
        return self._submit(job, coder_tasks.encoded_of, _not_encoded(spec))

    def image_facts(self, data: bytes, param: str, max_pixels: int) -> Future[ImageFacts]:
        """Have an image decoded; see :func:`.templates.image_facts`.

        The future raises :class:`InvalidRequest` also for an image of which the process dies.
        """
        job = partial(coder_tasks.image_check, data, param, max_pixels)
        return self._submit(job, coder_tasks.image_facts_of, _deadly(param))

    def mask_facts(self, data: bytes, param: str, max_pixels: int) -> Future[MaskFacts]:
        """Have a mask decoded, likewise; see :func:`.templates.mask_facts`."""
        job = partial(coder_tasks.mask_check, data, param, max_pixels)
        return self._submit(job, coder_tasks.mask_facts_of, _deadly(param))

    def control_map(self, data: bytes, order: MapOrder, max_pixels: int) -> Future[ControlMap]:
        """Have a ControlNet's map made of an image; see :func:`.control_maps.control_map`.

        The future raises :class:`InvalidRequest` also for an image of which the process dies.
        """
        job = partial(coder_tasks.map_making, data, order, max_pixels)
        return self._submit(job, coder_tasks.map_of, _deadly(order.param))

    def edit_pixels(
        self, image: bytes, mask: bytes | None, edit: Edit, work_px: SizePx
    ) -> Future[EditPixels]:
        """Have the images of an edit decoded; see :func:`.templates.edit_pixels`.

        The future raises :class:`RequestFailed` with stage ``coding`` if the process dies of them.
        """
        job = partial(coder_tasks.edit_decoding, image, mask, edit, work_px)
        return self._submit(job, coder_tasks.edit_pixels_of, _not_decoded())

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

    def _submit(
        self,
        job: Callable[[], Message],
        result_of: Callable[[Message], T],
        if_deadly: InvalidRequest | RequestFailed,
    ) -> Future[T]:
        # what it writes to the log names the image of whoever called
        context = copy_context()
        return self._threads.submit(context.run, lambda: result_of(self._run(job(), if_deadly)))

    def _run(self, job: Message, if_deadly: InvalidRequest | RequestFailed) -> Message:
        process = self._idle.get()
        try:
            for _attempt in range(_ATTEMPTS):
                try:
                    return process.run(job, MAX_JOB_S)
                except ProcessDied as error:
                    logger.warning("a job (%s) has no result: %s", job.header["task"], error)
                    process = self._replace(process)
                    if isinstance(error, JobTooLong):
                        break
        finally:
            self._idle.put(process)
        raise if_deadly

    def _replace(self, process: CoderProcess) -> CoderProcess:
        process.close()
        try:
            successor = _start()
        except OSError as error:
            # the closed one stays in its place, and the next job tries again
            raise RequestFailed(
                f"no process that codes images can be started ({error}); send the request again, "
                "and tell the operator: the machine may be out of memory or processes.",
                "coding",
            ) from error
        self._processes[self._processes.index(process)] = successor
        return successor


def _start() -> CoderProcess:
    return CoderProcess(coder_tasks.__name__, coder_tasks.run_task.__name__)


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
        param, "the process that decodes it took too long, or ended (is the machine out of memory?)"
    )
