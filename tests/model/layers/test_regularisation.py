"""`model.config` as the models apply it: dropout, stochastic depth, patch dropout."""

from typing import Any

import pytest
import torch
from timm.layers import DropPath
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from shardvit.model.config import ModelConfig, Regularisation
from shardvit.model.vit import build_model, timm_arguments
from shardvit.model.vocabulary import DropoutMasks, Pool
from tests.model.comparing import randomise

DEPTH, PATCHES = 4, 36


def _config(**more: Any) -> ModelConfig:
    return ModelConfig.model_validate({"width": 32, "depth": DEPTH, "heads": 2, "patch_size": 4} | more)


def _build(config: ModelConfig, **rates: float) -> Any:
    model = build_model(config, image_size=24, num_classes=3, head="linear", regularisation=Regularisation(**rates))
    return randomise(model)


def _drop_paths(model: nn.Module) -> dict[str, float]:
    return {name: module.drop_prob for name, module in model.named_modules() if isinstance(module, DropPath)}


@pytest.mark.parametrize("position", ["learned_1d", "learned_2d"])
def test_stochastic_depth_rises_linearly_as_timms(position: str) -> None:
    config = _config(position=position)
    ours = _drop_paths(_build(config, stochastic_depth=0.3))
    theirs = VisionTransformer(**timm_arguments(config, image_size=24), num_classes=3, drop_path_rate=0.3)
    assert ours == _drop_paths(theirs)
    for layer in range(1, DEPTH):  # the first block is never dropped, the last with the rate asked for
        for branch in (1, 2):
            assert ours[f"blocks.{layer}.drop_path{branch}"] == pytest.approx(0.3 * layer / (DEPTH - 1))
    assert len(ours) == 2 * (DEPTH - 1)


@pytest.mark.parametrize("masks", ["process", "sample"])
def test_uniform_stochastic_depth_has_one_rate_in_all_blocks(masks: DropoutMasks) -> None:
    """As facebookresearch/deit's models_v2.py: `dpr = [drop_path_rate for i in range(depth)]`."""
    by = Regularisation(stochastic_depth=0.3, masks=masks, depth_rule="uniform")
    model = build_model(_config(), image_size=24, num_classes=3, head="linear", regularisation=by)
    assert _drop_paths(model) == {f"blocks.{layer}.drop_path{side}": 0.3 for layer in range(DEPTH) for side in (1, 2)}
    off = Regularisation(depth_rule="uniform")
    assert not _drop_paths(build_model(_config(), image_size=24, num_classes=3, head="linear", regularisation=off))


def test_a_dropped_branch_is_missing_and_a_kept_one_larger() -> None:
    """With the last block's attention branch alone stochastic, each image gets it divided by the share kept, or not."""
    model = _build(_config(), stochastic_depth=0.5)
    block = model.blocks[DEPTH - 1]
    tokens = torch.randn(64, 5, 32)
    with torch.no_grad():
        branch = block.attn(block.norm1(tokens))
        torch.manual_seed(0)
        added = block.drop_path1(branch)
    dropped = (added == 0).all(dim=(1, 2))
    assert 10 < dropped.sum() < 54
    torch.testing.assert_close(added[~dropped], 2 * branch[~dropped])


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
@pytest.mark.parametrize("position", ["learned_1d", "learned_2d", "sincos_2d", "none"])
@pytest.mark.parametrize(("rate", "kept"), [(0.5, 18), (0.75, 9), (0.99, 1)])
def test_patch_dropout_keeps_the_class_token_and_as_many_patches(
    pool: Pool, position: str, rate: float, kept: int
) -> None:
    model = _build(_config(pool=pool, position=position), patch_dropout=rate)
    seen: list[Tensor] = []
    embedded: list[Tensor] = []
    model.patch_drop.register_forward_hook(lambda _, arguments, output: (embedded.append(arguments[0]), None)[1])
    model.blocks[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    prefix = int(pool == "cls")
    images = torch.randn(5, 3, 24, 24)

    logits = model.train()(images)
    assert logits.shape == (5, 3)
    (all_tokens,), (tokens,) = embedded, seen
    assert all_tokens.shape[1] == prefix + PATCHES and tokens.shape == (5, prefix + kept, 32)
    assert torch.equal(tokens[:, :prefix], all_tokens[:, :prefix])
    chosen = []
    for image in range(5):  # each is one of the image's embedded patches, with its own position, and none comes twice
        same = (tokens[image, prefix:, None] == all_tokens[image, None, prefix:]).all(dim=-1)
        assert (same.sum(dim=1) == 1).all() and same.sum(dim=0).max() == 1
        chosen.append(tuple(same.any(dim=0).tolist()))
    assert len(set(chosen)) > 1  # every image has its own

    model.eval()(images)
    assert seen[1].shape[1] == prefix + PATCHES


@pytest.mark.parametrize("rates", [{"dropout": 0.3}, {"stochastic_depth": 0.3}, {"patch_dropout": 0.3}])
def test_it_is_for_training_only_and_leaves_no_trace_in_the_state(rates: dict[str, float]) -> None:
    plain, model = _build(_config()), _build(_config(), **rates)
    assert {n: v.shape for n, v in model.state_dict().items()} == {n: v.shape for n, v in plain.state_dict().items()}
    images = torch.randn(4, 3, 24, 24)
    with torch.no_grad():
        assert torch.equal(model.eval()(images), plain.eval()(images))
        torch.manual_seed(0)
        assert (model.train()(images) - plain(images)).abs().max() > 1e-3


@pytest.mark.parametrize("position", ["learned_1d", "learned_2d", "relative", "sincos_2d", "none"])
def test_dropout_comes_between_the_stems_positions_and_the_first_block(position: str) -> None:
    model = _build(_config(position=position), dropout=0.5).train()
    seen: list[Tensor] = []
    model.pos_drop.register_forward_hook(lambda _, arguments, output: seen.extend((arguments[0], output)))
    model.blocks[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    model(torch.randn(4, 3, 24, 24))
    before, after, first = seen
    assert torch.equal(first, after)
    assert 0.4 < (after == 0).float().mean() < 0.6 and (before == 0).float().mean() < 0.01


def test_dropout_sites_of_a_relative_model_are_those_of_the_plain_one() -> None:
    def sites(position: str) -> dict[str, float]:
        model = _build(_config(position=position), dropout=0.3)
        return {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p}

    assert sites("relative") == sites("learned_1d")
    assert len(sites("relative")) == 1 + 3 * DEPTH


@pytest.mark.parametrize("rate", [-0.1, 1.0])
@pytest.mark.parametrize("name", ["dropout", "stochastic_depth", "patch_dropout"])
def test_rates_out_of_range_are_refused_in_words(name: str, rate: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 0 and below 1, not {rate}"):
        Regularisation(**{name: rate}).check(_config())


@pytest.mark.parametrize(
    "more", [{"position": "relative"}, {"position": "learned_2d", "position_at": "every_layer"}], ids=str
)
def test_patches_cannot_be_left_out_where_positions_come_later(more: dict[str, str]) -> None:
    Regularisation(dropout=0.1, stochastic_depth=0.1).check(_config(**more))
    with pytest.raises(ValueError, match="patch_dropout needs positions that are added once"):
        Regularisation(patch_dropout=0.5).check(_config(**more))


@pytest.mark.parametrize("name", ["dropout", "stochastic_depth", "patch_dropout"])
def test_a_pure_resnet_has_none_of_it(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not for a pure ResNet"):
        Regularisation(**{name: 0.1}).check(ModelConfig(resnet_layers=(1, 1)))
