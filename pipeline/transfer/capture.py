"""The features before a model's head, caught while its ordinary forward pass runs: also under ZeRO 3 and compiled.

pre_logits  what the last linear layer is given: big_vision's `pre_logits`. With the one linear layer of fine-tuning
            the trunk's pooled output; with the MLP head of pre-training tanh of its hidden layer.
pooled      what the head is given: the trunk's pooled output (class token, mean or attention pooling), of any head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from model.head import MlpHead
from pipeline.recipe.vocabulary import FeatureLayer


class Captured:
    """What the hook has seen since the last `take`."""

    def __init__(self) -> None:
        self._seen: list[Tensor] = []

    def note(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._seen.append(inputs[0].detach())

    def take(self) -> Tensor:
        """The features [n, D] of the one forward pass since the last call, in the type that they were computed in."""
        (features,) = self._seen
        self._seen.clear()
        return features


@contextmanager
def captured_features(model: nn.Module, *, layer: FeatureLayer) -> Iterator[Captured]:
    """Within it, each forward pass of `model` leaves its features; afterwards the model is as before."""
    head = model.get_submodule("head")
    last = head.logits if layer == "pre_logits" and isinstance(head, MlpHead) else head
    captured = Captured()
    hook = last.register_forward_pre_hook(captured.note)
    try:
        yield captured
    finally:
        hook.remove()
