"""A line chart as SVG text: both axes logarithmic, a line per name.

Knows numbers and names. Knows nothing of what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from math import floor, log10

__all__ = ["line_chart"]

_WIDTH, _HEIGHT, _LEFT = 560, 300, 70
_COLOURS = ("#06c", "#c30", "#283", "#a0a", "#b80", "#555")


def line_chart(curves: Mapping[str, Mapping[float, float]], *, title: str, x_title: str, y_title: str) -> str:
    """curves: name -> y by x, all above 0; points of which either is not are left out."""
    kept = {name: {x: y for x, y in curve.items() if x > 0 and y > 0} for name, curve in curves.items()}
    x_at = _Scale((x for curve in kept.values() for x in curve), 0, _WIDTH)
    y_at = _Scale((y for curve in kept.values() for y in curve.values()), _HEIGHT, 0)
    box = f"{-_LEFT} -40 {_WIDTH + _LEFT + 20} {_HEIGHT + 90 + 18 * len(kept)}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="12">']
    parts.append(f'<rect x="{-_LEFT}" y="-40" width="100%" height="100%" fill="white"/>')
    parts.append(_text(0, -18, title))
    for value in y_at.marks:
        parts.append(f'<path d="M0 {y_at(value):.1f}H{_WIDTH}" stroke="#ddd"/>')
        parts.append(_text(-6, y_at(value) + 4, f"{value:,g}", anchor="end"))
    for value in x_at.marks:
        parts.append(_text(x_at(value), _HEIGHT + 18, f"{value:,g}", anchor="middle"))
    parts.append(_text(_WIDTH, _HEIGHT + 36, x_title, anchor="end"))
    parts.append(_text(-_LEFT + 4, -4, y_title))
    for number, (name, curve) in enumerate(kept.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [(x_at(x), y_at(y)) for x, y in sorted(curve.items())]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(_text(0, _HEIGHT + 54 + 18 * number, name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """From a value to a place between start and end, by its logarithm. `marks`: 1, 2 and 5 of each power of ten."""

    def __init__(self, values: Iterable[float], start: float, end: float) -> None:
        logs = [log10(value) for value in values] or [0.0]
        self._low, self._span = min(logs), (max(logs) - min(logs)) or 1.0
        self._start, self._end = start, end
        steps = [m * 10.0**power for power in range(floor(min(logs)), floor(max(logs)) + 1) for m in (1, 2, 5)]
        self.marks = [step for step in steps if min(logs) <= log10(step) <= max(logs)] or [10 ** min(logs)]

    def __call__(self, value: float) -> float:
        return self._start + (log10(value) - self._low) / self._span * (self._end - self._start)


def _text(x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
