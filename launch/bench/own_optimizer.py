"""An optimizer as a user may write one, for `launch.bench.overhead`: it takes no verdict from the device."""

from typing import Any

import torch


def sgd(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """Return torch's SGD."""
    return torch.optim.SGD(groups, lr=lr)
