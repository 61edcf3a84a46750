"""Plots as SVG, by hand: lines on logarithmic axes, readable on light and dark ground."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Line = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 350, 40, 50
# Okabe and Ito's colours, those that stand out from white and from black.
_COLOURS = ("#d55e00", "#e69f00", "#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#8c6d31", "#888888", "#b22222")
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.axis { stroke: #57606a }
.grid { stroke: #d0d7de }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .axis { stroke: #8b949e }
  .grid { stroke: #30363d }
}
"""


def plot(title: str, across: str, up: str, lines: Mapping[str, Line]) -> str:
    """An SVG document. Lines are (x, y) pairs, all positive; the first ones have the strongest colours."""
    points = [point for line in lines.values() for point in line]
    place_x = _scale([x for x, _ in points], _LEFT, _WIDTH - _RIGHT)
    place_y = _scale([y for _, y in points], _HEIGHT - _BOTTOM, _TOP)
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<text class="title" x="{_LEFT}" y="20">{escape(title)}</text>',
        *_grid([x for x, _ in points], [y for _, y in points], place_x, place_y),
        f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(across)}</text>',
        f'<text transform="translate(16 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(up)}</text>',
    ]
    for number, (name, line) in enumerate(lines.items()):
        parts += _drawn(number, name, [(place_x(x), place_y(y)) for x, y in sorted(line)])
    return "\n".join([*parts, "</svg>", ""])


def _drawn(number: int, name: str, places: list[tuple[float, float]]) -> list[str]:
    colour = _COLOURS[number % len(_COLOURS)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
    at = _TOP + 10 + 24 * number
    left = _WIDTH - _RIGHT + 20
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
        *dots,
        f'<line x1="{left}" x2="{left + 22}" y1="{at}" y2="{at}" stroke="{colour}" stroke-width="3"/>',
        f'<text x="{left + 30}" y="{at + 4}">{escape(name)}</text>',
    ]


def _grid(
    xs: Sequence[float],
    ys: Sequence[float],
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
) -> list[str]:
    right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for x in _decades(xs):
        at = f"{place_x(x):.1f}"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{_TOP}" y2="{floor}"/>')
        parts.append(f'<text x="{at}" y="{floor + 18}" text-anchor="middle">{x:,g}</text>')
    for y in _decades(ys):
        at = f"{place_y(y):.1f}"
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{float(at) + 4:.1f}" text-anchor="end">{y:,g}</text>')
    parts.append(f'<path class="axis" fill="none" d="M{_LEFT} {_TOP}V{floor}H{right}"/>')
    return parts


def _decades(values: Sequence[float]) -> list[float]:
    """The powers of ten that enclose the values."""
    first, last = _exponents(values)
    return [10.0**exponent for exponent in range(first, last + 1)]


def _exponents(values: Sequence[float]) -> tuple[int, int]:
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return first, max(last, first + 1)


def _scale(values: Sequence[float], low: float, high: float) -> Callable[[float], float]:
    first, last = _exponents(values)
    return lambda value: low + (high - low) * (math.log10(value) - first) / (last - first)
