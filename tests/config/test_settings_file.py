"""The watched file is replaced as a whole, and where it cannot be, that is said."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ray_cluster.config.settings_file import SettingsFile
from ray_cluster.errors import ConfigError

GOOD = "pools: [{name: a, model: shapes-sd}]\n"


def test_a_file_is_written_with_its_mode_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("old")
    path.chmod(0o640)
    file = SettingsFile(path)
    file.write(GOOD)
    assert path.read_text() == GOOD
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_broken_document_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(GOOD)
    with pytest.raises(ConfigError, match=rf"{path}.*poolz: there is no such key"):
        SettingsFile(path).write(f"{GOOD}poolz: []")
    assert path.read_text() == GOOD


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, path = tmp_path / "target.yaml", tmp_path / "my.yaml"
    target.write_text("old")
    path.symlink_to(target)
    SettingsFile(path).write(GOOD)
    assert path.is_symlink()
    assert target.read_text() == GOOD


def test_a_mounted_config_map_is_to_be_edited_itself(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "my.yaml").write_text(GOOD)
    (tmp_path / "..data").symlink_to(tmp_path / "v1")
    path = tmp_path / "my.yaml"
    path.symlink_to(tmp_path / "..data" / "my.yaml")
    with pytest.raises(ConfigError, match="is mounted from a ConfigMap: edit that"):
        SettingsFile(path).write(GOOD)


def test_paths_of_storage_start_where_the_service_was_started(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    config = SettingsFile(path, folder=Path("/start")).parse(
        f"{GOOD}storage: {{results: kept}}".encode()
    )
    assert config.storage.results == "/start/kept"


def test_what_is_no_yaml_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("pools: [{name: a, model: b\nlimits: {")
    file = SettingsFile(path)
    with pytest.raises(ConfigError) as refused:
        file.parse(file.content())
    assert "\n" not in str(refused.value)
    assert "unicode string" not in str(refused.value)
    assert "line 2" in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "http: {api_keys: topsecret}",
        "http: {api_keys: [1234567, topsecret]}",
        "http: {api_keys: [{topsecret: 1}]}",
        "http: topsecret",
        "http:\n  api_keys: [topsecret\n  port: 8000",
        "http: {api_keys: [topsecret}",
        "http: {api_keys: [*topsecret]}",
        "http: {api_keys: [!topsecret x]}",
        "http: {api_keys: [!topsecret!x x]}",
        "http: {api_keys: {topsecret, topsecret}}",
        'http: {api_keys: "topsecret}',
        "http: {api_keys: &topsecret [&topsecret x]}",
        "topsecret",
        "- topsecret",
        "storage: {jobs: 'mysql://me:topsecret@host/jobs'}",
        "storage: {results: 's3://me:topsecret@b/x', states: 's3://me:topsecret@b/x'}",
        "storage: topsecret",
    ],
)
def test_no_error_quotes_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    for more_keys in ("", "another"):
        monkeypatch.setenv("RAY_CLUSTER_API_KEYS", more_keys)
        with pytest.raises(ConfigError) as refused:
            SettingsFile(tmp_path / "my.yaml").parse(f"{GOOD}{text}".encode())
        for secret in ("topsecret", "1234567", "another"):
            assert secret not in str(refused.value)


def test_what_is_no_yaml_is_said_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        SettingsFile(tmp_path / "my.yaml").parse(b"http:\n  api_keys: [key\n  port: 8000\n")
    assert str(refused.value).endswith(
        "cannot read the configuration: line 3, column 7: while parsing a flow sequence, expected "
        "',' or ']', but got ':' (it begins at line 2, column 13)"
    )


def test_keys_come_from_a_file_as_well(tmp_path: Path) -> None:
    path, keys = tmp_path / "my.yaml", tmp_path / "keys.yaml"
    path.write_text(f"http: {{api_keys: [one], api_keys_file: {keys}}}\n{GOOD}")
    file = SettingsFile(path)
    with pytest.raises(ConfigError, match="cannot read the file of API keys"):
        file.parse(file.content())
    keys.write_text("api_keys: [two]")
    config = file.parse(file.content())
    assert [key.plain for key in config.http.api_keys] == ["one", "two"]
    before = file.look()
    keys.write_text("api_keys: [three]")
    assert file.look() != before
    for wrong in ("[two]", "api_keys: two", "api_keys: []\nkeys: []"):
        keys.write_text(wrong)
        with pytest.raises(ConfigError, match=r"keys and values|must hold the key 'api_keys'"):
            file.parse(file.content())
    keys.write_text("api_keys: ['', 1]")
    with pytest.raises(ConfigError, match=r"http\.api_keys\.1.*empty"):
        file.parse(file.content())
