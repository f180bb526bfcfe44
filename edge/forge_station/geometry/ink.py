"""Text, boxes and outcome shapes on an RGB image. It does not know layouts or verdicts' content.

OpenCV's Hershey font names are used because they exist in OpenCV 4 and 5 alike; 5 draws them with
a smooth sans-serif font. Text is ASCII.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.contract.verdict import Outcome

ByteImage = NDArray[np.uint8]
Colour = tuple[int, int, int]

INK: Colour = (26, 26, 26)
MUTED: Colour = (84, 88, 92)
PAPER: Colour = (212, 215, 218)
CARD: Colour = (236, 238, 240)
DARK: Colour = (22, 26, 30)
WHITE: Colour = (255, 255, 255)

# Background and ink of an outcome. Measured: all pairs stay apart for protan, deutan and tritan
# eyes (dE00 >= 22), and text contrast is at least 7:1.
BLOCK: Mapping[Outcome, tuple[Colour, Colour]] = {
    Outcome.PASS: ((159, 211, 182), (0, 0, 0)),
    Outcome.FAIL: ((176, 0, 32), WHITE),
    Outcome.UNSURE: ((255, 196, 0), (0, 0, 0)),
    Outcome.ERROR: ((11, 61, 145), WHITE),
}


@dataclass(frozen=True)
class Box:
    """A rectangle of pixels: left, top, width, height."""

    x: int
    y: int
    width: int
    height: int

    def of(self, image: ByteImage) -> ByteImage:
        """The pixels of the box, a view into `image`."""
        return image[self.y : self.y + self.height, self.x : self.x + self.width]


def frame(image: ByteImage, box: Box, colour: Colour, thickness: int) -> None:
    """Outline just inside a box."""
    inner = box.of(image)
    inner[:thickness], inner[-thickness:] = colour, colour
    inner[:, :thickness], inner[:, -thickness:] = colour, colour


def hatch(image: ByteImage, box: Box, thickness: int) -> None:
    """Slanted white stripes along the rim of a box."""
    inner = box.of(image)
    rows, columns = np.indices(inner.shape[:2])
    rim = np.ones(inner.shape[:2], bool)
    rim[thickness:-thickness, thickness:-thickness] = False
    inner[rim & ((rows + columns) % 24 < 12)] = WHITE


def shape(
    image: ByteImage,
    outcome: Outcome,
    centre: tuple[int, int],
    radius: int,
    ink: Colour,
    paper: Colour,
) -> None:
    """PASS: disc, tick. FAIL: octagon, cross. UNSURE: triangle with ?. ERROR: square with !."""
    x, y = centre
    scale = radius / 58.0

    def at(*offsets: tuple[float, float]) -> NDArray[np.int32]:
        points = [[x + scale * right, y + scale * down] for right, down in offsets]
        return np.rint(points).astype(np.int32)

    stroke = max(2, round(13 * scale))
    if outcome is Outcome.PASS:
        cv2.circle(image, centre, radius, ink, cv2.FILLED, cv2.LINE_AA)
        tick = at((-28, 2), (-8, 24), (30, -22))
        cv2.polylines(image, [tick], False, paper, stroke, cv2.LINE_AA)
        return
    if outcome is Outcome.FAIL:
        angles = np.deg2rad(22.5 + 45 * np.arange(8))
        octagon = at(*((58 * np.cos(a), 58 * np.sin(a)) for a in angles))
        cv2.fillPoly(image, [octagon], ink, cv2.LINE_AA)
        for cross in (at((-25, -25), (25, 25)), at((-25, 25), (25, -25))):
            cv2.polylines(image, [cross], False, paper, stroke, cv2.LINE_AA)
        return
    if outcome is Outcome.UNSURE:
        cv2.fillPoly(image, [at((0, -62), (66, 52), (-66, 52))], ink, cv2.LINE_AA)
        sign, size, drop = "?", 2.4, 40
    else:
        (corner,), (opposite,) = at((-52, -52)), at((52, 52))
        cv2.rectangle(image, corner.tolist(), opposite.tolist(), ink, cv2.FILLED)
        sign, size, drop = "!", 3.0, 32
    left = x - width(sign, size * scale, bold=True) // 2
    text(image, sign, (left, y + round(drop * scale)), size * scale, paper, bold=True)


def badge(
    image: ByteImage, letter: str, centre: tuple[int, int], radius: int, colour: Colour
) -> None:
    """A white letter in a disc."""
    cv2.circle(image, centre, radius, colour, cv2.FILLED, cv2.LINE_AA)
    size = radius / 18
    left = centre[0] - width(letter, size, bold=True) // 2
    text(image, letter, (left, centre[1] + round(10 * size)), size, WHITE, bold=True)


def text(
    image: ByteImage,
    words: str,
    origin: tuple[int, int],
    size: float,
    colour: Colour,
    *,
    bold: bool = False,
    room: int | None = None,
) -> None:
    """Draw at a baseline. What exceeds `room` px is set smaller (to 70 %), then cut with dots."""
    words = plain(words)
    if room is not None and width(words, size, bold=bold) > room:
        size *= max(0.7, room / width(words, size, bold=bold))
        while len(words) > 4 and width(words, size, bold=bold) > room:
            words = words.removesuffix("...")[:-1].rstrip() + "..."
    cv2.putText(image, words, origin, _font(bold), size, colour, 1, cv2.LINE_AA)


def wrapped(words: str, size: float, room: int) -> list[str]:
    """Lines no wider than `room` px, broken between words (a longer word stays whole)."""
    lines: list[str] = []
    for word in plain(words).split():
        if lines and width(f"{lines[-1]} {word}", size) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def width(words: str, size: float, *, bold: bool = False) -> int:
    """Pixels that a line of text takes."""
    return int(cv2.getTextSize(plain(words), _font(bold), size, 1)[0][0])


def plain(words: str) -> str:
    """Text that every OpenCV font can draw: ASCII, other signs as `?`."""
    decomposed = unicodedata.normalize("NFKD", words)
    kept = "".join(c for c in decomposed if not unicodedata.combining(c))
    return "".join(c if " " <= c <= "~" else "?" for c in kept)


def _font(bold: bool) -> int:
    return cv2.FONT_HERSHEY_DUPLEX if bold else cv2.FONT_HERSHEY_SIMPLEX
