"""nvImageCodec in this process: whether it is there, what it loads, and what it leaves alone. Pixels: `test_decode`."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.images import decode, decode_nvimgcodec
from shardvit.data_shards.images.crops import Box
from shardvit.data_shards.images.decode import read_image
from tests.conftest import python_path
from tests.data_shards.images.pictures import PHOTOGRAPHS, TOP, has_nvimgcodec

PHOTOGRAPH = PHOTOGRAPHS["china 160 4:4:4"]


@pytest.fixture
def nothing_remembered() -> Iterator[None]:
    """Forget what is known about decoders, before and after this test."""
    for function in (decode.require_decoder, decode_nvimgcodec.complaint):
        function.cache_clear()
    yield
    for function in (decode.require_decoder, decode_nvimgcodec.complaint):
        function.cache_clear()


@pytest.mark.parametrize(
    ("decoder", "package"),
    [("nvimgcodec", "nvidia-nvimgcodec-cu13"), ("gpu", "nvidia-nvimgcodec-cu13"), ("simplejpeg", "simplejpeg")],
)
def test_a_decoder_asked_for_by_name_that_is_missing_is_the_users_mistake(
    decoder: decode.DecoderName, package: str, monkeypatch: pytest.MonkeyPatch, nothing_remembered: None
):
    monkeypatch.setattr(decode, "find_spec", lambda name: None)
    monkeypatch.setattr(decode_nvimgcodec, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"decoder {decoder}: .*{package}.* is not installed"):
        read_image(PHOTOGRAPH, decoder=decoder)
    assert read_image(PHOTOGRAPH).pixels(TOP).shape == (8, 9, 3)


@has_nvimgcodec
def test_a_library_that_decodes_nothing_is_no_decoder(monkeypatch: pytest.MonkeyPatch, nothing_remembered: None):
    monkeypatch.setattr(decode_nvimgcodec, "decode_jpegs", lambda parts, **k: [None] * len(parts))
    with pytest.raises(UserError, match="does not decode JPEGs on this machine"):
        read_image(PHOTOGRAPH, decoder="nvimgcodec")
    assert read_image(PHOTOGRAPH).pixels(TOP).shape == (8, 9, 3)


@has_nvimgcodec
def test_the_gpu_needs_a_gpu():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match="decoder gpu: torch sees no CUDA device"):
        read_image(PHOTOGRAPH, decoder="gpu")


@pytest.mark.gpu
@has_nvimgcodec
def test_the_gpu_decodes_nearly_the_same_pixels():
    """Run in a process of its own: nvImageCodec loads its codecs at its first import."""
    run_alone(
        """
        image = read_image(data, decoder="gpu")
        for box in (None, Box(20, 30, 50, 60)):
            pixels, expected = image.pixels(box).astype(int), read_image(data, decoder="pillow").pixels(box)
            assert pixels.shape == expected.shape and ((pixels - expected) ** 2).mean() < 65, "below 30 dB"
        """
    )


PREAMBLE = f"""
import sys
from shardvit.data_shards.images.crops import Box
from shardvit.data_shards.images.decode import read_image
data = bytes.fromhex({PHOTOGRAPH.hex()!r})
"""


def run_alone(script: str) -> str:
    """Run it in a new process; -> what it wrote to stderr."""
    body = "\n".join(line.removeprefix("        ") for line in script.splitlines())
    process = subprocess.run(
        [sys.executable, "-"],
        input=PREAMBLE + body,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert process.returncode == 0, process.stderr
    return process.stderr


@has_nvimgcodec
def test_nvimgcodec_is_quiet_leaves_the_environment_alone_and_needs_no_torch():
    stderr = run_alone(
        """
        import os, tempfile
        before, folder = dict(os.environ), tempfile.mkdtemp()
        tempfile.tempdir = folder
        assert read_image(data, decoder="nvimgcodec").pixels(Box(9, 9, 20, 30)).shape == (20, 30, 3)
        from shardvit.data_shards.images.decode_nvimgcodec import decode_jpegs
        assert decode_jpegs([(data, Box(0, 0, 5000, 5000))], device="cpu") == [None], "which it would also announce"
        assert dict(os.environ) == before and os.listdir(folder) == []
        assert "torch" not in sys.modules and "nvidia.nvimgcodec" in sys.modules
        os.rmdir(folder)
        """
    )
    assert "nvjpeg" not in stderr.lower() and "ERROR" not in stderr and "WARNING" not in stderr


def test_nothing_heavy_is_loaded_before_an_image_comes():
    run_alone("assert not {'torch', 'PIL', 'nvidia.nvimgcodec', 'simplejpeg', 'timm'} & set(sys.modules)")


@has_nvimgcodec
def test_threads_and_forked_children_make_decoders_of_their_own():
    run_alone(
        """
        import os
        from concurrent.futures import ThreadPoolExecutor
        from shardvit.data_shards.images.decode_nvimgcodec import _decoder
        mine, box = _decoder("cpu"), Box(9, 9, 20, 30)
        assert _decoder("cpu") is mine
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(_decoder, "cpu").result() is not mine
        expected = read_image(data, decoder="nvimgcodec").pixels(box)
        child = os.fork()
        if child == 0:
            same = (read_image(data, decoder="nvimgcodec").pixels(box) == expected).all()
            os._exit(0 if same and _decoder("cpu") is not mine else 1)
        assert os.waitpid(child, 0)[1] == 0
        """
    )


@has_nvimgcodec
def test_it_neither_turns_the_image_nor_the_region():
    """Here and not through `read_image`, where Pillow would step in for a region that is turned out of the image."""
    image = Image.open(io.BytesIO(PHOTOGRAPH))
    exif = Image.Exif()
    exif[0x0112] = 6  # "turn by 90 degrees to show it"
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif)
    whole = np.asarray(Image.open(buffer)).astype(int)
    for box in (Box(30, 20, 40, 60), Box(0, 0, 160, 208), Box(150, 190, 10, 18)):
        pixels = decode_nvimgcodec.decode_jpegs([(buffer.getvalue(), box)], device="cpu")[0]
        assert pixels is not None and pixels.shape == (box.height, box.width, 3)
        assert np.abs(pixels - whole[box.top : box.bottom, box.left : box.right]).max() <= 4
