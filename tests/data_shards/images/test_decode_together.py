"""Boxes of many images in one call: each as if it were alone, whatever stands beside it. Pillow is the oracle."""

import io
import random

import numpy as np
from PIL import Image

from shardvit.data_shards.images import decode
from shardvit.data_shards.images.crops import Box
from shardvit.data_shards.images.decode import EncodedImage, decode_together, of_pillow, read_image
from tests.data_shards.images.pictures import (
    PHOTOGRAPHS,
    assert_within_55_db,
    by_pillow,
    cut,
    encoded,
    every_decoder,
    has_nvimgcodec,
    picture,
)


def draw_box(image: EncodedImage, draw: random.Random) -> Box:
    height, width = draw.randint(1, image.height), draw.randint(1, image.width)
    return Box(draw.randint(0, image.height - height), draw.randint(0, image.width - width), height, width)


def without_tables(data: bytes) -> bytes:
    """A JPEG whose header is whole, and whose first Huffman table is not: libjpeg declines it."""
    at = data.index(b"\xff\xc4") + 5
    return data[:at] + b"\xff" * 16 + data[at + 16 :]


@every_decoder
def test_together_or_alone_the_pixels_are_the_same(decoder: decode.DecoderName):
    draw = random.Random(5)
    contents = [*PHOTOGRAPHS.values(), encoded(Image.fromarray(picture()), "PNG")]
    for _ in range(4):
        draw.shuffle(contents)
        images = [read_image(content, decoder=decoder) for content in contents]
        parts = [(image, draw_box(image, draw)) for image in images]
        found = decode_together(parts)
        assert len(found) == len(parts)
        for content, (image, box), pixels in zip(contents, parts, found, strict=True):
            expected = cut(by_pillow(content), box)
            assert_within_55_db(image.pixels(box) if pixels is None else pixels, expected)
            if pixels is not None:
                assert pixels.flags.c_contiguous and pixels.flags.writeable
                np.testing.assert_array_equal(pixels, image.pixels(box))
        if decoder in ("simplejpeg", "pillow"):
            assert found == [None] * len(parts)


@has_nvimgcodec
def test_what_is_declined_does_not_affect_its_neighbours():
    good = PHOTOGRAPHS["china 160 4:2:0"]
    contents = [good, without_tables(good), encoded(Image.fromarray(picture()), "PNG"), good]
    box = Box(9, 20, 70, 81)
    images = [read_image(content, decoder="nvimgcodec") for content in contents[:2]]
    images += [of_pillow(Image.open(io.BytesIO(contents[2]))), read_image(good, decoder="nvimgcodec")]
    found = decode_together([(image, Box(0, 0, 20, 20) if at == 2 else box) for at, image in enumerate(images)])
    assert found[1] is None and found[2] is None
    for pixels in (found[0], found[3]):
        assert pixels is not None
        assert_within_55_db(pixels, cut(by_pillow(good), box))


def test_of_nothing_comes_nothing():
    assert decode_together([]) == []
