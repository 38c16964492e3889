"""How much a page of jobs may hold: no more than one message should."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ray_cluster.protocol.jobs import Job

# text of prompts, and images
_MOST_CHARS, _MOST_IMAGES = 500_000, 250


@dataclass(slots=True)
class PageSize:
    """What a page holds while it is put together."""

    num_jobs: int = 0
    num_images: int = 0
    num_chars: int = 0

    def takes(self, job: Job) -> bool:
        """Count a job; False if the page is full without it. One job always fits."""
        self.num_jobs += 1
        self.num_images += len(job.requests)
        self.num_chars += sum(len(one.prompt) for one in job.requests)
        is_small = self.num_images <= _MOST_IMAGES and self.num_chars <= _MOST_CHARS
        return is_small or self.num_jobs == 1


def until_full(jobs: Iterable[Job]) -> Iterator[Job]:
    """Yield jobs up to the first that does not fit in a page: it tells that more follow."""
    size = PageSize()
    for job in jobs:
        yield job
        if not size.takes(job):
            return
