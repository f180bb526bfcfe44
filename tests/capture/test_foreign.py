"""Gray-code folders of other tools: every order gives the same points, every fault is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from forge_station.capture import foreign, structured_light
from forge_station.capture.calibration import Calibration, PatternSpec
from forge_station.errors import InputError
from tests.capture.test_structured_light import PAIRS, head, seen

Images = NDArray[np.uint8]
BITS = 9
COLUMNS = PatternSpec(
    kind="gray_pairs", axis="column", period_px=0.0, steps=0, column_bits=BITS, code_step=1
)


@pytest.fixture(scope="module")
def known() -> tuple[Calibration, Images, NDArray[np.float32]]:
    """A head, its images in this package's order, and the points they give."""
    calibration = head(PAIRS)
    stack, _ = seen(calibration)
    return calibration, stack.images[0], structured_light.decode(stack, calibration).points


def write(folder: Path, images: Images, name: str = "img_{}.png") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for k, image in enumerate(images):
        assert cv2.imwrite(str(folder / name.format(k)), image)
    return folder


def pairs(images: Images) -> Images:
    """[bits, 2, H, W]: patterns and inverses."""
    return images[:-2].reshape(2 * BITS, 2, *images.shape[1:])


def _plain(images: Images) -> Images:
    return images


def _white_first(images: Images) -> Images:
    return np.concatenate([images[-2:], images[:-2]])


def _black_before_white(images: Images) -> Images:
    return np.concatenate([images[:-2], images[-1:], images[-2:-1]])


def _fine_first(images: Images) -> Images:
    both = pairs(images).reshape(2, BITS, 2, *images.shape[1:])[:, ::-1]
    return np.concatenate([both.reshape(-1, *images.shape[1:]), images[-2:]])


def _rows_first(images: Images) -> Images:
    both = pairs(images)
    turned = np.concatenate([both[BITS:], both[:BITS]]).reshape(-1, *images.shape[1:])
    return np.concatenate([turned, images[-2:]])


def _inverses_behind(images: Images) -> Images:
    both = pairs(images)
    return np.concatenate([both[:, 0], both[:, 1], images[-2:]])


def _inverse_first(images: Images) -> Images:
    return np.concatenate([pairs(images)[:, ::-1].reshape(-1, *images.shape[1:]), images[-2:]])


def _without_inverses(images: Images) -> Images:
    return np.concatenate([pairs(images)[:, 0], images[-2:]])


def _without_white(images: Images) -> Images:
    return images[:-2]


ORDERS = [
    _plain, _white_first, _black_before_white, _fine_first, _rows_first, _inverses_behind,
    _inverse_first, _without_inverses, _without_white,
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=lambda f: f.__name__)
def test_every_order_gives_the_same_points(
    order: Callable[[Images], Images],
    known: tuple[Calibration, Images, NDArray[np.float32]],
    tmp_path: Path,
) -> None:
    calibration, images, points = known
    found = foreign.read_folder(write(tmp_path, order(images)), calibration)
    scan = structured_light.decode(found.stack, found.calibration)
    assert np.isfinite(scan.points[..., 2]).mean() > 0.97
    off = np.abs(scan.points - points)[..., 2]
    assert np.nanmax(off) < 0.05
    assert found.stack.meta["found"].startswith(f"{len(order(images))} images")


def test_names_count_by_value_and_columns_alone_are_enough(
    known: tuple[Calibration, Images, NDArray[np.float32]], tmp_path: Path
) -> None:
    calibration, images, points = known
    columns = np.concatenate([images[: 2 * BITS], images[-2:]])
    found = foreign.read_folder(write(tmp_path, columns, "Capture {}.BMP"), calibration)
    assert found.calibration.pattern == COLUMNS
    scan = structured_light.decode(found.stack, found.calibration)
    assert np.nanmedian(np.abs(scan.points - points)[..., 2]) < 0.5


@pytest.mark.parametrize("bits", [10, 12, 16])
def test_deep_and_coloured_images_are_brought_to_eight_bits(
    bits: int, known: tuple[Calibration, Images, NDArray[np.float32]], tmp_path: Path
) -> None:
    calibration, images, _ = known
    deep = images.astype(np.uint16) << (bits - 8)
    found = foreign.read_folder(write(tmp_path / "deep", deep), calibration)
    assert np.abs(found.stack.images[0].astype(int) - images).max() <= 1
    colour = np.repeat(images[..., None], 3, axis=-1)
    found = foreign.read_folder(write(tmp_path / "colour", colour), calibration)
    assert np.array_equal(found.stack.images[0], images)


def _cut(folder: Path) -> None:
    path = folder / "img_7.png"
    path.write_bytes(path.read_bytes()[:-200])


def _small(folder: Path) -> None:
    cv2.imwrite(str(folder / "img_7.png"), np.zeros((20, 30), np.uint8))


def _text(folder: Path) -> None:
    (folder / "img_7.png").write_text("not an image")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: (f / "img_11.png").unlink(), "."),
        (lambda f: [(f / f"img_{k}.png").unlink() for k in (10, 11)], "Image 10, 11 is missing"),
        (_cut, "truncated image .*img_7.png"),
        (_small, "img_7.png.*expected 200x150, got 30x20"),
        (_text, "damaged or truncated image .*img_7.png"),
        (lambda f: [p.unlink() for p in f.iterdir()], "got 0 images"),
        (lambda f: [cv2.imwrite(str(p), np.full((150, 200), 9, np.uint8)) for p in f.iterdir()],
         "nothing is lit"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_capture_is_one_clear_error(
    damage: Callable[[Path], object],
    text: str,
    known: tuple[Calibration, Images, NDArray[np.float32]],
    tmp_path: Path,
) -> None:
    calibration, images, _ = known
    damage(write(tmp_path, images))
    with pytest.raises(InputError, match=text):
        foreign.read_folder(tmp_path, calibration)


def test_another_code_than_the_calibrations_says_how_many_patterns_there_are(
    known: tuple[Calibration, Images, NDArray[np.float32]], tmp_path: Path
) -> None:
    calibration, images, _ = known
    other = replace(calibration, pattern=replace(PAIRS, column_bits=11, row_bits=10))
    with pytest.raises(InputError, match=r"expected 11 column and 10 row patterns.*got 18"):
        foreign.read_folder(write(tmp_path, images), other)
