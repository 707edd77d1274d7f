"""Two kinds of plot as SVG: grouped bars with their spread, and lines between logarithmic axes.

Knows numbers, names and pixels. Knows nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import log10

from bench.spread import Spread
from kvreuse.ops.bench.plot import line_chart

__all__ = ["Bars", "Lines", "svg"]

_WIDTH, _HEIGHT, _LEFT = 720, 260, 60
_COLOURS = ("#1b6ca8", "#e07b39", "#3c9d5d", "#a34a8a", "#8a7a2f", "#7d8894", "#c0392b", "#16a2a2")
_KEY_COLUMN, _KEY_ROW, _CHARACTER = 24, 20, 6.6  # pixels; of 12 px sans-serif on average
_NUM_TICKS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """groups: what stands together along the axis -> series -> value. unit: of the values."""

    unit: str
    groups: Mapping[str, Mapping[str, Spread]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """lines: series -> (x, y), all above 0. x_unit, unit: of x and y."""

    x_unit: str
    unit: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def svg(plot: Bars | Lines) -> str:
    """The whole file."""
    if isinstance(plot, Lines):
        curves = {name: dict(points) for name, points in plot.lines.items()}
        return line_chart(curves, title="", x_title=plot.x_unit, y_title=plot.unit)
    names, top, marks = _bars(plot)
    key, key_height = _key(names)
    view = f"0 {-30 - key_height} {_LEFT + _WIDTH + 20} {_HEIGHT + 80 + key_height}"
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#333"'
    background = f'<rect x="0" y="{-30 - key_height}" width="100%" height="100%" fill="#fff"/>'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" {style}>', background]
    return "\n".join([*parts, *key, *_scale(top, plot.unit), *marks, "</svg>", ""])


def _bars(plot: Bars) -> tuple[list[str], float, list[str]]:
    names = list(dict.fromkeys(name for group in plot.groups.values() for name in group))
    top = _round_up(max((value.high for group in plot.groups.values() for value in group.values()), default=1.0))
    room = _WIDTH / max(len(plot.groups), 1)
    width = min(room * 0.8 / max(len(names), 1), 48)
    marks = []
    for number, (label, group) in enumerate(plot.groups.items()):
        middle = _LEFT + room * (number + 0.5)
        marks.append(_text(middle, _HEIGHT + 18, label, anchor="middle"))
        for place, (name, value) in enumerate(group.items()):
            x = middle + width * (place - len(group) / 2)
            marks += _bar(x, width, value, top=top, colour=_colour(names.index(name)))
    return names, top, marks


def _bar(x: float, width: float, value: Spread, *, top: float, colour: str) -> list[str]:
    y, low, high = (_HEIGHT * (1 - amount / top) for amount in (value.median, value.low, value.high))
    bar = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 2:.1f}" height="{_HEIGHT - y:.1f}" fill="{colour}"/>'
    centre = x + width / 2 - 1
    whisker = f'<path d="M{centre:.1f} {low:.1f}V{high:.1f}" stroke="#222"/>' if value.high > value.low else ""
    return [bar + whisker, _text(centre, high - 4, short(value.median), anchor="middle", size=9)]


def _scale(top: float, unit: str) -> list[str]:
    parts = [_text(_LEFT - 8, -14, unit, anchor="end" if len(unit) < 9 else "start", x_if_start=4)]
    for number in range(_NUM_TICKS + 1):
        y = _HEIGHT * (1 - number / _NUM_TICKS)
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{_WIDTH}" stroke="{"#ddd" if number else "#333"}"/>')
        parts.append(_text(_LEFT - 8, y + 4, short(top * number / _NUM_TICKS), anchor="end"))
    return parts


def _key(names: Sequence[str]) -> tuple[list[str], int]:
    """Colour and name of each series, in as many rows as they need."""
    if len(names) < 2:
        return [], 0
    placed, x, row = [], float(_LEFT), 0
    for number, name in enumerate(names):
        width = _KEY_COLUMN + _CHARACTER * len(name) + 12
        if x + width > _LEFT + _WIDTH:
            x, row = float(_LEFT), row + 1
        placed.append((x, row, number, name))
        x += width
    height = _KEY_ROW * (row + 1)
    parts = []
    for x, row, number, name in placed:
        y = -30 - height + _KEY_ROW * row + 10
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="12" height="12" fill="{_colour(number)}"/>')
        parts.append(_text(x + 18, y + 10, name, anchor="start"))
    return parts, height


def _text(x: float, y: float, text: str, *, anchor: str, size: int = 12, x_if_start: float | None = None) -> str:
    at = x_if_start if anchor == "start" and x_if_start is not None else x
    small = f' font-size="{size}"' if size != 12 else ""
    return f'<text x="{at:.1f}" y="{y:.1f}" text-anchor="{anchor}"{small}>{escape(text)}</text>'


def short(value: float) -> str:
    """Three digits, thousands as k and millions as M."""
    for factor, sign in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{sign}"
    return f"{value:.3g}"


def _round_up(value: float) -> float:
    """The next of 1, 2, 2.5, 5 or 10 times a power of ten, so that five steps have round names."""
    if value <= 0:
        return 1.0
    power = 10.0 ** int(log10(value) // 1)
    return next(
        step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10) if step * power >= value * 1.02 or step == 10
    )


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
