"""Edges of pictures, and how well two sets of edges agree."""

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# of Canny's hysteresis, for pictures of 8 bits
_LOW, _HIGH = 60, 140


def find_edges(pixels: Tensor) -> Tensor:
    """Canny's edges [B, H, W], boolean, of pictures [B, 3, H, W] in 0..1."""
    pictures = (pixels.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    edges = np.stack([cv2.Canny(np.ascontiguousarray(one), _LOW, _HIGH) for one in pictures])
    return torch.from_numpy(edges > 0)


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
