"""The images of a job that has ended, or why there are none."""

from __future__ import annotations

from collections.abc import Callable

from ray_cluster.api.replies import JobImage, JobResponse
from ray_cluster.cli.made import GeneratedFile, GenerateFailed, MadeImages, effort_words
from ray_cluster.cli.remote_service import error_from


def check_completed(job: JobResponse) -> None:
    """Raise the reason why a job that has ended has no images, in the API's words."""
    if job.error is not None:
        raise error_from(job.error)
    if job.state != "completed":
        raise GenerateFailed(f"{job.id} was cancelled: it has no images")


def images_of(job: JobResponse, load: Callable[[JobImage], bytes]) -> MadeImages:
    """Return the images of a completed job.

    Args:
        load: fetches an image.
    """
    assert job.finished is not None
    return MadeImages(
        model=job.model,
        size=job.size,
        images=tuple(_image(image, load) for image in job.data),
        elapsed_s=job.finished - job.created,
        deadline_met=job.deadline.met,
    )


def _image(image: JobImage, load: Callable[[JobImage], bytes]) -> GeneratedFile:
    timing = {} if image.timing is None else image.timing.model_dump()
    return GeneratedFile(load(image), image.seed, timing, effort_words(image.fidelity))
