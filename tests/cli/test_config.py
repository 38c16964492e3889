"""``config`` says what a configuration comes to; the document has every key as the code has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ray_cluster.config.loading import load_config
from ray_cluster.config.reference_docs import reference
from tests.cli.conftest import Cli

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_what_is_written_is_the_same_configuration(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"http": {"port": 8100}, "pools": [{"name": "one", "model": "shapes-sd"}]}
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    result = cli("config", path)
    assert result.exit_code == 0
    written = yaml.safe_load(result.output)
    assert written["http"]["port"] == 8100
    assert written["pools"][0]["max_batch"] == 8
    assert load_config(written) == load_config(path)


def test_keys_of_clients_are_not_shown(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    pools = [{"name": "one", "model": "shapes-sd"}]
    path.write_text(yaml.safe_dump({"http": {"api_keys": ["very-secret"]}, "pools": pools}))
    output = cli("config", path).output
    assert "api_keys" in output
    assert "very-secret" not in output


def test_a_wrong_key_is_named(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("pools: [{name: one, model: shapes-sd, max_bach: 4}]")
    result = cli("config", path)
    assert result.exit_code != 0
    assert "max_bach" in result.output


@pytest.mark.parametrize("wrong", ["max_px: 100", "defaults: {size: 60x64}"])
def test_sizes_that_the_model_would_refuse_at_its_start_are_named(
    cli: Cli, tmp_path: Path, wrong: str
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(f"pools: [{{name: one, model: shapes-sd, {wrong}}}]")
    result = cli("config", path)
    assert result.exit_code != 0
    assert "pool one" in result.output
    assert "change defaults.size, min_px or max_px" in " ".join(result.output.split())
    # a model that is not here may take any size
    path.write_text(f"pools: [{{name: one, model: somebody/model, {wrong}}}]")
    assert cli("config", path).exit_code == 0


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ("model: shapes-sd4", "is neither a built-in name, nor a diffusers folder"),
        ("model: shapes-sd, defaults: {sampler: flow_match_euler}", "allowed: ddim, euler,"),
        ("model: shapes-sd3, defaults: {sampler: ddim}", "allowed: flow_match_euler"),
    ],
)
def test_names_that_cannot_be_right_are_refused(
    cli: Cli, tmp_path: Path, pool: str, message: str
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(f"pools: [{{name: one, {pool}}}]")
    result = cli("config", path)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def test_every_key_is_described() -> None:
    bare = [line for line in reference().splitlines() if line.startswith("| `") and "|  |" in line]
    assert bare == []


def test_the_document_has_the_keys_of_the_code(cli: Cli) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text.endswith(reference()), (
        "docs/configuration.md is not what the code has: replace what follows its introduction "
        "by the output of `ray-cluster config --reference`"
    )
    assert cli("config", "--reference").output == reference()


def test_the_example_in_the_document_is_right() -> None:
    example = DOCUMENT.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    config = load_config(yaml.safe_load(example))
    assert [pool.model_name for pool in config.pools] == ["shapes-sd", "draft"]
