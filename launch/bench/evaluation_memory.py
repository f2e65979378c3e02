"""Measure what an evaluation keeps of its batches until it ends: the bytes of all storages that its results reach.

A result that is a view of its batch keeps the whole batch, pixels too. Batches here are one storage each, as the
loader's are; the model's outputs are random. In this process, within a second.
"""

import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardvit.data_shards.loading.batch import Batch
from shardvit.data_shards.vocabulary import GOOGLES
from shardvit.model.loss import loss_function
from shardvit.pipeline.evaluation.evaluate import run_model
from shardvit.pipeline.stage.task import Classification

_CPU = torch.device("cpu")
_CLASSES, _SIZE = 1000, 32


def kept_bytes_per_image(*, batches: int = 20, images: int = 8) -> float:
    """Bytes kept an image, on the device and on the host."""
    engine: Any = types.SimpleNamespace(
        device=_CPU,
        input_dtype=torch.float32,
        module=types.SimpleNamespace(eval=lambda: None, train=lambda: None),
        predict=lambda pixels: torch.randn(len(pixels), _CLASSES),
    )
    task = Classification(
        engine=engine,
        classes=tuple(map(str, range(_CLASSES))),
        label_kind="single",
        normalisation=GOOGLES,
        train_loss=loss_function("softmax", label_smoothing=0.0),
        loss_kind="softmax",
    )
    faults: Any = types.SimpleNamespace(note=lambda *arguments, **options: None)
    kept = run_model(_batches(batches, images=images), task=task, faults=faults)
    return sum(dict(_storages(kept)).values()) / (batches * images)


def _batches(count: int, *, images: int) -> Iterator[Batch]:
    shape = (images, _SIZE, _SIZE, 3)
    sizes = [torch.Size(shape).numel(), 8 * images, images]
    for number in range(count):
        pixels, labels, mirrored = torch.zeros(sum(sizes), dtype=torch.uint8).split(sizes)
        yield Batch(
            images=pixels.view(shape),
            mirrored=mirrored.view(torch.bool),
            labels=labels.view(torch.int64),
            counted=torch.ones(images, dtype=torch.bool),
            substituted=torch.zeros(images, dtype=torch.bool),
            samples=torch.arange(images) + number * images,
            epochs=torch.zeros(images, dtype=torch.int64),
            keys=tuple(f"{number}/{row}" for row in range(images)),
        )


def _storages(value: Any) -> Iterator[tuple[int, int]]:
    """Yield address and bytes of each storage that `value` reaches."""
    if isinstance(value, Tensor):
        yield value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()
    elif isinstance(value, np.ndarray):
        yield from _storages(torch.from_numpy(value if value.base is None else value.base))
    elif is_dataclass(value):
        yield from _storages([getattr(value, each.name) for each in fields(value)])
    elif isinstance(value, dict):
        yield from _storages(list(value.values()))
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _storages(each)
