"""``jobs`` against the real HTTP application: list, show, watch, cancel, fetch."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.served import PATIENCE_S, Served, subprocess_of

UNKNOWN = "job-" + "0" * 32
# one call of each command that asks for a job
COMMANDS = (("list",), *((name, UNKNOWN) for name in ("show", "watch", "cancel", "fetch")))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make commands take what they write to for a wide terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")


def here(served: Served) -> tuple[str, ...]:
    return ("--url", served.url, "--api-key", "secret")


def plain(text: str) -> str:
    """Return what a terminal shows, without colours and movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_jobs_are_listed_the_newest_first(cli: Cli, served: Served) -> None:
    assert "no jobs" in cli("jobs", "list", *here(served)).stderr
    done = served.create("a [red]circle\x1b[31m\nand more")
    served.ended(done)
    served.pause()
    waiting = [served.create(f"number {number}") for number in range(3)]
    result = cli("jobs", "list", *here(served))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*reversed(waiting), done]
    assert re.match(rf"{waiting[2]}  queued +[\d:]{{8}}  0/10 +number 2", lines[0])
    assert re.match(rf"{done}  completed  [\d:]{{8}}  10/10 +a \[red\]cir", lines[3])
    of_state = cli("jobs", "list", "--state", "queued", "--limit", 2, *here(served))
    assert [line.split()[0] for line in of_state.stdout.splitlines()] == waiting[:0:-1]
    as_json = json.loads(cli("jobs", "list", "--json", *here(served)).stdout)
    assert [job["id"] for job in as_json] == [*reversed(waiting), done]
    assert as_json[3]["prompt"] == "a [red]circle\x1b[31m\nand more"


@pytest.mark.usefixtures("terminal")
def test_a_terminal_gets_a_table(cli: Cli, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = served.create("a [red]circle\x1b[31m\nand more")
    served.ended(job_id)
    heading, line = plain(cli("jobs", "list", *here(served)).stdout).splitlines()
    assert heading.split() == ["job", "state", "created", "model", "images", "steps", "prompt"]
    assert re.search(rf"{job_id} +completed +[\d:]+ +shapes +1 +10/10 +a \[red\]circle", line)
    monkeypatch.setenv("COLUMNS", "80")
    heading, line = plain(cli("jobs", "list", *here(served)).stdout).splitlines()
    assert heading.split() == ["job", "state", "created", "steps", "prompt"]
    assert re.search(rf"{job_id}  completed  [\d:]+  10/10  a \[red\]", line)
    assert len(line) <= 80


def test_a_line_fits_80_columns_however_old_the_job_is(
    cli: Cli, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    served.pause()
    for prompt in ("a very long prompt, longer than any line, with 水 and more", "short"):
        served.create(prompt, num_inference_steps=100)
    assert cli("jobs", "cancel", served.jobs()[1]["id"], *here(served)).exit_code == 0
    for now_s in (time.time(), time.time() + 1e6):
        monkeypatch.setattr(time, "time", lambda now_s=now_s: now_s)
        lines = cli("jobs", "list", *here(served)).stdout.splitlines()
        assert len(lines) == 2
        assert all(len(line) <= 80 for line in lines)
        assert lines[1].startswith(served.jobs()[1]["id"])
        assert "a very l" in lines[1]


def test_more_jobs_than_a_page_holds(cli: Cli, served: Served) -> None:
    served.stop()
    served.is_working = False
    served.start(max_open=200, max_queued=200)
    ids = [served.create() for _ in range(105)]
    listed = cli("jobs", "list", "--limit", 103, "--state", "queued", *here(served)).stdout
    assert [line.split()[0] for line in listed.splitlines()] == ids[:1:-1]


def test_show_tells_everything(cli: Cli, served: Served) -> None:
    job_id = served.create("a blue star", n=2, slo_s=30)
    job = served.ended(job_id)
    text = cli("jobs", "show", job_id, *here(served)).stdout
    for said in (job_id, "completed", "shapes", "a blue star", "2 of 64x64", "20 of 20"):
        assert said in text
    assert "30 s after its creation: met" in text
    assert f"{job['data'][1]['url']}  seed 8  7 bytes" in text
    assert json.loads(cli("jobs", "show", job_id, "--json", *here(served)).stdout) == job


def test_watching_plainly_to_the_end(cli: Cli, served: Served) -> None:
    served.is_working = False
    ids = [served.create(num_inference_steps=30) for _ in range(2)]

    def work_later() -> None:
        served.until(lambda: all(f"/v1/jobs/{one}" in served.answered for one in ids))
        served.is_working = True

    with ThreadPoolExecutor() as pool:
        pool.submit(work_later)
        result = cli("jobs", "watch", *here(served))
    assert result.exit_code == 0, result.output
    for job_id, place in zip(ids, ("next", "1 before it"), strict=True):
        said = [
            line.partition("  ")[2]
            for line in result.stdout.splitlines()
            if line.startswith(job_id)
        ]
        assert said[0].startswith(f"queued, step 0 of 30, in the queue: {place}, done at ")
        assert any(line.startswith("running, step ") for line in said)
        assert said[-1] == "completed: 1 image(s)"
    assert "no open jobs" in cli("jobs", "watch", *here(served)).stderr


@pytest.mark.usefixtures("terminal")
def test_watching_on_a_terminal_to_the_end(cli: Cli, served: Served) -> None:
    job_id = served.create(num_inference_steps=30)
    result = cli("jobs", "watch", job_id, job_id, *here(served))
    assert result.exit_code == 0, result.output
    shown = plain(result.stdout)
    assert "running" in shown
    last = [line for line in shown.splitlines() if line.startswith(job_id)][-1]
    assert re.search(r"completed +━{16} +30/30 +- +[\d:]+ *$", last)


def test_watching_goes_on_over_a_restart(cli: Cli, served: Served) -> None:
    served.is_working = False
    job_id = served.create()

    def restart() -> None:
        # a service that is not there at the first call is an error
        served.until(lambda: f"/v1/jobs/{job_id}" in served.answered)
        served.stop()
        threading.Event().wait(1.0)
        served.is_working = True
        served.start()

    with ThreadPoolExecutor() as pool:
        restarted = pool.submit(restart)
        result = cli("jobs", "watch", job_id, *here(served))
        restarted.result()
    assert result.exit_code == 0, result.output
    assert "trying again" in result.stderr
    assert result.stdout.splitlines()[-1].startswith(f"{job_id}  completed")


def test_a_failed_job_is_an_error_with_the_reason(cli: Cli, served: Served, tmp_path: Path) -> None:
    served.fails = True
    job_id = served.create()
    watched = cli("jobs", "watch", job_id, *here(served))
    assert watched.exit_code == 1
    assert watched.stderr.startswith(f"error: {job_id} failed: The model failed on this request")
    fetched = cli("jobs", "fetch", job_id, "-o", tmp_path / "a.png", *here(served))
    assert fetched.exit_code == 1
    assert fetched.stderr.startswith("error: The model failed on this request: out of luck")
    shown = cli("jobs", "show", job_id, *here(served))
    assert shown.exit_code == 0
    assert "error      The model failed on this request: out of luck" in shown.stdout


def test_cancelling(cli: Cli, served: Served, tmp_path: Path) -> None:
    done = served.create()
    served.ended(done)
    served.is_working = False
    open_ids = [served.create() for _ in range(2)]
    result = cli("jobs", "cancel", open_ids[0], UNKNOWN, done, open_ids[1], *here(served))
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"{open_ids[0]}  cancelled",
        f"{done}  completed already; there is nothing to cancel",
        f"{open_ids[1]}  cancelled",
    ]
    assert result.stderr.startswith(f"error: There is no job '{UNKNOWN}'")
    assert [served.job(one)["state"] for one in open_ids] == ["cancelled", "cancelled"]
    assert cli("jobs", "cancel", open_ids[0], *here(served)).exit_code == 0
    fetched = cli("jobs", "fetch", open_ids[0], "-o", tmp_path / "a.png", *here(served))
    assert (fetched.exit_code, fetched.stdout) == (1, "")
    assert "was cancelled: it has no images" in fetched.stderr
    watched = cli("jobs", "watch", open_ids[0], *here(served))
    assert watched.exit_code == 1
    assert watched.stderr == f"error: {open_ids[0]} cancelled\n"


def test_fetching_images(cli: Cli, served: Served, tmp_path: Path) -> None:
    job_id = served.create(n=2, output_format="jpeg", slo_s=60)
    served.ended(job_id)
    result = cli("jobs", "fetch", job_id, "-o", tmp_path / "out.jpg", *here(served))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out-1.jpg").read_bytes() == b"image 7"
    assert (tmp_path / "out-2.jpg").read_bytes() == b"image 8"
    assert f"{tmp_path}/out-2.jpg  seed 8  64x64  queue 0.10 s" in result.stdout
    again = cli("jobs", "fetch", job_id, "-o", tmp_path / "out.jpg", *here(served))
    assert (again.exit_code, again.stdout) == (1, "")
    assert "out-1.jpg exists already" in again.stderr
    forced = cli("jobs", "fetch", job_id, "-f", "-o", tmp_path / "out.jpg", *here(served))
    assert forced.exit_code == 0
    wrong = cli("jobs", "fetch", job_id, "-o", tmp_path / "out.png", *here(served))
    assert wrong.exit_code == 1
    assert f"named as png, but the images of {job_id} are jpeg" in wrong.stderr
    named = cli("jobs", "fetch", job_id, "-o", tmp_path / "named", *here(served))
    assert named.exit_code == 0
    assert (tmp_path / "named-1.jpeg").exists()


def test_fetching_what_is_not_done_or_forgotten(cli: Cli, served: Served, tmp_path: Path) -> None:
    served.is_working = False
    job_id = served.create()
    early = cli("jobs", "fetch", job_id, "-o", tmp_path / "a.png", *here(served))
    assert early.exit_code == 1
    assert f"{job_id} is not done: queued, step 0 of 10" in early.stderr
    assert f"jobs watch {job_id} --url {served.url}' waits for it" in early.stderr
    served.is_working = True
    url = served.ended(job_id)["data"][0]["url"]
    served.cell.results.delete([url.rpartition("/")[2]])
    late = cli("jobs", "fetch", job_id, "-o", tmp_path / "a.png", *here(served))
    assert late.exit_code == 1
    assert "images are forgotten after a while" in late.stderr
    assert not (tmp_path / "a.png").exists()


def test_an_unknown_id_and_a_wrong_key_are_refused_by_the_service(cli: Cli, served: Served) -> None:
    for command in COMMANDS:
        if UNKNOWN in command:
            result = cli("jobs", *command, *here(served))
            assert (result.exit_code, result.stdout) == (1, ""), command
            assert result.stderr.startswith(f"error: There is no job '{UNKNOWN}'"), command
        result = cli("jobs", *command, "--url", served.url, "--api-key", "wrong")
        assert result.exit_code == 1, command
        assert result.stderr.startswith("error: The API key is not valid"), command
        assert len(result.stderr.splitlines()) == 1, command


def test_a_service_that_is_away_is_an_error_at_once(cli: Cli, free_port: int) -> None:
    for command in COMMANDS:
        result = cli("jobs", *command, "--url", f"http://127.0.0.1:{free_port}")
        assert result.exit_code == 1, command
        assert "cannot be reached" in result.stderr, command
        assert "ray-cluster serve" in result.stderr, command
        assert len(result.stderr.splitlines()) == 1, command


def test_jobs_are_those_of_the_own_key(
    cli: Cli, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = served.create()
    others = cli("jobs", "list", "--url", served.url, "--api-key", "other")
    assert (others.exit_code, others.stdout) == (0, "")
    assert "no jobs" in others.stderr
    # without an option, the key of the service's own configuration
    monkeypatch.setenv("RAY_CLUSTER_API_KEYS", "secret")
    assert job_id in cli("jobs", "list", "--url", served.url).stdout


def test_ctrl_c_ends_the_watch_and_not_the_job(served: Served) -> None:
    served.is_working = False
    job_id = served.create()
    with subprocess_of("jobs", "watch", job_id, *here(served)) as process:
        assert process.stdout is not None
        assert "queued" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stdout, stderr) == (130, "", "")
    assert served.job(job_id)["state"] == "queued"
