"""Mixing is a function of (seed, step); its distribution is timm's, drawn from timm itself."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from timm.data.mixup import Mixup, cutmix_bbox_and_lam

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.loading import mixing
from shardvit.data_shards.loading.mixing import Mix, MixupConfig, draw_mix

law = settings(max_examples=50, deadline=None)  # a deadline measures how busy the machine is

ALPHAS = [0.2, 1.0, 4.0]


def draw_many(config: MixupConfig, *, count: int, seed: int = 3, image_size: int = 224) -> list[Mix]:
    mixes = [draw_mix(config, seed=seed, step=step, image_size=image_size) for step in range(count)]
    assert all(mixes)
    return [mix for mix in mixes if mix]


def keeps(mixes: list[Mix]) -> np.ndarray:
    return np.array([mix.keep for mix in mixes])


def timms_weights(alpha: float, *, count: int) -> np.ndarray:
    mixup = Mixup(mixup_alpha=alpha, cutmix_alpha=0.0, num_classes=2)
    return np.array([mixup._params_per_batch()[0] for _ in range(count)])


@pytest.fixture(autouse=True)
def _numpy_seed():
    """timm draws from numpy's global generator."""
    before = np.random.get_state()
    np.random.seed(0)
    yield
    np.random.set_state(before)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_mixups_weights_are_distributed_as_timms_folded_to_the_larger_part(alpha: float):
    mixes = draw_many(MixupConfig(mixup_alpha=alpha), count=3000)
    assert {mix.kind for mix in mixes} == {"mixup"} and {mix.box for mix in mixes} == {None}
    theirs = timms_weights(alpha, count=3000)
    assert stats.ks_2samp(keeps(mixes), np.maximum(theirs, 1 - theirs)).pvalue > 1e-3
    assert keeps(mixes).min() >= 0.5 and keeps(mixes).max() <= 1


@pytest.mark.parametrize("alpha", ALPHAS)
def test_cutmix_boxes_and_weights_are_distributed_as_timms(alpha: float):
    size, count = 64, 3000
    mixes = draw_many(MixupConfig(cutmix_alpha=alpha), count=count, image_size=size)
    assert {mix.kind for mix in mixes} == {"cutmix"}
    ours = np.array([(m.box.top, m.box.bottom, m.box.left, m.box.right) if m.box else (0, 0, 0, 0) for m in mixes])
    theirs = [cutmix_bbox_and_lam((3, size, size), np.random.beta(alpha, alpha)) for _ in range(count)]
    assert stats.ks_2samp(keeps(mixes), np.array([weight for _, weight in theirs])).pvalue > 1e-3
    their_boxes = np.array([box for box, _ in theirs])
    their_boxes[(their_boxes[:, 1] == their_boxes[:, 0]) | (their_boxes[:, 3] == their_boxes[:, 2])] = 0
    measures: list[Callable[[np.ndarray], np.ndarray]] = [
        lambda box: box[:, 1] - box[:, 0],
        lambda box: box[:, 3] - box[:, 2],
        lambda box: box[:, 0] + box[:, 1],
        lambda box: box[:, 2] + box[:, 3],
    ]
    for measure in measures:
        assert stats.ks_2samp(measure(ours), measure(their_boxes)).pvalue > 1e-3


@law
@given(st.floats(0, 1), st.integers(1, 500), st.floats(0, 1 - 2**-53), st.floats(0, 1 - 2**-53))
def test_a_box_is_timms_for_the_same_weight_and_place(weight: float, size: int, down: float, right: float):
    with pytest.MonkeyPatch.context() as patch:
        places = iter([int(down * size), int(right * size)])
        patch.setattr(np.random, "randint", lambda low, high, size: np.int64(next(places)))
        (top, bottom, left, right_end), keep = cutmix_bbox_and_lam((3, size, size), weight)
        patch.setattr(mixing, "_beta", lambda alpha, share: weight)
        patch.setattr(mixing, "uniforms", lambda *words, draws: np.array([[0.0, 0.0, down, right]]))
        mix = draw_mix(MixupConfig(cutmix_alpha=1.0), seed=0, step=0, image_size=size)
    assert mix is not None and mix.keep == pytest.approx(keep, abs=1e-15)
    if mix.box is None:
        assert mix.keep == 1 and (top == bottom or left == right_end)
    else:
        assert (mix.box.top, mix.box.bottom, mix.box.left, mix.box.right) == (top, bottom, left, right_end)


@law
@given(st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 600), st.floats(0.01, 10), st.floats(0.01, 10))
def test_the_weight_is_the_exact_share_of_pixels_that_stay(
    seed: int, step: int, size: int, mixup_alpha: float, cutmix_alpha: float
):
    mix = draw_mix(MixupConfig(mixup_alpha, cutmix_alpha), seed=seed, step=step, image_size=size)
    assert mix is not None and 0 <= mix.keep <= 1
    if mix.kind == "cutmix":
        canvas = np.ones((size, size))
        if mix.box:
            assert 0 <= mix.box.top < mix.box.bottom <= size and 0 <= mix.box.left < mix.box.right <= size
            canvas[mix.box.top : mix.box.bottom, mix.box.left : mix.box.right] = 0
        assert mix.keep == pytest.approx(canvas.mean(), abs=1e-12)
    else:
        assert mix.box is None and mix.keep >= 0.5


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_of_cutmix_where_both_are_on(share: float):
    mixes = draw_many(MixupConfig(mixup_alpha=0.8, cutmix_alpha=1.0, switch_share=share), count=2000)
    cuts = np.mean([mix.kind == "cutmix" for mix in mixes])
    assert abs(cuts - share) <= 4 * (share * (1 - share) / 2000) ** 0.5
    # The kind tells nothing about the weight.
    pasted = keeps([mix for mix in mixes if mix.kind == "cutmix"])
    if 0 < share < 1:
        alone = keeps(draw_many(MixupConfig(cutmix_alpha=1.0), count=2000, seed=4))
        assert stats.ks_2samp(pasted, alone).pvalue > 1e-3


@pytest.mark.parametrize("config", [None, MixupConfig(), MixupConfig(switch_share=1.0)])
def test_nothing_is_mixed_unless_wanted(config: MixupConfig | None):
    assert draw_mix(config, seed=0, step=0, image_size=32) is None


def test_it_is_a_function_of_seed_and_step():
    config = MixupConfig(mixup_alpha=0.8, cutmix_alpha=1.0)
    forwards = [draw_mix(config, seed=5, step=step, image_size=64) for step in range(50)]
    backwards = [draw_mix(config, seed=5, step=step, image_size=64) for step in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) > 45  # and steps differ
    assert forwards != [draw_mix(config, seed=6, step=step, image_size=64) for step in range(50)]
    np.testing.assert_allclose(  # runs must be able to continue after an update of scipy
        [draw_mix(MixupConfig(0.2), seed=0, step=step, image_size=64).keep for step in range(3)], KEPT, rtol=1e-9
    )


KEPT = [0.6297816027032814, 0.9999937717691906, 0.962922557172745]


@pytest.mark.parametrize(
    "values", [(-0.1, 0.0, 0.5), (0.0, float("inf"), 0.5), (float("nan"), 0, 0.5), (0.1, 0.1, 1.5)]
)
def test_numbers_that_mean_nothing_are_refused(values: tuple[float, float, float]):
    with pytest.raises(UserError, match=r"alpha|switch_share"):
        MixupConfig(*values)


def test_deciding_what_to_mix_needs_no_torch():
    script = (
        "import sys\nfrom shardvit.data_shards.loading.mixing import MixupConfig, draw_mix\n"
        "draw_mix(MixupConfig(0.2), seed=0, step=0, image_size=8)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240, cwd=Path(mixing.__file__).parents[2])


def test_a_share_of_the_batches_is_mixed_and_as_without_it():
    all_mixed, some = MixupConfig(0.8, 1.0), MixupConfig(0.8, 1.0, mixed_share=0.3)
    pairs = list(zip(draw_many(all_mixed, count=2000), draw_many(some, count=2000), strict=True))
    mixed = [ours == plain for plain, ours in pairs]
    assert {ours for plain, ours in pairs if ours != plain} == {Mix("none", keep=1.0)}
    assert stats.binomtest(sum(mixed), 2000, 0.3).pvalue > 1e-3
    with pytest.raises(UserError, match="mixed_share"):
        MixupConfig(0.8, mixed_share=1.5)
