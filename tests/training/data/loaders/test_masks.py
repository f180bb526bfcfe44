"""Masks -> class, score and grid, by both rules; what is refused, and that nothing is left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.training.data.pictures import Run, picture
from training.data import examples
from training.data.loaders import masks
from training.data.loaders.sample import LoadError

HEIGHT, WIDTH = 64, 128


def tile(folder: Path, kind: str, name: str, seed: int, box: tuple[int, int, int, int] | None):
    """A picture and its mask, defective in rows box[0]:box[1], columns box[2]:box[3]."""
    picture(folder / kind / f"{name}.jpg", seed, (HEIGHT, WIDTH))
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    if box:
        mask[box[0] : box[1], box[2] : box[3]] = 255
    Image.fromarray(mask).save(folder / kind / f"{name}.png")


@pytest.fixture
def tiles(tmp_path: Path) -> Path:
    folder = tmp_path / "tiles"
    # Cells are 4 x 8 px. Row 5 (1-based) is rows 16..19, columns 5 and 6 are 32..47.
    tile(folder, "MT_Crack", "exp1_num_100", 1, (16, 20, 32, 48))
    tile(folder, "MT_Crack", "exp2_num_120", 2, (30, 31, 65, 66))  # one pixel
    tile(folder, "MT_Free", "exp1_num_900", 3, None)
    tile(folder, "MT_Free", "exp2_num_5000", 4, None)
    return folder


def by_id(folder: Path) -> dict[str, examples.Example]:
    return {example.id: example for example in examples.read(folder / examples.FILE)}


def test_a_mask_becomes_class_score_and_cells(tiles, tmp_path, run: Run):
    report = run("masks", tiles, "--part", "magnetic_tile")
    found = by_id(tmp_path / "out")
    crack = found["MT_Crack-exp1_num_100"]
    assert crack.messages[1].content == "<image>surface joint\nmagnetic_tile"
    # 2 of 256 cells: 7 (1 - sqrt(4 * 2 / 256)) = 5.76
    assert crack.messages[2].content == "class: crack\nscore: 6/10\nphoto r5: 5,6"
    clean = found["MT_Free-exp1_num_900"]
    assert clean.messages[2].content == "class: normal\nscore: 10/10\nphoto: none"
    assert (tmp_path / "out" / crack.images[0]).read_bytes() == (
        tiles / "MT_Crack" / "exp1_num_100.jpg"
    ).read_bytes()
    assert report["examples"] == 4 and report["code"] == 0 and report["leaks"] == []


def test_a_single_pixel_keeps_a_cell_by_area_and_vanishes_by_the_paper(tiles, tmp_path, run: Run):
    vanished = run("masks", tiles)["vanished"]
    assert vanished == {"crack": {"masks": 2, "lanczos": 1, "area_before_one_cell": 1}}
    small = by_id(tmp_path / "out")["MT_Crack-exp2_num_120"]
    assert small.messages[2].content.endswith("photo r8: 9")
    run("masks", tiles, "--coverage", "lanczos", "--overwrite")
    small = by_id(tmp_path / "out")["MT_Crack-exp2_num_120"]
    assert small.messages[2].content.endswith("photo: none")


def test_a_running_number_groups_what_was_taken_together(tiles, tmp_path, run: Run):
    run("masks", tiles, "--group", r"num_(?P<run>\d+)", "--run-gap", "50")
    groups = {name: example.group for name, example in by_id(tmp_path / "out").items()}
    assert groups["MT_Crack-exp1_num_100"] == groups["MT_Crack-exp2_num_120"] == "run100"
    assert groups["MT_Free-exp1_num_900"] == "run900" != groups["MT_Free-exp2_num_5000"]


def test_masks_in_a_folder_of_their_own(tmp_path, run: Run):
    """The layout of MVTec: ground truth apart, names with a suffix, good parts without masks."""
    for n, kind in enumerate(("good", "scratch_head")):
        picture(tmp_path / "test" / kind / "000.png", n, (64, 64))
    mask = np.zeros((64, 64), np.uint8)
    mask[0:4, 0:4] = 1
    (tmp_path / "truth" / "scratch_head").mkdir(parents=True)
    Image.fromarray(mask).save(tmp_path / "truth" / "scratch_head" / "000_mask.png")
    run("masks", tmp_path / "test", "--masks", tmp_path / "truth", "--mask-suffix", "_mask.png")
    texts = [e.messages[2].content for e in by_id(tmp_path / "out").values()]
    assert texts == [
        "class: normal\nscore: 10/10\nphoto: none",
        "class: scratch_head\nscore: 6/10\nphoto r1: 1",
    ]


def spoil(folder: Path, how: str) -> None:
    crack = folder / "MT_Crack" / "exp1_num_100"
    if how == "truncated":
        whole = crack.with_suffix(".jpg").read_bytes()
        crack.with_suffix(".jpg").write_bytes(whole[: len(whole) * 2 // 3])
    elif how == "no picture":
        crack.with_suffix(".jpg").write_text("hello")
    elif how == "size":
        Image.new("L", (10, 10), 255).save(crack.with_suffix(".png"))
    elif how == "empty":
        Image.new("L", (WIDTH, HEIGHT)).save(crack.with_suffix(".png"))
    elif how == "clean with defect":
        Image.new("L", (WIDTH, HEIGHT), 255).save(folder / "MT_Free" / "exp1_num_900.png")
    elif how == "missing":
        crack.with_suffix(".png").unlink()
    elif how == "colour":
        Image.new("RGB", (WIDTH, HEIGHT), (255, 0, 0)).save(crack.with_suffix(".png"))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "truncated",
            "MT_Crack-exp1_num_100: MT_Crack/exp1_num_100.jpg: picture cannot be decoded",
        ),
        ("no picture", "exp1_num_100.jpg: picture cannot be opened"),
        ("size", "exp1_num_100.png: mask of another size, got 10 x 10; allowed: 128 x 64"),
        (
            "empty",
            "exp1_num_100.png: class and mask contradict, got empty; allowed: as class crack",
        ),
        ("clean with defect", "exp1_num_900.png: class and mask contradict, got not empty"),
        ("missing", "MT_Crack/exp1_num_100.jpg: mask: picture without a mask"),
        ("colour", "exp1_num_100.png: mask in colour"),
    ],
)
def test_bad_input_is_one_error_and_leaves_nothing(tiles, tmp_path, run: Run, how, said):
    spoil(tiles, how)
    report = run("masks", tiles)
    assert report["code"] == 2 and "1 entries cannot be loaded" in report["error"]
    assert said in report["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["tiles"]
    report = run("masks", tiles, "--skip-bad")
    assert report["examples"] == 3 and len(report["skipped"]) == 1


def test_only_named_classes_are_known(tiles, tmp_path, run: Run):
    error = run("masks", tiles, "--classes", "MT_Free=normal")["error"]
    assert error.count("unknown class, got MT_Crack; allowed: MT_Free") == 2
    assert "NAME=class" in run("masks", tiles, "--classes", "MT_Free")["error"]
    assert "lower-case" in run("masks", tiles, "--classes", "MT_Free=No way!")["error"]
    run("masks", tiles, "--classes", "MT_Free=normal,MT_Crack=fracture")
    labels = {e.messages[2].content.split("\n")[0] for e in by_id(tmp_path / "out").values()}
    assert labels == {"class: normal", "class: fracture"}


def test_names_of_folders_lose_what_all_share():
    found = masks.class_names(["MT_Blowhole", "MT_Free", "MT_Crack"])
    assert found == {"MT_Blowhole": "blowhole", "MT_Free": "normal", "MT_Crack": "crack"}
    assert masks.class_names(["scratch_head", "scratch"]) == {
        "scratch_head": "scratch_head",
        "scratch": "scratch",
    }
    assert masks.class_names(["MT_Crack"]) == {"MT_Crack": "mt_crack"}


def saved(path: Path, values: np.ndarray, mode: str | None = None) -> np.ndarray:
    image = Image.fromarray(values)
    (image if mode is None else image.convert(mode)).save(path)
    return masks.read_mask(path)


def test_every_kind_of_mask_is_read(tmp_path):
    on = np.zeros((4, 6), bool)
    on[1, 2] = True
    for values in (
        on.astype(np.uint8),
        on * np.uint8(255),
        on * np.uint8(3),
        on * np.uint16(65535),
    ):
        assert np.array_equal(saved(tmp_path / "m.png", values), on), values.dtype
    assert np.array_equal(saved(tmp_path / "m.png", on * np.uint8(255), "1"), on)
    assert np.array_equal(saved(tmp_path / "m.png", on * np.uint8(255), "RGB"), on)
    palette = Image.fromarray(on.astype(np.uint8) * 2, "L").convert("P")
    palette.putpalette([0, 0, 0, 9, 9, 9, 128, 0, 0])
    palette.putdata((on.astype(np.uint8) * 2).ravel().tolist())
    palette.save(tmp_path / "p.png")
    assert np.array_equal(masks.read_mask(tmp_path / "p.png"), on)
    half = saved(tmp_path / "m.png", on * np.uint8(51))
    assert half[1, 2] == pytest.approx(0.2)


def test_a_photo_that_lies_on_its_side_is_turned_and_its_mask_must_fit(tmp_path, run: Run):
    folder = tmp_path / "tiles" / "crack"
    picture(folder / "a.jpg", 1, (40, 80))
    with Image.open(folder / "a.jpg") as image:
        exif = image.getexif()
        exif[0x0112] = 6  # a quarter turn: seen as 80 x 40
        image.save(folder / "a.jpg", exif=exif)
    mask = np.zeros((80, 40), np.uint8)
    mask[:5, :2] = 255
    Image.fromarray(mask).save(folder / "a.png")
    run("masks", tmp_path / "tiles")
    (example,) = by_id(tmp_path / "out").values()
    with Image.open(tmp_path / "out" / example.images[0]) as image:
        assert image.size == (40, 80) and image.getexif().get(0x0112, 1) == 1
    assert example.messages[2].content.endswith("photo r1: 1")


def test_what_is_there_is_not_lost(tiles, tmp_path, run: Run):
    run("masks", tiles)
    assert "something is there already" in run("masks", tiles)["error"]
    (tmp_path / "out" / examples.FILE).unlink()
    assert "not a folder of examples" in run("masks", tiles, "--overwrite")["error"]


def test_the_page_shows_a_picture_for_each_example(tiles, tmp_path, run: Run):
    run("masks", tiles, "--contact-sheet", tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as page:
        red = (np.asarray(page).astype(int) - (230, 60, 20)).__abs__().max(-1) < 30
    assert red.sum() > 60  # the outlines of three cells
    report = run("look", tmp_path / "out" / examples.FILE, "--out", tmp_path / "b.png", out=False)
    assert report["drawn"] == 4


def test_what_masks_cannot_be(tmp_path):
    (tmp_path / "m.png").write_bytes(b"nothing")
    with pytest.raises(LoadError, match="mask cannot be read"):
        masks.read_mask(tmp_path / "m.png")


def test_help_of_every_command_teaches(capsys):
    from training import load

    for name in (*load.SOURCES, "check", "look", "to-qwen", "to-trl"):
        with pytest.raises(SystemExit) as stop:
            load.main([name, "--help"])
        assert stop.value.code == 0
        text = capsys.readouterr().out
        assert name == "look" or f"python -m training.load {name}" in text, name
