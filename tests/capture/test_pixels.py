"""Pixel formats by the bytes that the PFNC standard lays down."""

from __future__ import annotations

import numpy as np
import pytest

from forge_station.capture.cameras import pixels
from forge_station.errors import CameraSettingsError


def as_bytes(values: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)


@pytest.mark.parametrize("name", ["Mono10p", "Mono12p", "Mono10Packed", "Mono12Packed"])
def test_packed_formats_are_unpacked(name: str) -> None:
    bits = 10 if "10" in name else 12
    rng = np.random.default_rng(bits)
    values = rng.integers(0, 1 << bits, (4, 8), dtype=np.uint16)
    if name.endswith("p"):  # one little-endian stream of bits
        stream = sum(int(value) << bits * k for k, value in enumerate(values.ravel()))
        data = stream.to_bytes(values.size * bits // 8, "little")
    else:  # two pixels: high bits of the first, low bits of both, high bits of the second
        low = bits - 8
        mask = (1 << low) - 1
        data = b"".join(
            bytes([a >> low, (a & mask) | (b & mask) << 4, b >> low])
            for a, b in values.reshape(-1, 2).tolist()
        )
    got = pixels.image(np.frombuffer(data, np.uint8), name, 8, 4)
    assert got.dtype == np.uint16 and np.array_equal(got, values)


def test_an_odd_number_of_packed_pixels_has_its_last_one() -> None:
    values = [0x123, 0x456, 0x789]
    stream = sum(value << 12 * k for k, value in enumerate(values))
    got = pixels.image(np.frombuffer(stream.to_bytes(5, "little"), np.uint8), "Mono12p", 3, 1)
    assert got.tolist() == [values]


@pytest.mark.parametrize("name", ["Mono8", "Mono10", "Mono12", "Mono14", "Mono16"])
def test_plain_grey_is_as_sent(name: str) -> None:
    dtype = np.uint8 if name == "Mono8" else np.dtype("<u2")
    values = np.arange(12, dtype=dtype).reshape(3, 4) * 3
    got = pixels.image(as_bytes(values), name, 4, 3)
    assert got.dtype == dtype and np.array_equal(got, values)


@pytest.mark.parametrize(
    ("name", "order"), [("RGB8", [0, 1, 2]), ("BGR8", [2, 1, 0]), ("RGBa8", None), ("BGRa8", None)]
)
def test_colour_becomes_rgb(name: str, order: list[int] | None) -> None:
    rgb = np.random.default_rng(1).integers(0, 256, (3, 5, 3), np.uint8)
    sent = rgb if order is None else rgb[..., order]
    if order is None:
        alpha = np.full((3, 5, 1), 7, np.uint8)
        sent = np.concatenate([rgb if name == "RGBa8" else rgb[..., ::-1], alpha], axis=2)
    assert np.array_equal(pixels.image(as_bytes(sent), name, 5, 3), rgb)


@pytest.mark.parametrize("pattern", ["RG", "GR", "GB", "BG"])
@pytest.mark.parametrize("bits", [8, 12])
def test_a_mosaic_becomes_the_colours_it_was_taken_of(pattern: str, bits: int) -> None:
    """A scene of one colour: each pixel sends the value of its filter."""
    colour = {"R": 200, "G": 120, "B": 40}
    tile = {"RG": "RGGB", "GR": "GRBG", "GB": "GBRG", "BG": "BGGR"}[pattern]
    mosaic = np.array([colour[c] for c in tile]).reshape(2, 2)
    scene = np.tile(mosaic, (4, 4)).astype(np.uint8 if bits == 8 else "<u2")
    got = pixels.image(as_bytes(scene), f"Bayer{pattern}{bits}", 8, 8)
    assert got.shape == (8, 8, 3) and got.dtype == scene.dtype
    assert (got[2:-2, 2:-2] == [200, 120, 40]).all()


def test_row_padding_is_dropped_and_missing_bytes_are_black() -> None:
    rows = np.arange(12, dtype=np.uint8).reshape(3, 4)
    padded = np.concatenate([rows, np.full((3, 3), 255, np.uint8)], axis=1)
    assert np.array_equal(pixels.image(as_bytes(padded), "Mono8", 4, 3, padding=3), rows)
    short = pixels.image(as_bytes(rows)[:6], "Mono8", 4, 3)
    assert short.ravel().tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ["Coord3D_C16", "YUV411_8", "0x80001234"])
def test_a_format_that_is_no_image_is_refused_by_name(name: str) -> None:
    with pytest.raises(CameraSettingsError, match=rf"{name}.*expected Mono8, "):
        pixels.image(np.zeros(64, np.uint8), name, 4, 4)


def test_codes_and_names_belong_together() -> None:
    assert pixels.name_of(0x01080001) == "Mono8" and pixels.name_of(0x80001234) == "0x80001234"
    assert [pixels.row_bytes(name, 100) for name in ("Mono8", "Mono12p", "RGB8")] == [100, 150, 300]
    assert len(set(pixels.CODES.values())) == len(pixels.CODES)
