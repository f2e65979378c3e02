"""Masks are a function of (seed, step, place in the global batch, site), and look random across each of them."""

import dataclasses
import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, chi2_contingency

from shardvit.data_shards.loading.loader import Layout, TrainBatches
from shardvit.data_shards.order.randomness import hash_words
from shardvit.data_shards.vocabulary import RandomStream
from shardvit.launch.bench.operations import Operations
from shardvit.model.config import ModelConfig, Regularisation
from shardvit.model.layers.dropout import SampleDropout, SampleDropPath, SamplePatchDropout, SampleWords
from shardvit.model.vit import build_model
from shardvit.pipeline.recipe.optimizer import Schedule
from shardvit.pipeline.recipe.stage_plan import StagePlan
from shardvit.pipeline.stage.dropout_masks import draw_masks, sample_words, step_key

GLOBAL_BATCH, RATE = 24, 0.3
TOKENS, WIDTH = 13, 20
RARE = 1e-4  # of a p-value; seeds are fixed, so a test that passes once passes always


def _plan(world_size: int, micro_batch: int, *, seed: int = 5) -> StagePlan:
    return StagePlan(
        world_size=world_size,
        global_batch_images=GLOBAL_BATCH,
        micro_batch_size=micro_batch,
        accumulation_steps=GLOBAL_BATCH // world_size // micro_batch,
        lanes=GLOBAL_BATCH,
        total_steps=10,
        schedule=Schedule(),
        samples_per_epoch=100,
        seed=seed,
    )


@pytest.fixture(scope="module")
def engine() -> Any:
    by = Regularisation(0.2, 0.4, 0.5, masks="sample")
    config = ModelConfig(width=16, depth=3, heads=2, patch_size=4)
    model = build_model(config, image_size=16, num_classes=2, head="linear", regularisation=by)
    return SimpleNamespace(module=model.train(), device=torch.device("cpu"))


def _masked(engine: Any, plan: StagePlan, *, step: int) -> torch.Tensor:
    """What every module that draws makes of ones, sample after sample of the global batch: [24, ...] flattened."""
    found: list[torch.Tensor] = []
    for rank in range(plan.world_size):
        for micro_step in range(plan.accumulation_steps):
            draw_masks(engine, plan=plan, step=step, place=plan.first_place(rank=rank, micro_step=micro_step))
            ramp = torch.arange(1.0, 18.0)[None, :, None].expand(plan.micro_batch_size, 17, 16).contiguous()
            modules = [
                m for m in engine.module.modules() if type(m) in (SampleDropout, SampleDropPath, SamplePatchDropout)
            ]
            found.append(torch.cat([module(ramp).flatten(1) for module in modules], dim=1))
    return torch.cat(found)


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 8), (1, 1), (2, 12), (2, 3), (4, 6), (4, 2), (3, 4)])
def test_the_global_batch_has_the_same_masks_however_it_is_cut(engine: Any, world_size: int, micro_batch: int) -> None:
    whole = _masked(engine, _plan(1, GLOBAL_BATCH), step=3)
    assert torch.equal(_masked(engine, _plan(world_size, micro_batch), step=3), whole)
    assert len({tuple(row.tolist()) for row in whole}) == GLOBAL_BATCH  # each place has its own
    assert not torch.equal(_masked(engine, _plan(1, GLOBAL_BATCH), step=4), whole)
    assert not torch.equal(_masked(engine, _plan(1, GLOBAL_BATCH, seed=6), step=3), whole)


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 3), (2, 1), (4, 2)])
def test_places_are_the_loaders(world_size: int, accumulation: int) -> None:
    """The loader's own order is asked which places a micro-batch reads, with one lane for each place."""
    micro_batch = GLOBAL_BATCH // world_size // accumulation
    plan = _plan(world_size, micro_batch)
    order: Any = SimpleNamespace(
        global_batch_images=GLOBAL_BATCH,
        images_per_lane=1,
        resolve=lambda lane, position: SimpleNamespace(
            lane=lane, epoch=0 * lane, sample=lane, part=lambda own: lane[own]
        ),
    )
    for rank in range(world_size):
        batches = TrainBatches.__new__(TrainBatches)
        batches.order, batches.seed, batches._rows, batches._plans = order, 0, micro_batch, {}
        batches.layout = Layout(rank, world_size, micro_batch, accumulation)
        for number in range(3 * accumulation):
            first = plan.first_place(rank=rank, micro_step=number % accumulation)
            lanes: Any = batches.plan(number)[0]
            assert lanes.tolist() == list(range(first, first + micro_batch))


def _keep(*, seed: int = 1, step: int = 0, site: str = "blocks.0.mlp.drop1", places: int = 400) -> np.ndarray:
    """Which elements of each place are kept: bool [places, TOKENS * WIDTH]."""
    words = SampleWords()
    module = SampleDropout(RATE, words=words, name=site).train()
    drawn = sample_words(step_key(seed, step=step), sites=words.sites, places=torch.arange(places))
    words.give(drawn, step_word=1000 * seed + step)
    return (module(torch.ones(places, TOKENS, WIDTH)) != 0).flatten(1).numpy()


def _p_of_counts(dropped: np.ndarray, *, trials: int) -> float:
    expected = trials * RATE
    statistic = ((dropped - expected) ** 2 / (expected * (1 - RATE))).sum()
    return float(chi2.sf(statistic, dropped.size))


def test_the_share_that_is_dropped_is_the_rate_for_each_element_and_each_sample() -> None:
    dropped = ~_keep(places=4000)
    assert dropped.mean() == pytest.approx(RATE, abs=4 * (RATE * (1 - RATE) / dropped.size) ** 0.5)
    by_element = _p_of_counts(dropped.sum(axis=0), trials=dropped.shape[0])
    by_sample = _p_of_counts(dropped.sum(axis=1), trials=dropped.shape[1])
    # Neither too far from the binomial law nor, as evenly spread points would be, too near.
    assert RARE < by_element < 1 - RARE and RARE < by_sample < 1 - RARE


def _independent(left: np.ndarray, right: np.ndarray) -> float:
    """The p-value of the chi-square test on the table of two outcomes."""
    table = [[np.sum((left == a) & (right == b)) for b in (False, True)] for a in (False, True)]
    return float(chi2_contingency(table, correction=False).pvalue)


def test_samples_sites_steps_seeds_and_elements_are_independent() -> None:
    kept = _keep()
    pairs = {
        "samples": (kept[0::2], kept[1::2]),
        "the next sample's next element": (kept[:-1, :-1], kept[1:, 1:]),
        "elements": (kept[:, 0::2], kept[:, 1::2]),
        "tokens": (kept[:, :-WIDTH], kept[:, WIDTH:]),
        "steps": (kept, _keep(step=1)),
        "step and sample": (kept[1:], _keep(step=1)[:-1]),
        "sites": (kept, _keep(site="blocks.1.mlp.drop1")),
        "sites of a block": (kept, _keep(site="blocks.0.mlp.drop2")),
        "seeds": (kept, _keep(seed=2)),
    }
    for name, (left, right) in pairs.items():
        assert _independent(left, right) > RARE, name
    assert _independent(kept, kept) < RARE  # it can fail


def test_no_pair_of_samples_has_masks_that_resemble_one_another() -> None:
    """All 79,800 pairs of 400 samples: the numbers of common drops are spread as those of independent masks."""
    dropped = (~_keep(places=400)).astype(np.float64)
    size = dropped.shape[1]
    centred = (dropped - RATE) / (RATE * (1 - RATE)) ** 0.5
    correlations = (centred @ centred.T / size)[np.triu_indices(400, 1)]
    assert abs(correlations.mean()) < 4 * (len(correlations) * size) ** -0.5
    assert correlations.std() == pytest.approx(size**-0.5, rel=0.02)
    assert np.abs(correlations).max() < 6 * size**-0.5


def test_stochastic_depth_and_patch_dropout_have_their_rates() -> None:
    count = 4000
    words = SampleWords()
    path = SampleDropPath(RATE, words=words, name="a").train()
    patch = SamplePatchDropout(0.5, num_prefix_tokens=1, words=words, name="b").train()
    words.give(sample_words(step_key(3, step=7), sites=words.sites, places=torch.arange(count)), step_word=11)
    branch = path(torch.ones(count, 2, 3))
    dropped = (branch == 0).all(dim=(1, 2))
    assert ((branch == 0).any(dim=(1, 2)) == dropped).all() and branch[~dropped] == pytest.approx(1 / (1 - RATE))
    assert dropped.double().mean().item() == pytest.approx(RATE, abs=4 * (RATE * (1 - RATE) / count) ** 0.5)

    patches, kept = 12, 6
    tokens = torch.arange(1 + patches)[None, :, None].expand(count, 1 + patches, 2)
    left = patch(tokens)[:, 1:, 0].numpy() - 1
    for place in (0, kept - 1):  # the first and the last that stays: each patch equally often
        counts = np.bincount(left[:, place], minlength=patches)
        assert chi2.sf(((counts - count / patches) ** 2 / (count / patches)).sum(), patches - 1) > RARE
    stays = np.stack([(left == patch).any(axis=1) for patch in range(patches)]).astype(np.float64)
    pairs = (stays @ stays.T)[np.triu_indices(patches, 1)]
    expected = count * kept * (kept - 1) / (patches * (patches - 1))
    assert np.abs(pairs - expected).max() < 5 * expected**0.5


def test_words_do_not_depend_on_which_other_sites_and_places_are_asked_for() -> None:
    key = step_key(3, step=2)
    all_words = sample_words(key, sites=["a", "b", "c"], places=torch.arange(10))
    assert all_words.shape == (3, 10, 2) and all_words.dtype == torch.int32
    some = sample_words(key, sites=["c", "a"], places=torch.arange(4, 7))
    assert torch.equal(some, all_words[[2, 0], 4:7]) and all_words.unique().numel() == all_words.numel()
    # Frozen: a run that continues must draw what it would have drawn.
    first = sample_words(step_key(1, step=2), sites=["pos_drop"], places=torch.tensor([3]))
    assert first.tolist() == [[[-985400652, -1396839248]]]


@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**31), st.lists(st.text(), min_size=1))
def test_words_drawn_on_the_device_are_the_hosts_hash(seed: int, step: int, place: int, sites: list[str]) -> None:
    digests = [hashlib.blake2b(site.encode(), digest_size=8).digest() for site in sites]
    numbers = np.array([int.from_bytes(each, "little") for each in digests], dtype=np.uint64)[:, None]
    hashed = hash_words(RandomStream.DROPOUT_BY_SAMPLE, seed, step, numbers, np.arange(place, place + 3))
    drawn = sample_words(step_key(seed, step=step), sites=sites, places=torch.arange(place, place + 3))
    assert np.array_equal(drawn.numpy(), hashed.astype("<u8")[..., None].view("<i4"))


def _model(depth: int, *, dropout: float, stochastic_depth: float) -> Any:
    by = Regularisation(dropout, stochastic_depth, masks="sample")
    config = ModelConfig(width=16, depth=depth, heads=2, patch_size=4)
    return build_model(config, image_size=16, num_classes=2, head="linear", regularisation=by).train()


def _step(depth: int, *, images: int, rate: float, steps: int = 2, **to: Any) -> list[Operations]:
    """Operations of drawing, forward and backward pass in the last of some steps."""
    model = _model(depth, dropout=rate, stochastic_depth=rate).to(**to)
    weights = next(model.parameters())
    engine: Any = SimpleNamespace(module=model, device=weights.device)
    plan = dataclasses.replace(_plan(1, GLOBAL_BATCH), micro_batch_size=images)
    pixels = torch.randn(images, 3, 16, 16).to(weights)
    counts: list[Operations] = []
    for step in range(steps):
        drawing, forward, backward = counts = [Operations() for _ in range(3)]
        with drawing:
            draw_masks(engine, plan=plan, step=step, place=0)
        with forward:
            loss = model(pixels).square().mean()
        with backward:
            loss.backward()
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_uncompiled_block_has_five_operations_more_forwards_and_backwards(dtype: torch.dtype) -> None:
    """Three dropouts and two branches, however many images there are; drawing does not depend on the depth either."""

    def more(depth: int, *, images: int) -> list[int]:
        with_masks, plain = (_step(depth, images=images, rate=rate, dtype=dtype) for rate in (0.2, 0.0))
        return [ours.total - theirs.total for ours, theirs in zip(with_masks, plain, strict=True)]

    shallow, deep = more(2, images=3), more(4, images=3)
    assert more(4, images=24) == deep
    assert deep[0] == shallow[0] <= 35
    assert [(b - a) / 2 for a, b in zip(shallow[1:], deep[1:], strict=True)] == [5, 5]
    assert deep[1] - 5 * 4 <= 30 and deep[2] - 5 * 4 == 1  # T of two sizes; dropout before the blocks


def test_the_host_waits_for_no_gpu_after_the_first_step() -> None:
    """`meta` stands for a GPU: no copy to it, and nothing is read from it."""
    assert [each.num_waits for each in _step(2, images=3, rate=0.2, device="meta")] == [0, 0, 0]
    assert _step(2, images=3, rate=0.2, device="meta", steps=1)[0].num_waits > 0  # it can fail


def test_no_module_is_walked_in_a_step(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def walked(*_: Any) -> Any:
        raise AssertionError

    for name in ("modules", "named_modules", "children", "named_children"):
        monkeypatch.setattr(torch.nn.Module, name, walked)
    draw_masks(engine, plan=_plan(1, 8), step=1, place=0)
