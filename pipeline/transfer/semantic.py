"""Find semantic duplicates of a set: images whose features of a given model are alike, as SemDeDup (arXiv 2303.09540).

Features (see `features`) are clustered by scikit-learn's MiniBatchKMeans, about 1,000 images a cluster, seed 0, and
compared by cosine within clusters alone, so pairs on both sides of a border are missed. Each image is listed with the
most alike earlier one; leaving out all that are listed keeps the first of each chain. Costs reading the features twice,
as many bytes of disk again, and memory for 16,384 images or a 256th of the set. Numbers round as the features do.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardvit.data_shards.checking.near_duplicates.fingerprint import ShardImages
from shardvit.data_shards.checking.near_duplicates.matches import Match, Matches
from shardvit.data_shards.errors import UserError
from shardvit.data_shards.shards.shard_set import ShardSet
from shardvit.data_shards.store.store import Store
from shardvit.pipeline.transfer.features import Features, FeatureStore

_CLUSTER_IMAGES = 1000
_MOST_CLUSTERS = 8192
_FILES = 256
_ROWS_AT_ONCE = 1024


def semantic_matches(features: FeatureStore, shards: ShardSet, *, similar: float, store: Store) -> Matches:
    """Find images with a cosine of `similar` or more to an earlier one of their cluster. UserError as `features`."""
    from sklearn.cluster import MiniBatchKMeans

    number = max(1, min(_MOST_CLUSTERS, shards.num_samples // _CLUSTER_IMAGES))
    kmeans = MiniBatchKMeans(number, init="random", random_state=0)
    found: list[Match] = []
    damaged = width = 0
    with tempfile.TemporaryDirectory(prefix="shardvit-semantic-") as scratch:
        for part in features.blocks(shards, store=store):
            damaged += len(part.damaged)
            if len(part.samples) >= number:  # only the last one may have fewer
                width = part.values.shape[1]
                kmeans.partial_fit(_units(part))
        if not width:
            raise UserError(f"{shards.source}: hardly any image can be read: check it with --decode")
        files = [f"{scratch}/{each}" for each in range(min(number, _FILES))]
        for part in features.blocks(shards, store=store):
            rows = np.empty(len(part.samples), _row(width))
            rows["image"], rows["values"] = part.samples, _units(part)
            rows["cluster"] = kmeans.predict(rows["values"]) if len(rows) else 0
            for each, path in enumerate(files):
                with open(path, "ab") as file:
                    file.write(rows[rows["cluster"] % len(files) == each].tobytes())
        for path in files:
            rows = np.fromfile(path, _row(width))
            for cluster in np.unique(rows["cluster"]):
                found += _alike(rows[rows["cluster"] == cluster], similar)
    found.sort(key=lambda match: (-match.likeness, match.image))
    images = ShardImages(shards, store, damaged="report")
    return Matches(images, (images,), tuple(found), {images.name: damaged} if damaged else {})


def _alike(rows: NDArray[Any], similar: float) -> Iterator[Match]:
    """Compare the rows of one cluster, ordered by image."""
    images, values = rows["image"], np.ascontiguousarray(rows["values"])
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        end = min(len(rows), start + _ROWS_AT_ONCE)
        cosines = values[start:end] @ values[:end].T
        cosines[np.arange(end) >= np.arange(start, end)[:, None]] = -2  # earlier ones alone
        nearest = cosines.argmax(axis=1)
        for row in np.flatnonzero(cosines.max(axis=1) >= similar):
            image, other = int(images[start + row]), int(images[nearest[row]])
            yield Match(image, other, 0, "semantic", round(float(cosines[row, nearest[row]]), 4), mirrored=False)


def _units(part: Features) -> NDArray[np.float32]:
    values = part.values.numpy()
    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)


def _row(width: int) -> np.dtype[Any]:
    return np.dtype([("image", np.int64), ("cluster", np.int32), ("values", np.float32, width)])
