"""A model's features of a set of shards, cached on disk.

A folder for each (weights, model, preprocessing, shards, layer), named by their digest, holds parts of at most 16,384
samples. Parts are written whole: an interrupted command resumes, and a second method computes only what is missing.
Values do not depend on the data workers, and on the batch size only by rounding. Costs 4 KB a sample of 1,024 features;
above 20 GB the least recently used folders are removed. Damaged images are left out and named.

Images are chosen by hash of (seed, sample number): the 5 shots are among the 10 shots, and the next image of its class
replaces a damaged one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shardvit.data_shards.durable import replaced
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images.decode import USUAL_LIMIT, PixelLimit
from shardvit.data_shards.images.transforms import EvalTransform
from shardvit.data_shards.loading.assemble import Access
from shardvit.data_shards.loading.batch import Batch, Fault
from shardvit.data_shards.loading.device_prefetch import Batches, prefetch_to_device
from shardvit.data_shards.loading.loader import EvalBatches, eval_batches
from shardvit.data_shards.order.randomness import hash_words
from shardvit.data_shards.reading.shard_reader import UNKNOWN
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.store.store import Store
from shardvit.data_shards.vocabulary import GOOGLES, Normalisation, RandomStream
from shardvit.model.layers.head import MlpHead
from shardvit.pipeline.kernels.settle import fp32_products
from shardvit.pipeline.ranks.start_clock import StartClock
from shardvit.pipeline.recipe.vocabulary import FeatureLayer
from shardvit.pipeline.stage.pixels import model_input
from shardvit.pipeline.using.predict import Predictor, channels_of

_FORMAT = 1
_PART_SAMPLES = 16_384
_MOST_BYTES = 20 * 10**9
_OURS = re.compile("[0-9a-f]{32}")  # the folder may hold other files


@dataclass(frozen=True)
class Features:
    """Features of the readable samples, ordered by sample number."""

    samples: Int64s  # [n], ascending
    values: torch.Tensor  # float32 [n, D]
    labels: torch.Tensor  # int64 [n]
    damaged: Int64s  # the unreadable samples
    faults: tuple[Fault, ...] = ()  # damaged samples met in this process

    def rows_of(self, samples: Int64s) -> torch.Tensor:
        """Return the rows of these samples, int64; all must be present."""
        return torch.from_numpy(np.searchsorted(self.samples, samples))

    def take(self, samples: Int64s) -> Features:
        rows = self.rows_of(np.sort(samples))
        return Features(self.samples[rows.numpy()], self.values[rows], self.labels[rows], self.damaged, self.faults)


class FeatureStore:
    """Features of one model, computed unless `folder` has them; UserError for an ONNX file.

    `digest` is the weights'; `forward_passes` counts the batches computed so far.
    """

    def __init__(
        self,
        predictor: Predictor,
        *,
        layer: FeatureLayer = "pre_logits",
        folder: Path | None = None,
        batch_images: int = 64,
        workers: int = 4,
        pixel_limit: PixelLimit = USUAL_LIMIT,
        say: Callable[[str], None] = lambda line: None,
        clock: StartClock | None = None,
    ) -> None:
        if not isinstance(predictor.logits, nn.Module):
            raise UserError(
                f"{predictor.origin} is an ONNX file, whose features before the head cannot be seen: give "
                "the model that it was exported from"
            )
        self.predictor, self._say, self.clock = predictor, say, clock or StartClock()
        self.layer: FeatureLayer = layer
        self._model = predictor.logits
        self._folder = folder or default_features_folder()
        self._batch_images, self._workers, self._pixel_limit = batch_images, workers, pixel_limit
        meta = predictor.meta
        self.transform = EvalTransform(meta.image_size, protocol=meta.eval_protocol, crop_share=meta.eval_crop_share)
        self.digest = state_digest(self._model)
        self.forward_passes = 0

    def features(self, shards: ShardSet, *, store: Store | None = None, samples: Int64s | None = None) -> Features:
        """Features of all samples of a set, or of `samples`. UserError if features are not finite, a shard is gone or
        no image is readable; OSError if the disk fails."""
        wanted = np.arange(shards.num_samples) if samples is None else np.unique(samples)
        folder = self._folder / self._key(shards)
        known = [part for file in sorted(folder.glob("*.npz")) if (part := _read(file)) is not None]
        there = np.concatenate([np.zeros(0, dtype=np.int64), *(each.samples for each in known)])
        missing = np.setdiff1d(wanted, there)  # damaged ones included: they may have been repaired
        if len(missing):
            folder.mkdir(parents=True, exist_ok=True)
            self._say(f"{shards.source}: features of {len(missing):,} images")
        else:
            with suppress(OSError):
                os.utime(folder)  # marks the last use
        for start in range(0, len(missing), _PART_SAMPLES):
            part = self._compute(shards, store=store, samples=missing[start : start + _PART_SAMPLES])
            if len(part.samples):
                _write(folder / f"{_digest(part.samples.tobytes())}.npz", part)
            known.append(part)
        if len(missing):
            _remove_old(self._folder, keep=folder)
        return _joined(known, wanted, source=shards.source)

    def blocks(self, shards: ShardSet, *, store: Store | None = None) -> Iterator[Features]:
        """Yield the features of 16,384 samples after the other, some perhaps damaged; UserError as `features`."""
        folder = self._folder / self._key(shards)
        for start in range(0, shards.num_samples, _PART_SAMPLES):
            samples = np.arange(start, min(start + _PART_SAMPLES, shards.num_samples))
            file = folder / f"{_digest(samples.tobytes())}.npz"
            part = _read(file)
            if part is None:
                folder.mkdir(parents=True, exist_ok=True)
                part = self._compute(shards, store=store, samples=samples)
                _write(file, part)
            yield replace(part, damaged=np.setdiff1d(samples, part.samples))

    def _key(self, shards: ShardSet) -> str:
        meta = self.predictor.meta
        about = meta.model_dump(mode="json", include={"model", "image_size", "head", "mean", "std"})
        shown = [self.transform.protocol, self.transform.crop_share]
        return _digest(json.dumps([_FORMAT, self.digest, about, shown, self.layer, shards.digest]).encode())

    def _compute(self, shards: ShardSet, *, store: Store | None, samples: Int64s) -> Features:
        channels = channels_of(shards, self.predictor.meta)
        access = Access(shards, store=store, pixel_limit=self._pixel_limit, on_corrupt="substitute", channels=channels)
        part = EvalBatches(
            access, transform=self.transform, rank=0, world_size=1, batch_size=self._batch_images, samples=samples
        )
        meta, parts, status = self.predictor.meta, list[Features](), f"computing features of {shards.source}"
        found = extract(
            eval_batches(part, workers=self._workers, kind="thread"),
            model=self._model,
            forward=self._forward,
            layer=self.layer,
            device=self.predictor.device,
            dtype=torch.float32,
            normalisation=Normalisation(mean=meta.mean, std=meta.std),
        )
        with closing(found):
            self.clock.set_status(status, f"0 of {len(samples):,} images")
            for each in found:
                if not each.values.isfinite().all():
                    raise UserError(
                        f"{self.predictor.origin}: the model's features are not finite: its weights are damaged"
                    )
                parts.append(each)
                done = sum(len(one.samples) for one in parts)
                self.clock.set_status(status, f"{done:,} of {len(samples):,} images")
        return merged(parts, samples=samples)

    @torch.inference_mode()
    def _forward(self, images: torch.Tensor) -> None:
        with fp32_products("ieee"):
            self._model(images)
        self.forward_passes += 1


def extract(
    batches: Batches,
    *,
    model: nn.Module,
    forward: Callable[[torch.Tensor], object],
    layer: FeatureLayer,
    device: torch.device,
    dtype: torch.dtype,
    normalisation: Normalisation = GOOGLES,
) -> Generator[Features]:
    """Yield each batch's features, captured while `forward` runs `model` on its images."""
    with (
        closing(prefetch_to_device(batches, device=device)) as ready,
        captured_features(model, layer=layer) as captured,
    ):
        for batch in ready:
            forward(model_input(batch, device=device, dtype=dtype, normalisation=normalisation))
            yield of_batch(batch, captured.pop())


def shot_features(
    labels: Int64s, *, shots: int, seeds: int, features_of: Callable[[Int64s], Features]
) -> tuple[Features, dict[int, Int64s]]:
    """Return the features of all seeds' shots, with all damage met, and the shots by seed. The next image of its class
    replaces a damaged one, whose label becomes UNKNOWN."""
    damaged, faults = [np.zeros(0, dtype=np.int64)], dict[tuple[str, str], Fault]()
    while True:
        by_seed = {seed: choose_shots(labels, shots=shots, seed=seed) for seed in range(seeds)}
        found = features_of(np.unique(np.concatenate([*by_seed.values()])))
        damaged.append(found.damaged)
        faults |= {(each.shard, each.key): each for each in found.faults}
        if not len(found.damaged):
            return replace(found, damaged=np.concatenate(damaged), faults=tuple(faults.values())), by_seed
        labels[found.damaged] = UNKNOWN


def of_batch(batch: Batch, features: torch.Tensor) -> Features:
    """The rows of a batch that count, on the CPU."""
    counted = batch.counted
    return Features(
        samples=batch.samples[counted].numpy(),
        values=features.float().cpu()[counted],
        labels=batch.labels.cpu()[counted],
        damaged=np.zeros(0, dtype=np.int64),
        faults=batch.faults,
    )


def merged(parts: list[Features], *, samples: Int64s) -> Features:
    """Merge and sort parts; samples missing from all are damaged."""
    numbers = np.concatenate([each.samples for each in parts])
    order = np.argsort(numbers, kind="stable")
    faults = {(each.shard, each.key): each for part in parts for each in part.faults}
    return Features(
        samples=numbers[order],
        values=torch.cat([each.values for each in parts])[order],
        labels=torch.cat([each.labels for each in parts])[order],
        damaged=np.setdiff1d(samples, numbers),
        faults=tuple(faults.values()),
    )


def state_digest(model: nn.Module) -> str:
    """Digest names, dtypes and bytes of all weights; a second per GB."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def default_features_folder() -> Path:
    """Folder in the user's cache, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardvit" / "features"


def _joined(parts: list[Features], wanted: Int64s, *, source: str) -> Features:
    every = merged(parts, samples=wanted)
    here = np.isin(every.samples, wanted)
    if not here.any():
        why = f" ({every.faults[0].reason})" if every.faults else ""
        raise UserError(f"{source}: none of {len(wanted):,} images can be read{why}")
    return every.take(every.samples[here])


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _write(file: Path, part: Features) -> None:
    with replaced(file, sync="none", writers="several") as beside, beside.open("wb") as stream:
        np.savez(stream, samples=part.samples, values=part.values.numpy(), labels=part.labels.numpy())


def _read(file: Path) -> Features | None:
    """Read a part; remove it and return None if it is damaged."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as content:
            samples, values, labels = (content[name] for name in ("samples", "values", "labels"))
        if not len(samples) == len(values) == len(labels) or values.ndim != 2 or values.dtype != np.float32:
            raise ValueError("shapes that do not fit")
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        with suppress(OSError):
            file.unlink()
        return None
    return Features(samples, torch.from_numpy(values), torch.from_numpy(labels), damaged=np.zeros(0, dtype=np.int64))


def _remove_old(root: Path, *, keep: Path) -> None:
    """Remove least recently used folders of ours above the size limit."""
    with suppress(OSError):  # another process may be doing the same
        ours = [each for each in root.iterdir() if _OURS.fullmatch(each.name) and each.is_dir()]
        files = {each: list(each.glob("*.npz")) for each in ours}
        sizes = {each: sum(file.stat().st_size for file in files[each]) for each in ours}
        total = sum(sizes.values())
        for folder in sorted(ours, key=lambda each: each.stat().st_mtime):
            if total <= _MOST_BYTES:
                return
            if folder != keep:
                for file in files[folder]:
                    file.unlink(missing_ok=True)
                total -= sizes[folder]
                folder.rmdir()


@contextmanager
def captured_features(model: nn.Module, *, layer: FeatureLayer) -> Iterator[list[Tensor]]:
    """Yield a list to which each forward pass of `model` appends its features [n, D], also under ZeRO 3 or compiled.
    pre_logits: input of the last linear layer (big_vision's `pre_logits`; with the MLP head tanh of its hidden layer);
    pooled: input of the head."""
    head = model.get_submodule("head")
    last = head.logits if layer == "pre_logits" and isinstance(head, MlpHead) else head
    captured: list[Tensor] = []
    hook = last.register_forward_pre_hook(lambda module, inputs: captured.append(inputs[0].detach()))
    try:
        yield captured
    finally:
        hook.remove()


Int64s = NDArray[np.int64]


def choose_shots(labels: Int64s, *, shots: int, seed: int) -> Int64s:
    """Numbers of up to `shots` samples per class, by class, then in the order drawn; negative `labels` are skipped."""
    keys = hash_words(RandomStream.FEW_SHOT, seed, np.arange(len(labels)))
    order = np.lexsort((keys, labels))
    order = order[labels[order] >= 0]
    sorted_labels = labels[order]
    first_of_class = np.searchsorted(sorted_labels, sorted_labels, side="left")
    return order[np.arange(len(order)) - first_of_class < shots].astype(np.int64)


def choose_images(num_samples: int, *, most: int) -> Int64s:
    """Choose up to `most` samples, always the same; returns their numbers, ascending."""
    keys = hash_words(RandomStream.TRANSFER_IMAGES, 0, np.arange(num_samples))
    return np.sort(np.argsort(keys, kind="stable")[:most]).astype(np.int64)


def held_out_rows(samples: Int64s, *, share: float) -> NDArray[np.bool_]:
    """Mask, bool [n], of the samples that choose the regularisation: round(share * n), at least one, never all."""
    count = min(max(1, round(share * len(samples))), len(samples) - 1)
    keys = hash_words(RandomStream.TRANSFER_HOLD_OUT, 0, samples)
    chosen = np.zeros(len(samples), dtype=np.bool_)
    chosen[np.argsort(keys, kind="stable")[:count]] = True
    return chosen
