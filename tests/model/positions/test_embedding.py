"""`model.positions.embedding`: what each kind adds where, and relative attention by its formula."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import Attention
from torch import Tensor

from shardvit.model.config import ModelConfig
from shardvit.model.init import initialise
from shardvit.model.positions.embedding import (
    Learned1d,
    Learned2d,
    RelativeAttention,
    SinCos2d,
    by_key,
    make_position,
    relative_attention,
)
from shardvit.model.vit import build_model
from shardvit.model.vocabulary import Pool
from tests.model.comparing import randomise

GRID, WIDTH, DEPTH = 3, 8, 2


def _config(**more: Any) -> ModelConfig:
    return ModelConfig.model_validate({"width": WIDTH, "depth": DEPTH, "heads": 2, "patch_size": 4} | more)


@pytest.mark.parametrize("num_prefix_tokens", [0, 1])
def test_a_patch_gets_the_vector_of_its_column_and_then_that_of_its_row(num_prefix_tokens: int) -> None:
    table = Learned2d(GRID, WIDTH, num_prefix_tokens=num_prefix_tokens)
    randomise(table, scale=1.0)
    added = table(torch.zeros(2, num_prefix_tokens + GRID**2, WIDTH))
    for y in range(GRID):
        for x in range(GRID):
            patch = added[1, num_prefix_tokens + GRID * y + x]
            assert torch.equal(patch, torch.cat([table.column[x], table.row[y]]))
    if table.prefix is not None:
        assert torch.equal(added[0, 0], table.prefix[0])


@pytest.mark.parametrize("position", ["learned_1d", "learned_2d"])
@pytest.mark.parametrize("at", ["stem", "every_layer", "every_layer_shared"])
def test_a_class_token_without_position_is_left_alone(position: str, at: str) -> None:
    config = _config(position=position, position_at=at, class_token_position="none")
    made = make_position(config, grid_size=GRID, depth=DEPTH)
    randomise(made, scale=1.0)
    tokens = torch.randn(2, 1 + GRID**2, WIDTH)
    moved = made.at_stem(tokens) if at == "stem" else made.before_block(tokens, layer=1)
    assert torch.equal(moved[:, 0], tokens[:, 0]) and (moved[:, 1:] != tokens[:, 1:]).all()
    assert sum(parameter.numel() for parameter in made.tables[0].parameters()) == (
        WIDTH * GRID**2 if position == "learned_1d" else WIDTH * GRID
    )


@pytest.mark.parametrize("num_prefix_tokens", [0, 1])
def test_a_learned_1d_table_has_a_vector_for_each_token(num_prefix_tokens: int) -> None:
    table = Learned1d(num_prefix_tokens + GRID**2, WIDTH)
    randomise(table, scale=1.0)
    tokens = torch.randn(2, num_prefix_tokens + GRID**2, WIDTH)
    assert torch.equal(table(tokens), tokens + table.embedding)
    assert table.embedding.shape == (1, num_prefix_tokens + GRID**2, WIDTH)


def test_sincos_is_fixed_and_adds_nothing_to_the_class_token() -> None:
    table = SinCos2d(GRID, WIDTH, num_prefix_tokens=1)
    tokens = torch.randn(2, 1 + GRID**2, WIDTH)
    added = table(tokens) - tokens
    assert not added[:, 0].any()
    # at the origin all sines are 0 and all cosines 1; one step to the right changes the x half only
    torch.testing.assert_close(added[0, 1], torch.tensor([0.0, 0, 1, 1, 0, 0, 1, 1]), atol=1e-6, rtol=0)
    torch.testing.assert_close(added[0, 2, 4:], added[0, 1, 4:], atol=1e-6, rtol=0)
    expected = torch.tensor([1.0, 1e-4]).sin()
    torch.testing.assert_close(table.table[2, :2], expected)
    assert not list(table.parameters()) and not table.state_dict()


@pytest.mark.parametrize("position", ["learned_2d", "sincos_2d"])
def test_precision_follows_the_parameters(position: str) -> None:
    """Buffers that stay in float32 when parameters are lowered, as under ZeRO-3, do not raise what is computed."""
    made = make_position(_config(position=position), grid_size=GRID, depth=DEPTH)
    tokens = torch.randn(2, 1 + GRID**2, WIDTH).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made.at_stem(tokens).dtype == torch.float32
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16()
    assert made.at_stem(tokens).dtype == torch.bfloat16


@pytest.mark.parametrize("pool", ["cls", "gap"])
@pytest.mark.parametrize(
    ("position", "at"),
    [
        ("learned_1d", "every_layer"),
        ("learned_1d", "every_layer_shared"),
        ("learned_2d", "stem"),
        ("learned_2d", "every_layer"),
        ("learned_2d", "every_layer_shared"),
    ],
)
def test_where_a_learned_table_is_added(position: str, at: str, pool: Pool) -> None:
    model = build_model(_config(position=position, position_at=at, pool=pool), image_size=12, num_classes=3, head="mlp")
    randomise(model, scale=1.0)
    model.eval()
    tables = model.position.tables
    assert len(tables) == (DEPTH if at == "every_layer" else 1)
    images = torch.randn(2, 3, 12, 12)

    tokens = model.patch_embed(images)
    if model.cls_token is not None:
        tokens = torch.cat([model.cls_token.expand(2, -1, -1), tokens], dim=1)
    nothing = torch.zeros_like(tokens)
    if at == "stem":
        tokens = tokens + tables[0](nothing)
    for layer, block in enumerate(model.blocks):
        if at != "stem":
            tokens = tokens + tables[layer if at == "every_layer" else 0](nothing)
        tokens = block(tokens)
    torch.testing.assert_close(model.forward_features(images), model.norm(tokens))


def test_the_stem_may_be_timms() -> None:
    """Learned 1-D positions at the stem are timm's `pos_embed`; the same values in our table give the same logits."""
    standard = build_model(_config(), image_size=12, num_classes=3, head="linear")
    randomise(standard, scale=1.0)
    config = _config(position="none")
    ours = build_model(config, image_size=12, num_classes=3, head="linear")
    ours.load_state_dict({name: value for name, value in standard.state_dict().items() if name != "pos_embed"})
    images = torch.randn(2, 3, 12, 12)
    assert (ours(images) - standard(images)).abs().max() > 1e-3
    ours.position = make_position(_config(), grid_size=GRID, depth=DEPTH)
    ours.position.load_state_dict({"tables.0.embedding": standard.state_dict()["pos_embed"]})
    torch.testing.assert_close(ours(images), standard(images))


@pytest.mark.parametrize("position", ["none", "relative"])
def test_nothing_is_added_without_positions(position: str) -> None:
    made = make_position(_config(position=position), grid_size=GRID, depth=DEPTH)
    tokens = torch.randn(2, 1 + GRID**2, WIDTH)
    assert made.at_stem(tokens) is tokens
    assert made.before_block(tokens, layer=1) is tokens
    assert not made.state_dict()


@pytest.mark.parametrize("position", ["none", "learned_2d", "sincos_2d", "relative"])
def test_without_positions_and_only_then_the_order_of_patches_why(position: str) -> None:
    """With the mean as pooling, a network without positions is invariant under a permutation of the patches."""
    model = build_model(_config(position=position, pool="gap"), image_size=12, num_classes=3, head="mlp").eval()
    randomise(model, scale=1.0)
    images = torch.randn(2, 3, 12, 12)
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3)
    order = torch.tensor([4, 2, 7, 0, 8, 1, 3, 6, 5])
    shuffled = patches[:, :, order].unflatten(2, (GRID, GRID)).permute(0, 1, 2, 4, 3, 5).reshape(images.shape)
    with torch.no_grad():
        difference = (model(images) - model(shuffled)).abs().max()
    assert (difference < 1e-4) == (position == "none")


@pytest.mark.parametrize("position", ["learned_2d", "sincos_2d", "relative"])
def test_building_without_memory_and_copying(position: str) -> None:
    config = _config(position=position)
    with torch.device("meta"):
        shell = build_model(config, image_size=12, num_classes=3, head="mlp")
    assert all(value.is_meta for value in shell.state_dict().values())
    model = build_model(config, image_size=12, num_classes=3, head="mlp")
    assert {n: v.shape for n, v in shell.state_dict().items()} == {n: v.shape for n, v in model.state_dict().items()}
    initialise(model, seed=0)
    images = torch.randn(2, 3, 12, 12)
    assert torch.equal(copy.deepcopy(model)(images), model(images))


TOKENS, HEAD_WIDTH, HEADS = 7, 12, 3


def _attention() -> RelativeAttention:
    attention = relative_attention(TOKENS)(HEAD_WIDTH, num_heads=HEADS, qkv_bias=True)
    return randomise(attention, scale=0.5)


def _by_hand(attention: RelativeAttention, tokens: Tensor) -> np.ndarray:
    """Softmax over j of (q_i . k_j + q_i . r_(i-j)) / sqrt(d), number by number, in float64."""
    state = {name: value.double().numpy() for name, value in attention.state_dict().items()}
    x = tokens.double().numpy()
    size = HEAD_WIDTH // HEADS
    offsets = range(TOKENS - 1, -TOKENS, -1)  # i - j of the table's rows: from the first token seen by the last one
    embedding = dict(zip(offsets, state["relative"], strict=True))
    result = np.zeros_like(x)
    for image in range(len(x)):
        q, k, v = np.split(x[image] @ state["qkv.weight"].T + state["qkv.bias"], 3, axis=1)
        for head in range(HEADS):
            of_head = slice(head * size, (head + 1) * size)
            for i in range(TOKENS):
                logits = [
                    (q[i, of_head] @ k[j, of_head] + q[i, of_head] @ embedding[i - j]) / math.sqrt(size)
                    for j in range(TOKENS)
                ]
                weights = np.exp(logits) / np.exp(logits).sum()
                result[image, i, of_head] = sum(weights[j] * v[j, of_head] for j in range(TOKENS))
    return result @ state["proj.weight"].T + state["proj.bias"]


def test_equals_the_formula() -> None:
    attention = _attention()
    tokens = torch.randn(2, TOKENS, HEAD_WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = attention(tokens).numpy()
    theirs = _by_hand(attention, tokens)
    assert np.abs(theirs).mean() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_zero_table_is_timms_attention() -> None:
    attention = _attention()
    plain = Attention(HEAD_WIDTH, num_heads=HEADS, qkv_bias=True)
    plain.load_state_dict({name: value for name, value in attention.state_dict().items() if name != "relative"})
    tokens = torch.randn(2, TOKENS, HEAD_WIDTH)
    assert (attention(tokens) - plain(tokens)).abs().max() > 1e-2
    torch.nn.init.zeros_(attention.relative)
    torch.testing.assert_close(attention(tokens), plain(tokens))


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_logits_by_offset_become_logits_by_key(tokens: int) -> None:
    by_offset = torch.randn(2, 3, tokens, 2 * tokens - 1)
    ours = by_key(by_offset)
    assert ours.shape == (2, 3, tokens, tokens)
    for i in range(tokens):
        for j in range(tokens):
            assert torch.equal(ours[..., i, j], by_offset[..., i, tokens - 1 + j - i])


def test_gradients_reach_every_offset_and_are_right() -> None:
    attention = _attention().double()
    tokens = torch.randn(1, TOKENS, HEAD_WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(attention, (tokens,))
    table = attention.relative.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda relative: torch.func.functional_call(attention, {"relative": relative}, (tokens.detach(),)), (table,)
    )
    attention(tokens).square().sum().backward()
    assert attention.relative.grad is not None and attention.relative.grad.abs().amin(dim=1).min() > 0


@pytest.mark.parametrize(("pool", "tokens"), [("cls", 17), ("gap", 16), ("map", 16)])
def test_the_model_has_a_table_for_each_layer_over_all_its_tokens(pool: Pool, tokens: int) -> None:
    config = ModelConfig(width=32, depth=2, heads=2, patch_size=4, pool=pool, position="relative")
    model: Any = build_model(config, image_size=16, num_classes=3, head="linear")
    assert model.pos_embed is None
    tables = [block.attn.relative for block in model.blocks]
    assert [table.shape for table in tables] == [(2 * tokens - 1, 16)] * 2
    initialise(model, seed=0)
    assert not torch.equal(*tables)
    for table in tables:  # Tensor2Tensor: 1 / sqrt(head size)
        assert table.std().item() == pytest.approx(0.25, rel=0.15)


def test_bfloat16_follows_autocast() -> None:
    attention = _attention()
    tokens = torch.randn(2, TOKENS, HEAD_WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = attention(tokens)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), attention(tokens), rtol=0, atol=0.1)
