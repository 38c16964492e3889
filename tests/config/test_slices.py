"""Each process gets its part of a configuration: no settings, no secrets of others."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.config.kinds import KINDS
from ray_cluster.config.loading import ClusterConfig, Document, load_config
from ray_cluster.config.section import Section, applied, section_in
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.settings import settings_of
from ray_cluster.config.slices import (
    as_json,
    controller_arguments,
    front_arguments,
    parsed,
    registered,
    started_section,
    with_settings,
    worker_arguments,
)
from ray_cluster.errors import ConfigError
from ray_cluster.protocol.settings import in_force, worker_settings

COUNTS = {"replicas", "surge", "num_gateways", "num_stores"}
CONTENT: dict[str, Any] = {
    "http": {"api_keys": ["key-of-a-client"]},
    "storage": {"jobs": "postgresql://me:of-the-jobs@db/jobs"},
    "pools": [
        {"name": "a", "model": "shapes-sd", "served_as": "m", "max_batch": 3, "replicas": 2},
        {"name": "b", "model": "shapes-sd", "num_threads": 2},
    ],
    "discriminators": [{"name": "judge", "model": "shapes-judge", "max_batch": 2}],
    "cascades": [
        {"name": "both", "light": "m", "heavy": "b", "discriminator": "judge", "threshold": 0.5}
    ],
    "controlnets": [
        {"name": "edges", "model": "shapes-edges", "bases": ["m"], "max_batch": 4},
        {"name": "blocks", "model": "shapes-blocks", "bases": ["m"], "mode": "local"},
    ],
}
WORKERS = ("a", "b", "judge", "edges", "loras")
# what a replica of pool "a" had registered with before keys had marks
EARLIER = (
    '{"name":"a","model":"shapes-sd","served_as":"m","device":"cpu","dtype":null,"num_cpus":1.0,'
    '"num_gpus":0.0,"num_threads":1,"batches":"mixed","layout":"auto","min_px":null,"max_px":null,'
    '"max_num_inference_steps":100,"memory_gib":null,"cuda_graphs":"off","offload":"auto"}'
)


def config_of(**changes: Any) -> ClusterConfig:
    return load_config(CONTENT | changes, folder=Path("/data"))


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_is_started_with_its_own_part_and_no_settings(name: str) -> None:
    config = config_of()
    arguments = worker_arguments(config, name)
    assert [one.name for one in arguments.pools] == ([name] if name in {"a", "b"} else [])
    assert [one.name for one in arguments.discriminators] == ([name] if name == "judge" else [])
    wanted = {"edges": ["edges"], "a": ["blocks"]}.get(name, [])
    assert [one.name for one in arguments.controlnets] == wanted
    content = as_json(arguments)
    section = content.get(KINDS[arguments.kind].section)
    assert section is not None
    for one in section if isinstance(section, list) else [section]:
        assert not {"max_batch", "defaults", "registered", *COUNTS} & set(one)
    # as Serve's config file gives them
    assert type(arguments).model_validate(json.loads(json.dumps(content))) == arguments


def test_secrets_do_not_leave_the_front() -> None:
    config = config_of()
    settings = settings_of(config)
    told = [json.dumps(as_json(worker_arguments(config, name))) for name in WORKERS]
    told += [worker_arguments(config, name).model_dump_json() for name in WORKERS]
    told += [json.dumps(as_json(controller_arguments(config))), settings.for_gateways()]
    told += [str(worker_settings(settings, name)) for name in WORKERS]
    told += [json.dumps(settings.content())]
    for text in told:
        assert "of-the-jobs" not in text
        assert "key-of-a-client" not in text
    assert "of-the-jobs" in front_arguments(config).storage.jobs


@pytest.mark.parametrize("name", WORKERS[:-1])
def test_what_is_started_and_what_is_live_make_the_whole_worker(name: str) -> None:
    config = config_of()
    settings = worker_settings(settings_of(config), name)
    assert in_force(worker_arguments(config, name).own, settings) == config.find(name)


def test_what_another_release_has_written_is_read_but_for_what_is_unknown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    pool = started_section("denoise", EARLIER)
    assert registered(pool) == registered(worker_arguments(config_of(), "a").own)
    assert not caplog.records
    later = {"max_batch": 2, "of_a_later_release": 1, "defaults": {"size": "64x64", "new": 2}}
    tuned = with_settings(PoolConfig(name="a", model="m"), later)
    assert (tuned.max_batch, tuned.defaults.size) == (2, "64x64")
    document = parsed(Document, json.dumps({"limits": {"max_body_s": 9, "new": 1}, "newer": []}))
    assert document.limits.max_body_s == 9
    assert "of_a_later_release" in caplog.text
    assert "defaults.new" in caplog.text
    assert "limits.new', 'newer'" in caplog.text


def test_settings_that_do_not_suit_what_runs_are_refused_in_words() -> None:
    pool = PoolConfig(name="a", model="m", max_num_inference_steps=10)
    with pytest.raises(ConfigError, match=r"a: defaults\.num_inference_steps 20 is above"):
        with_settings(pool, {"defaults": {"num_inference_steps": 20}})


def sections(kind: type[Section]) -> list[type[Section]]:
    inner = [section_in(field.annotation) for field in kind.model_fields.values()]
    return [one for one in inner if one is not None]


def test_every_key_is_of_one_kind_and_what_numbers_processes_is_a_count() -> None:
    for section in sections(Document):
        for key in section.model_fields:
            mark = applied(section, key)
            assert mark in {"live", "redeploy", "count"}
            assert (mark == "count") == (key in COUNTS)
