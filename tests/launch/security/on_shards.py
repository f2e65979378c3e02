"""What is done to somebody's shards, images and labels."""

import io
import json
import os
import pickle
import shutil
import stat
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.launch.security.somebody import Attack, World


def manifest_file(file: Callable[[World], str]) -> Attack:
    def attack(world: World) -> None:
        path = world.shards / "manifest.json"
        content = json.loads(path.read_text())
        content["shards"][0]["file"] = file(world)
        path.write_text(json.dumps(content))

    return attack


manifest_pipe = manifest_file(lambda world: world.pipe)
manifest_pipe.__name__ = "manifest_pipe"
manifest_url = manifest_file(lambda world: "file:///etc/passwd")
manifest_url.__name__ = "manifest_url"
manifest_above = manifest_file(lambda world: "../val/x.tar")
manifest_above.__name__ = "manifest_above"


def side_files_of_pipes(world: World) -> None:
    """What other tools would read."""
    (world.shards / "sizes.json").write_text(json.dumps({world.pipe: 100, "__len__": 10**9}))
    splits = {"train": {"name": "train", "num_samples": 9, "filenames": [world.pipe], "shard_lengths": [9]}}
    (world.shards.parent / "_info.json").write_text(json.dumps({"splits": splits}))


def index_of_pickle(world: World) -> None:
    for tar in world.shards.glob("*.tar"):
        tar.with_suffix(".idx").write_bytes(pickle.dumps(world.ran))


def add(tar: tarfile.TarFile, name: str, content: bytes = b"", **more: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in more.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(content))


def tar_of_others(world: World, *members: tuple[str, bytes], links: bool = False) -> None:
    """A folder of tars without a manifest, with a whole sample first."""
    world.shards = world.new("foreign/x-0.tar").parent
    with tarfile.open(world.shards / "x-0.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for key in ("a", "b", "c", "d") * 8:
            number = f"{key}{len(tar.getmembers())}"
            add(tar, f"{number}.png", world.image.read_bytes())
            add(tar, f"{number}.cls", b"0")
        for name, content in members:
            add(tar, name, content)
        if links:
            add(tar, "l.png", type=tarfile.SYMTYPE, linkname="/etc/passwd")
            add(tar, "m.png", type=tarfile.LNKTYPE, linkname="../../secret")
            add(tar, "fifo", type=tarfile.FIFOTYPE)
    world.change_recipe(train=str(world.shards), eval=str(world.shards), eval_overlap="allow")


def members_above(world: World) -> None:
    tar_of_others(world, ("../canary/x.png", world.image.read_bytes()), ("../canary/x.cls", b"0"))


def links(world: World) -> None:
    tar_of_others(world, links=True)


def pickled_members(world: World) -> None:
    """webdataset decodes .pyd, .pickle and .pth by unpickling, if it is asked to decode."""
    evil = pickle.dumps(world.ran)
    members = [(f"p.{ending}", evil) for ending in ("pyd", "pickle", "pkl", "pth", "npy", "npz", "cls", "json", "png")]
    tar_of_others(world, *members)


def cached_index_of_objects(world: World) -> None:
    """An index that was left where ours are kept."""
    from shardvit.data_shards.reading.opening import open_shards
    from shardvit.data_shards.shards.shard_set import ShardsSpec

    tar_of_others(world)
    open_shards(ShardsSpec(str(world.shards)), report=lambda line: None)
    indexes = list(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.npz"))
    assert indexes
    for path in indexes:
        with np.load(path) as arrays:
            names = list(arrays)
        np.savez(path, **dict.fromkeys(names, np.array([world.ran], dtype=object)))


def postscript(world: World) -> Path:
    """Pillow's EPS reader would start Ghostscript on it: here is one that tells."""
    path = world.new("bin/gs")
    path.write_text(f"#!/bin/sh\nmkdir {world.canary}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    world.image = world.new("scan.png")
    head = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%HiResBoundingBox: 0 0 8 8\n%%EndComments\n"
    world.image.write_text(f"{head}(%pipe%mkdir {world.canary}) (r) file\nshowpage\n%%EOF\n")
    return world.image


def postscript_image(world: World) -> None:
    postscript(world)


def postscript_to_pack(world: World) -> None:
    for name in ("a", "b"):
        (world.source / name).mkdir()
        shutil.copy(world.image, world.source / name / "whole.png")
    shutil.copy(postscript(world), world.source / "a/scan.png")


def _array(world: World) -> bytes:
    """An npy of objects, of which one makes the canary when it is unpickled."""
    np.save(file := io.BytesIO(), np.array([[world.ran]], dtype=object), allow_pickle=True)
    return file.getvalue()


def _giant_array() -> bytes:
    """A header of 2^60 values with nothing behind it."""
    np.lib.format.write_array_header_1_0(
        file := io.BytesIO(), {"descr": "<f4", "fortran_order": False, "shape": (2**30, 2**28, 4)}
    )
    return file.getvalue()


def _giant_tiff() -> bytes:
    tags = {256: 2**31 - 1, 257: 2**31 - 1, 258: 8, 259: 8, 262: 1, 273: 8, 277: 4, 278: 2**31 - 1, 279: 8, 284: 1}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return struct.pack("<2sHI", b"II", 42, 8) + struct.pack("<H", len(tags)) + entries + bytes(4)


def _as_channels(world: World, content: bytes) -> None:
    world.image.write_bytes(content)
    for folder in ("a", "b"):
        (world.source / folder).mkdir()
        np.save(world.source / folder / "whole.npy", np.zeros((8, 8, 4), np.float32))
    (world.source / "a/scan.npy").write_bytes(content)
    world.pack_options += ["--channels", "4"]


def array_of_objects(world: World) -> None:
    _as_channels(world, _array(world))


def giant_array(world: World) -> None:
    _as_channels(world, _giant_array())


def giant_tiff(world: World) -> None:
    _as_channels(world, _giant_tiff())


def postscript_in_a_tar(world: World) -> None:
    eps = postscript(world).read_bytes()
    world.image = world.top / "photo.png"
    tar_of_others(world, ("e.png", eps), ("e.cls", b"0"))


def pickles_to_pack(world: World) -> None:
    """CIFAR's own form, and other pickles among class folders."""
    for name in ("a", "b"):
        (world.source / name).mkdir()
        shutil.copy(world.image, world.source / name / "whole.png")
    for name in ("data_batch_1", "batches.meta", "a/x.pkl", "a/data.npy"):
        (world.source / name).write_bytes(pickle.dumps(world.ran))
    (world.source / "a/image.png").write_bytes(pickle.dumps(world.ran))


def cifar_of_pickles(world: World) -> None:
    """CIFAR-10 whole, every file of it poisoned."""
    folder = world.source / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"):
        (folder / name).write_bytes(pickle.dumps({b"data": world.ran, b"label_names": [world.ran]}, protocol=2))


def cifar_archive_of_pickles(world: World) -> None:
    cifar_of_pickles(world)
    archive = world.new("cifar-10-python.tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(world.source / "cifar-10-batches-py", "cifar-10-batches-py")
    world.source = archive


def tables_of_pickles(world: World) -> None:
    """Flowers-102, whose tables are MATLAB files."""
    (world.source / "jpg").mkdir()
    shutil.copy(world.image, world.source / "jpg/image_00001.jpg")
    for name in ("imagelabels.mat", "setid.mat"):
        (world.source / name).write_bytes(pickle.dumps(world.ran))


def archive_to_pack(*members: tuple[str, bytes], name: str, **link: str) -> Attack:
    def attack(world: World) -> None:
        world.source = world.new("theirs.tar")
        with tarfile.open(world.source, "w", format=tarfile.USTAR_FORMAT) as tar:
            for folder in ("a", "b"):
                add(tar, f"{folder}/1.png", world.image.read_bytes())
            for inner, content in members:
                add(tar, inner, content or world.image.read_bytes())
            for inner, target in link.items():
                add(tar, f"{inner}/2.png", type=tarfile.SYMTYPE, linkname=target)
                add(tar, f"{inner}/3.png", type=tarfile.LNKTYPE, linkname=f"../{target}")
                add(tar, f"{inner}/fifo.png", type=tarfile.FIFOTYPE)

    attack.__name__ = f"archive_{name}"
    return attack


archive_above = archive_to_pack(("../canary/x.png", b""), name="above")
archive_absolute = archive_to_pack(("/tmp/canary.png", b""), name="absolute")
archive_of_text = archive_to_pack(("a/text.png", b"no image"), name="of_text")
archive_of_links = archive_to_pack(name="of_links", a="/etc/passwd", b="../../secret")


def listing_of_objects(world: World) -> None:
    """What was remembered of an archive, poisoned."""
    from shardvit.data_shards.packing.sources.archive import Archive, list_archives

    archive_to_pack(name="plain")(world)
    list_archives([Archive(world.source)])
    listings = list(Path(os.environ["XDG_CACHE_HOME"]).rglob("archives-*.npz"))
    assert listings
    for path in listings:
        with np.load(path) as arrays:
            names = list(arrays)
        np.savez(path, **dict.fromkeys(names, np.array([world.ran], dtype=object)))


def labels_outside(ending: str) -> Attack:
    def attack(world: World) -> None:
        paths = ["../secret.png", "/etc/passwd", world.pipe, "whole.png"]
        shutil.copy(world.image, world.source / "whole.png")
        shutil.copy(world.image, world.top / "secret.png")
        labels = world.new(f"labels.{ending}")
        if ending == "csv":
            labels.write_text("path,label\n" + "".join(f'"{path}",=cmd|x\n' for path in paths))
        else:
            labels.write_text("".join(json.dumps({"path": path, "label": "x"}) + "\n" for path in paths))
        world.pack_options = ["--labels", str(labels)]

    attack.__name__ = f"labels_{ending}"
    return attack


def table_of_extensions(world: World) -> None:
    """A type that pyarrow once unpickled when it read the schema, and one of Hugging Face's."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(world.ran)}
    image = pa.field("image", pa.binary(), metadata=metadata)
    columns = [pa.array([world.image.read_bytes()]), pa.array([0])]
    table = pa.table(columns, schema=pa.schema([image, pa.field("label", pa.int64())]))
    pq.write_table(table, world.source / "x.parquet")


def table_of_pickles(world: World) -> None:
    """Pickles as images, and pandas' note that the column holds objects."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = {"name": "image", "field_name": "image", "pandas_type": "bytes", "numpy_type": "object", "metadata": None}
    noted = {"pandas": json.dumps({"columns": [column], "index_columns": [], "pandas_version": "2"})}
    table = pa.table({"image": [pickle.dumps(world.ran), world.image.read_bytes()], "label": ["a", "b"]})
    pq.write_table(table.replace_schema_metadata(noted), world.source / "x.parquet")


def table_of_paths(world: World) -> None:
    import pyarrow as pa

    shutil.copy(world.image, world.top / "secret.png")
    paths = ["../secret.png", "/etc/passwd", world.pipe, "file:///etc/passwd"]
    table = pa.table({"path": paths, "label": ["a"] * len(paths)})
    with pa.OSFile(str(world.source / "x.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def samples_to_pack(*names: str, links: bool = False) -> Attack:
    def attack(world: World) -> None:
        tar_of_others(world, *((name, world.image.read_bytes()) for name in names), links=links)
        world.source = world.shards
        world.pack_options = ["--label", "cls"]

    attack.__name__ = f"samples_{'links' if links else names[0]}"
    return attack


def samples_of_a_pipe(world: World) -> None:
    world.source = Path(world.pipe)
