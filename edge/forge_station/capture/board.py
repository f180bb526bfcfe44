"""Calibration boards: geometry, detection of their corners, and a file to print in exact mm.

Knows OpenCV's ChArUco boards and plain chessboards. Board frame: mm, origin at the outer corner of
the first square, x along the columns, y along the rows (down as printed), z into the board.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.capture import files
from forge_station.errors import CalibrationError, InputError

Float = NDArray[np.float64]
Grey = NDArray[np.uint8]
KINDS = ("charuco", "chessboard")
PRINT_PX_PER_MM = 20
_MARGIN_MM = 10.0
# ISO 216, landscape
_PAGES_MM = ((297, 210), (420, 297), (594, 420), (841, 594), (1189, 841))
_MM_PER_INCH = 25.4


@dataclass(frozen=True)
class Corners:
    """Board corners found in an image: ids int [N], pixels float64 [N, 2] (0 = pixel centre)."""

    ids: NDArray[np.int32]
    pixels: Float


@dataclass(frozen=True)
class Board:
    """A printed board. squares (columns, rows); lengths as measured on the print.

    `legacy`: the ChArUco layout of OpenCV before 4.6, which differs where the number of rows is
    even. marker_mm and dictionary (OpenCV's name) belong to ChArUco boards alone. Raises
    CalibrationError for a board that cannot be.
    """

    kind: str = "charuco"
    squares: tuple[int, int] = (11, 8)
    square_mm: float = 12.0
    marker_mm: float = 9.0
    dictionary: str = "DICT_5X5_100"
    legacy: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in KINDS:
            problems.append(f"kind {self.kind!r}: expected {' or '.join(KINDS)}")
        if not all(3 <= n <= 100 for n in self.squares):
            problems.append(f"squares {self.squares}: expected 3 to 100 columns and rows")
        if not 0.5 <= self.square_mm <= 500:
            problems.append(f"square {self.square_mm} mm: expected 0.5 to 500")
        if self.kind == "charuco":
            if not 0.3 * self.square_mm <= self.marker_mm < self.square_mm:
                problems.append(f"marker {self.marker_mm} mm: expected 0.3 to 1 squares")
            number = getattr(cv2.aruco, self.dictionary, None)
            if not self.dictionary.startswith("DICT_") or not isinstance(number, int):
                problems.append(
                    f"dictionary {self.dictionary!r}: expected a name like DICT_5X5_100"
                )
            else:
                has = len(cv2.aruco.getPredefinedDictionary(number).bytesList)
                if has < self.squares[0] * self.squares[1] // 2:
                    problems.append(
                        f"dictionary {self.dictionary}: {has} markers are too few for "
                        f"{self.squares[0]}x{self.squares[1]} squares"
                    )
        if problems:
            raise CalibrationError(f"board: {'; '.join(problems)}")

    def __str__(self) -> str:
        """One line that `parse` reads back."""
        words = [self.kind, f"{self.squares[0]}x{self.squares[1]}", f"{self.square_mm:.6g}"]
        if self.kind == "charuco":
            words += [f"{self.marker_mm:.6g}", self.dictionary]
        return " ".join(words + (["legacy"] if self.legacy else []))

    @classmethod
    def parse(cls, text: str) -> Board:
        """`charuco 11x8 12 9 DICT_5X5_100 [legacy]` or `chessboard 10x7 25`: lengths in mm."""
        words = text.split()
        legacy = words[-1:] == ["legacy"]
        words = words[: len(words) - legacy]
        try:
            columns, rows = (int(v) for v in words[1].split("x"))
            if words[0] == "charuco" and len(words) == 5:
                lengths = float(words[2]), float(words[3])
                return cls(words[0], (columns, rows), *lengths, words[4], legacy)
            if words[0] == "chessboard" and len(words) == 3 and not legacy:
                return cls(words[0], (columns, rows), float(words[2]))
        except (ValueError, IndexError):
            pass
        raise CalibrationError(
            "board not understood",
            which=repr(text),
            expected="charuco COLSxROWS SQUARE_MM MARKER_MM DICTIONARY [legacy], or chessboard "
            "COLSxROWS SQUARE_MM",
        )

    @cached_property
    def _charuco(self) -> Any:
        dictionary = cv2.aruco.getPredefinedDictionary(getattr(cv2.aruco, self.dictionary))
        made = cv2.aruco.CharucoBoard(self.squares, self.square_mm, self.marker_mm, dictionary)
        made.setLegacyPattern(self.legacy)
        return made

    @cached_property
    def corners_mm(self) -> Float:
        """Inner corners by id, float64 [N, 3], z = 0."""
        columns, rows = self.squares
        x, y = np.meshgrid(np.arange(1, columns), np.arange(1, rows))
        flat = np.stack([x.ravel(), y.ravel(), np.zeros(x.size)], axis=1)
        return np.asarray(flat * self.square_mm, np.float64)

    @property
    def centre_mm(self) -> Float:
        """Middle of the board in its own frame, float64 [3]."""
        return np.array([*self.squares, 0.0]) * self.square_mm / 2

    def find(self, image: Grey) -> Corners:
        """Corners in a grey image, to sub-pixels; none found is an empty result.

        A chessboard must be wholly in view and may be found turned by 180 degrees; of a ChArUco
        board any part will do.
        """
        pixels: Any
        ids: Any
        if self.kind == "charuco":
            detector = cv2.aruco.CharucoDetector(self._charuco)
            pixels, ids = detector.detectBoard(image)[:2]
            if pixels is not None and len(pixels) > 1:
                pixels = self._refined(image, pixels)
        else:
            size = (self.squares[0] - 1, self.squares[1] - 1)
            flags = cv2.CALIB_CB_NORMALIZE_IMAGE | cv2.CALIB_CB_ACCURACY
            found, pixels = cv2.findChessboardCornersSB(image, size, flags=flags)
            ids = np.arange(len(pixels)) if found else None
        if ids is None or pixels is None:
            return Corners(np.empty(0, np.int32), np.empty((0, 2)))
        return Corners(
            np.asarray(ids, np.int32).ravel(), np.asarray(pixels, np.float64).reshape(-1, 2)
        )

    def _refined(self, image: Grey, pixels: Any) -> Any:
        """Once more on a softened image, without the markers: halves the error (sharp edges along
        the pixel grid pull a corner to it).
        """
        clear = spacing(np.reshape(pixels, (-1, 2))) * (1 - self.marker_mm / self.square_mm) / 2
        half = int(np.clip(0.8 * clear, 3, 12))
        soft = cv2.GaussianBlur(image, (0, 0), 1.0)
        stop = (cv2.TERM_CRITERIA_COUNT + cv2.TERM_CRITERIA_EPS, 60, 1e-3)
        return cv2.cornerSubPix(soft, pixels.copy(), (half, half), (-1, -1), stop)

    def picture(self, px_per_mm: int = PRINT_PX_PER_MM) -> tuple[Grey, float]:
        """The bare board, uint8 [H, W], and its true scale in pixels a mm (whole px a square)."""
        side = max(round(self.square_mm * px_per_mm), 8)
        columns, rows = self.squares
        if self.kind == "charuco":
            image = self._charuco.generateImage((columns * side, rows * side))
        else:
            odd = np.add.outer(np.arange(rows), np.arange(columns)) % 2
            image = np.kron(odd.astype(np.uint8) * 255, np.ones((side, side), np.uint8))
        return np.asarray(image, np.uint8), side / self.square_mm

    def write(self, path: Path) -> str:
        """Write a .pdf or .png to print at 100 %; returns what page it is on.

        The page has a ruler: measure it on the print before the board is used.
        """
        page, scale, size_mm = self._page()
        suffix = path.suffix.lower()
        if suffix == ".pdf":
            data = _pdf(page, size_mm)
        elif suffix == ".png":
            data = _png(page, scale)
        else:
            raise InputError("board file of unknown kind", which=path, expected=".pdf or .png")
        files.write(path, data)
        return f"page of {size_mm[0]:g} x {size_mm[1]:g} mm"

    def _page(self) -> tuple[Grey, float, tuple[float, float]]:
        board, scale = self.picture()
        need = np.array(board.shape[::-1]) / scale + (2 * _MARGIN_MM, 2 * _MARGIN_MM + 12)
        fitting = [p for p in _PAGES_MM if need[0] <= p[0] and need[1] <= p[1]]
        width, height = fitting[0] if fitting else (float(need[0]), float(need[1]))
        page = np.full((round(height * scale), round(width * scale)), 255, np.uint8)
        left, top = (page.shape[1] - board.shape[1]) // 2, round(_MARGIN_MM * scale)
        page[top : top + board.shape[0], left : left + board.shape[1]] = board
        below = top + board.shape[0]
        ruler, thick = round(100 * scale), max(round(0.3 * scale), 1)
        ruler = min(ruler, board.shape[1] // 2)
        y = below + round(4 * scale)
        cv2.line(page, (left, y), (left + ruler, y), 0, thick)
        for end in (left, left + ruler):
            cv2.line(page, (end, y - round(2 * scale)), (end, y + round(2 * scale)), 0, thick)
        words = f"{ruler / scale:.1f} mm between the ends. Print at 100 %. {self}"
        size = 2.6 * scale / 22
        cv2.putText(
            page, words, (left, y + round(6 * scale)), cv2.FONT_HERSHEY_SIMPLEX, size, 0, thick
        )
        return page, scale, (float(width), float(height))


def spacing(pixels: Float) -> float:
    """Typical distance of neighbouring corners, [N, 2] px: the side of a square in the image."""
    apart = np.linalg.norm(pixels[:, None] - pixels[None], axis=2)
    np.fill_diagonal(apart, np.inf)
    return float(np.median(apart.min(axis=1)))


def _png(page: Grey, px_per_mm: float) -> bytes:
    """PNG with its resolution (chunk pHYs), which viewers use to print in true size."""
    ok, encoded = cv2.imencode(".png", page, [cv2.IMWRITE_PNG_BILEVEL, 0])
    if not ok:
        raise InputError("the board cannot be written as PNG")
    data = encoded.tobytes()
    per_metre = round(px_per_mm * 1000)
    body = b"pHYs" + struct.pack(">IIB", per_metre, per_metre, 1)
    chunk = struct.pack(">I", 9) + body + struct.pack(">I", zlib.crc32(body))
    head = 8 + 25  # signature and IHDR
    return data[:head] + chunk + data[head:]


def _pdf(page: Grey, size_mm: tuple[float, float]) -> bytes:
    """One page with one image that fills it."""
    points = [v * 72 / _MM_PER_INCH for v in size_mm]
    box = f"{points[0]:.4f} {points[1]:.4f}"
    pixels = zlib.compress(page.tobytes())
    drawing = f"q {points[0]:.4f} 0 0 {points[1]:.4f} 0 0 cm /Board Do Q".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R /ViewerPreferences << /PrintScaling /None >> >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {box}] /Contents 4 0 R "
        "/Resources << /XObject << /Board 5 0 R >> >> >>".encode(),
        f"<< /Length {len(drawing)} >>\nstream\n".encode() + drawing + b"\nendstream",
        f"<< /Type /XObject /Subtype /Image /Width {page.shape[1]} /Height {page.shape[0]} "
        "/ColorSpace /DeviceGray /BitsPerComponent 8 /Filter /FlateDecode "
        f"/Length {len(pixels)} >>\nstream\n".encode()
        + pixels
        + b"\nendstream",
    ]
    out, starts = bytearray(b"%PDF-1.4\n"), []
    for number, content in enumerate(objects, 1):
        starts.append(len(out))
        out += f"{number} 0 obj\n".encode() + content + b"\nendobj\n"
    table = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{start:010d} 00000 n \n".encode() for start in starts)
    out += f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\n".encode()
    out += f"startxref\n{table}\n%%EOF\n".encode()
    return bytes(out)
