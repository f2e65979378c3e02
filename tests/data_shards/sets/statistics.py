"""Statistics of a packed split, measured by Pillow, for tests of what is made of them."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from shardvit.data_shards.shards.manifest import Manifest
from tests.data_shards.packing.folders import by_index


def write_statistics(manifest: Manifest) -> list[dict[str, object]]:
    """Write `statistics.parquet` as it is specified, as far as expressions of the tests need it; its rows."""
    places = [(shard, row) for shard, one in enumerate(manifest.shards) for row in range(one.num_samples)]
    seen: set[bytes] = set()
    rows: list[dict[str, object]] = []
    for (shard, row), (key, image, label) in zip(places, by_index(manifest), strict=True):
        width, height = Image.open(io.BytesIO(image)).size
        rows.append({"shard": shard, "row": row, "key": key, "labels": [label], "width": width, "height": height})
        rows[-1] |= {"bytes": len(image), "duplicate": image in seen}
        seen.add(image)
    pq.write_table(pa.Table.from_pylist(rows), manifest.root / "statistics.parquet", row_group_size=7)
    return rows
