"""k nearest neighbours by cosine, weighted by exp(cosine / temperature), as in DINO; in blocks of bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 2**25  # of the matrix of cosines that is held at once


def knn_votes(
    features: Tensor,
    *,
    train: Tensor,
    labels: Tensor,
    num_classes: int,
    k: Sequence[int],
    temperature: float,
    device: torch.device,
    told: Callable[[str], None] = lambda far: None,
) -> list[Tensor]:
    """Votes for features [n, D] by the `k` nearest (all if fewer) of `train` [m, D] with `labels` int64 [m], for each
    `k`: float64 [n, C] on the CPU. `told` hears the progress. Cosines are float32."""
    known, classes = _unit(train, device), labels.to(device)
    most = min(max(k), len(train))
    votes = [torch.zeros(len(features), num_classes, dtype=torch.float64) for _ in k]
    block = max(1, _BLOCK_ELEMENTS // max(1, len(train)))
    for start in range(0, len(features), block):
        told(f"{start:,} of {len(features):,} images")
        rows = slice(start, start + block)
        cosines, nearest = (_unit(features[rows], device) @ known.T).topk(most, dim=1)
        # relative to the nearest: same shares, no overflow at low temperatures
        weights = ((cosines - cosines[:, :1]).double() / temperature).exp()
        for number, count in enumerate(k):
            table = torch.zeros(len(cosines), num_classes, dtype=torch.float64, device=device)
            table.scatter_add_(1, classes[nearest[:, :count]], weights[:, :count])
            votes[number][rows] = table.cpu()
    return votes


def _unit(features: Tensor, device: torch.device) -> Tensor:
    return torch.nn.functional.normalize(features.to(device, torch.float32), dim=1)
