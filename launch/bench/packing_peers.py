"""One writer of another library, started by `packing` in a Python that need not have shardvit: METHOD PHOTOS OUT."""

import io
import os
import random
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

_PER_SHARD = 1000


def files(folder: str) -> list[tuple[str, int]]:
    """List (path, class number) in a random order, as a packer needs it."""
    names = sorted(os.listdir(folder))
    found = [
        (f"{folder}/{name}/{file}", at) for at, name in enumerate(names) for file in os.listdir(f"{folder}/{name}")
    ]
    random.Random(0).shuffle(found)
    return found


def images(folder: str, *, decodes: bool = True) -> Iterator[tuple[int, bytes, int]]:
    """Read each image, and decode it in full, so that none is packed that cannot be trained on."""
    from PIL import Image

    for number, (path, label) in enumerate(files(folder)):
        with open(path, "rb") as stream:
            data = stream.read()
        if decodes:
            with Image.open(io.BytesIO(data)) as image:
                image.load()
        yield number, data, label


def with_webdataset(folder: str, out: str, *, decodes: bool) -> None:
    """Write tars with webdataset's ShardWriter."""
    webdataset = import_module("webdataset")
    os.makedirs(out)
    with webdataset.ShardWriter(f"{out}/%06d.tar", maxcount=_PER_SHARD, verbose=0) as writer:
        for number, data, label in images(folder, decodes=decodes):
            writer.write({"__key__": f"{number:07d}", "jpg": data, "cls": label})


def with_mosaic(folder: str, out: str) -> None:
    """Write MDS shards with Mosaic's streaming."""
    streaming = import_module("streaming")
    columns = {"image": "bytes", "label": "int"}
    with streaming.MDSWriter(out=out, columns=columns, size_limit=1 << 27, hashes=["sha1"]) as writer:
        for _, data, label in images(folder):
            writer.write({"image": data, "label": label})


def with_ray(folder: str, out: str) -> None:
    """Shuffle with Ray Data, and write tars with its `write_webdataset`."""
    ray = import_module("ray")

    def opened(row: dict[str, Any]) -> dict[str, Any]:
        from PIL import Image

        with Image.open(io.BytesIO(row["bytes"])) as image:
            image.load()
        name = row["path"].rpartition("/")[2]
        return {"__key__": name.partition(".")[0], "jpg": row["bytes"], "cls": row["path"].split("/")[-2]}

    ray.init(include_dashboard=False, log_to_driver=False)
    read = import_module("ray.data").read_binary_files(folder, include_paths=True)
    read.random_shuffle(seed=0).map(opened).repartition(3).write_webdataset(out, encoder=None)


def main() -> None:
    """Run the method named on the command line."""
    method, folder, out = sys.argv[1:]
    if method.startswith("webdataset"):
        with_webdataset(folder, out, decodes=method == "webdataset")
    else:
        {"mosaic": with_mosaic, "ray": with_ray}[method](folder, out)


if __name__ == "__main__":
    main()
