"""Relative attention against loops over numbers, and timm's attention where it has nothing to add."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import Attention
from torch import Tensor

from model.config import ModelConfig
from model.init import initialise
from model.positions.embedding import RelativeAttention, by_key, relative_attention
from model.vit import build_model
from model.vocabulary import Pool
from tests.model.comparing import randomise

TOKENS, WIDTH, HEADS = 7, 12, 3


def _attention() -> RelativeAttention:
    attention = relative_attention(TOKENS)(WIDTH, num_heads=HEADS, qkv_bias=True)
    return randomise(attention, scale=0.5)


def _by_hand(attention: RelativeAttention, tokens: Tensor) -> np.ndarray:
    """Softmax over j of (q_i . k_j + q_i . r_(i-j)) / sqrt(d), number by number, in float64."""
    state = {name: value.double().numpy() for name, value in attention.state_dict().items()}
    x = tokens.double().numpy()
    size = WIDTH // HEADS
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
    tokens = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = attention(tokens).numpy()
    theirs = _by_hand(attention, tokens)
    assert np.abs(theirs).mean() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_zero_table_is_timms_attention() -> None:
    attention = _attention()
    plain = Attention(WIDTH, num_heads=HEADS, qkv_bias=True)
    plain.load_state_dict({name: value for name, value in attention.state_dict().items() if name != "relative"})
    tokens = torch.randn(2, TOKENS, WIDTH)
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
    tokens = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
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
    tokens = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = attention(tokens)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), attention(tokens), rtol=0, atol=0.1)
