"""Common loaders, each set up as its documentation shows.

A peer maps the prepared images and a transform (JPEG bytes -> pixels; some bring their own) to an iterator of batches
of 64, with two workers. Peers need not be installed: `import_module` hides them from the type checker.
"""

import io
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from shardvit.data_shards.shards.tar_index import index_path, open_index
from shardvit.launch.bench.data_methods import BATCH_IMAGES, CROP_AREA, PIXELS, WORKERS, Work

Transform = Callable[[bytes], Any]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_SHUFFLE_SAMPLES = 1000  # buffer of webdataset and DALI
_CHUNK = 1 << 26  # bytes per file of Mosaic and LitData: their default


def stock_transform() -> Transform:
    """torchvision v1 on Pillow, the usual ImageNet script: normalised float32 [3, 224, 224]."""
    from PIL import Image
    from torchvision import transforms as tv

    steps = tv.Compose(
        [
            tv.RandomResizedCrop(PIXELS, scale=CROP_AREA, interpolation=tv.InterpolationMode.BICUBIC),
            tv.RandomHorizontalFlip(),
            tv.ToTensor(),
            tv.Normalize(MEAN, STD),
        ]
    )

    def transform(content: bytes) -> Any:
        with Image.open(io.BytesIO(content)) as image:
            return steps(image.convert("RGB"))

    return transform


def webdataset(work: Work, transform: Transform) -> Iterator[Any]:
    """WebDataset and WebLoader: shards split among the workers, a shuffle buffer, batches made in the workers."""
    wds = import_module("webdataset")
    tars = [str(path) for path in sorted(work.shards.glob("*.tar"))]
    samples = (
        wds.WebDataset(tars, shardshuffle=len(tars), empty_check=False)
        .shuffle(_SHUFFLE_SAMPLES)
        .to_tuple("jpg", "cls")
        .map_tuple(transform, int)
        .batched(BATCH_IMAGES)
    )
    return iter(wds.WebLoader(samples, batch_size=None, num_workers=WORKERS))


def torch_folder(work: Work, transform: Transform) -> Iterator[Any]:
    """torchvision's ImageFolder and torch's DataLoader, map-style."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    images = ImageFolder(str(work.images), transform=transform, loader=lambda path: Path(path).read_bytes())
    return iter(DataLoader(images, batch_size=BATCH_IMAGES, shuffle=True, num_workers=WORKERS))


def timm(work: Work) -> Iterator[Any]:
    """timm's ImageFolder and create_loader with its own transform; uint8 batches, as sent to the device."""
    import torch
    from timm.data import create_dataset, create_loader

    images: Any = create_dataset("", root=str(work.images))
    loader: Any = create_loader(
        images,
        input_size=(3, PIXELS, PIXELS),
        batch_size=BATCH_IMAGES,
        is_training=True,
        scale=CROP_AREA,
        color_jitter=0.0,
        interpolation="bicubic",
        num_workers=WORKERS,
        device=torch.device("cpu"),
        pin_memory=False,
    )
    return iter(loader.loader)  # without its prefetcher, which only normalises, on the device


def prepare_mosaic(work: Work) -> None:
    """Write the images in Mosaic's format."""
    streaming = import_module("streaming")
    columns = {"image": "bytes", "label": "int"}
    with streaming.MDSWriter(out=str(work.mosaic), columns=columns, size_limit=_CHUNK) as writer:
        for path, label in _files(work):
            writer.write({"image": path.read_bytes(), "label": label})


def mosaic(work: Work, transform: Transform) -> Iterator[Any]:
    """MosaicML streaming in torch's DataLoader."""
    from torch.utils.data import DataLoader

    streaming = import_module("streaming")
    streaming.base.util.clean_stale_shared_memory()  # it fails on what a killed run left
    images = _transformed(streaming.StreamingDataset, transform)(
        local=str(work.mosaic), shuffle=True, batch_size=BATCH_IMAGES
    )
    return iter(DataLoader(images, batch_size=BATCH_IMAGES, num_workers=WORKERS))


def _transformed(dataset: Any, transform: Transform) -> Any:
    class Images(dataset):
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return transform(sample["image"]), sample["label"]

    return Images


def prepare_litdata(work: Work) -> None:
    """Write the images in LitData's format."""
    import_module("litdata").optimize(
        fn=_litdata_sample,
        inputs=[(str(path), label) for path, label in _files(work)],
        output_dir=str(work.litdata),
        chunk_bytes=_CHUNK,
        num_workers=WORKERS,
        start_method="fork",
        verbose=False,
    )


def _litdata_sample(file: tuple[str, int]) -> dict[str, Any]:
    return {"image": Path(file[0]).read_bytes(), "label": file[1]}


def litdata(work: Work, transform: Transform) -> Iterator[Any]:
    """LitData's StreamingDataset and StreamingDataLoader."""
    litdata = import_module("litdata")
    images = _transformed(litdata.StreamingDataset, transform)(str(work.litdata), shuffle=True)
    return iter(litdata.StreamingDataLoader(images, batch_size=BATCH_IMAGES, num_workers=WORKERS))


class _TarSamples:
    """Random access for Grain: one pread at an index's offset, like DINOv3's tarballs."""

    def __init__(self, folder: Path) -> None:
        self._tars = [path.open("rb", buffering=0) for path in sorted(folder.glob("*.tar"))]
        self._places = [
            (tar.fileno(), *place)
            for tar in self._tars
            for index in [open_index(Path(tar.name))]
            for place in zip(*(getattr(index, name).tolist() for name in _PLACE), strict=True)
        ]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> tuple[bytes, int]:
        from os import pread

        tar, offset, size, label_offset, label_size = self._places[number]
        return pread(tar, size, offset), int(pread(tar, label_size, label_offset))


_PLACE = ("image_offset", "image_size", "label_offset", "label_size")


def grain(work: Work, transform: Transform) -> Iterator[Any]:
    """Grain in one process: global shuffle over the tars' indexes, two threads."""
    import numpy as np
    import torch

    grain = import_module("grain")
    torch.set_num_threads(1)  # as torch does in its workers: leave the cores to the threads

    def labelled(sample: tuple[bytes, int]) -> Any:
        return np.asarray(transform(sample[0])), sample[1]

    options = grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=2 * BATCH_IMAGES)
    samples = grain.MapDataset.source(_TarSamples(work.shards)).seed(0).shuffle().map(labelled)
    return iter(samples.to_iter_dataset(options).batch(BATCH_IMAGES))


def dali(work: Work) -> Iterator[Any]:
    """DALI on the CPU, normalised float32; its own crop in the decoder, triangular resize."""
    return _dali(work, normalise=True)


def dali_uint8(work: Work) -> Iterator[Any]:
    """DALI on the CPU, uint8: as far as ours goes before the device."""
    return _dali(work, normalise=False)


def _dali(work: Work, *, normalise: bool) -> Iterator[Any]:
    fn, types, pipeline = (import_module(f"nvidia.dali.{name}") for name in ("fn", "types", "pipeline"))
    plugin = import_module("nvidia.dali.plugin.pytorch")
    tars = sorted(work.shards.glob("*.tar"))

    @pipeline.pipeline_def(batch_size=BATCH_IMAGES, num_threads=WORKERS, device_id=None, seed=1)
    def images() -> Any:
        encoded, label = fn.readers.webdataset(
            paths=[str(tar) for tar in tars],
            index_paths=[str(index_path(tar)) for tar in tars],  # in DALI's own format
            ext=["jpg", "cls"],
            random_shuffle=True,
            initial_fill=_SHUFFLE_SAMPLES,
            name="reader",
        )
        pixels = fn.decoders.image_random_crop(encoded, device="cpu", random_area=list(CROP_AREA))
        pixels = fn.resize(pixels, size=[PIXELS, PIXELS])
        if normalise:
            pixels = fn.crop_mirror_normalize(
                pixels,
                mirror=fn.random.coin_flip(),
                mean=[255 * value for value in MEAN],
                std=[255 * value for value in STD],
                dtype=types.FLOAT,
                output_layout="CHW",
            )
        return pixels, fn.pad(label, fill_value=0)

    return iter(plugin.DALIGenericIterator(images(), ["image", "label"], reader_name="reader", auto_reset=False))


def _files(work: Work) -> Iterable[tuple[Path, int]]:
    for label, folder in enumerate(sorted(work.images.iterdir())):
        for path in sorted(folder.iterdir()):
            yield path, label
