"""Methods that the data benchmark compares, and the folders they read. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

BATCH_IMAGES, WORKERS, PIXELS = 64, 2, 224
CROP_AREA = (0.08, 1.0)  # torchvision's, timm's and DALI's default; ours is set to it
SHORT_SIDE, QUALITY = 320, 90  # of the shards that are packed smaller


@dataclass(frozen=True)
class Work:
    """Folders of the prepared images."""

    root: Path

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def shards(self) -> Path:
        return self.root / "shards" / "train"

    @property
    def resized(self) -> Path:
        return self.root / "shards-320" / "train"

    @property
    def many(self) -> Path:
        return self.root / "many"

    @property
    def mosaic(self) -> Path:
        return self.root / "mosaic"

    @property
    def litdata(self) -> Path:
        return self.root / "litdata"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"


TransformName = Literal["stock", "fast", "own"]
WorkerKind = Literal["thread", "process"]


@dataclass(frozen=True)
class Method:
    """One loader that is measured.

    Attributes:
        label: what it is, for the table.
        needs: packages beyond those that the project has anyway.
        transform: torchvision's, ours, or one that it brings along.
        batches: name of the function in `data_peers`; None for ours.
        prepare: name of the function in `data_peers` that writes its own format.
        shards: which packed set it reads.
        kind: what the workers of ours are.
    """

    label: str
    needs: tuple[str, ...] = ()
    transform: TransformName = "stock"
    batches: str | None = None
    prepare: str | None = None
    shards: Literal["originals", "resized"] = "originals"
    kind: WorkerKind = "thread"


STOCK = "webdataset"
OURS, OURS_PROCESSES, OURS_RESIZED = "ours", "ours-processes", "ours-320"  # ours: what data.worker_kind auto gives

METHODS: dict[str, Method] = {
    STOCK: Method("webdataset + WebLoader, torchvision", batches="webdataset"),
    "torch": Method("torch DataLoader + ImageFolder, torchvision", batches="torch_folder"),
    "timm": Method("timm ImageFolder + create_loader", batches="timm", transform="own"),
    "mosaic": Method(
        "MosaicML streaming, torchvision", needs=("streaming",), batches="mosaic", prepare="prepare_mosaic"
    ),
    "litdata": Method("LitData, torchvision", needs=("litdata",), batches="litdata", prepare="prepare_litdata"),
    "grain": Method("Grain threads, torchvision", needs=("grain",), batches="grain"),
    "dali": Method("DALI CPU, float32", needs=("nvidia.dali",), batches="dali", transform="own"),
    "dali-uint8": Method("DALI CPU, uint8", needs=("nvidia.dali",), batches="dali_uint8", transform="own"),
    "webdataset-fast": Method("webdataset + WebLoader, our transform", batches="webdataset", transform="fast"),
    "mosaic-fast": Method(
        "MosaicML streaming, our transform",
        needs=("streaming",),
        batches="mosaic",
        prepare="prepare_mosaic",
        transform="fast",
    ),
    "litdata-fast": Method(
        "LitData, our transform",
        needs=("litdata",),
        batches="litdata",
        prepare="prepare_litdata",
        transform="fast",
    ),
    "grain-fast": Method("Grain threads, our transform", needs=("grain",), batches="grain", transform="fast"),
    OURS: Method("ours, threads", transform="own"),
    OURS_PROCESSES: Method("ours, processes", transform="own", kind="process"),
    OURS_RESIZED: Method("ours, threads, shards of --resize-short 320 --quality 90", transform="own", shards="resized"),
}
