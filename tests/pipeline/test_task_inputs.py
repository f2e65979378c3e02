"""From uint8 pixels to the model's input, against numpy; and that what is mixed does not depend on who computes it."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data.mixup import mixup_target

from shardvit.data_shards.images.crops import Box
from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.loading.erasing import NOISE_PLACES, Erasure, normal_numbers
from shardvit.data_shards.loading.mixing import Mix, MixupConfig, draw_mix
from shardvit.data_shards.vocabulary import LabelKind
from shardvit.pipeline.stage.pixels import model_input, targets

law = settings(max_examples=60, deadline=None)  # a deadline measures how busy the machine is
CPU = torch.device("cpu")


def make_batch(
    images: np.ndarray, mirrored: list[bool], *, labels: torch.Tensor | None = None, mix: Mix | None = None
) -> Batch:
    n = len(images)
    return Batch(
        images=torch.from_numpy(images),
        mirrored=torch.tensor(mirrored),
        labels=torch.arange(n) if labels is None else labels,
        counted=torch.ones(n, dtype=torch.bool),
        substituted=torch.zeros(n, dtype=torch.bool),
        samples=torch.arange(n),
        epochs=torch.zeros(n, dtype=torch.int64),
        keys=tuple(map(str, range(n))),
        mix=mix,
    )


def random_batch(n: int, *, size: int = 6, seed: int = 0, mix: Mix | None = None) -> Batch:
    draw = np.random.default_rng(seed)
    images = draw.integers(0, 256, (n, size, size, 3), dtype=np.uint8)
    labels = torch.from_numpy(draw.integers(0, 5, n))
    return make_batch(images, draw.integers(0, 2, n).astype(bool).tolist(), labels=labels, mix=mix)


def rows(batch: Batch, wanted: list[int]) -> Batch:
    """Some rows of a batch."""
    names = [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), torch.Tensor)]
    parts = {name: getattr(batch, name)[wanted] for name in names}
    return replace(batch, **parts, keys=tuple(batch.keys[row] for row in wanted))


def expected_input(images: np.ndarray, mirrored: list[bool]) -> np.ndarray:
    flipped = np.stack([image[:, ::-1] if flip else image for image, flip in zip(images, mirrored, strict=True)])
    return ((flipped.astype(np.float32) - 127.5) / 127.5).transpose(0, 3, 1, 2)


# ---- images


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_input_is_scaled_flipped_and_channels_first(dtype: torch.dtype):
    images = np.random.default_rng(0).integers(0, 256, (5, 6, 6, 3), dtype=np.uint8)
    mirrored = [True, False, True, True, False]
    batch = make_batch(images, mirrored)
    result = model_input(batch, device=CPU, dtype=dtype)
    assert result.dtype == dtype and result.shape == (5, 3, 6, 6) and result.is_contiguous()
    expected = torch.from_numpy(expected_input(images, mirrored))
    torch.testing.assert_close(result, expected.to(dtype), rtol=0, atol=0)  # one rounding, from float32
    np.testing.assert_array_equal(batch.images.numpy(), images)  # the batch itself is left as it is


def test_every_byte_maps_into_minus_one_to_one():
    images = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    result = model_input(make_batch(images, [False]), device=CPU, dtype=torch.float32)
    levels = result[0, 0].flatten()
    assert levels[0] == -1 and levels[-1] == 1
    np.testing.assert_allclose(levels.numpy(), np.linspace(-1, 1, 256), rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixup_adds_the_next_row_after_flip_and_scaling(dtype: torch.dtype):
    batch = random_batch(5, mix=Mix("mixup", keep=0.7))
    own = expected_input(batch.images.numpy(), batch.mirrored.tolist())
    result = model_input(batch, device=CPU, dtype=dtype)
    assert result.shape == (4, 3, 6, 6) and result.dtype == dtype and result.is_contiguous()
    expected = own[:-1] * np.float32(0.7) + own[1:] * np.float32(1 - 0.7)
    torch.testing.assert_close(result, torch.from_numpy(expected).to(dtype), rtol=0, atol=0)  # one rounding


def test_cutmix_pastes_the_box_of_the_next_row_after_its_flip():
    box = Box(top=1, left=0, height=3, width=2)
    batch = random_batch(5, mix=Mix("cutmix", keep=1 - 6 / 36, box=box))
    own = expected_input(batch.images.numpy(), batch.mirrored.tolist())
    expected = own[:-1].copy()
    expected[:, :, 1:4, 0:2] = own[1:, :, 1:4, 0:2]
    np.testing.assert_array_equal(model_input(batch, device=CPU, dtype=torch.float32).numpy(), expected)


@pytest.mark.parametrize("mix", [Mix("mixup", keep=1.0), Mix("cutmix", keep=1.0), Mix("none", keep=1.0)])
def test_a_weight_of_one_leaves_the_images_and_labels(mix: Mix):
    batch = random_batch(5, mix=mix)
    plain = rows(replace(batch, mix=None), [0, 1, 2, 3])
    whole = model_input(plain, device=CPU, dtype=torch.float32)
    torch.testing.assert_close(model_input(batch, device=CPU, dtype=torch.float32), whole, rtol=0, atol=0)
    shares = targets(batch, device=CPU, num_classes=5, label_kind="single")
    torch.testing.assert_close(shares, torch.nn.functional.one_hot(plain.labels, 5).float(), rtol=0, atol=0)


ERASINGS = [
    Erasure(0, Box(top=1, left=2, height=3, width=4), "pixel", noise=77),
    Erasure(2, Box(top=0, left=0, height=6, width=2), "rand", noise=NOISE_PLACES - 1),
    Erasure(2, Box(top=4, left=1, height=2, width=5), "const", noise=5),
]


@pytest.mark.parametrize("mix", [None, Mix("mixup", keep=0.7)])
def test_rectangles_are_erased_after_flip_and_scaling_and_before_mixing(mix: Mix | None):
    batch = random_batch(4, mix=mix)
    own = expected_input(batch.images.numpy(), batch.mirrored.tolist())
    noise = normal_numbers(NOISE_PLACES + 108)
    own[0, :, 1:4, 2:6] = noise[77 : 77 + 36].reshape(3, 3, 4)
    own[2, :, :, :2] = noise[NOISE_PLACES - 1 : NOISE_PLACES + 2].reshape(3, 1, 1)
    own[2, :, 4:, 1:] = 0
    if mix is not None:
        own = own[:-1] * np.float32(0.7) + own[1:] * np.float32(1 - 0.7)
    found = model_input(replace(batch, erasures=tuple(ERASINGS)), device=CPU, dtype=torch.float32)
    np.testing.assert_array_equal(found.numpy(), own)


@law
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 1000),
    st.sampled_from([MixupConfig(0.4), MixupConfig(cutmix_alpha=1.0), MixupConfig(0.4, 1.0), None]),
    st.sampled_from(["single", "multi"]),
)
def test_any_cut_of_the_global_batch_gives_the_same_bits(
    parts: int, each: int, size: int, step: int, config: MixupConfig | None, kind: LabelKind
):
    """Each part has its own rows and the first of the next part; the last part has the first row of all."""
    mix = draw_mix(config, seed=1, step=step, image_size=size)
    slots = parts * each
    whole = random_batch(slots, size=size, seed=step, mix=mix)
    if kind == "multi":
        labels = torch.from_numpy(np.random.default_rng(step).integers(-1, 5, (slots, 3)))
        whole = replace(whole, labels=labels)

    def results(first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = [slot % slots for slot in range(first, stop + (mix is not None))]
        batch = rows(whole, wanted)
        images = model_input(batch, device=CPU, dtype=torch.bfloat16)
        return images, targets(batch, device=CPU, num_classes=5, label_kind=kind)

    images, wanted = results(0, slots)
    assert len(images) == len(wanted) == slots
    pieces = [results(part * each, (part + 1) * each) for part in range(parts)]
    torch.testing.assert_close(torch.cat([piece[0] for piece in pieces]), images, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([piece[1] for piece in pieces]), wanted, rtol=0, atol=0)


# ---- targets


def test_single_labels_stay_numbers_of_classes():
    batch = random_batch(6)
    result = targets(batch, device=CPU, num_classes=5, label_kind="single")
    assert result.dtype == torch.int64 and torch.equal(result, batch.labels)


def test_mixed_single_labels_are_timms():
    batch = random_batch(5, mix=Mix("mixup", keep=0.7))
    result = targets(batch, device=CPU, num_classes=5, label_kind="single")
    assert result.dtype == torch.float32 and result.shape == (4, 5)
    for row in range(4):  # timm mixes with the batch turned round: two rows at a time are ours
        pair = mixup_target(batch.labels[row : row + 2], 5, 0.7)
        torch.testing.assert_close(result[row], pair[0])
    torch.testing.assert_close(result.sum(dim=1), torch.ones(4))


def test_several_labels_become_ones_and_none_nothing():
    labels = torch.tensor([[3, 0, -1], [-1, -1, -1], [4, -1, -1], [1, 1, 2]])
    batch = replace(random_batch(4), labels=labels)
    result = targets(batch, device=CPU, num_classes=5, label_kind="multi")
    expected = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [0, 1, 1, 0, 0]]
    assert result.dtype == torch.float32 and result.is_contiguous()
    assert result.tolist() == expected
    mixed = targets(replace(batch, mix=Mix("mixup", keep=0.75)), device=CPU, num_classes=5, label_kind="multi")
    own = np.array(expected, dtype=np.float32)
    np.testing.assert_array_equal(mixed.numpy(), own[:-1] * 0.75 + own[1:] * 0.25)


def test_a_class_beyond_the_last_is_an_error():
    for kind, labels in (("single", torch.tensor([0, 7])), ("multi", torch.tensor([[0], [7]]))):
        batch = replace(random_batch(2, mix=Mix("mixup", keep=0.7)), labels=labels)
        with pytest.raises(RuntimeError, match="out of bounds"):
            targets(batch, device=CPU, num_classes=5, label_kind=kind)
