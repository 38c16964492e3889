"""API keys in a configuration: plain ones, and entries of clients with names and roles."""

from __future__ import annotations

from traceback import format_exception
from typing import Any

import pytest

from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.sections.keys import ROLES, ApiKey, KeyConfig, key_digest
from ray_cluster.config.settings import settings_of
from ray_cluster.errors import ConfigError
from tests.keys import entry

DIGEST = f"sha256:{'a' * 64}"
EMPTY = f"sha256:{key_digest('')}"


def config_of(*keys: object, **http: object) -> ClusterConfig:
    pools = [{"name": "a", "model": "shapes-sd"}]
    return load_config({"http": {"api_keys": list(keys), **http}, "pools": pools})


def test_a_plain_key_is_a_client_of_its_own_and_a_named_one_its_name() -> None:
    both = entry("ci", "key-1", "operate", "use")
    more = {"name": "ci", "key": f"sha256:{key_digest('key-2').upper()}"}
    keys = {one.client: one for one in settings_of(config_of("plain", both)).api_keys}
    digest = key_digest("plain")
    assert keys == {
        digest: ApiKey(digest, digest, ("use",)),
        "ci": ApiKey(key_digest("key-1"), "ci", ("use", "operate")),
    }
    # an old and a new key, each with its roles
    roles = {one.digest: one.roles for one in settings_of(config_of(both, more)).api_keys}
    assert roles == {key_digest("key-1"): ("use", "operate"), key_digest("key-2"): ("use",)}


def test_keys_of_the_environment_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLUSTER_API_KEYS", "one, two")
    keys = settings_of(config_of("one", entry("ci", "three", *ROLES))).api_keys
    assert {one.client: one.roles for one in keys} == {
        key_digest("one"): ("use",),
        key_digest("two"): ("use",),
        "ci": ROLES,
    }
    with pytest.raises(ConfigError, match="are the same key"):
        config_of(entry("ci", "two"), "one")


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("", r"api_keys\.1: an API key is empty"),
        ("  ", r"api_keys\.1: an API key is empty"),
        (DIGEST, r"api_keys\.1: is a digest where a plain key is expected"),
        (7, r"api_keys\.1: a key is a text, or a mapping of 'name', 'key' and 'roles'"),
        (None, r"api_keys\.1: a key is a text"),
        (["x"], r"api_keys\.1: a key is a text"),
        ({"name": "a", "key": DIGEST, "weight": 2}, "and of nothing else"),
        ({"name": "a"}, r"1\.key: is missing"),
        ({"key": DIGEST}, r"1\.name: is missing"),
        ({"name": None, "key": DIGEST}, r"1\.name: must be 1 to 64 small letters"),
        ({"name": "a", "key": "abc"}, r"1\.key: must be 'sha256:' .* 'ray-cluster keys new NAME'"),
        # of 64 hexadecimal digits, as many keys are
        ({"name": "a", "key": "a" * 64}, r"1\.key: must be 'sha256:'"),
        ({"name": "a", "key": f"{DIGEST}0"}, r"1\.key: must be 'sha256:'"),
        ({"name": "a", "key": EMPTY}, r"1\.key: an API key is empty"),
        ({"name": "a", "key": DIGEST, "roles": []}, r"1\.roles: must be a list of at least 1"),
        ({"name": "a", "key": DIGEST, "roles": ["admin"]}, "'use', 'loras' or 'operate'"),
        ({"name": "a", "key": DIGEST, "roles": "use"}, r"1\.roles: must be a list"),
    ],
)
def test_what_is_no_key_is_refused_and_how_one_is_made_said(key: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of("good", key)


@pytest.mark.parametrize(
    "name",
    ["", "A", "a b", "ä", ".a", "-a", "a/b", "a\n", "a" * 65, "a" * 64, "0" * 64, "open"],
)
def test_a_name_is_no_digest_and_stands_for_nobody_else(name: str) -> None:
    with pytest.raises(ConfigError, match=r"api_keys\.0\.name: (must|looks like a digest)"):
        config_of({"name": name, "key": DIGEST})


def test_names_are_small_letters_digits_and_three_signs() -> None:
    for name in ("a", "0", "team.a-b_c", "g" * 64, "opener", "a" * 63):
        assert config_of({"name": name, "key": DIGEST}).http.api_keys[0].entry.client == name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("k", entry("a", "k", "use")),
        (entry("a", "k", "use"), entry("b", "k", "use")),
        (entry("a", "k", "use"), entry("a", "k", "use", "loras")),
    ],
)
def test_one_key_is_not_two_clients(one: object, other: object) -> None:
    for keys in ((one, other), (other, one)):
        with pytest.raises(ConfigError, match="are the same key with different names or roles"):
            config_of(*keys)
    assert len(settings_of(config_of(one, one)).api_keys) == 1


def test_keys_are_the_same_after_options_were_added() -> None:
    config = config_of("plain", entry("ci", "k", *ROLES), open=True)
    # as `serve` does with its options
    assert load_config(config.model_dump()) == config
    shown = config.model_dump(mode="json")["http"]["api_keys"]
    assert shown == ["**********", {"name": "ci", "key": "**********", "roles": list(ROLES)}]


SECRET = "topsecret"


@pytest.mark.parametrize(
    "keys",
    [
        [SECRET, SECRET, {SECRET: SECRET}],
        [{"name": SECRET.upper(), "key": DIGEST}],
        [{"name": [SECRET], "key": [SECRET], "roles": [SECRET]}],
        [{"name": "a", "key": SECRET, "roles": [SECRET], SECRET: 1}],
        [{"name": "a", "key": {SECRET: SECRET}, "roles": SECRET}],
        [SECRET, {"name": SECRET, "key": f"sha256:{key_digest(SECRET)}"}],
        {"a": SECRET},
        SECRET,
    ],
)
def test_no_error_and_no_text_shows_what_may_be_a_secret(keys: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config({"http": {"api_keys": keys}, "pools": [{"name": "a", "model": "b"}]})
    # as a traceback of the dispatcher shows it
    assert SECRET not in "".join(format_exception(refused.value)).lower()
    config = config_of(SECRET, entry("ci", f"{SECRET}-2"))
    for text in (
        repr(config),
        str(config.http),
        config.model_dump_json(),
        repr(settings_of(config)),
    ):
        assert SECRET not in text
        assert key_digest(SECRET) not in text or text == repr(settings_of(config))


def test_an_entry_is_made_of_a_key() -> None:
    made = KeyConfig.of("ci", "k", ["operate", "use"])
    assert made.entry == ApiKey(key_digest("k"), "ci", ("use", "operate"))
    assert made.plain is None
    assert config_of("k").http.api_keys[0].plain == "k"
