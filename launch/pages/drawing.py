"""Curves as SVG markup, small enough for several beside one another and on a phone: what the page shows without its
script, in the same layout in which the script (`templates/page.js`) draws them again to zoom.

Numbers are ours; texts are escaped. Lines differ in colour and dashes (by the page's classes), so that grey will do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np

from data_shards.text import printable
from launch.pages.curves import Curve, Scale

WIDTH, HEIGHT = 400, 216
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 8, 32
_MOST_DOTS = 60
_LETTER = 7.3  # wide at the most, of a number at 11 px, in the widest fonts that browsers have: DejaVu Sans and Verdana
_X_NAME = "images seen"


def text(value: str) -> str:
    """A text for an SVG or HTML: escaped, control characters shown."""
    return escape(printable(value))


def draw_curves(
    curves: Sequence[Curve], *, scale: Scale, is_share: bool, marks: Sequence[tuple[float, str]], alt: str
) -> str:
    """A chart over images seen; `marks`: (images, what happened there)."""
    x0 = min(float(curve.images[0]) for curve in curves)
    x1 = max(float(curve.images[-1]) for curve in curves)
    if x1 <= x0:
        room = max(0.5, 1e-9 * x0)  # above 2^53 a half is nothing
        x0, x1 = x0 - room, x1 + room
    low, high = y_range(curves, scale=scale, is_share=is_share)
    forward: Callable[[Any], Any] = np.log if scale == "log" else lambda value: value
    span = float(forward(high)) - float(forward(low))

    rows = [(value, show_y(value, is_share)) for value in (log_ticks if scale == "log" else ticks)(low, high)]
    left = max(_LEFT, round(_LETTER * max((len(label) for _, label in rows), default=0)) + 12)

    def at_x(value: Any) -> Any:
        return left + (value - x0) / (x1 - x0) * (WIDTH - left - _RIGHT)

    def at_y(value: Any) -> Any:
        return HEIGHT - _BOTTOM - (forward(value) - float(forward(low))) / span * (HEIGHT - _TOP - _BOTTOM)

    base, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = [f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(alt)}">']
    for value, label in rows:
        y = float(at_y(value))
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{base}" y2="{base}"/>')
    for value in ticks(x0, x1, wanted=4):
        x = float(at_x(value))
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>')
        label = short(value)
        if x + _LETTER * (len(label) / 2 + 1) < right - _LETTER * len(_X_NAME):
            parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{label}</text>')
    parts.append(f'<text class="label" x="{right}" y="{base + 16}" text-anchor="end">{_X_NAME}</text>')
    for images, said in marks:
        x = float(at_x(images))
        if left <= x <= right:
            line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{base}">'
            parts.append(f"{line}<title>{text(said)}</title></line>")
    for curve in curves:
        drawable = np.isfinite(curve.values) & ((curve.values > 0) if scale == "log" else True)
        xs = at_x(curve.images.astype(np.float64))
        with np.errstate(divide="ignore", invalid="ignore"):
            ys = np.where(drawable, at_y(np.where(drawable, curve.values, 1.0)), np.nan)
        parts.append(f'<path class="line {curve.style}" d="{_trace(xs, ys)}"/>')
        if (curve.has_dots and len(xs) <= _MOST_DOTS) or len(xs) == 1:
            parts += [
                f'<circle class="dot {curve.style}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'
                for x, y in zip(xs, ys, strict=True)
                if math.isfinite(y)
            ]
    return "".join([*parts, "</svg>"])


def y_range(curves: Sequence[Curve], *, scale: Scale, is_share: bool) -> tuple[float, float]:
    """From the lowest to the highest value, with some room; from zero where that is near."""
    finite = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in curves])
    low, high = float(finite.min()), float(finite.max())
    if scale == "log":
        return (low / 1.2, high * 1.2) if high / low < 1.2 else (low, high)
    room = 0.05 * (high - low) if high > low else abs(high) * 0.1 or 1.0
    low = 0.0 if 0 <= low < 0.5 * high else low - room
    return low, min(1.0, high + room) if is_share and high <= 1 else high + room


def ticks(low: float, high: float, *, wanted: int = 5) -> list[float]:
    """Round values between two, about `wanted`."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / wanted))
    step = next((each * power for each in (1, 2, 5, 10) if span / (each * power) <= wanted), 10 * power)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, min(last, first + 20) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 between them where there are few; at most six."""
    firsts = (1,) if math.log10(high / low) > 3 else (1, 2, 5)
    found = [
        float(f"{first * 10.0**power:.6g}")
        for power in range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        for first in firsts
        if low * 0.999 <= first * 10.0**power <= high * 1.001
    ]
    return found[:: max(1, math.ceil(len(found) / 6))]


def short(value: float) -> str:
    """For an axis: 25 k, 1.2 M, 0.05, 1.5e-5."""
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    if not value or abs(value) >= 1e-3:
        return f"{value:.4g}"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def show_y(value: float, is_share: bool) -> str:
    """A value of the y axis."""
    return f"{100 * value:.4g} %" if is_share else short(value)


def _trace(xs: np.ndarray, ys: np.ndarray) -> str:
    pieces: list[str] = []
    pen = "M"
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        if math.isfinite(y):
            pieces.append(f"{pen}{x:.1f} {y:.1f}")
            pen = "L"
        else:
            pen = "M"
    return "".join(pieces)
