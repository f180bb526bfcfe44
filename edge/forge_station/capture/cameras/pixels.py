"""Bytes of a buffer -> image, by the pixel format's name in the GenICam PFNC standard.

Knows no SDK. Packed formats are unpacked, Bayer mosaics become RGB, BGR becomes RGB, alpha is
dropped; 10 to 16 bit values stay as they are, in uint16.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from forge_station.errors import CameraSettingsError

Bytes = NDArray[np.uint8]
Image = NDArray[np.uint8] | NDArray[np.uint16]

# Names and codes of the PFNC. Bits 16 to 23 of a code are the bits of one pixel.
CODES = {
    "Mono8": 0x01080001, "Mono10": 0x01100003, "Mono12": 0x01100005, "Mono14": 0x01100025,
    "Mono16": 0x01100007, "Mono10p": 0x010A0046, "Mono12p": 0x010C0047,
    "Mono10Packed": 0x010C0004, "Mono12Packed": 0x010C0006,
    "BayerGR8": 0x01080008, "BayerRG8": 0x01080009, "BayerGB8": 0x0108000A, "BayerBG8": 0x0108000B,
    "BayerGR10": 0x0110000C, "BayerRG10": 0x0110000D, "BayerGB10": 0x0110000E,
    "BayerBG10": 0x0110000F, "BayerGR12": 0x01100010, "BayerRG12": 0x01100011,
    "BayerGB12": 0x01100012, "BayerBG12": 0x01100013, "BayerGR16": 0x0110002E,
    "BayerRG16": 0x0110002F, "BayerGB16": 0x01100030, "BayerBG16": 0x01100031,
    "RGB8": 0x02180014, "BGR8": 0x02180015, "RGBa8": 0x02200016, "BGRa8": 0x02200017,
    "Coord3D_ABC32f": 0x026000C0, "Coord3D_ABC32f_Planar": 0x026000C1,
    "Coord3D_ABC16": 0x023000B9, "Coord3D_ABC16_Planar": 0x023000BA,
    "Coord3D_A32f": 0x012000BD, "Coord3D_B32f": 0x012000BE, "Coord3D_C32f": 0x012000BF,
    "Coord3D_A16": 0x011000B6, "Coord3D_B16": 0x011000B7, "Coord3D_C16": 0x011000B8,
    "Confidence8": 0x010800C6, "Confidence16": 0x011000C7, "Confidence32f": 0x012000C8,
}  # fmt: skip
_NAMES = {code: name for name, code in CODES.items()}
_BAYER = {
    "BayerRG": cv2.COLOR_BayerRGGB2RGB,
    "BayerGR": cv2.COLOR_BayerGRBG2RGB,
    "BayerGB": cv2.COLOR_BayerGBRG2RGB,
    "BayerBG": cv2.COLOR_BayerBGGR2RGB,
}
_COLOUR = {
    "BGR8": (3, cv2.COLOR_BGR2RGB),
    "RGBa8": (4, cv2.COLOR_RGBA2RGB),
    "BGRa8": (4, cv2.COLOR_BGRA2RGB),
}
IMAGES = tuple(name for name in CODES if not name.startswith(("Coord3D", "Confidence")))
"""The formats that `image` reads."""


def name_of(code: int) -> str:
    """Name of a PFNC code; its hexadecimal number where it is not one of `CODES`."""
    return _NAMES.get(code, f"0x{code:08X}")


def row_bytes(pixel_format: str, width: int) -> int:
    """Bytes of one row without padding. Raises CameraSettingsError for an unknown format."""
    if pixel_format not in CODES:
        raise CameraSettingsError(
            "pixel format that this driver does not read",
            which=pixel_format,
            expected=", ".join(CODES),
        )
    return -(-width * (CODES[pixel_format] >> 16 & 0xFF) // 8)


def image(data: Bytes, pixel_format: str, width: int, height: int, padding: int = 0) -> Image:
    """Bytes of one image -> [H, W] or [H, W, 3] RGB, uint8 or uint16.

    data uint8 [bytes], may be a view; padding: bytes after every row. Missing bytes at the end (of
    an incomplete frame) read as 0. Raises CameraSettingsError for a format that is no image.
    """
    if pixel_format not in IMAGES:
        raise CameraSettingsError(
            "pixel format that this driver does not read as an image",
            which=pixel_format,
            expected=", ".join(IMAGES),
            action="set pixel_format in the camera's settings",
        )
    flat = unpadded(data, row_bytes(pixel_format, width), height, padding)
    if pixel_format in ("Mono10p", "Mono12p", "Mono10Packed", "Mono12Packed"):
        return _unpack(flat, pixel_format, width * height).reshape(height, width)
    if pixel_format == "RGB8":
        return flat.reshape(height, width, 3)
    if pixel_format in _COLOUR:
        channels, code = _COLOUR[pixel_format]
        return np.asarray(cv2.cvtColor(flat.reshape(height, width, channels), code), np.uint8)
    wide = CODES[pixel_format] >> 16 & 0xFF == 16
    grey: Any = (flat.view("<u2") if wide else flat).reshape(height, width)
    mosaic = _BAYER.get(pixel_format[:7])
    return grey if mosaic is None else np.asarray(cv2.demosaicing(grey, mosaic))


def unpadded(data: Bytes, row: int, height: int, padding: int) -> Bytes:
    """The `height` rows of `row` bytes without their padding, filled up with 0."""
    wanted = (row + padding) * height
    if data.size < wanted:
        data = np.concatenate([data, np.zeros(wanted - data.size, np.uint8)])
    data = data[:wanted]
    if padding:
        data = data.reshape(height, row + padding)[:, :row]
    return np.ascontiguousarray(data).reshape(-1)


def _unpack(data: Bytes, pixel_format: str, pixels: int) -> NDArray[np.uint16]:
    """10p and 12p are little-endian bit streams, four pixels in five bytes or two in three.

    The Packed ones of GigE Vision: two in three, their low bits together in the middle byte.
    """
    group = 5 if pixel_format == "Mono10p" else 3
    whole = np.concatenate([data, np.zeros(-data.size % group, np.uint8)])
    b = whole.reshape(-1, group).T.astype(np.uint16)
    if pixel_format == "Mono12p":
        values = [b[0] | (b[1] & 0x0F) << 8, b[1] >> 4 | b[2] << 4]
    elif pixel_format == "Mono10p":
        values = [
            b[0] | (b[1] & 0x03) << 8,
            b[1] >> 2 | (b[2] & 0x0F) << 6,
            b[2] >> 4 | (b[3] & 0x3F) << 4,
            b[3] >> 6 | b[4] << 2,
        ]
    elif pixel_format == "Mono12Packed":
        values = [b[0] << 4 | b[1] & 0x0F, b[2] << 4 | b[1] >> 4]
    else:
        values = [b[0] << 2 | b[1] & 0x03, b[2] << 2 | b[1] >> 4 & 0x03]
    return np.stack(values, axis=1).reshape(-1)[:pixels].astype(np.uint16)
