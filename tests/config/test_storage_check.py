"""Which storage is refused in a cluster of several nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_cluster.config.sections.cell_wide import StorageConfig
from ray_cluster.errors import ConfigError

LOCAL = "sqlite:////data/jobs.db"
POSTGRESQL = "postgresql://user:secret@host/jobs"


@pytest.mark.parametrize(
    ("jobs", "results", "named"),
    [
        (LOCAL, "/data/results", ["storage.jobs", LOCAL, "storage.results", "/data/results"]),
        (LOCAL, "s3://bucket/results", ["storage.jobs", LOCAL]),
        (POSTGRESQL, "/data/results", ["storage.results", "/data/results"]),
        (POSTGRESQL, "file:///data/results", ["storage.results"]),
    ],
)
def test_files_of_one_node_are_refused_on_several(
    jobs: str, results: str, named: list[str]
) -> None:
    config = StorageConfig(
        jobs=jobs, results=results, states="s3://bucket/states", inputs="s3://bucket/inputs"
    )
    with pytest.raises(ConfigError) as caught:
        config.check_nodes(2)
    message = str(caught.value)
    assert all(name in message for name in ["2 nodes", *named, "storage.is_shared: true"])
    assert "secret" not in message
    config.check_nodes(1)
    config.model_copy(update={"is_shared": True}).check_nodes(2)


@pytest.mark.parametrize("key", ["states", "inputs"])
def test_unfinished_images_and_inputs_of_one_node_are_refused_too(key: str) -> None:
    remote = {one: f"s3://bucket/{one}" for one in ("results", "states", "inputs")}
    config = StorageConfig(jobs=POSTGRESQL, **{**remote, key: f"/data/{key}"})
    with pytest.raises(ConfigError, match=rf"but storage.{key} \(/data/{key}\) would"):
        config.check_nodes(2)


def test_servers_are_taken_on_any_number_of_nodes() -> None:
    config = StorageConfig(
        jobs=POSTGRESQL, results="s3://bucket/r", states="s3://bucket/s", inputs="s3://bucket/i"
    )
    config.check_nodes(9)


def test_the_job_stores_url_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "url"
    config = StorageConfig(
        jobs_file=str(path), results="s3://b/results", states="s3://b/states", inputs="s3://b/in"
    )
    with pytest.raises(ConfigError, match=r"storage\.jobs_file cannot be read"):
        config.job_store()
    path.write_text("postgresql://me:secret@db/jobs\n")
    assert config.job_store() == "postgresql://me:secret@db/jobs"
    config.check_nodes(2)
    path.write_text("mysql://me:secret@db/jobs")
    with pytest.raises(ConfigError, match="must be sqlite:///FILE or postgresql://") as refused:
        config.job_store()
    assert "secret" not in str(refused.value)
