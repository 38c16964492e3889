"""A small network that describes what a picture shows at nine positions, and as a whole."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# pixels of the shorter side of what is read
READING_SIZE = 64
NUM_POSITIONS = 9
# how far the outer positions are from the middle, as a share of that side
ANCHOR_OFFSET = 0.24
# points a side at which the features around a position are read, and how far the outer ones are
# from its middle, in shorter sides of the picture
_POINTS, _REACH = 4, 0.27


class _Residual(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * F.relu(self.conv(x))


class PictureReader(nn.Module):
    """Describes pictures; what is described of a position are only the features around it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels // 2, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(channels // 2, channels, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.body = nn.Sequential(*(_Residual(channels, dilation) for dilation in (1, 2, 1, 2)))
        self.reduce = nn.Conv2d(channels, channels // 2, 1)
        seen = _POINTS * _POINTS * channels // 2
        self.look = nn.Sequential(nn.Linear(seen, 2 * channels), nn.ReLU())
        self.survey = nn.Sequential(nn.Linear(2 * channels, channels), nn.ReLU())

    def feature_maps(self, pixels: Tensor) -> list[Tensor]:
        """Activations [B, C, h, w] after the stem and after each block of the body.

        `pixels`: [B, 3, H, W] in 0..1; their shorter side is brought to 64 pixels.
        """
        maps = [self.stem(to_reading_size(pixels) * 2 - 1)]
        for block in self.body:
            maps.append(block(maps[-1]))
        return maps

    def describe(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """What is seen at each position, [B, 9, 2 C], and of the whole picture, [B, C]."""
        features = self.feature_maps(pixels)[-1]
        points = _sampling_points(features)
        around = F.grid_sample(self.reduce(features), points, align_corners=False)
        slots = around.permute(0, 2, 3, 1).flatten(2)  # [B, 9, points * C / 2]
        overall = torch.cat([features.mean((2, 3)), features.amax((2, 3))], 1)
        return self.look(slots), self.survey(overall)


def to_reading_size(pixels: Tensor) -> Tensor:
    """Bring the shorter side of pictures [B, 3, H, W] to 64 pixels."""
    short = min(pixels.shape[-2:])
    if short == READING_SIZE:
        return pixels
    size = [round(side * READING_SIZE / short) for side in pixels.shape[-2:]]
    return F.interpolate(pixels, size, mode="bilinear", antialias=True, align_corners=False)


def _sampling_points(features: Tensor) -> Tensor:
    """Points [B, 9, n * n, 2] around the nine positions, in -1..1 over a map [B, C, h, w]."""
    height, width = features.shape[-2:]
    half = torch.tensor([width, height], device=features.device) / min(width, height) / 2
    line = torch.linspace(-_REACH, _REACH, _POINTS, device=features.device)
    around = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).flatten(0, 1)  # [n * n, 2]
    steps = torch.arange(3, device=features.device) - 1
    # index = 3 * row + column; the outer positions are this share of a side from the middle
    cells = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1).flatten(0, 1)  # [9, 2]
    middles = cells * 2 * ANCHOR_OFFSET
    points = middles[:, None] + around / half
    return points.expand(len(features), -1, -1, -1)
