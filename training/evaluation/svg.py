"""Two diagrams as SVG text: calibration, and shares over size with intervals. Knows no files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 12, 44
_INK, _GRID, _MUTED = "#1f2933", "#e3e7eb", "#52606d"
COLOURS = ("#1f2933", "#0b6e99", "#b3541e", "#4c7d2e", "#7a3e9d", "#a3162e", "#8a6d1a")
"""One a curve, dark enough on white; curves also differ in their markers."""
_MARKERS = ("circle", "square", "diamond", "up", "down", "cross")


def calibration(bins: Sequence[Mapping[str, Any]]) -> str:
    """Share right over mean probability, one dot a bin, its area as the bin's size."""
    most = max(item["n"] for item in bins)
    body = [_axes("probability of what was read", "share right", _linear_ticks(), _linear_ticks())]
    body.append(
        f'<line x1="{_x(0)}" y1="{_y(0)}" x2="{_x(1)}" y2="{_y(1)}" stroke="{_MUTED}" '
        'stroke-dasharray="4 4"/>'
    )
    for item in bins:
        radius = 3 + 5 * math.sqrt(item["n"] / most)
        tip = f"{item['n']} answers: probability {item['probability']}, right {item['right']}"
        body.append(
            f'<circle cx="{_x(item["probability"])}" cy="{_y(item["right"])}" r="{radius:.1f}" '
            f'fill="{COLOURS[1]}" fill-opacity="0.75"><title>{tip}</title></circle>'
        )
    return _svg(body, "calibration diagram")


def over_size(curves: Mapping[str, Sequence[Mapping[str, Any]]], unit: str) -> str:
    """Share found over size (logarithmic), one curve a class, with 95 % intervals."""
    sizes = [max(item["middle"], 1e-6) for bins in curves.values() for item in bins]
    low, high = math.log10(min(sizes)), math.log10(max(sizes))
    margin = max(0.1, 0.04 * (high - low))
    low, high = low - margin, high + margin

    def at(size: float) -> float:
        return (math.log10(max(size, 1e-6)) - low) / (high - low)

    ticks = [
        (at(m * 10**e), f"{m * 10**e:g}")
        for e in range(math.floor(low), math.ceil(high) + 1)
        for m in (1, 2, 5)
        if -0.001 <= at(m * 10**e) <= 1.001
    ]
    body = [_axes(unit, "share found", ticks, _linear_ticks())]
    for number, (name, bins) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        shift = (number - (len(curves) - 1) / 2) * 1.5
        points = [(_x(at(item["middle"])) + shift, _y(item["found"])) for item in bins]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        for (x, y), item in zip(points, bins, strict=True):
            bottom, top = (_y(value) for value in item["interval"])
            tip = f"{name}, {item['from']:g} to {item['to']:g}: {item['found']} of {item['n']}"
            body.append(
                f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{top}" stroke="{colour}" '
                f'stroke-opacity="0.45"/>{_marker(number, x, y, colour, tip)}'
            )
    return _svg(body, "share found over size") + _legend(list(curves))


def _legend(names: Sequence[str]) -> str:
    items = []
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        mark = f'<svg width="16" height="12">{_marker(number, 8, 6, colour, name)}</svg>'
        items.append(f"<span>{mark}{name}</span>")
    return f'<p class="legend">{"".join(items)}</p>'


def _marker(number: int, x: float, y: float, colour: str, tip: str) -> str:
    kind, r = _MARKERS[number % len(_MARKERS)], 4.0
    look = f'fill="{colour}"><title>{tip}</title>'
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" {look}</circle>'
    shapes: dict[str, list[tuple[float, float]]] = {
        "square": [(-r, -r), (r, -r), (r, r), (-r, r)],
        "diamond": [(0, -5), (5, 0), (0, 5), (-5, 0)],
        "up": [(0, -5), (5, 4), (-5, 4)],
        "down": [(0, 5), (5, -4), (-5, -4)],
        "cross": [(-5, -2), (-2, -5), (5, 2), (2, 5)],
    }
    path = " ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in shapes[kind])
    return f'<polygon points="{path}" {look}</polygon>'


def _linear_ticks() -> list[tuple[float, str]]:
    return [(value / 5, f"{value / 5:g}") for value in range(6)]


def _x(share: float) -> float:
    return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(share: float) -> float:
    return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def _axes(
    right: str, up: str, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[tuple[float, str]]
) -> str:
    lines = []
    for share, text in x_ticks:
        lines.append(
            f'<line x1="{_x(share)}" y1="{_y(0)}" x2="{_x(share)}" y2="{_y(1)}" stroke="{_GRID}"/>'
            f'<text x="{_x(share)}" y="{_y(0) + 16}" text-anchor="middle">{text}</text>'
        )
    for share, text in y_ticks:
        lines.append(
            f'<line x1="{_x(0)}" y1="{_y(share)}" x2="{_x(1)}" y2="{_y(share)}" stroke="{_GRID}"/>'
            f'<text x="{_x(0) - 7}" y="{_y(share) + 4}" text-anchor="end">{text}</text>'
        )
    middle = (_x(0) + _x(1)) / 2
    height = (_y(0) + _y(1)) / 2
    lines.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{right}</text>')
    lines.append(
        f'<text x="14" y="{height}" text-anchor="middle" transform="rotate(-90 14 {height})">{up}'
        "</text>"
    )
    return "".join(lines)


def _svg(body: Sequence[str], label: str) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{label}" fill="{_INK}">{"".join(body)}</svg>'
    )
