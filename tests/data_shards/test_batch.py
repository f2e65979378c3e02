"""The last hop, against numpy."""

import numpy as np
import pytest
import torch

from data_shards.batch import Batch, model_input


def make_batch(images: np.ndarray, mirrored: list[bool]) -> Batch:
    n = len(images)
    return Batch(
        images=torch.from_numpy(images),
        mirrored=torch.tensor(mirrored),
        labels=torch.arange(n),
        counted=torch.ones(n, dtype=torch.bool),
        samples=torch.arange(n),
        epochs=torch.zeros(n, dtype=torch.int64),
        keys=tuple(map(str, range(n))),
    )


def expected_input(images: np.ndarray, mirrored: list[bool]) -> np.ndarray:
    flipped = np.stack([image[:, ::-1] if flip else image for image, flip in zip(images, mirrored, strict=True)])
    return ((flipped.astype(np.float32) - 127.5) / 127.5).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_input_is_scaled_flipped_and_channels_first(dtype: torch.dtype):
    images = np.random.default_rng(0).integers(0, 256, (5, 6, 6, 3), dtype=np.uint8)
    mirrored = [True, False, True, True, False]
    batch = make_batch(images, mirrored)
    result = model_input(batch, device=torch.device("cpu"), dtype=dtype)
    assert result.dtype == dtype and result.shape == (5, 3, 6, 6) and result.is_contiguous()
    expected = torch.from_numpy(expected_input(images, mirrored))
    torch.testing.assert_close(result, expected.to(dtype), rtol=0, atol=0)  # one rounding, from float32
    np.testing.assert_array_equal(batch.images.numpy(), images)  # the batch itself is left as it is


def test_every_byte_maps_into_minus_one_to_one():
    images = np.arange(256, dtype=np.uint8).repeat(3).reshape(1, 16, 16, 3)
    result = model_input(make_batch(images, [False]), device=torch.device("cpu"), dtype=torch.float32)
    levels = result[0, 0].flatten()
    assert levels[0] == -1 and levels[-1] == 1
    np.testing.assert_allclose(levels.numpy(), np.linspace(-1, 1, 256), rtol=0, atol=1e-7)


@pytest.mark.gpu
def test_pinned_batches_give_the_same_input_on_the_device():
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    batch = make_batch(images, [True, False, False, True])
    pinned = batch.pin_memory()
    assert pinned.images.is_pinned() and pinned.mirrored.is_pinned() and pinned.labels.is_pinned()
    assert pinned.counted.is_pinned() and pinned.keys == batch.keys
    on_device = model_input(pinned, device=torch.device("cuda"), dtype=torch.bfloat16)
    expected = model_input(batch, device=torch.device("cpu"), dtype=torch.bfloat16)
    torch.testing.assert_close(on_device.cpu(), expected, rtol=0, atol=0)
