"""What a file may take while it is decoded, and what happens to one that takes more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ray_cluster.errors import RequestFailed
from ray_cluster.imaging.processes.allowance import of_decoding
from ray_cluster.imaging.processes.image_coder import MAX_CHECK_S
from ray_cluster.imaging.processes.worker_process import CoderProcess, JobTooLong, Message
from tests.imaging.hostile import bombs, plain_png, png_of, regular_files, vast_png

MIB = 1 << 20
SIDE = 8192


@pytest.fixture
def greedy() -> Iterator[CoderProcess]:
    process = CoderProcess("tests.imaging.greedy", "greedy_task")
    yield process
    process.close()


def test_a_job_that_takes_more_memory_than_allowed_fails_alone(greedy: CoderProcess) -> None:
    small, large = ({"max_mib": 50, "max_s": 60, "mib": mib} for mib in (40, 60))
    assert greedy.run(Message(small), 60).header == {"size": 40 * MIB}
    with pytest.raises(RequestFailed, match="allocate"):
        greedy.run(Message(large), 60)
    # nothing adds up, and another job may have more
    for _ in range(3):
        assert greedy.run(Message(small), 60).header == {"size": 40 * MIB}
    assert greedy.run(Message(large | {"max_mib": 70}), 60).header == {"size": 60 * MIB}


def test_a_process_ends_when_the_cpu_time_of_its_job_is_used_up(greedy: CoderProcess) -> None:
    assert greedy.run(Message({"max_mib": 50, "max_s": 0.5, "mib": 1}), 60).header
    with pytest.raises(JobTooLong, match="CPU time"):
        greedy.run(Message({"max_mib": 50, "max_s": 0.02}), 60)


def test_a_file_may_take_as_much_as_its_pixels_need() -> None:
    small, large = of_decoding(regular_files()[0]), of_decoding(vast_png(SIDE))
    assert small.num_bytes < 70 * MIB
    assert small.cpu_s < 3
    # a file of 64 megapixels, by its header; the time is up before the process is ended
    assert SIDE * SIDE * 12 < large.num_bytes < SIDE * SIDE * 16
    assert 10 < large.cpu_s < MAX_CHECK_S


def test_what_cannot_be_read_may_take_next_to_nothing() -> None:
    for data in (b"", b"GIF89a", bombs()[4], png_of(plain_png(8, 8))[:20]):
        assert of_decoding(data).num_bytes < 70 * MIB
        assert of_decoding(data).cpu_s < 3
