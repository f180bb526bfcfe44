"""COCO, LabelMe and YOLO: regions as defects and as marks, and input that is wrong or hostile."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.training.data.pictures import Run, picture
from training.data import examples
from training.data.loaders import regions, rle, yolo
from training.data.loaders.regions import Region
from training.data.loaders.sample import LoadError, Problems, inside

SIZE = (64, 128)
"""Cells are 4 px high and 8 px wide."""


def coco(folder: Path, annotations: list[dict[str, Any]], **image: Any) -> Path:
    picture(folder / "a.jpg", 0, SIZE)
    data = {
        "images": [{"id": 1, "file_name": "a.jpg", "height": 64, "width": 128, **image}],
        "annotations": [{"image_id": 1, "category_id": 1, **item} for item in annotations],
        "categories": [{"id": 1, "name": "Scratch"}, {"id": 2, "name": "Dent"}],
    }  # fmt: skip
    path = folder / "instances.json"
    path.write_text(json.dumps(data))
    return path


def answers(folder: Path) -> list[str]:
    return [e.messages[-1].content for e in examples.read(folder / "out" / examples.FILE)]


BOX = {"bbox": [32, 16, 16, 4]}
RLE = {"segmentation": {"size": [64, 128], "counts": [64 * 32 + 16, 4, 64 * 15 + 60, 4, 5100]}}
POLYGON = {"segmentation": [[32, 16, 47.9, 16, 47.9, 19.9, 32, 19.9]]}


@pytest.mark.parametrize(
    ("shape", "rows"),
    [(BOX, "photo r5: 5,6"), (POLYGON, "photo r5: 5,6"), (RLE, "photo r5: 5,7")],
)
def test_coco_shapes_become_cells(tmp_path, run: Run, shape, rows):
    run("coco", coco(tmp_path, [shape]), "--part", "plate")
    assert answers(tmp_path) == [f"class: scratch\nscore: 6/10\n{rows}"]


def test_every_region_has_a_cell_and_the_largest_names_the_class(tmp_path, run: Run):
    shapes = [BOX, {"bbox": [0, 0, 1, 1]}, {"bbox": [64, 32, 40, 8], "category_id": 2}]
    report = run("coco", coco(tmp_path, shapes), "--part", "plate")
    (answer,) = answers(tmp_path)
    assert answer.startswith("class: dent\n") and "photo r1: 1\n" in answer
    assert report["splits"]["train"] | {"dent": 1, "scratch": 1} == report["splits"]["train"]
    assert report["regions"] == 3 and report["vanished"] == 0


def test_a_small_box_vanishes_by_the_rule_of_the_paper(tmp_path, run: Run):
    file = coco(tmp_path, [{"bbox": [0, 0, 1, 1]}])
    report = run("coco", file, "--coverage", "lanczos")
    assert report["vanished"] == 1 and answers(tmp_path)[0].endswith("photo: none")


@pytest.mark.parametrize(
    ("annotation", "image", "said"),
    [
        ({"category_id": 9, **BOX}, {}, "annotations[0].category_id: unknown class, got 9"),
        ({}, {}, "annotations[0].bbox: not a box"),
        ({"bbox": [0, 0, "1", 1]}, {}, "annotations[0].bbox: not a box"),
        ({"bbox": [5, 5, 0, 3]}, {}, "annotations[0].bbox: empty box"),
        ({"bbox": [100, 5, 60, 3]}, {}, "annotations[0].bbox: region outside its picture"),
        ({"segmentation": [[1, 2, 3]]}, {}, "annotations[0].segmentation: not a polygon"),
        ({"segmentation": [["a"] * 6]}, {}, "annotations[0].segmentation: not a polygon"),
        (
            {"segmentation": {"size": [64, 128], "counts": [8192]}},
            {},
            "annotations[0]: empty annotation",
        ),
        (
            {"segmentation": {"size": [64, 128], "counts": [1, 2]}},
            {},
            "annotations[0].segmentation.counts: RLE of another length, got 3",
        ),
        (
            {"segmentation": {"size": [9, 9], "counts": "x"}},
            {},
            "annotations[0].segmentation.size: RLE of another size",
        ),
        ({"image_id": 7, **BOX}, {}, "annotations[0]: image_id: annotation of an unknown picture"),
        (BOX, {"width": 127}, "a.jpg: height, width: picture of another size"),
        (BOX, {"file_name": "b.jpg"}, "images[0]: file_name: no such file"),
        (BOX, {"file_name": "../a.jpg"}, "images[0]: file_name: path leaves the folder"),
        (BOX, {"file_name": "/etc/passwd"}, "images[0]: file_name: path leaves the folder"),
        (BOX, {"file_name": "C:\\x.jpg"}, "images[0]: file_name: path leaves the folder"),
        (BOX, {"file_name": 5}, "images[0]: file_name: not a file name"),
    ],
)
def test_a_fault_is_named_by_file_and_field(tmp_path, run: Run, annotation, image, said):
    report = run("coco", coco(tmp_path, [annotation], **image))
    assert report["code"] == 2 and f"instances.json: {said}".split(": ", 1)[1] in report["error"]
    assert not (tmp_path / "out").exists()


def test_a_picture_without_regions_is_not_taken_for_clean(tmp_path, run: Run):
    file = coco(tmp_path, [])
    assert "a.jpg: regions: picture without annotation" in run("coco", file)["error"]
    assert "nothing to write" in run("coco", file, "--unannotated", "skip")["error"]
    report = run("coco", file, "--unannotated", "clean")
    assert answers(tmp_path) == ["class: normal\nscore: 10/10\nphoto: none"]
    assert report["unannotated"] == 1


@pytest.mark.parametrize("text", ["", "[]", "{", '{"images": {}}', "[" * 100_000])
def test_a_file_that_is_no_coco(tmp_path, run: Run, text):
    (tmp_path / "x.json").write_text(text)
    assert "x.json" in run("coco", tmp_path / "x.json")["error"]


def test_links_do_not_lead_out_of_the_folder(tmp_path):
    (tmp_path / "in").mkdir()
    picture(tmp_path / "secret.jpg", 0)
    (tmp_path / "in" / "a.jpg").symlink_to(tmp_path / "secret.jpg")
    with pytest.raises(LoadError, match="through a link"):
        inside(tmp_path / "in", "a.jpg", "file_name")


# Text from the reference library (pycocotools 2.0.11), and how the mask was made.
REFERENCE = [
    ("3110001020O0N35NL", np.random.default_rng(0).random((5, 7)) < 0.4),
    ("41600090B", np.random.default_rng(1).random((9, 4)) < 0.15),
    (
        "0;<0JO61KN52LM43ML34NK25OJ160I070I070I070I070I070JO61KN52LM43ML34NK25OJ160I070I070I070I070"
        "I070I070JO61KN52LM43ML34NK25OJ160I070I070I070I070I070JO61KN52LM43ML34NK25OJ160I070I070I070"
        "I070I070I070JO61KN52LM43M",
        np.add.outer(np.arange(40), np.arange(50)) % 23 < 11,
    ),
]


@pytest.mark.parametrize(("text", "mask"), REFERENCE)
def test_run_lengths_as_the_reference_library_writes_them(text, mask):
    size = mask.shape
    assert np.array_equal(rle.decode({"size": list(size), "counts": text}, size), mask)


@settings(deadline=None)
@given(st.text(max_size=20) | st.lists(st.integers(-3, 40) | st.booleans(), max_size=6))
def test_any_run_lengths_are_read_or_refused(counts):
    try:
        mask = rle.decode({"size": [4, 5], "counts": counts}, (4, 5))
    except LoadError:
        return
    assert mask.shape == (4, 5)


def labelme(folder: Path, shapes: list[dict[str, Any]], **more: Any) -> Path:
    picture(folder / "a.jpg", 0, SIZE)
    data = {"imagePath": "a.jpg", "imageHeight": 64, "imageWidth": 128, "shapes": shapes, **more}
    (folder / "a.json").write_text(json.dumps(data))
    return folder


def png(mask: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(mask.astype(np.uint8) * 255).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ({"points": [[32, 16], [47.9, 16], [47.9, 19.9], [32, 19.9]]}, ["photo r5: 5,6"]),
        ({"shape_type": "rectangle", "points": [[48, 20], [32, 16]]}, ["photo r5: 5,6"]),
        ({"shape_type": "circle", "points": [[68, 34], [69, 34]]}, ["photo r9: 9"]),
        (
            # One pixel wide: an eighth of cells 10 and 11, a tenth and less of those it ends in.
            {"shape_type": "line", "points": [[66, 33], [66, 45]]},
            ["photo r10: 9", "photo r11: 9"],
        ),
        (
            {
                "shape_type": "mask",
                "points": [[32, 16], [47, 19]],
                "mask": png(np.ones((4, 16), bool)),
            },
            ["photo r5: 5,6"],
        ),
    ],
)
def test_labelme_shapes_become_cells(tmp_path, run: Run, shape, rows):
    run("labelme", labelme(tmp_path / "in", [{"label": "Crack", **shape}]))
    assert answers(tmp_path)[0].split("\n")[2:] == rows


@pytest.mark.parametrize(
    ("shape", "more", "said"),
    [
        ({"points": []}, {}, "a.json: shapes[0].points: not points"),
        ({"points": [[1, 2, 3]]}, {}, "a.json: shapes[0].points: not points"),
        ({"label": "", "points": [[1, 2]]}, {}, "a.json: shapes[0].label: key is missing"),
        ({"shape_type": "point", "points": [[1, 2]]}, {}, "shapes[0].shape_type: shape cannot"),
        ({"shape_type": "mask", "points": [[0, 0]], "mask": "!"}, {}, "shapes[0].mask: not a mask"),
        (
            {"shape_type": "mask", "points": [[120, 60]], "mask": png(np.ones((9, 9), bool))},
            {},
            "shapes[0].mask: mask outside its picture",
        ),
        ({"points": [[0, 0], [500, 0], [0, 9]]}, {}, "shapes[0].points: region outside"),
        (
            {"points": [[0, 0], [5, 0], [0, 9]]},
            {"imagePath": "..\\x.jpg"},
            "imagePath: path leaves",
        ),
        ({"points": [[0, 0], [5, 0], [0, 9]]}, {"imageHeight": 1}, "imageHeight, imageWidth"),
    ],
)
def test_a_labelme_fault_is_named(tmp_path, run: Run, shape, more, said):
    report = run("labelme", labelme(tmp_path / "in", [{"label": "Crack", **shape}], **more))
    assert report["code"] == 2 and said in report["error"]


def test_labelme_pictures_may_lie_elsewhere(tmp_path, run: Run):
    folder = labelme(tmp_path / "in", [{"label": "x", "points": [[0, 0], [9, 0], [0, 9]]}],
                     imagePath="..\\photos\\a.jpg")  # fmt: skip
    (tmp_path / "photos").mkdir()
    (folder / "a.jpg").rename(tmp_path / "photos" / "a.jpg")
    assert run("labelme", folder, "--images", tmp_path / "photos")["examples"] == 1


def screws(folder: Path, *lines: str) -> Path:
    picture(folder / "images" / "a.jpg", 0, SIZE)
    (folder / "labels").mkdir()
    (folder / "labels" / "a.txt").write_text("\n".join(lines))
    return folder


def test_yolo_boxes_become_marks_in_reading_order(tmp_path, run: Run):
    lines = ["0 .8 .2 .1 .2", "1 .2 .25 .1 .2", "1 .5 .8 .1 .2"]
    names = ("--names", "0=Long,1=Short", "--as", "marks")
    run("yolo", screws(tmp_path / "in", *lines), *names)
    (example,) = examples.read(tmp_path / "out" / examples.FILE)
    assert example.messages[1].content == (
        "<image>positions\nA [0.20,0.25]\nB [0.80,0.20]\nC [0.50,0.80]"
    )
    assert example.messages[2].content == "A: short\nB: long\nC: short"


def test_more_parts_than_marks_become_two_examples_of_one_group(tmp_path, run: Run):
    lines = [f"0 {0.1 * n + 0.1:.1f} .5 .05 .1" for n in range(8)]
    run("yolo", screws(tmp_path / "in", *lines), "--names", "0=long", "--as", "marks")
    first, second = examples.read(tmp_path / "out" / examples.FILE)
    assert (first.id, second.id) == ("a-0", "a-1")
    assert (first.group, first.split) == (second.group, second.split)
    assert second.messages[2].content == "A: long\nB: long"


def test_yolo_polygons_become_cells(tmp_path, run: Run):
    line = "0 " + " ".join(str(v) for v in (0.25, 0.25, 0.37, 0.25, 0.37, 0.31, 0.25, 0.31))
    run("yolo", screws(tmp_path / "in", line), "--names", "0=crack")
    assert answers(tmp_path)[0].endswith("photo r5: 5,6")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0 1 2", "a.txt: line 1: not shares of the picture"),
        ("0 .1 .2 .3", "a.txt: line 1: neither box nor polygon, got 3 numbers"),
        ("x .1 .2 .3 .4", "a.txt: line 1: not numbers"),
        ("5 .1 .2 .3 .4", "a.txt: line 1: unknown class, got 5"),
        ("0 nan .2 .3 .4", "a.txt: line 1: not shares"),
        ("0 .5 .5 0 .4", "a.txt: line 1: empty box"),
        ("0 .9 .5 .4 .4", "a.txt: line 1: region outside its picture"),
        ("", "a.jpg: regions: picture without annotation"),
    ],
)
def test_a_yolo_fault_is_named(tmp_path, run: Run, line, said):
    report = run("yolo", screws(tmp_path / "in", line), "--names", "0=crack")
    assert report["code"] == 2 and said in report["error"]


def test_a_label_without_its_picture_is_a_fault(tmp_path, run: Run):
    folder = screws(tmp_path / "in", "0 .5 .5 .1 .1")
    (folder / "labels" / "b.txt").write_text("0 .5 .5 .1 .1")
    assert "b.txt: label without a picture" in run("yolo", folder, "--names", "0=x")["error"]


def test_class_names_of_yolo(tmp_path):
    (tmp_path / "data.yaml").write_text("names: [a, b]")
    (tmp_path / "own.yaml").write_text("names: {3: c}")
    (tmp_path / "classes.txt").write_text("a\nb\n")
    assert yolo.class_list(str(tmp_path / "data.yaml")) == {0: "a", 1: "b"}
    assert yolo.class_list(str(tmp_path / "own.yaml")) == {3: "c"}
    assert yolo.class_list(str(tmp_path / "classes.txt")) == {0: "a", 1: "b"}
    with pytest.raises(LoadError, match="no class names"):
        yolo.class_list("nothing")


@settings(deadline=None)
@given(st.text(alphabet="0123456789. -e\tnaif", max_size=40).filter(str.strip))
def test_any_yolo_line_is_read_or_refused(line):
    try:
        region = yolo.line_region(line, {0: "x"}, SIZE, "line 1")
    except LoadError:
        return
    x0, y0, x1, y1 = region.box
    assert 0 <= x0 < x1 <= 128 and 0 <= y0 < y1 <= 64


def test_lines_of_slightly_different_height_are_one_line():
    boxes = [(50, 3, 60, 13), (10, 0, 20, 10), (30, 4, 40, 14), (0, 40, 10, 50)]
    ordered = regions.reading_order([Region(str(n), box) for n, box in enumerate(boxes)])
    assert [region.label for region in ordered] == ["1", "2", "0", "3"]
    assert regions.reading_order([]) == []


def test_problems_are_told_together():
    problems = Problems()
    for n in range(25):
        with problems.of(f"file{n}"):
            raise LoadError("wrong", which="field", expected="right", got=n)
    with pytest.raises(LoadError, match=r"25 entries cannot be loaded \(the first 20\)") as error:
        problems.finish()
    assert "file0: field: wrong, got 0; allowed: right" in str(error.value)
    assert "file20" not in str(error.value)
