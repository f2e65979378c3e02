"""Decode a region of a JPEG with nvImageCodec, on the CPU (libjpeg-turbo) or on the GPU (nvJPEG).

The CPU path needs neither GPU nor driver: 5 ms and 6 MB to load, 0.1 ms a photograph on top of libjpeg-turbo's time.
The library would also load OpenCV, TIFF and GPU codecs and report missing ones on stderr, so we show it libjpeg-turbo
alone. The GPU path has never been run on a GPU. It copies pixels back to the host and gives each worker a CUDA context
(400 MB). nvJPEG upsamples chroma more simply, so coloured edges differ a little.
"""

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from shardvit.data_shards.images.crops import Box, Pixels

Device = Literal["cpu", "gpu"]

_PACKAGE = "nvidia-nvimgcodec-cu13 (or -cu12)"
_CPU_EXTENSION = "libjpeg_turbo_ext.so*"

_importing = threading.Lock()
_of_thread = threading.local()


def decode_jpegs(parts: Sequence[tuple[bytes, Box]], *, device: Device) -> list[Pixels | None]:
    """Decode a box inside each image to uint8 [h, w, 3] in one call: 16 at once take a twelfth less time. None: the
    library declines, and gives no reason."""
    decoder = _decoder(device)
    library, streams, places = decoder.library, [], []
    pixels: list[Pixels | None] = [None] * len(parts)
    for place, (data, box) in enumerate(parts):
        try:
            region = library.Region(box.top, box.left, box.bottom, box.right)
            streams.append(library.CodeStream(data).get_sub_code_stream(region=region))
        except RuntimeError:
            continue
        places.append(place)
    try:
        for place, image in zip(places, decoder.decoder.decode(streams, params=decoder.params), strict=True):
            if image is not None:
                pixels[place] = np.asarray(image.cpu() if device == "gpu" else image)
    except RuntimeError:
        pass
    return pixels


@cache
def complaint(device: Device) -> str | None:
    """Say why nvImageCodec cannot be used in this process, else None; loads it and decodes a few pixels."""
    try:
        if find_spec("nvidia.nvimgcodec") is None:
            return f"the package {_PACKAGE} is not installed"
        if device == "gpu":
            import torch

            if not torch.cuda.is_available():
                return "torch sees no CUDA device"
        pixels = decode_jpegs([(_sample(), Box(top=0, left=0, height=16, width=16))], device=device)[0]
    except (ImportError, RuntimeError) as error:
        return f"the package {_PACKAGE} does not work here ({error})"
    if pixels is not None or device == "cpu":
        return f"the package {_PACKAGE} does not decode JPEGs on this machine" if pixels is None else None
    return "no JPEG could be decoded on the GPU: install nvidia-nvjpeg, and use one decoder for training and evaluation"


class _Decoder:
    """The library's objects; not shared between threads, nor with a forked child."""

    def __init__(self, device: Device) -> None:
        with _importing, _only_what_is_needed(device):
            from nvidia import nvimgcodec
        self.library = library = cast(Any, nvimgcodec)
        if device == "cpu":
            where = library.NVIMGCODEC_DEVICE_CPU_ONLY
            kinds = [library.BackendKind.CPU_ONLY]  # without this it asks for a GPU anyway
        else:
            import torch

            # Not torch's current device, which is 0 in every new thread and process.
            where = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
            kinds = [library.BackendKind.HW_GPU_ONLY, library.BackendKind.GPU_ONLY, library.BackendKind.HYBRID_CPU_GPU]
        backends = [library.Backend(kind) for kind in kinds]
        self.decoder = library.Decoder(device_id=where, max_num_cpu_threads=1, backends=backends)
        # By default it rotates the image, and the box with it, by the orientation tag.
        self.params = library.DecodeParams(apply_exif_orientation=False)


def _decoder(device: Device) -> _Decoder:
    """Return this thread's decoder. A forked child neither uses nor frees the parent's, whose threads are gone."""
    made: dict[tuple[int, Device], _Decoder] = _of_thread.__dict__.setdefault("made", {})
    key = os.getpid(), device
    if key not in made:
        made[key] = _Decoder(device)
    return made[key]


@contextmanager
def _only_what_is_needed(device: Device) -> Iterator[None]:
    """Set the variables that the library reads on import, unless the user has set them."""
    wanted = {"PYNVIMGCODEC_VERBOSITY": "0"}
    with tempfile.TemporaryDirectory(prefix="shardvit-nvimgcodec-") as folder:
        spec = find_spec("nvidia.nvimgcodec")
        homes = spec.submodule_search_locations if spec else None
        for file in Path(homes[0], "extensions").glob(_CPU_EXTENSION) if homes and device == "cpu" else ():
            Path(folder, file.name).symlink_to(file)
            wanted["NVIMGCODEC_EXTENSIONS_PATH"] = folder
        wanted = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name in wanted:
                del os.environ[name]


def _sample() -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("L", (16, 16)).save(buffer, "JPEG")
    return buffer.getvalue()
