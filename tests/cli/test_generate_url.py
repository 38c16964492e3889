"""``generate --url`` against the real HTTP application: a durable job from call to files."""

from __future__ import annotations

import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ray_cluster.cli.remote.remote_service import RemoteService
from ray_cluster.config.loading import load_config
from ray_cluster.imaging.encoder import encode_image
from ray_cluster.requests import CascadeUse, OutputSpec
from tests.cli.conftest import Cli
from tests.cli.served import PATIENCE_S, Served, subprocess_of
from tests.fakes import image_request


def here(served: Served, *more: object) -> tuple[object, ...]:
    return ("--url", served.url, "--api-key", "secret", *more)


# for half a second, not for five
IMPATIENT = "import ray_cluster.cli.remote.remote_jobs as jobs; jobs._CANCEL_S = 0.5"


def leased(served: Served) -> None:
    """Wait until the job is being made."""
    served.until(lambda: served.replica.leases)


def test_every_parameter_reaches_the_service(cli: Cli, served: Served, tmp_path: Path) -> None:
    result = cli(
        *("generate", "a red circle", *here(served)),
        *("--negative-prompt", "blue", "--seed", 7, "--n", 2, "--size", "96x64", "--steps", 9),
        *("--guidance", 4.5, "--sampler", "ddim", "--priority", 3, "--slo", 30),
        *("--model", "shapes", "--compression", 80, "-o", tmp_path / "a.jpg"),
    )
    assert result.exit_code == 0, result.output
    first, second = sorted(served.made, key=lambda request: request.seed)
    assert (first.seed, second.seed) == (7, 8)
    assert (first.prompt, first.negative_prompt) == ("a red circle", "blue")
    assert (first.width_px, first.height_px, first.num_steps) == (96, 64, 9)
    assert (first.guidance_scale, first.sampler) == (4.5, "ddim")
    assert (first.priority, first.slo_s) == (3, 30)
    assert (first.output.image_format, first.output.compression) == ("jpeg", 80)
    assert (tmp_path / "a-1.jpg").read_bytes() == b"image 7"
    assert (tmp_path / "a-2.jpg").read_bytes() == b"image 8"
    assert result.stderr == ""
    stages = "queue 0.10 s, encode 0.20 s, denoise 0.30 s, decode 0.40 s, total 1.00 s"
    *lines, summary = result.stdout.splitlines()
    assert lines == [
        f"{tmp_path}/a-{number}.jpg  seed {6 + number}  96x64  {stages}" for number in (1, 2)
    ]
    assert re.fullmatch(r"2 image\(s\) of shapes in \d\.\d\d s, within the deadline", summary)


def test_like_repeats_the_recipe_of_a_png(cli: Cli, served: Served, tmp_path: Path) -> None:
    # which cascade it came through is no part of how it is made
    request = image_request(
        model="shapes", seed=5, num_steps=4, prompt="grün", cascade=CascadeUse("auto")
    )
    recipe = request.recipe()
    png = encode_image(np.zeros((64, 64, 3), np.uint8), OutputSpec(), recipe)
    (tmp_path / "like.png").write_bytes(png)
    arguments = ("--like", tmp_path / "like.png", "--steps", 3, "-o", tmp_path / "a.png")
    result = cli("generate", *arguments, *here(served))
    assert result.exit_code == 0, result.output
    (made,) = served.made
    assert (made.prompt, made.seed, made.num_steps) == ("grün", 5, 3)


def test_a_url_may_end_in_v1(cli: Cli, served: Served, tmp_path: Path) -> None:
    arguments = ("--api-key", "secret", "--steps", 1, "-o", tmp_path / "a.png")
    assert cli("generate", "x", "--url", f"{served.url}/v1/", *arguments).exit_code == 0


def test_a_terminal_sees_the_place_and_the_steps(
    cli: Cli, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    served.is_working = False

    def work_later() -> None:
        served.until(lambda: served.cell.core.num_waiting)
        # two looks at a queue that stands still
        threading.Event().wait(0.7)
        served.is_working = True

    with ThreadPoolExecutor() as pool:
        pool.submit(work_later)
        result = cli("generate", "x", "--steps", 20, "-o", tmp_path / "a.png", *here(served))
    assert result.exit_code == 0, result.output
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.stderr)
    assert "waiting, 0 before it" in shown
    assert "denoising" in shown
    steps = {int(number) for number in re.findall(r"(\d+)/20 steps", shown)}
    assert len(steps) >= 3, steps


def test_a_wrong_parameter_is_named_with_its_option(
    cli: Cli, served: Served, tmp_path: Path
) -> None:
    result = cli("generate", "x", "--steps", 1000, *here(served), "-o", tmp_path / "a.png")
    assert result.exit_code == 1
    assert "'num_inference_steps' must be from 1 to 100" in result.stderr
    assert "(option --steps)" in result.stderr


@pytest.mark.parametrize(
    ("option", "value"), [("--guidance", "nan"), ("--slo", "inf"), ("--guidance", "-inf")]
)
def test_a_number_that_json_cannot_write_is_named_with_its_option(
    cli: Cli, served: Served, tmp_path: Path, option: str, value: str
) -> None:
    result = cli("generate", "x", option, value, *here(served), "-o", tmp_path / "a.png")
    assert result.exit_code == 1
    assert "must be a finite number" in result.stderr
    assert f"(option {option})" in result.stderr


def test_errors_of_the_service_are_one_sentence(cli: Cli, served: Served, tmp_path: Path) -> None:
    arguments = ("generate", "x", "-o", tmp_path / "a.png", "--url", served.url)
    refused = cli(*arguments).stderr
    assert "No API key given" in refused
    assert "--api-key" in refused
    wrong = cli(*arguments, "--api-key", "wrong")
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("error: The API key is not valid")
    served.fails = True
    failed = cli(*arguments, "--api-key", "secret")
    assert failed.exit_code == 1
    assert failed.stderr.startswith("error: The model failed on this request: out of luck")
    assert len(failed.stderr.splitlines()) == 1
    served.stop()
    served.is_working = False
    served.start(max_queued=1)
    served.create()
    full = cli(*arguments, "--api-key", "secret")
    assert full.exit_code == 1
    assert re.fullmatch(
        r"error: Your share of the queue of '[\w-]+' is full\. At present it is 1 image\. .*"
        r"It should have free slots in \d+ s; try again then\.\n",
        full.stderr,
    )
    assert not list(tmp_path.glob("*.png"))


def test_a_service_that_is_not_there(cli: Cli, free_port: int, tmp_path: Path) -> None:
    result = cli("generate", "x", "--url", f"http://127.0.0.1:{free_port}", "-o", tmp_path / "a")
    assert result.exit_code == 1
    assert "cannot be reached" in result.stderr
    assert "ray-cluster serve" in result.stderr
    assert "without --url" in result.stderr


def test_what_is_no_url_is_refused(cli: Cli, tmp_path: Path) -> None:
    result = cli("generate", "x", "--url", "localhost", "-o", tmp_path / "a")
    assert result.exit_code == 1
    assert "give one like http://127.0.0.1:8000" in result.stderr


def test_the_own_key_goes_to_this_machine_only(
    cli: Cli, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLUSTER_API_KEYS", "secret, other")
    assert cli("generate", "x", "--url", served.url, "-o", tmp_path / "a.png").exit_code == 0
    config = load_config()
    with RemoteService.at("http://example.com", None, config) as elsewhere:
        assert "Authorization" not in elsewhere.headers
    with RemoteService.at("http://example.com", "mine", config) as given:
        assert given.headers == {"Authorization": "Bearer mine"}


def test_pool_changes_nothing_at_a_url(cli: Cli, tmp_path: Path) -> None:
    result = cli(
        "generate", "x", "--url", "http://127.0.0.1:1", "--pool", "a", "-o", tmp_path / "a"
    )
    assert result.exit_code == 1
    assert "--pool changes nothing with --url" in result.stderr


@pytest.mark.parametrize("num_losses", [1, 3])
def test_lost_answers_lose_no_job_and_make_no_second(
    cli: Cli, served: Served, tmp_path: Path, num_losses: int
) -> None:
    served.num_losses = num_losses
    result = cli("generate", "x", "--steps", 2, "-o", tmp_path / "a.png", *here(served))
    assert result.exit_code == 0, result.output
    assert "trying again" in result.stderr
    assert len(result.stderr.splitlines()) == 2, "one outage is told of once"
    assert [job["state"] for job in served.jobs()] == ["completed"]
    assert (tmp_path / "a.png").exists()


def test_a_service_that_is_started_again_finishes_the_job(
    cli: Cli, served: Served, tmp_path: Path
) -> None:
    served.is_working = False

    def restart() -> None:
        served.until(lambda: served.cell.core.num_waiting)
        served.stop()
        # long enough for calls that find nobody
        threading.Event().wait(1.0)
        served.is_working = True
        served.start()

    with ThreadPoolExecutor() as pool:
        restarted = pool.submit(restart)
        result = cli("generate", "x", "--seed", 3, "-o", tmp_path / "a.png", *here(served))
        restarted.result()
    assert result.exit_code == 0, result.output
    assert "trying again" in result.stderr
    assert (tmp_path / "a.png").read_bytes() == b"image 3"
    assert len(served.jobs()) == 1


def test_the_timeout_ends_the_command_and_not_the_job(
    cli: Cli, served: Served, tmp_path: Path
) -> None:
    served.is_working = False
    arguments = ("generate", "x", "-o", tmp_path / "a.png", "--timeout", 1.5)
    result = cli(*arguments, *here(served))
    assert result.exit_code == 1
    (job,) = served.jobs()
    assert job["state"] == "queued"
    assert f"jobs fetch {job['id']} --url {served.url}" in result.stderr
    served.is_working = True
    served.ended(job["id"])
    assert cli("jobs", "fetch", job["id"], "-o", tmp_path / "a.png", *here(served)).exit_code == 0


def test_a_job_that_somebody_else_cancels(cli: Cli, served: Served, tmp_path: Path) -> None:
    served.is_working = False

    def cancel() -> None:
        assert cli("jobs", "cancel", first_job(served), *here(served)).exit_code == 0

    # the runner of commands redirects the process's streams: one command there, one here
    with subprocess_of("generate", "x", "-o", tmp_path / "a.png", *here(served)) as process:
        cancel()
        _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "was cancelled: it has no images" in stderr


@pytest.mark.parametrize(
    ("is_made", "how"),
    [(False, signal.SIGINT), (True, signal.SIGTERM)],
    ids=["waiting", "being made"],
)
def test_a_signal_cancels_the_job_and_says_so(
    served: Served, tmp_path: Path, is_made: bool, how: signal.Signals
) -> None:
    served.is_working = is_made
    arguments = ("generate", "x", "--steps", 100, "-o", tmp_path / "a.png", *here(served))
    with subprocess_of(*arguments) as process:
        leased(served) if is_made else served.until(lambda: served.cell.core.num_waiting)
        process.send_signal(how)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    (job,) = served.jobs()
    assert job["state"] == "cancelled"
    assert (process.returncode, stdout) == (130, "")
    assert stderr == f"cancelled {job['id']}\n"
    assert not (tmp_path / "a.png").exists()


def test_ctrl_c_while_the_service_is_away_tells_how_to_cancel(
    served: Served, tmp_path: Path
) -> None:
    served.is_working = False
    arguments = ("generate", "x", "-o", tmp_path / "a.png", *here(served))
    with subprocess_of(*arguments, first=IMPATIENT) as process:
        job = served.only_job()
        served.stop()
        assert process.stderr is not None
        assert "trying again" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert f"{job['id']} is perhaps not cancelled" in stderr
    assert f"jobs cancel {job['id']} --url {served.url}'" in stderr
    served.start()


def first_job(served: Served) -> str:
    """Wait for a job to be listed, some time after it waits, and return its id."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (jobs := served.jobs()):
        assert time.monotonic() < deadline_s, "no job is listed"
        time.sleep(0.05)
    return str(jobs[0]["id"])


def test_links_with_a_path_of_a_proxy_in_front_are_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The service may be called at its own address, or at the proxy's."""
    asked = []

    def call(self: RemoteService, method: str, path: str, **options: Any) -> Any:
        asked.append(self.base + path)
        return SimpleNamespace(content=b"png")

    monkeypatch.setattr(RemoteService, "_call", call)
    for url in ("http://127.0.0.1:8000", "https://example.com/images"):
        data = RemoteService(url, None).file("https://example.com/images/v1/files/img-1.png")
        assert data == b"png"
    assert asked == [
        "http://127.0.0.1:8000/v1/files/img-1.png",
        "https://example.com/images/v1/files/img-1.png",
    ]
