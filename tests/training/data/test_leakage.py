"""The leakage guard: planted duplicates are found, different pictures are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.training.data.pictures import Run, picture
from training.data import examples, leakage
from training.data.examples import Example, Message

PLANTED = {
    "copied": lambda image: image.copy(),
    "re-encoded": lambda image: image.copy(),
    "resized": lambda image: image.resize((image.width // 2, image.height // 2)),
    "cropped": lambda image: image.crop((2, 2, image.width - 1, image.height - 2)),
    "brighter": lambda image: image.point(lambda v: min(255, v * 1.15)),
}


def write(folder: Path, pictures: dict[str, Path], split: str, group: str = "") -> Path:
    rows = [
        Example(
            name,
            (Message("user", "<image>x"), Message("assistant", "class: normal")),
            (str(path.relative_to(folder)),),
            source="line",
            group=group or name,
            split=split,  # type: ignore[arg-type]
        )
        for name, path in pictures.items()
    ]
    examples.write(folder / examples.FILE, rows)
    return folder / examples.FILE


@pytest.mark.parametrize("how", PLANTED)
def test_a_planted_duplicate_is_found(tmp_path, run: Run, how):
    ours = {f"a{n}": picture(tmp_path / "a" / f"{n}.png", n, (150, 200)) for n in range(12)}
    theirs = {f"b{n}": picture(tmp_path / "b" / f"{n}.png", 100 + n, (150, 200)) for n in range(12)}
    with Image.open(ours["a3"]) as image:
        changed = PLANTED[how](image)
    suffix = "jpg" if how == "re-encoded" else "png"
    changed.save(tmp_path / "b" / f"planted.{suffix}", quality=60)
    theirs["planted"] = tmp_path / "b" / f"planted.{suffix}"
    files = [write(tmp_path / "a", ours, "train"), write(tmp_path / "b", theirs, "test")]
    report = run("check", *files, out=False)
    assert report["code"] == 1 and report["leaks"] == 1
    kind = "same pixels" if how == "copied" else "same picture"
    assert report["lines"][0].startswith(f"{kind}: a3 [a/train] = planted [b/test]")
    exact = run("check", *files, "--bits", "0", out=False)["leaks"]
    assert exact == (how == "copied")


def test_different_pictures_and_splits_of_their_own_are_no_leak(tmp_path, run: Run):
    ours = {f"a{n}": picture(tmp_path / "a" / f"{n}.png", n) for n in range(30)}
    ours["twin"] = picture(tmp_path / "a" / "twin.png", 3)  # in the same split
    report = run("check", write(tmp_path / "a", ours, "train"), out=False)
    assert (report["code"], report["leaks"]) == (0, 0)
    assert report["examples"] == {"a/train": 31}


def test_a_group_in_two_splits_is_a_leak(tmp_path, run: Run):
    a = write(tmp_path / "a", {"one": picture(tmp_path / "a" / "1.png", 1)}, "train", "serial 7")
    b = write(tmp_path / "b", {"two": picture(tmp_path / "b" / "2.png", 2)}, "val", "serial 7")
    report = run("check", a, b, out=False)
    assert report["lines"] == ["same group: line:serial 7 [a/train] = line:serial 7 [b/val]"]


def test_flat_pictures_have_no_likeness():
    assert leakage.perceptual_hash(Image.new("L", (40, 40), 90)) is None
    noise = np.random.default_rng(0).integers(90, 92, (40, 40), np.uint8)
    assert leakage.perceptual_hash(Image.fromarray(noise)) is None


def test_the_hash_counts_steps_to_the_right():
    """Brighter to the right everywhere: all 256 bits are one; mirrored: all are zero."""
    ramp = np.tile(np.linspace(0, 255, 170), (160, 1)).astype(np.uint8)
    code = leakage.perceptual_hash(Image.fromarray(ramp))
    assert code is not None and np.bitwise_count(code).sum() == 256
    code = leakage.perceptual_hash(Image.fromarray(ramp[:, ::-1]))
    assert code is not None and np.bitwise_count(code).sum() == 0


def test_blocks_find_what_all_at_once_finds(monkeypatch):
    codes = np.random.default_rng(0).integers(0, 2**63, (50, 4), np.uint64)
    codes[40] = codes[7] ^ np.uint64(0b1011)
    prints = [leakage.Print(str(n), "ab"[n % 2], "", str(n), code) for n, code in enumerate(codes)]
    whole = leakage.alike(prints)
    monkeypatch.setattr(leakage, "_BLOCK", 6)
    assert leakage.alike(prints) == whole == [(7, 40)]
    (leak,) = leakage.leaks(prints)
    assert (leak.first, leak.second, leak.bits) == ("7", "40", 12)


def test_a_loader_refuses_joins_or_reports_twins(tmp_path, run: Run):
    for n in range(20):
        picture(tmp_path / "in" / f"{n}_{n % 2}.png", n % 10)  # every picture twice
    words = ("names", tmp_path / "in", "--pattern", "_(?P<A>[01])", "--values", "1=a,0=none",
             "--split", "0.5,0,0.5")  # fmt: skip
    report = run(*words)
    assert report["code"] == 2 and "same pixels" in report["error"]
    assert not (tmp_path / "out").exists()
    report = run(*words, "--leaks", "report")
    assert report["code"] == 1 and report["leaks"]
    report = run(*words, "--leaks", "merge", "--overwrite")
    assert (report["code"], report["leaks"], report["groups_merged"]) == (0, [], 10)
    assert run("check", tmp_path / "out" / examples.FILE, out=False)["leaks"] == 0


def test_two_examples_without_picture_are_named(tmp_path, run: Run):
    row = Example("text", (Message("user", "x"), Message("assistant", "a: b")))
    examples.write(tmp_path / "x.jsonl", [row])
    assert "example without a picture" in run("check", tmp_path / "x.jsonl", out=False)["error"]
