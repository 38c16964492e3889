from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from ray_cluster.errors import RequestFailed
from ray_cluster.imaging.edit_images import ImageFacts
from ray_cluster.imaging.encoder import encode_image, read_recipe
from ray_cluster.imaging.processes.fair_queue import QueueFull
from ray_cluster.imaging.processes.image_coder import ImageCoder, Source
from ray_cluster.imaging.processes.worker_process import CoderProcess, Message, ProcessDied
from ray_cluster.requests import OutputSpec
from tests.imaging.pictures import RECIPE, file_of, gradient, pixels_of

ROOT = Path(__file__).resolve().parents[2]


def test_it_returns_what_encode_image_returns() -> None:
    with ImageCoder() as coder:
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
        first = writer_of(coder)
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
        os.kill(writer_of(coder), signal.SIGKILL)
        with monkeypatch.context() as patch:
            patch.setattr("ray_cluster.imaging.processes.coder_pool._start", no_process)
            with pytest.raises(RequestFailed, match="Resource temporarily unavailable"):
                coder.submit(gradient(), OutputSpec(), RECIPE).result(60)
        again = coder.submit(gradient(), OutputSpec(), RECIPE)
        assert read_recipe(again.result(60)) == RECIPE


def test_a_job_that_takes_too_long_is_ended_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ImageCoder() as coder:
        first = writer_of(coder)
        monkeypatch.setattr("ray_cluster.imaging.processes.image_coder.MAX_JOB_S", 0.05)
        # seconds of work
        big = np.random.default_rng(0).integers(0, 256, (4000, 4000, 3), dtype=np.uint8)
        with pytest.raises(RequestFailed, match="Send the request again"):
            coder.submit(big, OutputSpec("webp"), {}).result(60)
        assert coder.process_ids == []
        monkeypatch.undo()
        assert writer_of(coder) != first


def test_an_answer_that_cannot_be_read_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of it would be taken for the answer to the next job."""

    def unreadable(pipe: object) -> Message:
        raise MemoryError

    with ImageCoder() as coder:
        first = writer_of(coder)
        with monkeypatch.context() as patch:
            patch.setattr("ray_cluster.imaging.processes.worker_process._read", unreadable)
            with pytest.raises(RequestFailed):
                coder.submit(gradient(), OutputSpec(), {}).result(60)
        assert writer_of(coder) != first


def test_its_processes_end_when_their_parent_is_killed() -> None:
    code = (
        "import time; from ray_cluster.imaging.processes.coder_pool import _start\n"
        "print([_start().pid for _ in range(2)], flush=True); time.sleep(60)"
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
        "import sys, ray_cluster.imaging.processes.coder_tasks\n"
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


class Held:
    """A file that is fetched when it is its turn, and not before it may be."""

    def __init__(self) -> None:
        self.asked, self.may_go = threading.Event(), threading.Event()

    def __call__(self) -> bytes:
        self.asked.set()
        assert self.may_go.wait(60)
        return file_of(gradient())


def check(coder: ImageCoder, data: Source, client: str) -> Future[ImageFacts]:
    return coder.image_facts(data, "image", 1 << 20, client)


def test_processes_start_when_they_are_needed() -> None:
    with ImageCoder(3) as coder:
        assert coder.process_ids == []
        for _ in range(3):
            assert check(coder, file_of(gradient()), "a").result(60).width_px == 40
            assert len(coder.process_ids) == 1
        held = Held()
        first = check(coder, held, "a")
        assert held.asked.wait(60)
        # that one is not needed before its file is there
        check(coder, file_of(gradient()), "b").result(60)
        assert len(coder.process_ids) == 1
        held.may_go.set()
        first.result(60)


def test_files_of_one_client_delay_nobody_else() -> None:
    with ImageCoder(2) as coder:
        files = [Held() for _ in range(8)]
        futures = [check(coder, one, "many") for one in files]
        assert files[0].asked.wait(60)
        for client in ("b", "c", "b"):
            assert check(coder, file_of(gradient()), client).result(60).width_px == 40
        # those that wait are not even fetched
        assert [one.asked.is_set() for one in files] == [True] + [False] * 7
        for one in files:
            one.may_go.set()
        assert {future.result(60).width_px for future in futures} == {40}


def test_no_result_waits_for_files_of_clients() -> None:
    with ImageCoder(2) as coder:
        files = {client: Held() for client in "abcd"}
        futures = [check(coder, one, client) for client, one in files.items()]
        assert files["a"].asked.wait(60)
        assert files["b"].asked.wait(60)
        assert read_recipe(coder.submit(gradient(), OutputSpec(), RECIPE).result(60)) == RECIPE
        for one in files.values():
            one.may_go.set()
        assert {future.result(60).width_px for future in futures} == {40}


def test_files_that_wait_are_bounded_and_those_given_up_do_not_count() -> None:
    data = file_of(np.random.default_rng(0).integers(0, 256, (400, 400, 3), np.uint8))
    with ImageCoder(2, max_waiting_bytes=5 * len(data)) as coder:
        held = Held()
        first = check(coder, held, "many")
        assert held.asked.wait(60)
        waiting = [check(coder, data, "many") for _ in range(4)]
        with pytest.raises(QueueFull):
            check(coder, data, "many")
        assert check(coder, data, "other").result(60).width_px == 400
        assert waiting[0].cancel()
        waiting.append(check(coder, data, "many"))
        held.may_go.set()
        assert first.result(60).width_px == 40
        assert [one.result(60).width_px for one in waiting[1:]] == [400] * 4


def test_a_file_that_cannot_be_fetched_costs_one_check() -> None:
    def gone() -> bytes:
        raise FileNotFoundError("gone")

    with ImageCoder(2) as coder:
        with pytest.raises(FileNotFoundError):
            check(coder, gone, "a").result(60)
        assert check(coder, file_of(gradient()), "a").result(60).width_px == 40


def test_a_closed_coder_takes_no_more() -> None:
    coder = ImageCoder()
    coder.close()
    with pytest.raises(RuntimeError, match="closed"):
        check(coder, b"", "a")
    coder.close()


def writer_of(coder: ImageCoder) -> int:
    """Return the id of the process that encodes; it is the only one that has started."""
    assert read_recipe(coder.submit(gradient(), OutputSpec(), RECIPE).result(60)) == RECIPE
    (process_id,) = coder.process_ids
    return process_id


def _is_running(process_id: int) -> bool:
    """Whether a process runs; a zombie that nobody has waited for does not."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
