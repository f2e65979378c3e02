"""Buckets: every trained parameter once, whole units in forward order, at most so many elements."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from shardvit.model.config import ModelConfig
from shardvit.model.vit import build_model
from shardvit.pipeline.engine.buckets import cut_buckets, turns_of, units_of
from shardvit.pipeline.optimizers.parameter_groups import parameter_groups
from shardvit.pipeline.recipe.optimizer import OptimizerConfig

VIT = {"width": 16, "depth": 4, "heads": 2, "patch_size": 4}
KINDS = {
    "vit": VIT,
    "hybrid": {**VIT, "resnet_layers": [1]},
    "map": {**VIT, "pool": "map"},
    "resnet": {"resnet_layers": [1, 1]},
}
ADAMW = OptimizerConfig(name="adamw", lr=0.1, weight_decay=0.1)


def model_of(kind: str) -> nn.Module:
    config = ModelConfig.model_validate(KINDS[kind])
    return build_model(config, image_size=32, num_classes=3, head="mlp" if kind == "vit" else "linear")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 1000, 5000, 10_000, math.inf])
def test_every_parameter_is_in_one_bucket_and_buckets_follow_the_forward_pass(kind: str, most: float) -> None:
    model = model_of(kind)
    groups, turns = parameter_groups(model, ADAMW), turns_of(model)
    buckets = cut_buckets(groups, turns=turns, most_elements=most)
    names = [name for bucket in buckets for name, _ in bucket]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for one, other in pairwise(buckets):
        assert max(turns[name] for name, _ in one) < min(turns[name] for name, _ in other)
        of_next = [each.numel() for name, each in other if turns[name] == min(turns[name] for name, _ in other)]
        assert sum(each.numel() for _, each in one) + sum(of_next) > most, "these would fit into one"
    for bucket in buckets:
        assert len({turns[name] for name, _ in bucket}) == 1 or sum(each.numel() for _, each in bucket) <= most
    if most == math.inf:  # the order of the groups, so that a rule is one segment
        assert names == [name for group in groups for name, _ in group["params"]]


def test_frozen_parameters_are_in_none() -> None:
    model = model_of("vit")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("head.")
    buckets = cut_buckets(parameter_groups(model, ADAMW), turns=turns_of(model), most_elements=1)
    assert [name.split(".")[0] for bucket in buckets for name, _ in bucket] == ["head"] * 4 and len(buckets) == 1


@pytest.mark.parametrize("kind", ["vit", "hybrid", "map"])
def test_units_are_called_in_their_order_and_once(kind: str) -> None:
    model, called = model_of(kind), list[str]()
    units = units_of(model)
    for name, module in units.items():
        module.register_forward_pre_hook(lambda _, inputs, name=name: called.append(name))
    model(torch.zeros(1, 3, 32, 32))
    assert called == [name for name in units if name in called]
    assert {name for name, module in units.items() if [*module.parameters()]} == {
        name for name in called if [*units[name].parameters()]
    }


def test_other_models_have_no_units_and_their_parameters_come_one_after_the_other() -> None:
    model: Any = model_of("resnet")
    assert units_of(model) == {}
    assert list(turns_of(model).values()) == [*range(len([*model.parameters()]))]
