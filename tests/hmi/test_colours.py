"""The colours of the verdicts, from the style sheet itself: read, and told apart by everybody."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from forge_station.hmi.app import STATIC

Colour = NDArray[np.float64]
VERDICTS = ("pass", "fail", "unsure", "error")
READ, SEEN, APART = 7.0, 3.0, 20.0
"""Least contrast of text and of what is no text (WCAG 2.2), least CIEDE2000 between verdicts."""
# Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protan": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                        [-0.003882, -0.048116, 1.051998]]),
    "deutan": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                        [-0.011820, 0.042940, 0.968881]]),
    "tritan": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                        [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
                   [0.0193339, 0.1191920, 0.9503041]])  # fmt: skip
WHITE = np.array([0.95047, 1.0, 1.08883])


def style(palette: str) -> dict[str, Colour]:
    """Name -> linear RGB of the colours of a palette."""
    text = (STATIC / "base.css").read_text()
    blocks = re.findall(r":root(?:\[data-palette='(\w+)'\])? \{(.*?)\}", text, re.DOTALL)
    found: dict[str, Colour] = {}
    for name, block in blocks:
        if name in ("", palette):
            for key, value in re.findall(r"--([\w-]+): #([0-9a-f]{3,6});", block):
                digits = value if len(value) == 6 else "".join(2 * c for c in value)
                found[key] = linear(np.frombuffer(bytes.fromhex(digits), np.uint8) / 255)
    return found


def linear(rgb: Colour) -> Colour:
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(a: Colour, b: Colour) -> float:
    light = sorted(float(TO_XYZ[1] @ item) for item in (a, b))
    return (light[1] + 0.05) / (light[0] + 0.05)


def lab(rgb: Colour) -> Colour:
    ratio = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def ciede2000(one: Colour, two: Colour) -> float:
    (l1, a1, b1), (l2, a2, b2) = one, two
    mean_c = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 0.5 * (1 - np.sqrt(mean_c**7 / (mean_c**7 + 25.0**7)))
    c1, c2 = np.hypot((1 + g) * a1, b1), np.hypot((1 + g) * a2, b2)
    h1 = np.degrees(np.arctan2(b1, (1 + g) * a1)) % 360
    h2 = np.degrees(np.arctan2(b2, (1 + g) * a2)) % 360
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    dh = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    lm, cm = (l1 + l2) / 2, (c1 + c2) / 2
    hm = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    t = (
        1 - 0.17 * np.cos(np.radians(hm - 30)) + 0.24 * np.cos(np.radians(2 * hm))
        + 0.32 * np.cos(np.radians(3 * hm + 6)) - 0.20 * np.cos(np.radians(4 * hm - 63))
    )  # fmt: skip
    sl = 1 + 0.015 * (lm - 50) ** 2 / np.sqrt(20 + (lm - 50) ** 2)
    sc, sh = 1 + 0.045 * cm, 1 + 0.015 * cm * t
    rc = 2 * np.sqrt(cm**7 / (cm**7 + 25.0**7))
    rt = -np.sin(np.radians(60 * np.exp(-(((hm - 275) / 25) ** 2)))) * rc
    dl, dc, dh = (l2 - l1) / sl, (c2 - c1) / sc, dh / sh
    return float(np.sqrt(dl**2 + dc**2 + dh**2 + rt * dc * dh))


@pytest.mark.parametrize(
    ("one", "two", "difference"),  # Sharma, Wu, Dalal 2005, table 1
    [
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_colour_difference_is_that_of_the_paper(
    one: tuple[float, ...], two: tuple[float, ...], difference: float
) -> None:
    assert ciede2000(np.array(one), np.array(two)) == pytest.approx(difference, abs=1e-4)


@pytest.mark.parametrize("palette", ["muted", "classic"])
def test_verdicts_are_read_and_seen(palette: str) -> None:
    colours = style(palette)
    for name in VERDICTS:
        assert contrast(colours[name], colours[f"on-{name}"]) >= READ, name
    assert contrast(colours["ink"], colours["page"]) >= SEEN  # the outline of each block
    assert contrast(colours["ink"], colours["card"]) >= READ
    assert contrast(colours["quiet"], colours["card"]) >= 4.5


@pytest.mark.parametrize("palette", ["muted", "classic"])
@pytest.mark.parametrize("blindness", sorted(BLINDNESS))
def test_verdicts_are_told_apart_by_the_colour_blind(palette: str, blindness: str) -> None:
    colours = style(palette)
    seen = {name: lab(BLINDNESS[blindness] @ colours[name]) for name in VERDICTS}
    found = {(a, b): ciede2000(seen[a], seen[b]) for a, b in combinations(VERDICTS, 2)}
    assert min(found.values()) >= APART, found
