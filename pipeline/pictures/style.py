"""Style all figures: one palette for light and dark, distinct in greyscale; text stays text; no math markup.

Figures use the light palette. CSS in each SVG swaps colours where the reader prefers dark, so one file serves both.
"""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardvit.data_shards.text import one_line
from shardvit.pipeline.runs.pictures import Cell, DrawRequest, Picture, keep_image, keep_table

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

INK = "#1b1d22"  # text, axes, data
MUTED = "#5d626d"  # labels and explanations
GRID = "#dfe1e6"
PAPER = "#ffffff"
ACCENT = "#0a5fa5"  # emphasis
GOOD, BAD = "#00815f", "#c4480a"  # right and wrong; never the only cue
# Neighbours differ in lightness; all are distinct to colour-blind readers (after Okabe and Ito).
SERIES = (ACCENT, "#d96a1b", "#2aa187", "#8e4585", "#5fb3e4", "#d9a514", "#7a7f8a")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 3)))  # distinguish lines in greyscale

DARK = {
    INK: "#eceef2",
    MUTED: "#a4aab6",
    GRID: "#363a43",
    PAPER: "#16181c",
    ACCENT: "#6fb4f0",
    GOOD: "#4cc9a4",
    BAD: "#f08a52",
    **dict(zip(SERIES[1:], ("#f29a58", "#55cbb0", "#c98ac1", "#8fcdf3", "#ecc452", "#9ba1ad"), strict=True)),
}

PNG_DOTS_PER_INCH = 160
_EMBEDDED = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)")
_WORTH_JPEG_BYTES, _MOST_COLOURS, _JPEG_QUALITY = 8_000, 4096, 85

Drawn = tuple[Picture, "Figure | Mapping[str, Sequence[Cell]]"]  # texts, and a figure or a table's columns


def new_figure(
    *, width: float, height: float, rows: int = 1, columns: int = 1, **grid: Any
) -> tuple[Figure, np.ndarray]:
    """Make a figure of `width` x `height` inches and its axes [rows, columns]; `grid` as in `Figure.subplots`. Pages
    show at most 960 px: use 6 to 10 inches for a full-width figure."""
    _use_style()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **grid)


def draw_level(axes: Axes, y: float, text: str, **style: Any) -> None:
    """Draw a dashed line across the axes with a text above its right end; `style` applies to the text."""
    axes.axhline(y, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1)
    at = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points", "ha": "right"}
    axes.annotate(text, (1.0, y), color=MUTED, **at, **style)


def plain_numbers(axis: Axis) -> None:
    """Label an axis 10, 100, 1,000 instead of powers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


@cache
def sequential() -> LinearSegmentedColormap:
    """Colour map from paper over accent to ink; monotonic in greyscale."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shardvit", [PAPER, "#a9cdea", "#3f8fcb", ACCENT, "#0a2c4d"])


def plain(text: str, *, longest: int = 40) -> str:
    """Escape a name for a figure, and elide its middle beyond `longest` characters."""
    text = one_line(text)
    if len(text) <= longest:
        return text
    head = (longest - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def keep_drawn(request: DrawRequest, drawn: Iterable[Drawn]) -> None:
    """Write each picture or table as it is drawn; raises as `keep_image` and the drawer."""
    for picture, content in drawn:
        if isinstance(content, Mapping):
            keep_table(request.stage_folder, picture, columns=content, step=request.step)
        else:
            keep_picture(request.stage_folder, picture, figure=content, step=request.step)


def keep_picture(stage_folder: Path, picture: Picture, *, figure: Figure, step: int) -> Path:
    """Write a figure as PNG and SVG with its texts; raises as `keep_image`."""
    png, svg = rendered(figure)
    return keep_image(stage_folder, picture, png=png, svg=svg, step=step)


def rendered(figure: Figure) -> tuple[bytes, bytes]:
    """Render a figure as PNG and SVG."""
    png, svg = io.BytesIO(), io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")  # any class name; the SVG keeps it
        figure.savefig(png, format="png")
        figure.suppressComposite = True  # keep images separate
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return png.getvalue(), finished_svg(_EMBEDDED.sub(_smaller, svg.getvalue())).encode()


def _smaller(found: re.Match[str]) -> str:
    """Re-encode an embedded photograph (opaque, too many colours for a palette) as JPEG."""
    from PIL import Image

    content = base64.b64decode(found[1])
    if len(content) < _WORTH_JPEG_BYTES:
        return found[0]
    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        rgba = image.convert("RGBA")
    if rgba.getchannel("A").getextrema() != (255, 255) or rgba.getcolors(maxcolors=_MOST_COLOURS) is not None:
        return found[0]
    jpeg = io.BytesIO()
    rgba.convert("RGB").save(jpeg, "JPEG", quality=_JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg.getvalue()).decode('ascii')}"


def finished_svg(svg: str) -> str:
    """Add the dark palette; remove what XML forbids and browsers ignore."""
    rules = "".join(
        f'[style*="{use}: {light}"]{{{use}:{dark}!important}}'
        for light, dark in DARK.items()
        for use in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    svg = re.sub(r"<!DOCTYPE[^>]*>\s*", "", svg, count=1)  # contains a URL
    svg = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", "\ufffd", svg)
    return re.sub(r"(<svg\b[^>]*>)", lambda found: found[1] + style, svg, count=1)


@cache
def _use_style() -> None:
    """Set matplotlib's style for the whole process, since most of it is read when text and axes are made."""
    import matplotlib
    from matplotlib.rcsetup import cycler

    settings: dict[Any, Any] = {
        "text.parse_math": False,  # a class may be called $x^2$
        "font.family": ["DejaVu Sans"],  # ships with matplotlib
        "font.size": 9.5,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlecolor": INK,
        "axes.labelsize": 9.5,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": MUTED,
        "axes.facecolor": PAPER,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=list(SERIES)),
        "figure.facecolor": PAPER,
        "figure.titlesize": 11.5,
        "figure.titleweight": "bold",
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "legend.frameon": False,
        "legend.labelcolor": INK,
        "lines.linewidth": 1.6,
        "patch.edgecolor": PAPER,
        "text.color": INK,
        **{f"{axis}tick.color": MUTED for axis in "xy"},
        **{f"{axis}tick.labelcolor": INK for axis in "xy"},
        **{f"{axis}tick.labelsize": 8.0 for axis in "xy"},
        "image.interpolation": "nearest",
        "savefig.dpi": PNG_DOTS_PER_INCH,
        "svg.fonttype": "none",  # keep text as text
        "svg.hashsalt": "shardvit",  # deterministic ids
    }
    matplotlib.rcParams.update(settings)
