"""The section of detectors, which make maps for ControlNets."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field

from ray_cluster.config.section import Section


class PreprocessorsConfig(Section):
    """Detectors of controlnet-aux, which need the extra `preprocessors`."""

    folder: str | None = Field(
        None,
        min_length=1,
        description="folder with the detectors' weights, which every node has: the files of the "
        "repository `lllyasviel/Annotators`; null for a service with the built-in ones alone",
    )

    def resolved(self, folder: Path) -> Self:
        """Return it with an absolute path: its readers run in other working folders."""
        if self.folder is None:
            return self
        return self.model_copy(update={"folder": str(folder / Path(self.folder).expanduser())})
