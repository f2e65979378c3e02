"""Methods of the data benchmark and the folders that they read. Imports nothing heavy."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

BATCH_IMAGES, WORKERS, PIXELS = 64, 2, 224
CROP_AREA = (0.08, 1.0)  # default of torchvision, timm and DALI; we set ours to it
PLACES = ("local", "http", "s3")
SHORT_SIDE, QUALITY = 320, 90  # of the resized shards


class Work:
    """Folders of the prepared images."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shards, self.resized = root / "shards" / "train", root / "shards-320" / "train"
        self.images, self.many, self.temporary = root / "images", root / "many", root / "tmp"
        self.mosaic, self.litdata = root / "mosaic", root / "litdata"


# The transform alone, in the report's order.
TRANSFORMS = {
    "stock": "torchvision on Pillow, bicubic, float32",
    "opencv": "OpenCV: whole decode, INTER_AREA, uint8",
    "alone": "ours an image at a time, as lent to peers, uint8",
    "ours": "ours as the loader calls it (flip and normalisation are the device's)",
    "decode": "of that, decoding the boxes (the rest is the resize)",
    "limit": "libjpeg-turbo alone on the boxes of ours",
}

TransformName = Literal["stock", "fast", "opencv", "own"]
_TRANSFORMS: dict[TransformName, str] = {
    "stock": ", torchvision",
    "fast": ", our transform",
    "opencv": ", OpenCV",
    "own": "",
}


@dataclass(frozen=True)
class Method:
    """A loader to measure."""

    loader: str  # name in the table
    needs: tuple[str, ...] = ()  # packages that are no dependency of this project
    transform: TransformName = "stock"  # torchvision's, ours, a few lines of OpenCV, or the loader's own
    batches: str | None = None  # function of `data_peers`; None: ours
    prepare: str | None = None  # function of `data_peers` that writes the loader's own format
    shards: Literal["originals", "resized"] = "originals"
    kind: Literal["thread", "process"] = "thread"  # of our workers

    @property
    def label(self) -> str:
        return self.loader + _TRANSFORMS[self.transform]


STOCK = "webdataset"
OURS, OURS_PROCESSES, OURS_RESIZED = "ours", "ours-processes", "ours-320"  # ours: same as data.worker_kind auto

_PEERS: dict[str, Method] = {
    STOCK: Method("webdataset + WebLoader", batches="webdataset"),
    "torch": Method("torch DataLoader + ImageFolder", batches="torch_folder"),
    "timm": Method("timm ImageFolder + create_loader", batches="timm", transform="own"),
    "mosaic": Method("MosaicML streaming", needs=("streaming",), batches="mosaic", prepare="prepare_mosaic"),
    "litdata": Method("LitData", needs=("litdata",), batches="litdata", prepare="prepare_litdata"),
    "grain": Method("Grain threads", needs=("grain",), batches="grain"),
    "dali": Method("DALI CPU, float32", needs=("nvidia.dali",), batches="dali", transform="own"),
    "dali-uint8": Method("DALI CPU, uint8", needs=("nvidia.dali",), batches="dali_uint8", transform="own"),
}
METHODS: dict[str, Method] = {
    **_PEERS,
    **{f"{name}-fast": replace(_PEERS[name], transform="fast") for name in (STOCK, "mosaic", "litdata", "grain")},
    f"{STOCK}-opencv": replace(_PEERS[STOCK], needs=("cv2",), transform="opencv"),
    OURS: Method("ours, threads", transform="own"),
    OURS_PROCESSES: Method("ours, processes", transform="own", kind="process"),
    OURS_RESIZED: Method("ours, threads, shards of --resize-short 320 --quality 90", transform="own", shards="resized"),
}
