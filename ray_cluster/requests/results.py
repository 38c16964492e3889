"""What comes of a request: an image and its times, or a failure."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, field
from typing import Literal

from ray_cluster.errors import Stage
from ray_cluster.requests.parts import ImageFormat


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that one image spent in each stage; waiting counts to the later stage.

    ``queue_s`` is what the last dispatcher has seen: too little for a job that outlived one.
    """

    queue_s: float = 0.0
    encode_s: float = 0.0
    denoise_s: float = 0.0
    decode_s: float = 0.0
    upscale_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All stages together."""
        return sum(self.as_dict().values())

    def plus(self, later: Timing) -> Timing:
        """Return these seconds and those of later stages."""
        return Timing(*map(sum, zip(astuple(self), astuple(later), strict=True)))

    def as_dict(self) -> dict[str, float]:
        """Return the stages by name, in seconds."""
        return asdict(self)


# no usual discriminator takes more
SMALL_SIDE_PX = 256


@dataclass(frozen=True, slots=True)
class SmallImage:
    """An image as a discriminator gets it, not coded; ``SMALL_SIDE_PX`` bounds its shorter side.

    Attributes:
        data: ``height_px * width_px * 3`` bytes, red, green and blue of each pixel, row by row.
    """

    width_px: int
    height_px: int
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ImageResult:
    """A coded image and how long it took.

    Attributes:
        data: the image; empty where it went to the result store.
        num_bytes: its size.
        steps_by_degree: of a group: numbers of ranks with the steps that were taken on them.
    """

    request_id: str
    data: bytes
    image_format: ImageFormat
    timing: Timing
    num_bytes: int
    steps_by_degree: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ended without an image.

    Attributes:
        kind: ``error``: an exception; ``invalid``: found wrong only by the replica (a prompt with
            too many tokens); ``aborted`` by its client; ``lost``: too many replicas died under it.
        param: the parameter that is wrong, as the API spells it; with ``invalid`` only.
        code: machine-readable reason; likewise.
        attempts: leases it took, as the dispatcher counted them.
    """

    request_id: str
    kind: Literal["error", "invalid", "aborted", "lost"]
    message: str
    stage: Stage
    param: str | None = None
    attempts: int = 0
    code: str = "invalid_value"
