"""``serve`` before Ray: options, ports, warnings, examples, and the reasons of failures."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from ray_cluster.cli.output import command
from ray_cluster.cli.service.ports import check_ports
from ray_cluster.cli.service.ray_messages import own_error, short_reason
from ray_cluster.cli.service.report import (
    base_url,
    curl_example,
    example_model,
    generate_example,
    open_service_warnings,
    openai_example,
    print_report,
)
from ray_cluster.cli.service.served_file import with_options
from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.sections.http import HttpConfig
from ray_cluster.errors import ConfigError
from ray_cluster.protocol.leases import LoadedWords
from tests.cli.conftest import Cli
from tests.fakes import registration


def config_with(**http: object) -> ClusterConfig:
    return load_config({"http": http, "pools": [{"name": "a", "model": "shapes-sd"}]})


@pytest.mark.parametrize(
    ("option", "what"), [("--port", "the API"), ("--dashboard-port", "Ray's dashboard")]
)
def test_a_taken_port_is_said_before_ray_starts(
    cli: Cli, tiny_config: Path, taken_port: int, option: str, what: str
) -> None:
    result = cli("serve", tiny_config, option, taken_port)
    assert result.exit_code == 1
    assert f"{what} cannot listen on 127.0.0.1:{taken_port}" in result.stderr
    assert f"taken by process {os.getpid()} (" in result.stderr
    assert option in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_holder_of_a_port_is_shown_without_padding(tiny_config: Path, free_port: int) -> None:
    listen = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); "
        "print(flush=True); sys.stdin.read()"
    )
    # Ray's processes fill the rest of their command line with blanks
    words = [sys.executable, "-c", listen, str(free_port), "ray::Holder" + 40 * " "]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        changed = with_options(load_config(tiny_config), {"http": {"port": free_port}}, None)
        with pytest.raises(ConfigError, match=rf"process {process.pid} \(.* ray::Holder\); stop"):
            check_ports(changed)


def test_a_taken_port_ends_the_program_with_a_code(tiny_config: Path, taken_port: int) -> None:
    command = [sys.executable, "-m", "ray_cluster.cli", "serve", str(tiny_config)]
    answer = subprocess.run(
        [*command, "--port", str(taken_port)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert answer.returncode == 1
    assert answer.stderr.startswith("error: the API cannot listen")
    assert "Traceback" not in answer.stderr


def test_pools_that_cannot_be_served_are_left_out_before_anything_is_downloaded(
    tiny_config: Path, tmp_path: Path
) -> None:
    content = yaml.safe_load(tiny_config.read_text())
    checkpoint = tmp_path / "lone.safetensors"
    checkpoint.write_bytes(b"")
    content["pools"] = [
        {"name": "lone", "model": str(checkpoint)},
        {"name": "far", "model": "owner/name", "device": "cuda", "num_gpus": 1, "ranks": 2},
    ]
    tiny_config.write_text(yaml.safe_dump(content))
    answer = subprocess.run(
        [sys.executable, "-m", "ray_cluster.cli", "serve", str(tiny_config)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert answer.returncode == 1
    # each on its own: a service with a third pool would run
    assert "pool lone: not served" in answer.stderr
    assert "pool far: not served" in answer.stderr
    assert "lone.safetensors is empty" in answer.stderr
    assert "far: a replica needs 2 GPU(s)" in answer.stderr
    assert "finds 0 on this machine: set device: cpu" in answer.stderr
    assert "cannot be downloaded" not in answer.stderr


def test_one_port_for_two_purposes_is_refused(
    cli: Cli, tiny_config: Path, ports: list[int]
) -> None:
    result = cli("serve", tiny_config, "--dashboard-port", ports[0])
    assert result.exit_code == 1
    assert f"cannot both have port {ports[0]}" in result.stderr


def test_an_address_of_another_machine_is_refused(cli: Cli, tiny_config: Path) -> None:
    result = cli("serve", tiny_config, "--host", "192.0.2.1")
    assert result.exit_code == 1
    assert "give an address of this machine" in result.stderr


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("pools: []", "pools: must be a list of at least 1"),
        (
            "pools: [{name: a, model: b, replica: 2}]",
            "pools.0.replica: there is no such key; did you mean 'replicas'? allowed: name,",
        ),
        ("{http: {prot: 1}, pools: [{name: a, model: b}]}", "http.prot: there is no such key; did"),
        (
            "pools: [{name: a, model: b, defaults: {sampelr: ddim}}]",
            "pools.0.defaults.sampelr: there is no such key; did you mean 'sampler'? allowed: size",
        ),
        ("{zzz: 1, pools: [{name: a, model: b}]}", "no such key; allowed: http, ray, limits"),
        (
            "{api_key: [x], pools: [{name: a, model: b}]}",
            "api_key: there is no such key; did you mean 'http.api_keys'? allowed: http, ray",
        ),
        ("a: [", "cannot read the configuration"),
        ("{pools: [{name: a, model: b}], pools: []}", "the key 'pools' is there twice"),
        ("pools: " + 2000 * "[" + 2000 * "]", "nested too deeply"),
        ("pools: {name: a}", "pools: must be a list"),
        ("pools: [a]", "pools.0: must be a mapping"),
        ("http: {port: 1}", "pools: is missing"),
        ("pools: [{name: a, model: b, memory_gib: .inf}]", "memory_gib: must be a finite number"),
        ("pools: [{name: a, model: b, min_px: 64, max_px: 32}]", "min_px 64 is above max_px 32"),
        ("pools: [{name: a, model: b, defaults: {guidance_scale: 99}}]", "must be at most 30"),
        (
            (
                "pools: [{name: a, model: b, max_num_inference_steps: 5, "
                "defaults: {num_inference_steps: 10}}]"
            ),
            "defaults.num_inference_steps 10 is above max_num_inference_steps 5",
        ),
        (
            (
                "pools: [{name: a, model: b, "
                "fidelity: {sampler: ddim, max_guidance_scale: 2, steps: []}}]"
            ),
            "pools.0.fidelity.steps: must be a list of at least 1",
        ),
        (
            "{storage: {jobs: 'mysql://x'}, pools: [{name: a, model: b}]}",
            "storage.jobs: must be sqlite:///FILE or postgresql://",
        ),
        (
            "{storage: {results: x, states: x}, pools: [{name: a, model: b}]}",
            "results and states must be different places",
        ),
        (
            "{storage: {states: x, inputs: x/}, pools: [{name: a, model: b}]}",
            "states and inputs must be different places",
        ),
        (
            "{limits: {max_upload_s: 2000}, pools: [{name: a, model: b}]}",
            "storage.inputs_grace_s 3600 is below twice limits.max_upload_s 2000",
        ),
        (
            "{limits: {max_input_bytes: 300000000}, pools: [{name: a, model: b}]}",
            "max_upload_bytes 209715200 is below max_input_bytes 300000000",
        ),
        ("{http: {api_keys: ['']}, pools: [{name: a, model: b}]}", "an API key is empty"),
        (
            "{dispatch: {poll_s: 100}, pools: [{name: a, model: b}]}",
            "poll_s 100 is not below replica_timeout_s 6",
        ),
    ],
)
def test_a_wrong_configuration_is_told_without_a_traceback(
    cli: Cli, tmp_path: Path, content: str, sentence: str
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    result = cli("serve", path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert sentence in result.stderr


def test_the_keys_of_a_section_are_listed_once(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(
        "{http: {prot: 1, hots: x}, pools: [{name: a, model: b, u: 1}, {name: c, model: d, v: 1}]}"
    )
    said = cli("serve", path).stderr
    assert "http.prot: there is no such key; did you mean 'port'? allowed: host" in said
    assert "http.hots: there is no such key; did you mean 'host'?; pools.0.u" in said
    assert "pools.1.v: there is no such key" in said
    assert (said.count("num_gateways"), said.count("max_num_inference_steps")) == (1, 1)


def test_options_change_the_configuration_and_are_checked_like_it() -> None:
    changes = {"http": {"host": "0.0.0.0", "port": None}, "ray": {"dashboard_port": 9000}}
    config = with_options(config_with(port=8123, api_keys=["k"]), changes, 3)
    assert (config.http.host, config.http.port) == ("0.0.0.0", 8123)
    assert config.http.api_keys[0].plain == "k"
    assert config.ray.dashboard_port == 9000
    assert config.pools[0].replicas == 3
    with pytest.raises(ConfigError, match=r"http\.port"):
        with_options(config_with(), {"http": {"port": 70000}}, None)


@pytest.mark.parametrize(
    ("http", "is_warned"),
    [
        ({}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_keys": ["k"]}, False),
        ({"host": "::1"}, False),
    ],
)
def test_an_open_service_is_warned_of(http: dict[str, object], is_warned: bool) -> None:
    assert (
        any("ANYBODY" in text for text in open_service_warnings(config_with(**http))) is is_warned
    )


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("gpu-1", "http://gpu-1:8000"),
    ],
)
def test_the_printed_url_can_be_called(host: str, url: str) -> None:
    assert base_url(HttpConfig(host=host)) == url


def test_the_report_loses_nothing_in_a_narrow_terminal(tiny_model: Path) -> None:
    config = load_config({"pools": [{"name": "tiny", "model": str(tiny_model), "memory_gib": 4}]})
    words = LoadedWords("float32", "ddim, 20 steps", "fits: given 4096 MiB")
    loaded = {"tiny": replace(registration("r"), words=words)}
    text = io.StringIO()
    console = Console(file=text, width=60, soft_wrap=True)
    replicas = {"tiny": {"BaseModel": 2}}
    print_report(console, config, loaded, replicas, dashboard_url=None, logs="/logs")
    report = "".join(text.getvalue().split())
    # the other columns are empty beside the last one
    for word in (*words.memory.split(), *words.sampling.split(), str(tiny_model)):
        assert word in report


def test_commands_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = tmp_path / "my env" / "bin"
    ours.mkdir(parents=True)
    for name in ("python", "ray-cluster"):
        (ours / name).write_text("")
        (ours / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(ours / "python"))
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(tmp_path)
    assert command() == "'my env/bin/ray-cluster'"
    assert generate_example(config_with()).startswith("'my env/bin/ray-cluster' generate ")
    monkeypatch.chdir("/")
    assert command() == f"'{tmp_path.relative_to('/')}/my env/bin/ray-cluster'"
    monkeypatch.chdir(ours)
    assert command() == "./ray-cluster"
    monkeypatch.setenv("PATH", f"/usr/bin:{ours}")
    assert command() == "ray-cluster"
    # run from a folder that was not installed
    assert command("ray") == "ray"


def test_the_examples_are_valid_and_hold_no_key() -> None:
    for config in (config_with(), config_with(api_keys=["topsecret"])):
        ast.parse(openai_example(config))
        curl = curl_example(config)
        checked = subprocess.run(["sh", "-n", "-c", curl], timeout=10, check=False)
        assert checked.returncode == 0
        assert "topsecret" not in curl + openai_example(config)
        assert ("$KEY" in curl) is not config.http.is_open


def test_the_examples_name_a_model_that_makes_images_from_text() -> None:
    one = registration("r")
    fills = replace(one, profile=replace(one.profile, edits="masked"))
    looks = replace(one, profile=replace(one.profile, max_references=3, min_references=1))
    pools = [{"name": name, "model": "shapes-sd"} for name in ("fill", "look", "make")]
    config = load_config({"pools": pools})
    model = example_model(config, {"fill": fills, "look": looks, "make": one})
    assert model == "make"
    assert " --model make " in generate_example(config, model)
    assert '{"model": "make", "prompt"' in curl_example(config, model)
    assert 'generate(model="make", prompt="' in openai_example(config, model)
    ast.parse(openai_example(config, model))
    assert example_model(config, {"fill": one}) == example_model(config, {}) == ""
    # the first one is not served
    assert example_model(config, {"look": one}) == "look"
    assert "--model" not in generate_example(config)
    assert example_model(load_config({"pools": pools[:2]}), {"fill": fills, "look": looks}) is None


TRACEBACK = """The deployment failed to start 3 times in a row. Error:
\x1b[36mray::ServeReplica:a:BaseModel.initialize()\x1b[39m (pid=1)
  File "/x/loading.py", line 40, in load_model
    raise ConfigError(f"a")
{last}
"""


@pytest.mark.parametrize("kind", ["errors.ModelUnsupported", "jobs.ownership.JobStoreInUse"])
def test_our_own_reason_is_found_in_a_traceback(kind: str) -> None:
    message = TRACEBACK.format(last=f"ray_cluster.{kind}: x is a FluxPipeline")
    assert own_error(message) == "x is a FluxPipeline"
    assert short_reason(message) == "x is a FluxPipeline"


def test_another_reason_is_the_errors_own_line() -> None:
    message = TRACEBACK.format(last="torch.OutOfMemoryError: no room\nsee the logs")
    assert own_error(message) is None
    assert short_reason(message) == "torch.OutOfMemoryError: no room"
    assert short_reason("one line") == "one line"
    assert short_reason("") == "no reason given"


LIBRARIES = ("torch", "diffusers", "transformers", "peft")
LIGHT = """
import sys
import ray_cluster.cell.front, ray_cluster.cli.service.ray_service, ray_cluster.deployments.app
import ray_cluster.replica.lora_store.skill, ray_cluster.replica.lora_store.folder
from pathlib import Path
from ray_cluster.cli.service.service_run import _checks
from ray_cluster.config.loading import load_config

for path in sys.argv[1:]:
    for check in _checks(load_config(Path(path))).values():
        check()
print([name for name in %r if name in sys.modules])
"""


def test_only_replicas_import_the_model_libraries() -> None:
    """They take the command, and each process of the front, seconds to import."""
    configs = [f"configs/{name}.yaml" for name in ("local", "cascade", "add-ons")]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT % (LIBRARIES,), *configs],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
