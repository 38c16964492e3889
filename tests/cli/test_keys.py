"""``keys`` makes keys whose entries a configuration takes; commands say what a key lacks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ray_cluster.cli.app import app
from ray_cluster.cli.remote.remote_service import RemoteService
from ray_cluster.config.loading import load_config
from ray_cluster.config.sections.keys import ROLES, key_digest
from tests.cli.conftest import Cli
from tests.cli.served import Served
from tests.keys import entry

POOLS = [{"name": "a", "model": "shapes-sd"}]


@pytest.mark.parametrize("roles", [[], ["loras"], ["operate", "use", "loras"]])
def test_a_new_key_is_shown_once_with_an_entry_that_is_taken_as_it_is(
    cli: Cli, tmp_path: Path, roles: list[str]
) -> None:
    # a name that YAML would take for a number
    options = [word for role in roles for word in ("--role", role)]
    made = cli("keys", "new", "0123", *options)
    assert made.exit_code == 0, made.stderr
    key = made.stdout.splitlines()[1]
    assert made.stdout.count(key) == 1
    path = tmp_path / "my.yaml"
    # the whole output is YAML but for the key's own line
    listed = yaml.safe_load(made.stdout.replace(key, "", 1))
    path.write_text(yaml.safe_dump({"http": {"api_keys": listed}, "pools": POOLS}))
    [found] = load_config(path).http.api_keys
    wanted = tuple(one for one in ROLES if one in (roles or ["use"]))
    assert (found.entry.client, found.entry.roles) == ("0123", wanted)
    assert found.entry.digest == hashlib.sha256(key.encode()).hexdigest()
    assert cli("keys", "new", "0123").stdout.splitlines()[1] != key


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("Shop",), "name: must be 1 to 64 small letters"),
        (("open",), "name: must not be 'open'"),
        (("shop", "--role", "admin"), "roles.0: must be 'use', 'loras' or 'operate'"),
    ],
)
def test_a_wrong_name_or_role_makes_no_key(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    made = cli("keys", "new", *arguments)
    assert (made.exit_code, made.stdout) == (1, "")
    assert said in made.stderr


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_digest_is_that_of_the_key_without_the_lines_end(end: str) -> None:
    found = CliRunner().invoke(app, ["keys", "digest"], input=f"my key{end}")
    assert found.stdout == f"sha256:{key_digest('my key')}\n"


@pytest.mark.parametrize("given", ["", "\n", "  \n", "one\ntwo\n"])
def test_what_is_no_key_has_no_digest(given: str) -> None:
    found = CliRunner().invoke(app, ["keys", "digest"], input=given)
    assert (found.exit_code, found.stdout) == (1, "")
    assert "one API key in one line" in found.stderr


def test_a_command_says_which_role_its_key_lacks(cli: Cli, served: Served, tmp_path: Path) -> None:
    here = ("--url", served.url, "--api-key", "other")
    for command in (
        ("loras", "add", "pastel", "--base", "shapes", "--source", "builtin:pastel"),
        ("loras", "remove", "pastel"),
        ("plan", "pause"),
        ("plan", "resume"),
    ):
        refused = cli(*command, *here)
        assert (refused.exit_code, refused.stdout) == (1, "")
        role = "loras" if command[0] == "loras" else "operate"
        assert f"error: This call needs an API key with the role '{role}'" in refused.stderr
        assert "RAY_CLUSTER_API_KEY gives another one here" in refused.stderr
    output = tmp_path / "a.png"
    refused = cli("generate", "a red circle", *here, "--priority", 5, "-o", output)
    assert refused.exit_code == 1
    assert "'priority' to 0 or less: 5 needs an API key with the role 'operate'" in refused.stderr
    assert cli("loras", "list", *here).exit_code == 0


def test_the_key_is_the_options_or_the_environments_or_a_plain_one_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = entry("ci", "named", *ROLES)
    config = load_config({"http": {"api_keys": [named, "plain"]}, "pools": POOLS})
    url = "http://127.0.0.1:8000"

    def given(where: str, option: str | None = None) -> str:
        with RemoteService.at(where, option, config) as service:
            return service.headers.get("Authorization", "")

    assert given(url) == "Bearer plain"
    assert given("http://elsewhere:8000") == ""
    monkeypatch.setenv("RAY_CLUSTER_API_KEY", "mine")
    assert given(url) == given("http://elsewhere:8000") == "Bearer mine"
    assert given(url, "option") == "Bearer option"
    monkeypatch.delenv("RAY_CLUSTER_API_KEY")
    config = load_config({"http": {"api_keys": [named]}, "pools": POOLS})
    assert given(url) == ""


def test_every_command_finds_the_service_of_the_environment(
    cli: Cli, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLUSTER_URL", served.url)
    monkeypatch.setenv("RAY_CLUSTER_API_KEY", "secret")
    done = cli("generate", "a red circle", "--steps", 4, "-o", tmp_path / "a.png")
    assert done.exit_code == 0, done.output
    assert len(served.made) == 1
    for command in (("jobs", "list"), ("loras", "list"), ("models", "list")):
        assert cli(*command).exit_code == 0
    # what is given comes first
    other = cli("jobs", "list", "--url", "http://127.0.0.1:9")
    assert other.exit_code == 1
    assert "127.0.0.1:9" in other.stderr
