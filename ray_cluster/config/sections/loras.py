"""The section of LoRAs: where their files may come from, and how much of them is kept."""

from __future__ import annotations

import re
from ipaddress import ip_network
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from ray_cluster.config.section import COUNT, LIVE, RESOURCE_NAME, Section, changed

LORA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


class LoraEntry(Section):
    """A LoRA that is registered when the dispatcher starts or the file changes, unless its name is
    taken."""

    name: str = Field(pattern=LORA_NAME.pattern, description="name by which calls choose it")
    base: str = Field(description="model that it is made for")
    source: str = Field(description="where its file is: as of `sources`, with the rest of it")
    sha256: str = Field("", description="digest of the file; another file is refused then")
    is_pinned: bool = Field(
        False, description="whether it is fetched at once, and kept whether it is used or not"
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        return checked_lora_name(name)

    @field_validator("sha256")
    @classmethod
    def _check_sha256(cls, sha256: str) -> str:
        if sha256 and _SHA256.fullmatch(sha256) is None:
            raise ValueError("must be 64 hexadecimal digits in lower case, or be left out")
        return sha256


class LorasConfig(Section):
    """LoRAs: where their files may come from, how much of them is kept, and which there are."""

    folder: str = Field(
        ".ray-cluster/loras",
        description="folder for their factors on the disk of each node; relative ones start where "
        "`serve` is called",
    )
    sources: tuple[str, ...] = Field(
        ("builtin:",),
        description="what their sources may begin with: `builtin:`, folders (`/models/loras`), "
        "URLs of folders (`s3://bucket/loras`, `https://host/loras`), `hf:` or `hf:OWNER`; what a "
        "URL redirects to must be among them, too",
    )
    private_hosts: tuple[str, ...] = Field(
        (),
        description="hosts of http and https sources that may be asked at addresses which are not "
        "public: names, or networks such as `10.0.0.0/8`; an address that stands in `sources` "
        "itself may be asked without",
    )
    max_file_bytes: int = Field(2 << 30, ge=1024, description="size of one file")
    max_disk_bytes: int = Field(
        20 << 30, ge=1 << 20, description="size of all factors on a node; the longest unused go"
    )
    max_held_bytes: int = Field(
        1 << 30, ge=1 << 20, description="size of the factors that one replica keeps in memory"
    )
    merge: Literal["auto", "never"] = Field(
        "auto",
        description="whether a replica merges LoRAs that all of its images have into its model's "
        "weights, where it has memory for these twice",
    )
    fetch_timeout_s: float = Field(
        300.0, gt=0, description="time after which a source that does not answer is given up"
    )
    min_fetch_bytes_per_s: int = Field(
        16 << 10,
        ge=0,
        description="rate of http, https and hub sources below which, over half a minute, one is "
        "given up",
    )
    registered: tuple[LoraEntry, ...] = Field(
        (),
        description="LoRAs that are registered at the start; others come by `POST /v1/loras`",
        json_schema_extra=LIVE,
    )
    max_loras: int = Field(
        10_000, ge=0, description="LoRAs that may be registered", json_schema_extra=LIVE
    )
    max_pinned: int = Field(
        100,
        ge=0,
        description="those of them that may be pinned; every node fetches each",
        json_schema_extra=LIVE,
    )
    client_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="share of `max_loras` and of `max_pinned` that one client may register: an API "
        "key's, or an address where there are no keys; those of `registered` count for none",
        json_schema_extra=LIVE,
    )
    num_stores: int = Field(
        1,
        ge=0,
        le=1000,
        description="processes that fetch them, at most one a node: as many as there are nodes "
        "with replicas; without any, replicas fetch for themselves",
        json_schema_extra=COUNT,
    )
    node_resource: str | None = Field(
        None,
        pattern=RESOURCE_NAME,
        description="custom resource of the Ray nodes that these processes run on: those with "
        "replicas, where there are others; null: on any",
    )

    @field_validator("private_hosts")
    @classmethod
    def _check_private_hosts(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        for entry in entries:
            if _HOST.fullmatch(entry) is None and not _is_network(entry):
                raise ValueError(
                    f"{entry!r} is neither the name of a host nor a network: give "
                    "'models.internal', '10.1.2.3' or '10.0.0.0/8', without scheme and port"
                )
        return entries

    @property
    def merges(self) -> bool:
        """Whether replicas may merge LoRAs."""
        return self.merge == "auto"

    def share_of(self, most: int) -> int:
        """Return how many of so many one client may register: at least one, if any."""
        return min(most, max(1, int(self.client_share * most)))

    def resolved(self, folder: Path) -> Self:
        """Return it with absolute paths."""
        places = tuple(one if _is_url(one) else str(folder / one) for one in self.sources)
        own = str(folder / Path(self.folder).expanduser())
        return changed(self, folder=own, sources=places)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [one.name for one in self.registered]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"the names of LoRAs must differ; given more than once: {twice}")
        return self


def checked_lora_name(name: str) -> str:
    """Return a name; raises ValueError for one that is not allowed."""
    if LORA_NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} is no name of a LoRA: 1 to 64 letters, digits, '.', '_' and '-', beginning "
            "with a letter or digit"
        )
    return name


def _is_network(entry: str) -> bool:
    try:
        ip_network(entry, strict=False)
    except ValueError:
        return False
    return True


def _is_url(source: str) -> bool:
    return "://" in source or source.startswith(("builtin:", "hf:"))
