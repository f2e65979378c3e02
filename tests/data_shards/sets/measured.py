"""Statistics of a packed split, for tests of what is made of them."""

import io

import numpy as np
from PIL import Image

from shardvit.data_shards.sets.statistics import SampleStatistics, image_statistics, to_parquet, write_statistics
from shardvit.data_shards.shards.manifest import Manifest
from shardvit.data_shards.store.folders import open_folder
from tests.data_shards.packing.folders import by_index


def measure(manifest: Manifest) -> None:
    """Write a split's `statistics.parquet` from its tars."""
    samples, parts = iter(by_index(manifest)), []
    for number, shard in enumerate(manifest.shards):
        rows = []
        for row in range(shard.num_samples):
            key, image, label = next(samples)
            pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB"))
            rows.append(SampleStatistics(row, key, None, [label], image_statistics(pixels, image)))
        parts.append((number, to_parquet(rows)))
    write_statistics(open_folder(manifest.root), manifest, parts)
