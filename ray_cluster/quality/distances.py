"""How far pictures [B, 3, H, W] in 0..1, or their edges, are from others."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ray_cluster.imaging.detectors import canny_edges
from ray_cluster.quality.classifier import AttributeClassifier

_BATCH = 64
_SSIM_WINDOW = 11
_SSIM_SIGMA = 1.5
# Wang et al. 2004, equations 10 and 11, for values in 0..1
_SSIM_C1 = 0.01**2
_SSIM_C2 = 0.03**2


@dataclass(frozen=True)
class FrechetDistance:
    """A Fréchet distance, and the `floor` to compare it with.

    The fewer pictures, the more a distance is biased upwards, so only the difference to the floor
    counts: the distance between two sets of renders, each of as many pictures.
    """

    value: float
    floor: float
    pictures: int


def similarity(pictures: Tensor, wanted: Tensor) -> Tensor:
    """Structural similarity [B] (SSIM, Gaussian window of 11 pixels), 1 for equal pictures.

    The mean of :func:`similarity_map`.

    Raises:
        ValueError: shapes differ.
    """
    return similarity_map(pictures, wanted).flatten(1).mean(1).float()


def similarity_map(pictures: Tensor, wanted: Tensor) -> Tensor:
    """Structural similarity of the windows around pixels, [B, H, W] in float64.

    Wang et al. 2004, section 3 B, with pictures mirrored at their borders as in torchmetrics: every
    pixel is the middle of a window.

    Raises:
        ValueError: shapes differ.
    """
    if pictures.shape != wanted.shape:
        raise ValueError(
            f"pictures are compared one by one, so shapes must agree; got {tuple(pictures.shape)} "
            f"and {tuple(wanted.shape)}"
        )
    # variances of flat pictures are differences of nearly equal numbers: float32 is not enough
    margins = (_SSIM_WINDOW // 2,) * 4
    one, other = (F.pad(each.double(), margins, mode="reflect") for each in (pictures, wanted))
    mean, other_mean = _blur(one), _blur(other)
    variance = (_blur(one * one) - mean * mean).clamp(min=0)
    other_variance = (_blur(other * other) - other_mean * other_mean).clamp(min=0)
    covariance = _blur(one * other) - mean * other_mean
    found = (2 * mean * other_mean + _SSIM_C1) * (2 * covariance + _SSIM_C2)
    found /= (mean**2 + other_mean**2 + _SSIM_C1) * (variance + other_variance + _SSIM_C2)
    return found.mean(1)


def _blur(values: Tensor) -> Tensor:
    """Weighted means [B, C, H - 10, W - 10] of [B, C, H, W] over windows of 11 x 11 pixels.

    Rows first, then columns: a convolution in float64 would copy each window.
    """
    offsets = torch.arange(_SSIM_WINDOW, dtype=torch.float64) - _SSIM_WINDOW // 2
    weights = (-(offsets**2) / (2 * _SSIM_SIGMA**2)).exp()
    weights = weights / weights.sum()
    for axis in (2, 3):
        length = values.shape[axis] - _SSIM_WINDOW + 1
        values = sum(
            (weight * values.narrow(axis, start, length) for start, weight in enumerate(weights)),
            start=torch.zeros((), dtype=torch.float64),
        )
    return values


def frechet_distance(
    classifier: AttributeClassifier, pictures: Tensor, real: Tensor, more_real: Tensor
) -> FrechetDistance:
    """Fréchet distance of pictures to renders on the classifier's features, with its floor.

    Heusel et al. 2017, section 2, on 192 features per picture: those of the positions, averaged,
    and those of the whole picture.

    Args:
        classifier: whose features are compared.
        pictures: to be judged.
        real: renders of the same kind and number.
        more_real: other renders, as many, for the floor.

    Raises:
        ValueError: the three sets are not of one size.
    """
    if not len(pictures) == len(real) == len(more_real):
        raise ValueError(
            "the distance depends on the number of pictures: all three sets must have the same; "
            f"got {len(pictures)}, {len(real)} and {len(more_real)}"
        )
    judged, first, second = (_features(classifier, each) for each in (pictures, real, more_real))
    return FrechetDistance(_frechet(judged, first), _frechet(second, first), len(pictures))


def _features(classifier: AttributeClassifier, pictures: Tensor) -> Tensor:
    """Features [B, 3 C] of pictures, in float64."""
    parts: list[Tensor] = []
    with torch.no_grad():
        for batch in pictures.split(_BATCH):
            slots, overall = classifier.describe(batch)
            parts.append(torch.cat([slots.mean(1), overall], 1))
    return torch.cat(parts).double()


def _frechet(features: Tensor, others: Tensor) -> float:
    """Squared distance of the means, plus tr(A + B - 2 (AB)^1/2) of the covariances."""
    means = (features.mean(0) - others.mean(0)).square().sum()
    one, other = features.T.cov(), others.T.cov()
    shared = torch.linalg.eigvals(one @ other).sqrt().real.sum()
    return float(means + one.trace() + other.trace() - 2 * shared)


def find_edges(pixels: Tensor) -> Tensor:
    """Canny's edges [B, H, W], boolean, of pictures [B, 3, H, W] in 0..1."""
    pictures = (pixels.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return torch.from_numpy(np.stack([canny_edges(one) for one in pictures]))


def edge_agreement(found: Tensor, wanted: Tensor, *, tolerance: int = 1) -> Tensor:
    """F1 [B] of edges [B, H, W]: those within `tolerance` pixels of the other's count as equal.

    1 where neither picture has an edge.
    """
    precision = _share_near(found, wanted, tolerance)
    recall = _share_near(wanted, found, tolerance)
    return 2 * precision * recall / (precision + recall).clamp_min(1e-9)


def _share_near(edges: Tensor, others: Tensor, tolerance: int) -> Tensor:
    """Share of a picture's edges with another's within reach; 1 where it has none."""
    side = 2 * tolerance + 1
    near = F.max_pool2d(others[:, None].float(), side, stride=1, padding=tolerance)[:, 0] > 0
    count = edges.sum((1, 2))
    share = (edges & near).sum((1, 2)) / count.clamp_min(1)
    return torch.where(count == 0, 1.0, share)
