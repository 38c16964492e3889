"""``doctor``: every problem has a finding, and an exit code."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.gpu.families import published
from benchmarks.gpu.folders import save_whole
from ray_cluster.cli.checks import Finding
from ray_cluster.cli.checks.cards import check_cards
from ray_cluster.cli.checks.machine import check_gpus, check_machine, check_processor
from ray_cluster.cli.checks.service import check_service
from ray_cluster.cli.checks.software import check_software
from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.sections.cell_wide import RayConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.files.folders import resolve_folder
from ray_cluster.engine.files.memory import model_need
from ray_cluster.policies.costs.gpu_shares import Card
from tests.cli.conftest import Cli


def test_a_sound_configuration_has_no_problem(cli: Cli, tiny_config: Path) -> None:
    result = cli("doctor", tiny_config, "--json")
    findings = json.loads(result.output)
    assert [item for item in findings if item["level"] == "problem"] == []
    assert result.exit_code == 0
    by_subject = {item["subject"]: item["found"] for item in findings}
    assert "fits" in by_subject["pool tiny"]
    assert {"Python", "torch", "Ray", "memory", "/dev/shm", "clock"} <= by_subject.keys()


def test_problems_stand_in_the_table_and_in_the_exit_code(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("pools: []")
    result = cli("doctor", path)
    assert result.exit_code == 1
    assert "problem" in result.output
    assert "cannot run here" in result.output


def config_of(tiny_config: Path, **pool: Any) -> ClusterConfig:
    content = yaml.safe_load(tiny_config.read_text())
    content["pools"][0].update(pool)
    return load_config(content)


def problems(findings: Any) -> list[Finding]:
    return [finding for finding in findings if finding.level == "problem"]


def test_an_upscaler_has_a_row_and_its_part_of_the_memory(tiny_config: Path) -> None:
    more = {
        "upscalers": [{"name": "big", "replicas": 2, "max_px": 4096}],
        "discriminators": [{"name": "judge", "model": "shapes-discriminator"}],
    }
    config = load_config(yaml.safe_load(tiny_config.read_text()) | more)
    found = {one.subject: one.found for one in check_service(config, Card(2**34, 2**34, (8, 9)))}
    assert found["the given GPU"] == "no pool runs on one"
    assert found["upscaler big"].startswith(
        "2 x, up to 1.0 GiB each, for images of at most 4096 px"
    )
    assert "big 1.0, judge 0.8" in found["memory of all replicas"]


@pytest.mark.parametrize(("dtype", "is_fast"), [("bfloat16", False), ("bfloat16", True)])
def test_numbers_that_the_processor_has_no_instructions_for_are_warned_of(
    tiny_config: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, is_fast: bool
) -> None:
    monkeypatch.setattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_fast, raising=False
    )
    [found] = check_processor(config_of(tiny_config, dtype=dtype).pools)
    assert found.level == ("ok" if is_fast else "warning")
    if not is_fast:
        assert "bfloat16 (pool tiny)" in found.found
        assert "dtype: float32" in found.advice
    [found] = check_processor(config_of(tiny_config).pools)
    assert found.level == "ok"


def test_a_taken_port_is_a_problem(tiny_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_cluster.cli.service.ports._ANSWER_S", 0.2)
    config = config_of(tiny_config)
    with socket.socket() as server:
        server.bind(("127.0.0.1", config.http.port))
        server.listen()
        (found,) = problems(check_service(config))
    assert "the port is taken by process" in found.found


def test_a_port_of_a_running_service_of_ours_is_none(
    cli: Cli, tiny_config: Path, service_url: str
) -> None:
    port = int(service_url.rpartition(":")[2])
    content = yaml.safe_load(tiny_config.read_text())
    content["http"] = {"port": port}
    tiny_config.write_text(yaml.safe_dump(content))
    result = cli("doctor", tiny_config, "--json")
    by_subject = {item["subject"]: item for item in json.loads(result.output)}
    assert "in use by a running ray-cluster" in by_subject[f"port {port}"]["found"]
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("pool", "sentence"),
    [
        ({"memory_gib": 0.0001}, "no room for even one image"),
        ({"model": "nosuch"}, "neither a built-in name"),
        ({"defaults": {"size": "65x64"}}, "default width is 65"),
        ({"replicas": 1000, "num_cpus": 1.0}, "replicas reserve 1000"),
    ],
)
def test_a_pool_that_cannot_run_is_a_problem(
    tiny_config: Path, pool: dict[str, Any], sentence: str
) -> None:
    found = problems(check_service(config_of(tiny_config, **pool)))
    assert any(sentence in finding.found for finding in found)


def test_smaller_batches_are_a_warning(tiny_config: Path, tiny_model: Path) -> None:
    need = model_need(tiny_model, [(96, 96)], torch.float32, max_batch=8)
    budget_bytes = need.weights_bytes + need.activation_by_size[96, 96].at(3)
    config = config_of(tiny_config, memory_gib=budget_bytes / 2**30)
    assert any(item.level == "warning" and "capped" in item.found for item in check_service(config))


def test_a_hub_model_is_not_downloaded(tiny_config: Path) -> None:
    (found,) = problems(check_service(config_of(tiny_config, model="nobody/nothing")))
    assert "is not in the cache" in found.found
    assert "HF_HUB_OFFLINE" in found.found


def test_a_hub_model_of_which_the_cache_has_a_variant_alone_is_planned(
    tiny_config: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--me--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(tiny_model, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    for path in list(snapshot.glob("*/*.safetensors")):
        path.rename(path.with_suffix(".fp16.safetensors"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = config_of(tiny_config, model="me/tiny")
    assert problems(check_service(config)) == []
    assert resolve_folder("me/tiny") == snapshot
    shutil.rmtree(snapshot / "vae")
    (found,) = problems(check_service(config))
    assert "vae" in found.found


SPOILT = {
    "unet/diffusion_pytorch_model.safetensors": None,
    "vae/diffusion_pytorch_model.safetensors": b"version https://git-lfs.github.com/spec/v1\n",
    "text_encoder/model.safetensors": b"<html></html>",
    "tokenizer/tokenizer.json": b"",
    "scheduler/scheduler_config.json": b"[]",
    "model_index.json": b"{",
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_would_stop_a_replica_is_found_by_doctor_config_and_serve_alike(
    cli: Cli, tiny_config: Path, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    broken = Path(shutil.copytree(tiny_model, tmp_path / "broken"))
    content = SPOILT[name]
    if content is None:
        (broken / name).unlink()
    else:
        (broken / name).write_bytes(content)
    config = yaml.safe_load(tiny_config.read_text())
    config["pools"][0]["model"] = str(broken)
    tiny_config.write_text(yaml.safe_dump(config))
    (found,) = problems(check_service(load_config(tiny_config)))
    assert name.rpartition("/")[2].partition(".")[0] in found.found
    for command in ("config", "serve"):
        result = cli(command, tiny_config)
        assert result.exit_code == 1, command
        [said] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert said.removeprefix("error: ").removeprefix("pool tiny: ") == found.found
        assert "Ray: starting" not in result.stderr


def test_a_long_temporary_folder_is_a_problem(tmp_path: Path) -> None:
    (found,) = problems(check_machine(RayConfig(temp_dir=f"/tmp/{'long' * 12}")))
    assert found.subject == "socket paths"
    assert "at most 41 characters" in found.advice


def test_ray_elsewhere_needs_nothing_here() -> None:
    subjects = {finding.subject for finding in check_machine(RayConfig(address="auto"))}
    assert not subjects & {"/dev/shm", "socket paths", "temporary folder"}


def test_missing_gpus_are_a_problem() -> None:
    pool = PoolConfig(name="a", model="b", device="cuda", num_gpus=1, replicas=99)
    (found,) = problems(check_gpus([pool]))
    assert "a want 99 GPU(s)" in found.found
    (found,) = problems(check_gpus([pool.model_copy(update={"ranks": 8, "replicas": 2})]))
    assert "a want 16 GPU(s)" in found.found


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """SDXL's and FLUX.1-dev's folders at their published sizes, headers alone."""
    place = tmp_path_factory.mktemp("published")
    return {
        one.name: save_whole(place / one.name, one, is_tiny=False)
        for one in published()
        if one.name in {"sdxl", "flux"}
    }


def pool_on_gpu(full_size: dict[str, Path], name: str, **changes: Any) -> dict[str, Any]:
    pool = {"name": name, "model": str(full_size[name]), "device": "cuda", "num_gpus": 1}
    return pool | {"max_px": 1024, "num_cpus": 0.1} | changes


@pytest.mark.parametrize(
    ("gib", "capability", "words"),
    [
        # 22.2 GiB of transformer, 8.9 of T5; in float16 a sixth of T5 and more is kept in float32
        (16, "7.5", ["float16: offload", "34258 MiB of weights", "369 MiB with all of them"]),
        (24, "8.9", ["bfloat16: offload", "32179 MiB of weights", "364 MiB with all of them"]),
        (32, "12.0", ["23112 MiB with the text encoders offloaded", "600 MiB of CUDA"]),
    ],
)
def test_what_flux_takes_of_a_named_gpu_is_known_without_it(
    cli: Cli,
    tiny_config: Path,
    full_size: dict[str, Path],
    gib: int,
    capability: str,
    words: list[str],
) -> None:
    content = yaml.safe_load(tiny_config.read_text())
    content["pools"] = [pool_on_gpu(full_size, "flux")]
    tiny_config.write_text(yaml.safe_dump(content))
    card = ("--gpu-memory-gib", gib, "--gpu-capability", capability)
    findings = json.loads(cli("doctor", tiny_config, *card, "--json").stdout)
    by_subject = {item["subject"]: item for item in findings}
    assert "GPUs for the pools" not in by_subject
    for word in words:
        assert word in by_subject["pool flux"]["found"]
    assert by_subject["replicas on one GPU"]["level"] == "ok"
    if gib == 24:
        # what is offloaded is counted where it goes
        assert "flux 31." in by_subject["memory of all replicas"]["found"]


def test_a_pool_shows_the_best_way_on_each_usual_gpu(
    tiny_config: Path, full_size: dict[str, Path]
) -> None:
    def lines(**changes: Any) -> list[str]:
        pool = PoolConfig(**pool_on_gpu(full_size, "flux", **changes))
        found = check_cards(pool)
        assert (found.subject, found.level) == ("pool flux, a GPU each", "ok")
        return found.found.split("\n")

    found = lines()
    assert [line.partition(": ")[0] for line in found] == [
        *("8 GiB", "12 GiB", "16 to 24 GiB", "48 GiB", "80 GiB")
    ]
    assert "all weights offloaded, 31.1 GiB copied in each step; batches of 3 of" in found[0]
    assert found[-1].startswith("80 GiB: whole; batches of 8 of 1024x1024")
    never = lines(offload="never")
    assert never[0] == "8 to 24 GiB: no room for one image of the largest size; lower max_px"
    turns, whole = lines(engine="diffusers", defaults={"size": "1024x1024"})
    assert turns.startswith("8 to 24 GiB: models take turns, 31.4 GiB of weights copied for each")
    assert whole == "48 to 80 GiB: whole, 31.4 GiB of weights and what an image takes"


def test_a_group_keeps_its_transformer_on_its_gpus(
    tiny_config: Path, full_size: dict[str, Path]
) -> None:
    def found(gib: int) -> dict[str, Finding]:
        pool = pool_on_gpu(full_size, "flux", ranks=8)
        content = yaml.safe_load(tiny_config.read_text()) | {"pools": [pool]}
        card = Card(gib * 2**30, gib * 2**30, (8, 9))
        return {one.subject: one for one in check_service(load_config(content), card)}

    refused, offloaded = found(24), found(32)
    words = "ranks of a group keep the transformer on their devices: raise memory_gib"
    assert words in refused["pool flux"].found
    assert "the text encoders' weights are moved in and out" in offloaded["pool flux"].found
    assert "flux 15.6" in offloaded["memory of all replicas"].found


@pytest.mark.slow
def test_replicas_that_share_a_gpu_are_counted_together(
    tiny_config: Path, full_size: dict[str, Path]
) -> None:
    content = yaml.safe_load(tiny_config.read_text())
    content["pools"] = [
        pool_on_gpu(full_size, "sdxl", num_gpus=0.5, memory_gib=13, dtype="bfloat16"),
        pool_on_gpu(full_size, "flux", num_gpus=0.5, memory_gib=12),
    ]
    card = Card(24 * 2**30, 24 * 2**30, (8, 9))
    findings = {one.subject: one for one in check_service(load_config(content), card)}
    assert "6617 MiB of weights" in findings["pool sdxl"].found
    found = findings["replicas on one GPU"]
    assert found.level == "problem"
    assert "25.0 of 24.0 GiB at most, CUDA contexts included: 1 x sdxl, up to 13.0" in found.found
    assert "1 x flux, up to 12.0 GiB each" in found.found
    assert "lower memory_gib" in found.advice


def test_sdxl_in_float16_decodes_in_float32(full_size: dict[str, Path]) -> None:
    need = model_need(full_size["sdxl"], [(1024, 1024)], torch.float16, 1, torch.device("cuda"))
    assert need.activation_by_size[1024, 1024].fixed_bytes > 3.7 * 2**30
    # its weights, too: 0.16 GiB more than in bfloat16
    assert need.weights_bytes / 2**20 == pytest.approx(6776, abs=1)


@pytest.mark.parametrize("wrong", ["9", "sm_90", "9.0.1"])
def test_a_wrong_capability_is_refused(cli: Cli, wrong: str) -> None:
    result = cli("doctor", "--gpu-memory-gib", 24, "--gpu-capability", wrong)
    assert result.exit_code == 2
    assert "compute capability such as" in result.stderr


def test_the_packages_of_this_environment_are_looked_at() -> None:
    subjects = [finding.subject for finding in check_software()]
    assert {"torch", "torchvision", "packages"} <= set(subjects)
    assert len(subjects) == len(set(subjects))
