"""What `forge-station inspect` is given in tests."""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np

from forge_station import intake, offline, sources
from forge_station.capture.base import Cloud
from forge_station.contract.verdict import Verdict
from forge_station.geometry import cloud_io


def command(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    offline.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def inspected(inspector, path: Path, **options: object) -> Verdict:
    (item,) = sources.items_of([path], sources.Options(**options))
    return intake.inspect(inspector, item, intake.Request(sources.Options(**options))).verdict


def tray_points(parts: int = 1, pixel_mm: float = 0.25, turn_deg: float = 20.0) -> np.ndarray:
    """Height map [H, W, 3] mm of a tray z = 0 with blocks of 16 x 6 x 5 mm, 24 mm apart.

    The blocks are turned against the rows of the map, as parts lie on a real tray.
    """
    x, y = np.meshgrid(np.arange(-20, 24 * parts - 4, pixel_mm), np.arange(-14, 14, pixel_mm))
    cos, sin = np.cos(np.deg2rad(turn_deg)), np.sin(np.deg2rad(turn_deg))
    z = np.random.default_rng(1).normal(0, 0.01, x.shape)
    for k in range(parts):
        along, across = cos * (x - 24 * k) + sin * y, cos * y - sin * (x - 24 * k)
        z[(np.abs(along) < 8) & (np.abs(across) < 3)] += 5.0
    return np.stack([x, y, z], -1).astype(np.float32)


def write_npz(path: Path, points: np.ndarray, **fields: object) -> Path:
    np.savez(path, points=points, **fields)
    return path


# ---------------------------------------------------------------- what it does


def draw_views(folder: Path, ground: int = 0, top_scale: float = 1.0) -> list[Path]:
    """A block of 40 x 16 x 12 mm at 0.25 mm a pixel, before a plain background."""
    paths = []
    for view, size in (("front", (48, 160)), ("side", (48, 64)), ("top", (64, 160))):
        image = np.full((200, 220), ground, np.uint8)
        rows, columns = (round(n * (top_scale if view == "top" else 1)) for n in size)
        image[20 : 20 + rows, 30 : 30 + columns] = 180
        paths.append(folder / f"block_{view}.png")
        cv2.imwrite(str(paths[-1]), image)
    return paths


def cloud_files(folder: Path, points: np.ndarray) -> dict[str, Path]:
    flat = points.reshape(-1, 3)
    write_npz(folder / "organised.npz", points, unit="mm", frame="tray")
    write_npz(folder / "turned.npz", points @ np.array([[1, 0, 0], [0, 0, 1], [0, -1, 0.0]]))
    cloud_io.write_cloud(folder / "flat.ply", Cloud(flat, None, 0.25))
    np.savetxt(folder / "text.xyz", flat, fmt="%.4f")
    header = "VERSION .7\nFIELDS x y z\nSIZE 4 4 4\nTYPE F F F\nCOUNT 1 1 1\n"
    header += f"WIDTH {points.shape[1]}\nHEIGHT {points.shape[0]}\nPOINTS {len(flat)}\n"
    (folder / "bin.pcd").write_bytes(header.encode() + b"DATA binary\n" + flat.tobytes())
    return {path.stem: path for path in folder.iterdir()}
