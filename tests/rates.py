"""Learning rates of an optimizer, as `Engine.step` sets them."""

from collections.abc import Iterable
from typing import Any


def set_lr(groups: Iterable[dict[str, Any]], lr: float) -> None:
    for group in groups:
        group["lr"] = lr * group["lr_scale"]
