"""Average precision of single classes: the only file that imports torchmetrics.

That import takes 4 seconds and loads half of what is installed, so it is made by the ranks of an evaluation that asks
for it, and only then. A class of n images costs a sort: 5 ms for 50,000.
"""

from __future__ import annotations

import math

import torch


def average_precision(scores: torch.Tensor, *, positive: torch.Tensor) -> float:
    """sum_k (R_k - R_(k-1)) P_k over the thresholds k, without interpolation (scikit-learn's too); NaN without a
    positive.

    Args:
        scores: [n], of any range; NaN counts as the lowest.
        positive: bool [n], images that have the class.
    """
    if not positive.any():
        return math.nan
    from torchmetrics.functional.classification import binary_precision_recall_curve

    # torchmetrics puts scores beyond [0, 1] through a sigmoid, where large ones become equal; their order is enough.
    values, place = scores.double().nan_to_num(nan=-torch.inf).unique(return_inverse=True)
    precision, recall, _ = binary_precision_recall_curve(place.double() / len(values), positive.long(), thresholds=None)
    gained = (recall[:-1] - recall[1:]).double() * precision[:-1]  # the curve begins at the lowest threshold
    return math.fsum(gained.tolist())  # a sum in parallel would depend on the threads
