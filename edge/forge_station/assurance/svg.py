"""Small charts as SVG text, for reports that are one file. It knows axes, marks and lines only."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

INK, GRID, BLUE, RED, GREY = "#1a1a1a", "#d4d7da", "#0b3d91", "#b00020", "#6b7075"
SERIES = (BLUE, "#b35900", "#00695c", "#6a1b9a", "#455a64")
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 30, 42


@dataclass
class Chart:
    """A chart of `size` pixels whose axes span `x` and `y`; `names`: texts at the x ticks."""

    title: str
    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str = ""
    y_label: str = ""
    names: Sequence[tuple[float, str]] = ()
    size: tuple[int, int] = (470, 280)
    _marks: list[str] = field(default_factory=list)

    def dots(self, points: Sequence[tuple[float, float]], colour: str = BLUE) -> None:
        for x, y in points:
            self._marks.append(
                f'<circle cx="{self._x(x):.1f}" cy="{self._y(y):.1f}" r="3" fill="{colour}"/>'
            )

    def line(
        self, points: Sequence[tuple[float, float]], colour: str = BLUE, dashed: bool = False
    ) -> None:
        path = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._marks.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>'
        )

    def level(self, y: float, text: str, colour: str = RED, at: float | None = None) -> None:
        """A dashed line across, with its name ending at `at` (default: the right end)."""
        self.line([(self.x[0], y), (self.x[1], y)], colour, dashed=True)
        end = self.size[0] - _RIGHT - 2 if at is None else self._x(at)
        self._text(end, self._y(y) - 4, text, "end", colour)

    def bar(self, x: float, y: float, width: float, colour: str = BLUE) -> None:
        left, right, top = self._x(x - width / 2), self._x(x + width / 2), self._y(y)
        height = self._y(max(0.0, self.y[0])) - top
        self._marks.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
            f'height="{max(0.0, height):.1f}" fill="{colour}"/>'
        )

    def whisker(self, x: float, low: float, high: float, colour: str = INK) -> None:
        """An interval, with end strokes."""
        self.line([(x, low), (x, high)], colour)
        for y in (low, high):
            at, px = self._y(y), self._x(x)
            self._marks.append(
                f'<path d="M{px - 5:.1f} {at:.1f}h10" stroke="{colour}" stroke-width="1.5"/>'
            )

    def legend(self, names: Sequence[str], colours: Sequence[str] = SERIES) -> None:
        """Names in the colours of their marks, at the upper right above the axes."""
        right = self.size[0] - _RIGHT
        for name, colour in reversed(list(zip(names, colours, strict=False))):
            self._text(right, _TOP - 6, f"\u25cf {name}", "end", colour)
            right -= 7 * len(name) + 22

    def text(self) -> str:
        """The chart as an <svg> element."""
        width, height = self.size
        self_closed = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(self.title)}" '
            'font-family="sans-serif" font-size="11">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *self._axes(),
            *self._marks,
            "</svg>",
        ]
        return "\n".join(self_closed)

    def _axes(self) -> list[str]:
        marks, self._marks = self._marks, []
        width, height = self.size
        bottom = height - _BOTTOM
        for y in ticks(*self.y):
            self.line([(self.x[0], y), (self.x[1], y)], GRID)
            self._text(_LEFT - 6, self._y(y) + 4, f"{y:g}", "end")
        for x, name in self.names or [(x, f"{x:g}") for x in ticks(*self.x)]:
            self._text(self._x(x), bottom + 16, name, "middle")
        self._marks.append(
            f'<path d="M{_LEFT} {_TOP}V{bottom}H{width - _RIGHT}" fill="none" stroke="{INK}"/>'
        )
        self._text(_LEFT, 15, self.title, "start", weight="bold")
        self._text((_LEFT + width - _RIGHT) / 2, height - 8, self.x_label, "middle", GREY)
        middle = (_TOP + bottom) / 2
        self._marks.append(
            f'<text x="14" y="{middle:.0f}" text-anchor="middle" fill="{GREY}" '
            f'transform="rotate(-90 14 {middle:.0f})">{html.escape(self.y_label)}</text>'
        )
        found, self._marks = self._marks, marks
        return found

    def _text(
        self, x: float, y: float, text: str, anchor: str, colour: str = INK, weight: str = "normal"
    ) -> None:
        self._marks.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
            f'font-weight="{weight}">{html.escape(text)}</text>'
        )

    def _x(self, x: float) -> float:
        low, high = self.x
        return _LEFT + (x - low) / ((high - low) or 1.0) * (self.size[0] - _LEFT - _RIGHT)

    def _y(self, y: float) -> float:
        low, high = self.y
        span = self.size[1] - _TOP - _BOTTOM
        return _TOP + span - (y - low) / ((high - low) or 1.0) * span


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values within [low, high]."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def padded(low: float, high: float, share: float = 0.06) -> tuple[float, float]:
    """The span with room at both ends."""
    room = (high - low) * share or abs(high) * share or 1.0
    return low - room, high + room
