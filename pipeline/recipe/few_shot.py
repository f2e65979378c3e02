"""The recipe's keys about few-shot measures during pre-training, and numbers that `shardvit fewshot` has, too."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from pipeline.recipe.data import OneSet
from pipeline.recipe.duration import BytesText, DurationText, Strict
from pipeline.recipe.vocabulary import FeatureLayer

_MOST_SHOTS = 10**6


def _all(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError("the list is empty: give at least one number")
    if len(set(values)) < len(values):
        raise ValueError("a number is given twice: leave one out")
    return values


Counts = Annotated[
    tuple[Annotated[int, Field(ge=1, le=_MOST_SHOTS)], ...], BeforeValidator(_all), AfterValidator(_distinct)
]
"""One number from 1 on, or a list of different ones."""
Strengths = Annotated[
    tuple[Annotated[float, Field(gt=0, le=1e30)], ...], BeforeValidator(_all), AfterValidator(_distinct)
]
"""One number above 0, or a list of different ones."""


class FewShotConfig(Strict):
    """A data set on which few-shot accuracy is measured while a model is pre-trained, as the ViT paper's figure 4 does:
    least squares in closed form on the features of a few images of each class (big_vision's `fewshot_lsr`)."""

    name: str
    """In the metrics: val/fewshot_NAME_5shot."""
    train: OneSet
    """Where the few images are taken from; only these are read."""
    eval: OneSet
    """What is classified."""
    shots: Counts = (5,)
    """Images of each class: a number, or several."""
    seeds: int = Field(default=3, ge=1, le=1000)
    """How often they are drawn; the metric is the mean."""
    l2: float = Field(default=1024.0, gt=0, le=1e30)
    """Strength of the regularisation; big_vision's is 2^10."""
    layer: FeatureLayer = "pre_logits"
    """pre_logits: what the last linear layer is given, as big_vision; pooled: the trunk's pooled output."""
    every: DurationText | None = None
    """At the first evaluation (eval_every) after each multiple of this, and at the end; 0: at the end alone; null: at
    each evaluation."""
    keep_decoded: BytesText = "1 GB"
    """Decoded images that a process keeps in memory; what goes beyond is read and decoded each time."""

    @field_validator("name")
    @classmethod
    def _name_in_a_metric(cls, name: str) -> str:
        if not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_-]{0,59}", name):
            raise ValueError(f"{name[:60]!r} is part of a metric's name: give up to 60 letters, digits, '_' and '-'")
        return name

    @model_validator(mode="after")
    def _sets_alone(self) -> FewShotConfig:
        if self.train.weight is not None or self.eval.weight is not None:
            raise ValueError("a weight means nothing to a single set of shards: leave it out")
        return self
