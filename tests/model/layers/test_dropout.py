"""`model.layers.dropout`: a mask belongs to a sample's words, forwards, backwards and recomputed."""

from typing import Any

import pytest
import torch
from timm.layers import DropPath, PatchDropout
from torch import Tensor, nn

from shardvit.model.config import ModelConfig, Regularisation
from shardvit.model.layers import dropout
from shardvit.model.layers.dropout import SampleDropout, SampleWords, by_sample, drop, mix_words, signed, words_of
from shardvit.model.self_supervised.masked_patch import build_masked_patch
from shardvit.model.vit import build_model, checkpoint_blocks
from shardvit.model.vocabulary import Pool
from tests.model.comparing import randomise

RATES = {"dropout": 0.3, "stochastic_depth": 0.4, "patch_dropout": 0.5}
COUNT = 6


def _config(**more: Any) -> ModelConfig:
    return ModelConfig.model_validate({"width": 32, "depth": 3, "heads": 2, "patch_size": 4} | more)


def _build(config: ModelConfig | None = None, **rates: float) -> nn.Module:
    by = Regularisation(**(rates or RATES), masks="sample")
    return randomise(build_model(config or _config(), image_size=24, num_classes=3, head="linear", regularisation=by))


def _words(sites: int, *, count: int = COUNT, seed: int = 0) -> Tensor:
    return torch.randint(-(2**31), 2**31, (sites, count, 2), generator=torch.Generator().manual_seed(seed)).int()


def _give(model: nn.Module, words: Tensor, *, step_word: int = 9) -> None:
    shared = words_of(model)
    assert shared is not None
    shared.give(words, step_word=step_word)


def _sites(model: nn.Module) -> int:
    shared = words_of(model)
    assert shared is not None
    return len(shared.sites)


def test_a_samples_output_depends_on_its_words_alone_not_on_its_neighbours() -> None:
    model = _build().train()
    images, words = torch.randn(COUNT, 3, 24, 24), _words(_sites(model))

    def logits(rows: list[int]) -> Tensor:
        _give(model, words[:, rows])
        return model(images[rows])

    with torch.no_grad():
        whole = logits(list(range(COUNT)))
        for rows in ([0, 1, 2], [3], [5, 4], [2, 0, 4, 1]):
            torch.testing.assert_close(logits(rows), whole[rows], rtol=1e-5, atol=1e-6)
        _give(model, words, step_word=10)  # another step has other masks ...
        assert ((model(images) - whole).abs().amax(dim=1) > 1e-3).all()
        _give(model, _words(len(words), seed=1))  # ... and so have other words
        assert ((model(images) - whole).abs().amax(dim=1) > 1e-3).all()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_gradient_is_that_of_the_same_masks(checkpointed: bool) -> None:
    """Against autograd through explicit masks, which are read off the forward pass of ones."""
    model = _build(dropout=0.3, stochastic_depth=0.4).double().train()
    checkpoint_blocks(model, every=int(checkpointed))
    _give(model, _words(_sites(model)))
    images = torch.randn(COUNT, 3, 24, 24, dtype=torch.float64)
    model(images).square().sum().backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    for module in list(model.modules()):
        if isinstance(module, SampleDropout):
            module.forward = _explicit(module)  # pyright: ignore[reportAttributeAccessIssue]
    checkpoint_blocks(model, every=0)
    model(images).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, msg=name)


def _explicit(module: SampleDropout) -> Any:
    plain = module.forward
    return lambda x: x * plain(torch.ones_like(x)).detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_elements_are_divided_by_the_share_that_is_kept(dtype: torch.dtype) -> None:
    words = SampleWords()
    module = SampleDropout(0.3, words=words, name="a").train()
    words.give(_words(1, count=64), step_word=3)
    x = torch.randn(64, 50, 32).to(dtype)
    y = module(x)
    kept = y != 0
    assert 0.69 < kept.float().mean() < 0.71
    torch.testing.assert_close(y[kept], (x / 0.7)[kept])


@pytest.mark.parametrize(("rate", "share"), [(0.1, 0.1), (2.0**-33, 0.0), (1 - 2.0**-40, 1 - 2.0**-32)])
def test_the_rate_is_rounded_to_a_multiple_of_2_to_the_minus_32(rate: float, share: float) -> None:
    assert dropout.dropped_words(rate) / 2**32 == pytest.approx(share, abs=2.0**-33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("samples", [1, 4, COUNT])
def test_all_at_once_as_on_a_gpu_is_bit_for_bit_in_pieces(
    dtype: torch.dtype, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dropout, "_PIECE", samples * 56 + 55)
    x = torch.randn(COUNT, 7, 8).to(dtype)
    table = mix_words(torch.arange(56, dtype=torch.int32)).view(7, 8)
    factor, summand = (each.contiguous() for each in (_words(1)[0] | 1).unbind(dim=1))
    arguments = (x, table, factor, summand, dropout.dropped_words(0.3) - 2**31, 1 / 0.7)
    at_once, in_pieces = dropout._drop_at_once(*arguments), drop(*arguments)
    assert torch.equal(at_once, in_pieces) and (in_pieces == 0).any()

    def broken(function: Any, **_: Any) -> Any:
        def run(*_: Any) -> Tensor:
            raise RuntimeError("no C compiler")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    fused = dropout._fused.__wrapped__()
    with pytest.warns(UserWarning, match="uncompiled"):
        assert torch.equal(fused(*arguments), at_once)


def test_words_are_mixed_as_by_murmur_hash_3_and_none_comes_twice() -> None:
    def finaliser(word: int) -> int:
        word = ((word ^ word >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
        word = ((word ^ word >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
        return word ^ word >> 16

    words = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, 0xFFFFFFFF]
    mixed = mix_words(torch.tensor([signed(word) for word in words], dtype=torch.int32))
    assert mixed.tolist() == [signed(finaliser(word)) for word in words]
    assert mix_words(torch.arange(2**20, dtype=torch.int32)).unique().numel() == 2**20


def test_modules_names_and_rates_are_timms() -> None:
    kinds = (nn.Dropout, DropPath, PatchDropout)

    def rates(masks: Any) -> dict[str, object]:
        by = Regularisation(**RATES, masks=masks)
        model = build_model(_config(), image_size=24, num_classes=3, head="mlp", regularisation=by)
        found = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
        return {
            name: (rate, getattr(module, "num_prefix_tokens", None))
            for name, module in found.items()
            if (rate := next(getattr(module, key) for key in ("p", "drop_prob", "prob") if hasattr(module, key)))
        }

    assert rates("sample") == rates("process")
    assert len(rates("sample")) == 1 + 3 * 3 + 2 * 2 + 1


def test_without_rates_nothing_is_replaced_and_no_words_are_needed() -> None:
    model = _build(dropout=0.0)
    assert words_of(model) is None
    plain = randomise(build_model(_config(), image_size=24, num_classes=3, head="linear"))
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    by_sample(model)
    assert words_of(model) is None


def test_it_is_for_training_only_and_leaves_no_trace_in_the_state() -> None:
    plain, model = randomise(build_model(_config(), image_size=24, num_classes=3, head="linear")), _build()
    images = torch.randn(2, 3, 24, 24)
    assert model.state_dict().keys() == plain.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(model.eval()(images), plain.eval()(images))


def test_a_forward_pass_of_another_number_of_samples_is_refused() -> None:
    model = _build().train()
    with pytest.raises(RuntimeError, match="given for 0 samples"):
        model(torch.randn(2, 3, 24, 24))
    _give(model, _words(_sites(model)))
    with pytest.raises(RuntimeError, match=f"given for {COUNT} samples, and the forward pass has 2"):
        model(torch.randn(2, 3, 24, 24))


@pytest.mark.parametrize("pool", ["cls", "gap", "map"])
@pytest.mark.parametrize(("rate", "kept"), [(0.5, 18), (0.75, 9), (0.99, 1)])
def test_patch_dropout_keeps_the_class_token_and_as_many_patches(pool: Pool, rate: float, kept: int) -> None:
    model = _build(_config(pool=pool), patch_dropout=rate).train()
    _give(model, _words(_sites(model)))
    prefix = int(pool == "cls")
    tokens = torch.randn(COUNT, prefix + 36, 32)
    left = model.get_submodule("patch_drop")(tokens)
    assert left.shape == (COUNT, prefix + kept, 32) and torch.equal(left[:, :prefix], tokens[:, :prefix])
    same = (left[:, prefix:, None] == tokens[:, None, prefix:]).all(dim=-1)  # [n, kept, 36]
    assert (same.sum(dim=2) == 1).all() and same.sum(dim=1).max() == 1
    assert len({tuple(row.nonzero().flatten().tolist()) for row in same.any(dim=1)}) > 1


@pytest.mark.parametrize(
    "more", [{"resnet_layers": [1]}, {"position": "relative"}, {"position": "learned_2d"}], ids=str
)
def test_hybrids_other_positions_and_masked_patches_draw_by_sample_too(more: dict[str, Any]) -> None:
    by = Regularisation(dropout=0.2, stochastic_depth=0.2, masks="sample")
    config = _config(**more) if "resnet_layers" not in more else _config(**more, width=64)
    model = randomise(build_masked_patch(config, image_size=32, regularisation=by)).train()
    _give(model, _words(_sites(model), count=2))
    patches = config.grid_size(32) ** 2
    arguments = torch.randn(2, 3, 32, 32), torch.arange(patches).repeat(2, 1), torch.zeros(2, 1, dtype=torch.int64)
    with torch.no_grad():
        first = model(*arguments)
        torch.manual_seed(77)
        assert torch.equal(model(*arguments), first)
        _give(model, _words(_sites(model), count=2, seed=1))
        assert not torch.equal(model(*arguments), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_blocks_draw_the_same_bits_and_share_one_graph(dtype: torch.dtype) -> None:
    """Sites, rates of stochastic depth and words differ between blocks; none of them is part of the graph."""
    model = _build(dropout=0.3, stochastic_depth=0.4).to(dtype).train()
    graphs: list[torch.fx.GraphModule] = []

    def as_it_is(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    tokens = torch.randn(COUNT, 37, 32).to(dtype)
    for block in model.get_submodule("blocks").children():
        block.compile(fullgraph=True, dynamic=False, backend=as_it_is)
    for step in range(3):
        _give(model, _words(_sites(model), seed=step), step_word=2**32 - 1 - step)
        for block in model.get_submodule("blocks").children():
            x, y = (tokens.clone().requires_grad_() for _ in range(2))
            eager, ours = block.forward(x), block(y)
            assert torch.equal(eager, ours)
            eager.square().sum().backward()
            ours.square().sum().backward()
            torch.testing.assert_close(x.grad, y.grad)
    assert len(graphs) == 1


def test_stochastic_depth_has_a_place_in_every_block_and_its_first_one_drops_nothing() -> None:
    model = _build(stochastic_depth=0.4)
    sites = words_of(model)
    assert sites is not None and sum(".drop_path" in name for name in sites.sites) == 2 * 3
    _give(model.train(), _words(_sites(model)))
    first = model.get_submodule("blocks.0.drop_path1")
    x = torch.randn(COUNT, 3, 2)
    assert torch.equal(first(x), x)
