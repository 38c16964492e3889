"""``generate --url`` against the real HTTP application on a fake dispatcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_cluster.cli.remote_images import RemoteService
from ray_cluster.config import load_config
from ray_cluster.policies.types import Offer
from ray_cluster.requests import Failure, ImageRequest
from tests.cli.conftest import Cli
from tests.fakes import FakeDispatcherClient


def test_every_parameter_reaches_the_service(
    cli: Cli, service_url: str, dispatcher: FakeDispatcherClient, tmp_path: Path
) -> None:
    result = cli(
        *("generate", "a red circle", "--url", service_url, "--api-key", "secret"),
        *("--negative-prompt", "blue", "--seed", 7, "--n", 2, "--size", "96x64", "--steps", 9),
        *("--guidance", 4.5, "--sampler", "ddim", "--priority", 3, "--slo", 30),
        *("--model", "shapes", "--compression", 80, "-o", tmp_path / "a.jpg"),
    )
    assert result.exit_code == 0, result.output
    (requests,) = dispatcher.offered
    request = requests[0]
    assert [item.seed for item in requests] == [7, 8]
    assert (request.prompt, request.negative_prompt) == ("a red circle", "blue")
    assert (request.width_px, request.height_px, request.num_steps) == (96, 64, 9)
    assert (request.guidance_scale, request.sampler) == (4.5, "ddim")
    assert (request.priority, request.slo_s) == (3, 30)
    assert (request.output.image_format, request.output.compression) == ("jpeg", 80)
    assert (tmp_path / "a-1.jpg").read_bytes() == b"coded pixels"
    assert "seed 8" in result.output
    assert "within the deadline" in result.output


def test_a_url_may_end_in_v1(cli: Cli, service_url: str, tmp_path: Path) -> None:
    arguments = ("--api-key", "secret", "-o", tmp_path / "a.png")
    assert cli("generate", "x", "--url", f"{service_url}/v1/", *arguments).exit_code == 0


def test_a_wrong_parameter_is_named_with_its_option(
    cli: Cli, service_url: str, tmp_path: Path
) -> None:
    result = cli(
        *("generate", "x", "--steps", 1000, "--url", service_url, "--api-key", "secret"),
        *("-o", tmp_path / "a.png"),
    )
    assert result.exit_code == 1
    assert "'num_inference_steps' must be from 1 to 100" in result.stderr
    assert "(option --steps)" in result.stderr


def test_errors_of_the_service_are_one_sentence(
    cli: Cli, service_url: str, dispatcher: FakeDispatcherClient, tmp_path: Path
) -> None:
    arguments = ("generate", "x", "--url", service_url, "-o", tmp_path / "a.png")
    assert "No API key given" in cli(*arguments).stderr
    dispatcher.offers = [Offer(accepted=False, reason="queue_full", retry_after_s=12.0)]
    full = cli(*arguments, "--api-key", "secret")
    assert full.exit_code == 1
    assert full.stderr == (
        "error: The queue is full; there should be room again in 12 s. Try again then, or ask "
        "for fewer images.\n"
    )
    dispatcher.offers, dispatcher.outcome = [Offer(accepted=True)], _broken
    broken = cli(*arguments, "--api-key", "secret")
    assert broken.exit_code == 1
    assert "The model failed on this request" in broken.stderr


def _broken(request: ImageRequest) -> Failure:
    return Failure(request.request_id, "error", "no numbers", "denoise")


def test_a_service_that_is_not_there(cli: Cli, free_port: int, tmp_path: Path) -> None:
    result = cli("generate", "x", "--url", f"http://127.0.0.1:{free_port}", "-o", tmp_path / "a")
    assert result.exit_code == 1
    assert "cannot be reached" in result.stderr
    assert "ray-cluster serve" in result.stderr


def test_what_is_no_url_is_refused(cli: Cli, tmp_path: Path) -> None:
    result = cli("generate", "x", "--url", "localhost", "-o", tmp_path / "a")
    assert result.exit_code == 1
    assert "give one like http://127.0.0.1:8000" in result.stderr


def test_the_own_key_goes_to_this_machine_only(
    cli: Cli, service_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLUSTER_API_KEYS", "secret, other")
    assert cli("generate", "x", "--url", service_url, "-o", tmp_path / "a.png").exit_code == 0
    config = load_config()
    elsewhere = RemoteService.at("http://example.com", None, config, timeout_s=1.0)
    assert "Authorization" not in elsewhere.headers
    given = RemoteService.at("http://example.com", "mine", config, timeout_s=1.0)
    assert given.headers == {"Authorization": "Bearer mine"}


def test_pool_changes_nothing_at_a_url(cli: Cli, tmp_path: Path) -> None:
    result = cli(
        "generate", "x", "--url", "http://127.0.0.1:1", "--pool", "a", "-o", tmp_path / "a"
    )
    assert result.exit_code == 1
    assert "--pool changes nothing with --url" in result.stderr
