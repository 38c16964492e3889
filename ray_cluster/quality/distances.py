"""How far pictures are from other pictures: pixel by pixel, as they are seen, and as a whole set.

All functions take pictures [B, 3, H, W] in 0..1, float.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torchmetrics.functional.image import peak_signal_noise_ratio
from torchmetrics.image.fid import FrechetInceptionDistance

from ray_cluster.quality.classifier import AttributeClassifier

_BATCH = 64
_SSIM_WINDOW = 11
_SSIM_SIGMA = 1.5
# Wang et al. 2004, equations 10 and 11, for values in 0..1
_SSIM_C1 = 0.01**2
_SSIM_C2 = 0.03**2


@dataclass(frozen=True)
class FrechetDistance:
    """A Fréchet distance and what to hold it against.

    `floor`: the distance between two sets of renders, each of as many pictures; a distance is
    biased upwards the more, the fewer pictures there are, so only the difference tells something.
    """

    value: float
    floor: float
    pictures: int


def similarity(pictures: Tensor, wanted: Tensor) -> Tensor:
    """Structural similarity [B] (SSIM, Gaussian window of 11 pixels), 1 for equal pictures.

    Wang et al. 2004, section 3 B, with pictures mirrored at their borders, as torchmetrics does it:
    every pixel is the middle of a window.
    """
    _require_same_shape(pictures, wanted)
    # variances of flat pictures are differences of nearly equal numbers: float32 is not enough
    margins = (_SSIM_WINDOW // 2,) * 4
    one, other = (pad(each.double(), margins, mode="reflect") for each in (pictures, wanted))
    mean, other_mean = _blur(one), _blur(other)
    variance = (_blur(one * one) - mean * mean).clamp(min=0)
    other_variance = (_blur(other * other) - other_mean * other_mean).clamp(min=0)
    covariance = _blur(one * other) - mean * other_mean
    found = (2 * mean * other_mean + _SSIM_C1) * (2 * covariance + _SSIM_C2)
    found /= (mean**2 + other_mean**2 + _SSIM_C1) * (variance + other_variance + _SSIM_C2)
    return found.flatten(1).mean(1).float()


def _blur(values: Tensor) -> Tensor:
    """Weighted means [B, C, H - 10, W - 10] of [B, C, H, W] over windows of 11 x 11 pixels.

    Rows first, then columns: a convolution in float64 would copy each window.
    """
    places = torch.arange(_SSIM_WINDOW, dtype=torch.float64) - _SSIM_WINDOW // 2
    weights = (-(places**2) / (2 * _SSIM_SIGMA**2)).exp()
    weights = weights / weights.sum()
    for axis in (2, 3):
        length = values.shape[axis] - _SSIM_WINDOW + 1
        values = sum(
            (weight * values.narrow(axis, start, length) for start, weight in enumerate(weights)),
            start=torch.zeros((), dtype=torch.float64),
        )
    return values


def signal_to_noise(pictures: Tensor, wanted: Tensor) -> Tensor:
    """Peak signal-to-noise ratio [B] in dB; infinite for equal pictures."""
    _require_same_shape(pictures, wanted)
    return peak_signal_noise_ratio(
        pictures.float(), wanted.float(), data_range=1.0, reduction="none", dim=(1, 2, 3)
    )


def perceptual_distance(
    classifier: AttributeClassifier, pictures: Tensor, wanted: Tensor
) -> Tensor:
    """Distance [B] as the classifier sees it, 0 for equal pictures.

    Activations are scaled to length 1 at each place, and their squared differences averaged over
    places and added up over the network's depths: the form of LPIPS (Zhang et al. 2018, section 3)
    without weights of its own, on a network that knows this world.
    """
    _require_same_shape(pictures, wanted)
    with torch.no_grad():
        seen, due = classifier.feature_maps(pictures), classifier.feature_maps(wanted)
    layers = [
        (_to_unit(one) - _to_unit(other)).square().sum(1).mean((1, 2))
        for one, other in zip(seen, due, strict=True)
    ]
    return torch.stack(layers).sum(0)


def frechet_distance(
    classifier: AttributeClassifier, pictures: Tensor, real: Tensor, more_real: Tensor
) -> FrechetDistance:
    """Fréchet distance of pictures to renders on the classifier's features, with its floor.

    Heusel et al. 2017, section 2, on 192 features per picture: what is seen, averaged over
    positions, and the whole.

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
    metric = FrechetInceptionDistance(feature=_Features(classifier), reset_real_features=False)
    _update(metric, real, is_real=True)
    values: list[float] = []
    for other in (pictures, more_real):
        metric.reset()
        _update(metric, other, is_real=False)
        values.append(float(metric.compute()))
    return FrechetDistance(values[0], values[1], len(pictures))


class _Features(nn.Module):
    def __init__(self, classifier: AttributeClassifier) -> None:
        super().__init__()
        self.classifier = classifier
        self.num_features = 3 * classifier.reduce.in_channels

    def forward(self, pictures: Tensor) -> Tensor:
        with torch.no_grad():
            slots, overall = self.classifier.describe(pictures)
        return torch.cat([slots.mean(1), overall], 1)


def _update(metric: FrechetInceptionDistance, pictures: Tensor, *, is_real: bool) -> None:
    for part in pictures.split(_BATCH):
        metric.update(part, real=is_real)


def _to_unit(features: Tensor) -> Tensor:
    scaled: Tensor = features / (features.norm(dim=1, keepdim=True) + 1e-6)
    return scaled


def _require_same_shape(pictures: Tensor, wanted: Tensor) -> None:
    if pictures.shape != wanted.shape:
        raise ValueError(
            f"pictures are compared one by one, so shapes must agree; got {tuple(pictures.shape)} "
            f"and {tuple(wanted.shape)}"
        )
