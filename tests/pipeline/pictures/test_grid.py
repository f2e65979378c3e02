import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from shardvit.pipeline.pictures.grid import Cell, image_grid, shortened
from shardvit.pipeline.pictures.style import PNG_DOTS_PER_INCH, finished_svg, rendered


def noise(height: int, width: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png_of(figure) -> np.ndarray:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return np.asarray(Image.open(file).convert("RGB"))


def svg_of(figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg")
    return finished_svg(file.getvalue())


def has_block(picture: np.ndarray, block: np.ndarray) -> bool:
    height, width = block.shape[:2]
    windows = np.lib.stride_tricks.sliding_window_view(picture[..., 0], (height, width))
    places = np.argwhere((windows[..., 0, 0] == block[0, 0, 0]) & (windows[..., -1, -1] == block[-1, -1, 0]))
    return any((picture[y : y + height, x : x + width] == block).all() for y, x in places)


@pytest.mark.parametrize("side", [8, 16, 32, 37])
def test_a_small_image_is_enlarged_by_a_whole_number_and_every_pixel_is_a_square(side: int) -> None:
    cells = [Cell(noise(side, side, seed=seed), ("name",)) for seed in range(5)]
    picture = png_of(image_grid(cells, columns=3))
    factor = round(PNG_DOTS_PER_INCH / side)
    for cell in cells:
        assert has_block(picture, cell.image.repeat(factor, axis=0).repeat(factor, axis=1))


def test_a_photograph_is_reduced_and_keeps_its_proportions() -> None:
    image = np.zeros((600, 300, 3), np.uint8)
    picture = png_of(image_grid([Cell(image)], columns=1))
    rows, columns = np.nonzero((picture < 50).all(axis=2))
    assert np.ptp(rows) + 1 == PNG_DOTS_PER_INCH
    assert np.ptp(columns) + 1 == PNG_DOTS_PER_INCH // 2


@pytest.mark.filterwarnings("ignore:Glyph .* missing from")  # as in keep_picture
def test_names_are_text_whatever_they_hold_and_the_svg_is_xml() -> None:
    from xml.etree import ElementTree

    names = ["$x^2$", "<script>alert(1)</script>", "a\nb\x1b[2Jc", "{}", "\\frac{1}{2}", "\u202e evil", "猫", ""]
    cells = [Cell(noise(8, 8), (name,)) for name in names]
    svg = svg_of(image_grid(cells, columns=4, cell_inches=3.0))
    texts = [each.text for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {"$x^2$", "<script>alert(1)</script>", "a\\nb\\x1b[2Jc", "{}", "\\frac{1}{2}", "\\u202e evil", "猫"} == set(
        texts
    )
    assert "<script" not in svg


def test_what_is_wrong_is_told_by_form_not_by_colour_alone() -> None:
    pictures = [png_of(image_grid([Cell(noise(8, 8), ("a",), mark=mark)], columns=1)) for mark in ("right", "wrong")]
    greys = [np.asarray(Image.fromarray(each).convert("L")) for each in pictures]
    assert greys[0].shape == greys[1].shape
    assert (greys[0] != greys[1]).sum() > 500


@pytest.mark.parametrize("points", [10.0, 60.0, 200.0])
@pytest.mark.parametrize("text", ["short", "a name of many words " * 9, "猫" * 80])
def test_a_name_is_shortened_to_its_room_and_no_further(text: str, points: float) -> None:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    def width(shown: str) -> float:
        wide = sum(each == "猫" for each in shown)
        rest = text_to_path.get_text_width_height_descent(shown.replace("猫", ""), FontProperties(size=8), False)[0]
        return 8.0 * wide + rest

    shown = shortened(text, points=points)
    assert width(shown) <= points * 1.02 + 0.5
    if shown != text:
        head, tail = shown.split("…")
        assert re.match(re.escape(head), text) and text.endswith(tail)
        assert width(shown) > points - 20


def test_neighbours_that_belong_together_stand_closer() -> None:
    cells = [Cell(np.zeros((16, 16, 3), np.uint8)) for _ in range(4)]
    picture = png_of(image_grid(cells, columns=4, together=2))
    dark = (picture[picture.shape[0] // 2] < 50).all(axis=1)
    edges = np.flatnonzero(np.diff(dark.astype(int)))
    gaps = np.diff(edges)[1::2]
    assert len(gaps) == 3 and gaps[0] == gaps[2] < gaps[1]


def test_photographs_are_jpegs_in_an_svg_and_pixels_and_palettes_are_not() -> None:
    across, down = np.meshgrid(np.arange(300), np.arange(200))
    photograph = np.stack([across % 256, down, (across + down) // 2], axis=2).astype(np.uint8)
    photograph += noise(200, 300) // 16
    palette = np.repeat(np.random.default_rng(0).integers(0, 256, (200, 200, 1), dtype=np.uint8), 3, axis=2)
    _, svg = rendered(image_grid([Cell(each) for each in (photograph, palette, noise(60, 60))], columns=3))
    found = re.findall(r"data:image/(jpeg|png);base64,([A-Za-z0-9+/=\s]+)", svg.decode())
    images = {kind: np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")) for kind, data in found}
    assert [kind for kind, _ in found] == ["jpeg", "png", "png"]
    shown = np.asarray(Image.fromarray(photograph).resize((160, 107), Image.Resampling.LANCZOS)).astype(float)
    assert images["jpeg"].shape == shown.shape and np.abs(images["jpeg"][::-1] - shown).mean() < 6
    assert np.array_equal(images["png"], noise(60, 60))
