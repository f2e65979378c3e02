"""What the tests of transfer share: digits in shards, a small model with either head, and what it computes of them."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardvit.data_shards.packing.pack import pack
from shardvit.data_shards.reading.opening import open_shards
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.shards.tar_index import index_path, read_index
from shardvit.model.config import ModelConfig
from shardvit.model.saved.model_folder import SavedModelMeta, build_described, save_model
from shardvit.model.vocabulary import HeadKind
from shardvit.pipeline.transfer.features import FeatureStore
from shardvit.pipeline.using.predict import Predictor, open_predictor

SIZE, CLASSES = 8, 4


def pack_digits(folder: Path, *, seed: int = 0) -> Path:
    """Four digits, 30 % held out, in shards of 60."""
    classes = tuple(map(str, range(CLASSES)))
    pack("digits", folder, classes=classes, holdout=0.3, samples_per_shard=60, seed=seed, report=lambda line: None)
    return folder


def save_small(folder: Path, *, head: HeadKind = "linear", seed: int = 0) -> Path:
    """A model with random weights, of ten classes of its own."""
    config = ModelConfig(width=16, depth=1, heads=2, patch_size=4)
    names = tuple(f"class{number}" for number in range(10))
    meta = SavedModelMeta(model=config, image_size=SIZE, num_classes=10, class_names=names, head=head)
    model = build_described(meta)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save_model(folder, model.state_dict(), meta=meta)
    return folder


def open_small(folder: Path) -> Predictor:
    return open_predictor(folder, device="cpu")


def store_for(
    predictor: Predictor, folder: Path, *, batch_images: int = 16, workers: int = 0, **more: object
) -> FeatureStore:
    return FeatureStore(predictor, folder=folder, batch_images=batch_images, workers=workers, **more)  # pyright: ignore[reportArgumentType]


def digits(folder: Path, split: str) -> ShardSet:
    return open_shards(str(folder / split), damaged="report")


def damage(shards: ShardSet, sample: int) -> bytes:
    """Make an image unreadable; returns the tar as it was."""
    ends = np.cumsum(shards.shard_sizes)
    number = int(np.searchsorted(ends, sample, side="right"))
    sample -= int(ends[number]) - shards.shard_sizes[number]
    tar = Path(shards.shards[number].url)
    before = tar.read_bytes()
    index = read_index(index_path(tar))
    content = bytearray(before)
    start, size = int(index.image_offset[sample]), int(index.image_size[sample])
    content[start : start + size] = bytes(size)
    tar.write_bytes(content)
    return before


def trunk_output(predictor: Predictor, images: Tensor) -> Tensor:
    """By timm's own functions."""
    model = predictor.logits
    assert isinstance(model, torch.nn.Module)
    with torch.inference_mode():
        return model.forward_head(model.forward_features(images), pre_logits=True)  # pyright: ignore[reportCallIssue]
