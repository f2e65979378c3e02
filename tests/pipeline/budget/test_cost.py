"""What a stage adds to its model: the masked-patch head against torch's counter and the modules' parameters."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardvit.model.config import ModelConfig
from shardvit.model.self_supervised.masked_autoencoder import build_masked_autoencoder
from shardvit.model.self_supervised.masked_patch import build_masked_patch
from shardvit.pipeline.budget.cost import stage_cost
from shardvit.pipeline.recipe.schema import EngineConfig
from shardvit.pipeline.recipe.stages.pretraining import MaskedAutoencoderStage, MaskedPatchStage
from tests.pipeline.budget.planning import forecast, recipe
from tests.small_recipe import small_stage

SMALL: dict[str, Any] = {"width": 64, "depth": 2, "heads": 2, "patch_size": 4}


def masked_stage(image_size: int) -> MaskedPatchStage:
    return MaskedPatchStage.model_validate(small_stage(image_size=image_size))


@pytest.mark.parametrize("pool", ["cls", "map"])
def test_masked_patch_prediction_costs_what_torch_counts(pool: Any):
    config, size = ModelConfig(**SMALL, pool=pool), 32
    patches = config.grid_size(size) ** 2
    with torch.device("meta"):
        model = build_masked_patch(config, image_size=size).train()
        images = torch.empty(1, 3, size, size)
        source = torch.zeros(1, patches, dtype=torch.int64)
        corrupted = torch.zeros(1, patches // 2, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            model(images, source, corrupted).sum().backward()
    cost = stage_cost(config, stage=masked_stage(size), engine=EngineConfig(), num_classes=7)
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert cost.training_flops == pytest.approx(counter.get_total_flops(), rel=0.001)


@pytest.mark.parametrize(
    "more",
    [
        {"pool": "cls"},
        {"pool": "gap"},
        {"pool": "gap", "class_token": "kept", "final_norm": "pooled"},
        {"registers": 2, "qk_norm": "per_head", "mlp": "swiglu", "norm": "rms"},
        {"channels": 5},
    ],
)
def test_a_masked_autoencoder_costs_what_torch_counts(more: dict[str, Any]):
    """All but the one difference that 0.1 % allows: torch computes no gradient of the patches left out."""
    config, size = ModelConfig(**SMALL, **more), 32
    stage = MaskedAutoencoderStage.model_validate(
        small_stage(image_size=size, decoder={"width": 32, "depth": 3, "heads": 2}, mask_ratio=0.6)
    )
    with torch.device("meta"):
        model = build_masked_autoencoder(config, image_size=size, decoder=stage.decoder).train()
        images, order = torch.empty(1, config.channels, size, size), torch.zeros(1, 64, dtype=torch.int64)
        kept, hidden = order.tensor_split([25], dim=1)
        with FlopCounterMode(display=False) as counter:
            model(images, kept, hidden).sum().backward()
    cost = stage_cost(config, stage=stage, engine=EngineConfig(), num_classes=7)
    assert cost.tokens == 25 + model.num_prefix_tokens
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert cost.training_flops == pytest.approx(counter.get_total_flops(), rel=0.001)


@pytest.mark.parametrize("gelu", ["erf", "tanh"])
def test_a_masked_autoencoder_keeps_what_torch_keeps(gelu: Any):
    config, size = ModelConfig(**SMALL, gelu=gelu), 32
    stage = MaskedAutoencoderStage.model_validate(
        small_stage(image_size=size, decoder={"width": 32, "depth": 3, "heads": 2})
    )
    model = build_masked_autoencoder(config, image_size=size, decoder=stage.decoder).train()
    order = torch.arange(64).expand(4, -1)
    kept, held = dict[int, torch.Tensor](), {each.data_ptr() for each in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held and tensor.is_floating_point():
            kept[storage.data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        predicted = model(torch.randn(4, 3, size, size), order[:, :16], order[:, 16:])
    cost = stage_cost(config, stage=stage, engine=EngineConfig(precision="fp32"), num_classes=7)
    assert predicted.shape == (4, 48, 48)
    found = sum(each.untyped_storage().nbytes() for each in kept.values()) / 4
    assert cost.activation_bytes == pytest.approx(found, rel=0.06)


def test_the_head_is_the_stages():
    linear, mlp = (forecast(recipe("B/16", stage={"head": head}), classes=10).cost for head in ("linear", "mlp"))
    assert mlp.parameters - linear.parameters == 768 * 769
    many = forecast(recipe("B/16"), classes=21_841).cost
    assert many.parameters - linear.parameters == (21_841 - 10) * 769


def test_a_pure_resnet_has_no_tokens_and_its_units_as_depth():
    cost = forecast(recipe("R50x1")).cost
    assert (cost.tokens, cost.depth) == (0, 16)
    assert 0 < cost.working_bytes < cost.checkpointed_activation_bytes < cost.activation_bytes
