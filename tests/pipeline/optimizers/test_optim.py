"""Weight decay touches kernels alone, and every parameter is optimised exactly once."""

import re
from typing import Any

import pytest
import torch
from timm.optim import param_groups_layer_decay

from shardvit.data_shards.errors import UserError
from shardvit.model.config import DecoderConfig, ModelConfig
from shardvit.model.self_supervised.masked_autoencoder import build_masked_autoencoder
from shardvit.model.self_supervised.masked_patch import build_masked_patch
from shardvit.model.vit import build_model
from shardvit.pipeline.engine.saved_state.frozen import freeze
from shardvit.pipeline.optimizers.parameter_groups import parameter_groups
from shardvit.pipeline.recipe.optimizer import OptimizerConfig


@pytest.fixture(params=["mlp", "linear"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    config = ModelConfig(width=8, depth=2, heads=2, patch_size=4)
    return build_model(config, image_size=8, num_classes=3, head=request.param)


def groups_of(model: torch.nn.Module, **keys: Any) -> list[dict[str, Any]]:
    """The groups that the optimizer of these keys gets, without the names that go with the parameters."""
    groups = parameter_groups(model, OptimizerConfig(**{"name": "adamw", "lr": 0.1, "weight_decay": 0.1} | keys))
    return [{**group, "params": [parameter for _, parameter in group["params"]]} for group in groups]


def names(model: torch.nn.Module, parameters: Any) -> set[str]:
    wanted = {id(parameter) for parameter in parameters}
    return {name for name, parameter in model.named_parameters() if id(parameter) in wanted}


def rules(model: torch.nn.Module, **keys: Any) -> dict[str, tuple[float, float]]:
    """Each parameter's factor of the learning rate and its weight decay."""
    groups = parameter_groups(model, OptimizerConfig(**{"name": "adamw", "lr": 0.1, "weight_decay": 0.1} | keys))
    return {name: (group["lr_scale"], group["weight_decay"]) for group in groups for name, _ in group["params"]}


TRUNK: dict[str, Any] = {"width": 8, "depth": 3, "heads": 2, "patch_size": 4}


@pytest.mark.parametrize(
    "config", [TRUNK, {**TRUNK, "pool": "gap"}, {**TRUNK, "pool": "map"}, {"resnet_layers": [1, 2]}]
)
def test_layer_decay_and_the_mask_of_matrices_are_timms(config: dict[str, Any]):
    """Its own groups of the same model; a ResNet's first and last layers and each block between them are layers too."""
    model: Any = build_model(ModelConfig(**config), image_size=8, num_classes=3, head="linear")
    skipped = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    groups = param_groups_layer_decay(model, 0.1, no_weight_decay_list=skipped, layer_decay=0.6)
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    theirs = {known[id(p)]: (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    ours = rules(model, layer_decay=0.6, weight_decay_on="matrices")
    assert ours.keys() == theirs.keys()
    for name, rule in ours.items():
        assert rule == pytest.approx(theirs[name]), name


def test_layer_decay_by_depth(model: torch.nn.Module):
    """Two blocks: the embedding is three layers below the head, whether that has one layer or two."""
    expected = {"patch_embed": 3, "cls_token": 3, "pos_embed": 3, "blocks.0": 2, "blocks.1": 1, "norm": 1, "head": 0}
    for name, (scale, _) in rules(model, layer_decay=0.5, head_lr_factor=4.0).items():
        layer = next(number for start, number in expected.items() if name.startswith(start))
        assert scale == 0.5**layer * (4.0 if layer == 0 else 1.0), name


@pytest.mark.parametrize("config", [{**TRUNK, "position": "learned_2d", "position_at": "every_layer"}, TRUNK])
def test_our_own_positions_and_the_mask_token_belong_to_the_embedding(config: dict[str, Any]):
    model = build_masked_patch(ModelConfig(**config), image_size=8)
    found = rules(model, layer_decay=0.5, weight_decay_on="matrices")
    own = {name for name in found if name.startswith(("position.", "pos_embed", "mask_token"))}
    assert len(own) >= 2 and {found[name] for name in own} == {(0.5**4, 0.0)}


def test_a_masked_autoencoder_decays_tokens_if_asked_to_and_has_its_decoder_at_the_top():
    config = ModelConfig(**TRUNK, registers=2)
    model = build_masked_autoencoder(config, image_size=8, decoder=DecoderConfig(width=16, depth=1, heads=2))
    tokens = {"cls_token", "reg_token", "decoder.mask_token"}
    for on, decay in (("kernels", 0.0), ("matrices", 0.0), ("matrices_and_tokens", 0.1)):
        found = rules(model, weight_decay_on=on)
        assert {found[name][1] for name in tokens} == {decay}, on
        kinds = {name: parameter.ndim >= 2 for name, parameter in model.named_parameters() if name not in tokens}
        assert all(found[name][1] == (0.1 if is_matrix else 0.0) for name, is_matrix in kinds.items()), on


def test_the_heads_decay_is_its_last_kernels_alone(model: torch.nn.Module):
    decays = {name: decay for name, (_, decay) in rules(model, head_weight_decay=10.0).items()}
    last = {"head.weight", "head.logits.weight"} & decays.keys()
    assert {name for name, decay in decays.items() if decay == 10.0} == last and len(last) == 1
    assert decays.get("head.pre_logits.weight", 0.1) == 0.1


def test_the_heads_decay_is_that_of_both_heads_beside_a_distillation_token():
    config = ModelConfig(**TRUNK, distillation_token="learned")
    pair = build_model(config, image_size=8, num_classes=3, head="linear")
    decays = {name: decay for name, (_, decay) in rules(pair, head_weight_decay=10.0).items()}
    assert {name for name, decay in decays.items() if decay == 10.0} == {"head.weight", "head.dist.weight"}


def test_decay_by_the_schedule_is_the_same_at_every_learning_rate(model: torch.nn.Module):
    keys: dict[str, Any] = {"weight_decay_unit": "schedule", "layer_decay": 0.5, "head_lr_factor": 3.0, "lr": 0.02}
    products = {round(scale * decay * 0.02, 9) for scale, decay in rules(model, **keys).values()}
    assert products == {0.0, 0.1}


@pytest.mark.parametrize(
    ("frozen", "still"),
    [
        (("trunk",), {"head.weight", "head.bias"}),
        (("head", "blocks.*", "norm.*", "patch_embedding"), {"cls_token", "pos_embed"}),
        (
            ("head", "blocks.*", "norm.*", "positions", "class_token"),
            {"patch_embed.proj.weight", "patch_embed.proj.bias"},
        ),
        (("*.weight", "*embed*"), {"cls_token", "norm.bias", "head.bias"}),
    ],
)
def test_parts_and_patterns_are_frozen(frozen: tuple[str, ...], still: set[str]):
    model = build_model(ModelConfig(**VIT), image_size=8, num_classes=3, head="linear")
    freeze(model, frozen, key="k")
    trained = {name for name in rules(model) if not name.startswith("blocks.")}
    assert (
        trained == still == {n for n, p in model.named_parameters() if p.requires_grad and not n.startswith("blocks.")}
    )


@pytest.mark.parametrize(
    ("frozen", "said"),
    [
        (("position",), "'position' is no part of this model: the nearest are positions"),
        (("block.0.attn.qkv.weight",), "blocks.0.attn.qkv.weight"),
        (("zzz",), "give trunk, head"),
        (("*",), "nothing is left to train"),
        (("trunk", "head.*"), "nothing is left to train"),
    ],
)
def test_a_name_that_freezes_nothing_or_everything_is_refused(frozen: tuple[str, ...], said: str):
    model = build_model(ModelConfig(**VIT), image_size=8, num_classes=3, head="linear")
    with pytest.raises(UserError, match="k: ") as caught:
        freeze(model, frozen, key="k")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_registers_and_learned_rotations_are_parts():
    config = ModelConfig(**VIT, registers=2, rope="mixed")
    model = build_model(config, image_size=8, num_classes=3, head="linear")
    freeze(model, ("registers", "positions"), key="k")
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"reg_token", "pos_embed", "blocks.0.attn.freqs", "blocks.1.attn.freqs"}


def test_the_nearest_parts_are_those_that_the_model_has():
    pooled = build_model(ModelConfig(**{**VIT, "pool": "gap"}), image_size=8, num_classes=3, head="linear")
    with pytest.raises(UserError, match="'class_token' is no part of this model") as caught:
        freeze(pooled, ("class_token",), key="k")
    assert "class_token" not in str(caught.value).partition("is no part")[2]


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    model[0].requires_grad_(requires_grad=False)
    (only,) = groups_of(model)
    assert only["params"] == [model[1].weight]


VIT: dict[str, Any] = {"width": 8, "depth": 2, "heads": 2, "patch_size": 4}
KERNELS = r"(attn\.qkv|attn\.proj|attn_pool\.(q|kv|proj)|mlp\.fc[12]|patch_embed\.proj|head|conv\d?)\.weight"


@pytest.mark.parametrize(
    ("config", "decayed", "left"),
    [
        (VIT, {"patch_embed.proj.weight"}, {"cls_token", "pos_embed", "norm.bias", "blocks.0.norm1.weight"}),
        ({**VIT, "resnet_layers": [1]}, {"patch_embed.backbone.stem.conv.weight"}, {"patch_embed.proj.bias"}),
        ({"resnet_layers": [1, 1]}, {"stages.0.blocks.0.conv2.weight", "head.weight"}, {"norm.weight", "norm.bias"}),
        ({**VIT, "pool": "gap", "layer_scale": 0.1}, {"head.weight"}, {"blocks.0.ls1.gamma", "pos_embed"}),
        ({**VIT, "pool": "map"}, {"attn_pool.kv.weight"}, {"attn_pool.latent", "attn_pool.norm.weight"}),
        (
            {**VIT, "position": "learned_2d", "position_at": "every_layer"},
            {"blocks.1.mlp.fc2.weight"},
            {"position.tables.0.row", "position.tables.1.column", "position.tables.0.prefix", "cls_token"},
        ),
        ({**VIT, "position_at": "every_layer_shared"}, {"head.weight"}, {"position.tables.0.embedding"}),
        ({**VIT, "position": "relative"}, {"blocks.0.attn.qkv.weight"}, {"blocks.0.attn.relative"}),
        (
            {**VIT, "registers": 2, "rope": "mixed", "qk_norm": "per_head", "mlp": "swiglu_norm", "norm": "rms"},
            {"blocks.0.mlp.fc1.weight"},
            {"reg_token", "blocks.0.attn.freqs", "blocks.1.attn.q_norm.weight", "blocks.0.mlp.norm.weight"},
        ),
    ],
)
def test_kernels_of_every_kind_of_model_decay_and_nothing_else(
    config: dict[str, Any], decayed: set[str], left: set[str]
):
    """Google's code decays what flax calls `kernel`: neither norms, biases, positions, tokens, probes nor scales."""
    model = build_model(ModelConfig(**config), image_size=8, num_classes=3, head="linear")
    kernels, others = groups_of(model)
    ours, rest = names(model, kernels["params"]), names(model, others["params"])
    assert decayed <= ours and left <= rest
    assert ours == {name for name in ours | rest if re.search(KERNELS + "$", name)}
    assert ours | rest == {name for name, _ in model.named_parameters()} and not ours & rest
