from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ray_cluster.errors import RequestFailed
from ray_cluster.imaging.encoder import encode_image, read_recipe
from ray_cluster.imaging.image_coder import ImageCoder
from ray_cluster.imaging.worker_process import CoderProcess, Message, ProcessDied
from ray_cluster.requests import OutputSpec
from tests.imaging.pictures import RECIPE, gradient, pixels_of

ROOT = Path(__file__).resolve().parents[2]


def test_it_returns_what_encode_image_returns() -> None:
    with ImageCoder(2) as coder:
        specs = [OutputSpec(), OutputSpec("jpeg", 70, False), OutputSpec("webp", 70, False)]
        futures = [coder.submit(gradient(), spec, RECIPE) for spec in specs * 4]
        expected = [encode_image(gradient(), spec, RECIPE) for spec in specs * 4]
        assert [future.result(60) for future in futures] == expected


def test_what_cannot_be_coded_fails_alone() -> None:
    with ImageCoder() as coder:
        bad = coder.submit(np.zeros((2, 2), np.uint8), OutputSpec(), {})
        wide = coder.submit(np.zeros((1, 20_000, 3), np.uint8), OutputSpec("webp"), {})
        good = coder.submit(gradient(), OutputSpec(), RECIPE)
        with pytest.raises(RequestFailed, match="uint8"):
            bad.result(60)
        with pytest.raises(RequestFailed) as caught:
            wide.result(60)
        assert caught.value.stage == "coding"
        assert read_recipe(good.result(60)) == RECIPE


def test_a_killed_process_is_replaced_and_the_image_coded_again() -> None:
    with ImageCoder() as coder:
        coder.submit(gradient(), OutputSpec(), {}).result(60)
        (first,) = coder.process_ids
        big = np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), dtype=np.uint8)
        future = coder.submit(big, OutputSpec(), {})
        time.sleep(0.03)
        os.kill(first, signal.SIGKILL)
        assert np.array_equal(pixels_of(future.result(60)), big)
        assert coder.process_ids != [first]
        os.kill(coder.process_ids[0], signal.SIGKILL)
        again = coder.submit(gradient(), OutputSpec(), RECIPE)
        assert read_recipe(again.result(60)) == RECIPE


def test_an_image_that_kills_two_processes_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = CoderProcess.run
    tried: list[int] = []

    def deadly(self: CoderProcess, job: Message, max_s: float) -> Message:
        if "poison" in str(job.header):
            tried.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
            raise ProcessDied("killed")
        return run(self, job, max_s)

    monkeypatch.setattr(CoderProcess, "run", deadly)
    with ImageCoder() as coder:
        (first,) = coder.process_ids
        poison = coder.submit(gradient(), OutputSpec(), {"prompt": "poison"})
        good = coder.submit(gradient(), OutputSpec(), RECIPE)
        with pytest.raises(RequestFailed) as caught:
            poison.result(60)
        assert tried[0] == first
        assert len(set(tried)) == len(tried) == 2
        assert read_recipe(good.result(60)) == RECIPE
    message = caught.value.message
    assert caught.value.stage == "coding"
    assert "Send the request again" in message
    assert "output_format" in message
    assert not any(str(pid) in message for pid in tried)


def test_a_process_that_cannot_be_started_costs_one_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process() -> CoderProcess:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with ImageCoder() as coder:
        os.kill(coder.process_ids[0], signal.SIGKILL)
        with monkeypatch.context() as patch:
            patch.setattr("ray_cluster.imaging.image_coder._start", no_process)
            with pytest.raises(RequestFailed, match="Resource temporarily unavailable"):
                coder.submit(gradient(), OutputSpec(), RECIPE).result(60)
        again = coder.submit(gradient(), OutputSpec(), RECIPE)
        assert read_recipe(again.result(60)) == RECIPE


def test_a_job_that_takes_too_long_is_ended_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ImageCoder() as coder:
        (first,) = coder.process_ids
        monkeypatch.setattr("ray_cluster.imaging.image_coder.MAX_JOB_S", 0.05)
        # seconds of work
        big = np.random.default_rng(0).integers(0, 256, (4000, 4000, 3), dtype=np.uint8)
        with pytest.raises(RequestFailed, match="Send the request again"):
            coder.submit(big, OutputSpec("webp"), {}).result(60)
        (second,) = coder.process_ids
        assert second != first
        monkeypatch.undo()
        assert read_recipe(coder.submit(gradient(), OutputSpec(), RECIPE).result(60)) == RECIPE
        assert coder.process_ids == [second]


def test_an_answer_that_cannot_be_read_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of it would be taken for the answer to the next job."""

    def unreadable(pipe: object) -> Message:
        raise MemoryError

    with ImageCoder() as coder:
        (first,) = coder.process_ids
        with monkeypatch.context() as patch:
            patch.setattr("ray_cluster.imaging.worker_process._read", unreadable)
            with pytest.raises(RequestFailed):
                coder.submit(gradient(), OutputSpec(), {}).result(60)
        assert coder.process_ids != [first]
        again = coder.submit(gradient(), OutputSpec(), RECIPE)
        assert read_recipe(again.result(60)) == RECIPE


def test_its_processes_end_when_their_parent_is_killed() -> None:
    code = (
        "import time; from ray_cluster.imaging.image_coder import ImageCoder\n"
        "print(ImageCoder(2).process_ids, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        children = [int(one) for one in parent.stdout.readline().strip("[]\n").split(",")]
        parent.kill()
    until_s = time.monotonic() + 60
    while any(_is_running(child) for child in children):
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_it_imports_neither_torch_nor_ray_nor_the_parents_main_module() -> None:
    code = (
        "import sys, ray_cluster.imaging.coder_tasks\n"
        "print(sorted({name.split('.')[0] for name in sys.modules}))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    loaded = set(output.strip("[]\n").replace("'", "").split(", "))
    assert {"numpy", "PIL"} <= loaded
    assert not loaded & {
        "torch",
        "ray",
        "fastapi",
        "pydantic",
        "cv2",
        "scipy",
        "multiprocessing",
    }


def _is_running(process_id: int) -> bool:
    """Whether a process runs; a zombie that nobody has waited for does not."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
