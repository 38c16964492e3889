"""Settings and arguments are two halves of a configuration: a change of one leaves the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.section import Section, applied
from ray_cluster.config.sections.cell_wide import DispatchConfig, LimitsConfig, StorageConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.sections.upscalers import UpscalerConfig
from ray_cluster.config.settings import settings_of
from ray_cluster.config.slices import (
    front_arguments,
    needs_redeploy,
    with_settings,
    worker_arguments,
)
from ray_cluster.deployments.serve.deploy_file import serve_config
from ray_cluster.errors import ConfigError, without_password

FIDELITY = {
    "sampler": "ddim",
    "max_guidance_scale": 2.0,
    "steps": [{"asked": 20, "balanced": 8, "fast": 5}],
}
# where another number than the default cannot be made by adding one to it
OTHER_VALUES: dict[str, Any] = {
    "max_replicas": 9,
    "defaults": {"num_inference_steps": 7},
    "fidelity": FIDELITY,
    "lora_start": {"balanced": 0.1},
    "min_replicas": 0,
    "preemption": False,
    "progress_s": 0.5,
}
UPSCALERS = {"upscalers": [{"name": "big"}]}


def given() -> dict[str, Any]:
    pool = {"name": "a", "model": "shapes-sd", "max_in_flight": 16}
    return {
        "http": {},
        "limits": {},
        "dispatch": {},
        "storage": {},
        "pools": [pool, {**pool, "name": "b"}],
    }


def setting_keys() -> Iterator[tuple[str, str]]:
    """Every key that is a setting, with its section."""
    sections: dict[str, type[Section]] = {
        "limits": LimitsConfig,
        "dispatch": DispatchConfig,
        "storage": StorageConfig,
        "pools": PoolConfig,
        "upscalers": UpscalerConfig,
    }
    yield "http", "api_keys"
    for section, kind in sections.items():
        yield from ((section, name) for name in kind.model_fields if applied(kind, name) == "live")


def changed(section: str, name: str) -> dict[str, Any]:
    content = given() | UPSCALERS
    default = getattr(load_config(content), section)
    is_list = isinstance(default, tuple)
    if is_list:
        default = default[0]
    old = getattr(default, name)
    value = ["key"] if name == "api_keys" else OTHER_VALUES.get(name)
    value = old + 1 if value is None else value
    target = content[section][0] if is_list else content[section]
    target[name] = value
    return content


def arguments_of(config: ClusterConfig) -> list[str]:
    pools = [worker_arguments(config, worker.name) for worker in config.workers]
    front = front_arguments(config, "settings.yaml")
    return [one.model_dump_json() for one in (front, *pools)]


@pytest.mark.parametrize(("section", "name"), list(setting_keys()))
def test_a_changed_setting_changes_the_version_and_no_argument(section: str, name: str) -> None:
    before, after = load_config(given() | UPSCALERS), load_config(changed(section, name))
    assert settings_of(after).version != settings_of(before).version
    assert arguments_of(after) == arguments_of(before)
    path = Path("/etc/settings.yaml")
    assert serve_config(after, path) == serve_config(before, path)
    pools = {one.name: worker_arguments(before, one.name).own for one in before.workers}
    assert needs_redeploy(front_arguments(before), pools, after) == []


def test_a_new_pool_leaves_all_other_applications_as_they_are() -> None:
    content = given()
    content["pools"].append({"name": "c", "model": "shapes-sd-light"})
    before, after = load_config(given()), load_config(content)
    path = Path("/etc/settings.yaml")
    old, new = (serve_config(one, path)["applications"] for one in (before, after))
    assert new[:-1] == old
    assert new[-1]["name"] == "c"


@pytest.mark.parametrize(
    ("section", "name", "value", "named"),
    [
        ("http", "port", 8123, "front http.port (8000 runs, the file has 8123)"),
        ("dispatch", "port", 7000, "front dispatch.port"),
        ("storage", "is_shared", True, "front storage.is_shared"),
        ("logs", "level", "debug", "front logs.level"),
        ("loras", "folder", "/other", "front loras.folder"),
        ("pools", "num_threads", 3, "pool a num_threads (1 runs, the file has 3)"),
        ("pools", "dtype", "bfloat16", "pool a dtype"),
    ],
)
def test_a_changed_argument_is_named(section: str, name: str, value: object, named: str) -> None:
    content = given()
    target = content["pools"][0] if section == "pools" else content.setdefault(section, {})
    target[name] = value
    running, wanted = load_config(given()), load_config(content)
    pools = {"a": worker_arguments(running, "a").own}
    found = needs_redeploy(front_arguments(running), pools, wanted)
    assert len(found) == 1
    assert found[0].startswith(named)
    assert settings_of(wanted).version == settings_of(running).version
    if section != "pools":
        key = named.removeprefix("front ").partition(" ")[0]
        overridden = front_arguments(running, overridden=(key,))
        assert needs_redeploy(overridden, pools, wanted) == []


def test_a_password_is_not_shown_in_what_needs_a_redeploy() -> None:
    content = given()
    content["storage"]["jobs"] = "postgresql://me:very-secret@db/jobs"
    running, wanted = load_config(given()), load_config(content)
    [text] = needs_redeploy(front_arguments(running), {}, wanted)
    assert "very-secret" not in text
    assert "@db/jobs" in text


def test_numbers_of_processes_are_no_arguments() -> None:
    content = given()
    content["http"]["num_gateways"] = 3
    content["pools"][0]["replicas"] = 2
    content["loras"] = {"num_stores": 4}
    before, after = load_config(given()), load_config(content)
    assert arguments_of(after) == arguments_of(before)
    front, store, pool, _ = serve_config(after, Path("/etc/settings.yaml"))["applications"]
    assert front["deployments"] == [{"name": "Gateway", "num_replicas": 3}]
    assert pool["deployments"] == [{"name": "BaseModel", "num_replicas": 2}]
    assert store["deployments"] == [{"name": "LoraStore", "num_replicas": 4}]


def test_keys_are_kept_as_digests_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_CLUSTER_API_KEYS", "one,two")
    content = given()
    content["http"]["api_keys"] = ["one"]
    config = load_config(content)
    settings = settings_of(config, front_arguments(config).api_keys)
    assert len(settings.api_keys) == 2
    text = settings.model_dump_json() + str(serve_config(config, Path("/etc/settings.yaml")))
    assert "'one'" not in text
    assert '"one"' not in text


def test_a_pool_is_what_its_arguments_and_settings_say() -> None:
    content = given()
    content["pools"][0] |= {"max_batch": 3, "num_threads": 2}
    config = load_config(content)
    started = worker_arguments(config, "a").own
    assert (started.max_batch, started.num_threads) == (8, 2)
    tuned = with_settings(started, {"max_batch": 5, "of_a_later_release": 1})
    assert (tuned.max_batch, tuned.num_threads) == (5, 2)


@pytest.mark.parametrize(
    ("bounds", "sentence"),
    [
        ({"min_replicas": 3, "max_replicas": 2, "replicas": 3}, "min_replicas 3 is above"),
        ({"max_replicas": 2, "replicas": 3}, "replicas 3 is not between min_replicas 1 and"),
    ],
)
def test_bounds_that_contradict_are_refused(bounds: dict[str, int], sentence: str) -> None:
    content = given()
    content["pools"][0] |= bounds
    with pytest.raises(Exception, match=sentence):
        load_config(content)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@host/jobs", "postgresql://...@host/jobs"),
        ("postgresql://me:se@cret@host/jobs?password=x", "postgresql://...@host/jobs?..."),
        ("https://host/a.safetensors#token=x?y", "https://host/a.safetensors?..."),
        ("s3://bucket/folder", "s3://bucket/folder"),
        ("/folder@here", "/folder@here"),
        (8000, "8000"),
    ],
)
def test_a_url_is_shown_without_its_password(url: object, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"dispatch": {"default_slo_s": "9"}},
            "dispatch.default_slo_s: must be a number (given '9')",
        ),
        ({"http": {"port": "80"}}, "http.port: must be a whole number (given '80')"),
        ({"http": {"port": True}}, "http.port: must be a whole number (given True)"),
        ({"dispatch": {"preemption": "yes"}}, "dispatch.preemption: must be true or false"),
        ({"ray": {"num_cpus": "2"}}, "ray.num_cpus: must be a whole number (given '2')"),
    ],
)
def test_what_is_in_quotes_is_no_number(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(given() | sections)
    assert said in str(refused.value)
