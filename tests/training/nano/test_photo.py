"""Photo examples: read, varied, packed; a tiny line is learnt, exported and read by the station."""

from __future__ import annotations

import re
from pathlib import Path

import cv2
import numpy as np
import pytest

pytest.importorskip("torch", reason="training needs the extra training")

import torch

from forge_station import checks
from forge_station.checks import Thresholds
from forge_station.contract import tasks
from forge_station.contract.manifest import PhotoInput, Vocabulary
from forge_station.geometry import photo
from forge_station.vlm.model import VisionLanguageModel
from training import photo_lines
from training.data import conversations, examples
from training.data.examples import Example, ExampleError
from training.evaluation import case_files
from training.evaluation.photo_cases import write_cases
from training.nano import model as nano
from training.nano import pack
from training.nano import photo as photos
from training.nano import photo_baselines as baselines
from training.nano.photo import PhotoRun
from training.nano.photo_samples import (
    PhotoSample,
    PhotoSet,
    Variation,
    packed,
    read_samples,
    texts_of,
    varied,
)

SIZE = PhotoInput(56, 56)
TINY = {"vision_width": 32, "vision_depth": 1, "text_width": 64, "text_depth": 1}
STILL = Variation(flips=False, tilt_degrees=0, zoom=0, shift=0, light=0, noise=0)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(photos.SIZES, "small", TINY)


def write_line(folder: Path, count: int = 24) -> Path:
    """Grey plates; a third has a bright spot of one cell row, a third is dark at the bottom."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    rows = []
    for number in range(count):
        image = rng.integers(90, 110, (64, 64), np.uint8)
        cells = np.zeros((16, 16), bool)
        kind = ("normal", "blowhole", "uneven")[number % 3]
        if kind == "blowhole":
            row, column = rng.integers(2, 14, 2)
            image[4 * row : 4 * row + 8, 4 * column : 4 * column + 8] = 250
            cells[row : row + 2, column : column + 2] = True
        if kind == "uneven":
            image[48:] = 10
            cells[12:] = True
        name = f"images/{number:02d}.png"
        cv2.imwrite(str(folder / name), image)
        score = tasks.surface_score(float(cells.mean()))
        messages = conversations.surface(
            "surface joint\nplate", kind, score, {conversations.PHOTO: cells}
        )
        split = "test" if number % 4 == 3 else "train"
        rows.append(Example(f"plate-{number:02d}", messages, (name,), "plates", split=split))
    path = folder / examples.FILE
    examples.write(path, rows)
    return path


def write_block(folder: Path, count: int = 8) -> Path:
    """Four places, bright where something stands; the quarter tells the place by its grey."""
    (folder / "images").mkdir(parents=True)
    rows = []
    for number in range(count):
        image = np.repeat(np.array([[40, 60], [80, 100]], np.uint8), 32, 0).repeat(32, 1)
        found = {mark: "screw" if number >> i & 1 else "none" for i, mark in enumerate("ABCD")}
        for i, mark in enumerate("ABCD"):
            if found[mark] == "screw":
                top, left = 32 * (i // 2) + 10, 32 * (i % 2) + 10
                image[top : top + 12, left : left + 12] = 250
        name = f"images/{number}.png"
        cv2.imwrite(str(folder / name), image)
        messages = conversations.sheet("positions\nA B C D", found)
        split = "test" if number == count - 1 else "train"
        rows.append(Example(f"block-{number}", messages, (name,), "blocks", split=split))
    path = folder / examples.FILE
    examples.write(path, rows)
    return path


@pytest.fixture(scope="module")
def line(tmp_path_factory) -> Path:
    return write_line(tmp_path_factory.mktemp("line") / "data")


@pytest.fixture(scope="module")
def block(tmp_path_factory) -> Path:
    return write_block(tmp_path_factory.mktemp("block") / "data")


def test_examples_are_read_with_their_grid_and_answers(line):
    samples = read_samples(line, "train", (56, 56))
    assert len(samples) == 18
    first = samples[1]
    assert first.image.shape == (56, 56, 3)
    assert (first.facts, first.defect) == ("surface joint\nplate", "blowhole")
    assert first.cells.sum() == 4
    assert samples[0].cells is not None and not samples[0].cells.any()
    assert photos.vocabulary_of(samples) == Vocabulary(classes=("normal", "blowhole", "uneven"))


def test_an_example_of_two_pictures_is_no_photo_example(tmp_path):
    messages = conversations.surface("surface joint\nplate", "crack", 5, None)
    two = (messages[0], examples.Message("user", "<image><image>surface"), messages[2])
    examples.write(tmp_path / "e.jsonl", [Example("e", two, ("a.png", "b.png"))])
    with pytest.raises(ExampleError, match="one picture, one question"):
        read_samples(tmp_path / "e.jsonl", "train", (56, 56))


def test_a_photo_is_packed_as_the_station_decodes_it(line):
    samples = read_samples(line, "train", (56, 56))
    encoder = nano.Encoder(tuple(nano.vocabulary(nano.own_words(texts_of(samples)))))
    sample = samples[1]
    sequence = packed(sample, encoder)
    words = [encoder.words[token] for token in sequence.tokens]
    assert max(sequence.segment) - pack.FIRST_BRANCH + 1 == 2 + 16, "class, score, sixteen rows"
    trunk = encoder.encode(tasks.TRUNK_OPEN + tasks.IMAGE_OPEN)
    assert tuple(sequence.tokens[: len(trunk)]) == trunk
    assert words.count(tasks.IMAGE_TOKEN) == 4
    row = int(np.flatnonzero(sample.cells.any(1))[0])
    at = words.index(f"r{row + 1}:")
    wanted = encoder.encode(tasks.row_text(np.flatnonzero(sample.cells[row]).tolist()) + "\n")
    assert words[at - 1] == "photo"
    assert tuple(sequence.target[at : at + len(wanted)]) == wanted


def test_in_training_the_empty_rows_drawn_stand_for_all(line):
    samples = read_samples(line, "train", (56, 56))
    encoder = nano.Encoder(tuple(nano.vocabulary(nano.own_words(texts_of(samples)))))
    whole, part = packed(samples[0], encoder), packed(samples[0], encoder, np.random.default_rng(0))
    assert len(part.tokens) < len(whole.tokens)
    assert sum(part.weight) == pytest.approx(sum(whole.weight))


def test_a_flip_moves_the_grid_with_the_picture(line):
    sample = read_samples(line, "train", (56, 56))[1]
    flips = Variation(**{**STILL.__dict__, "flips": True})
    rng = np.random.default_rng(3)
    seen = set()
    for _ in range(40):
        new = varied(sample, [sample], flips, rng)
        bright = cv2.resize(new.image[..., 0], (16, 16), interpolation=cv2.INTER_AREA) > 150
        assert np.array_equal(bright, new.cells)
        seen.add(new.cells.tobytes())
    assert len(seen) == 4, "unflipped, both flips, and both together"


def test_a_shift_moves_the_grid_with_the_picture():
    image = np.full((112, 112, 3), 100, np.uint8)
    cells = np.zeros((16, 16), bool)
    image[42:70, 42:70], cells[6:10, 6:10] = 250, True
    sample = PhotoSample("x", image, "f", {tasks.CLASS_KEY: "crack"}, cells)
    moves = Variation(**{**STILL.__dict__, "shift": 0.2, "zoom": 0.1, "tilt_degrees": 3})
    rng = np.random.default_rng(0)
    for _ in range(8):
        new = varied(sample, [sample], moves, rng)
        bright = cv2.resize(new.image[..., 0], (16, 16), interpolation=cv2.INTER_AREA) > 175
        assert (bright ^ new.cells).sum() <= 2, "at most a cell that is covered by half"


def test_quarters_and_mirrors_keep_what_stands_where(block):
    samples = read_samples(block, "train", (56, 56))
    rng = np.random.default_rng(0)
    places = Variation(**{**STILL.__dict__, "flips": True, "places": (2, 2)})
    combinations = set()
    for _ in range(40):
        new = varied(samples[int(rng.integers(len(samples)))], samples, places, rng)
        quarters = new.image[..., 0].reshape(2, 28, 2, 28).max((1, 3)).ravel()
        assert [what == "screw" for what in new.places.values()] == (quarters > 200).tolist()
        combinations.add(tuple(new.places.values()))
    assert len(combinations) > len({tuple(s.places.values()) for s in samples})


def test_rare_classes_are_drawn_more_often_than_they_are():
    blank = np.zeros((56, 56, 3), np.uint8)
    kinds = ["normal"] * 90 + ["crack"] * 10
    samples = [PhotoSample(str(i), blank, "f", {"class:": kind}) for i, kind in enumerate(kinds)]
    drawn = PhotoSet(samples, STILL)
    assert drawn.chances.sum() == pytest.approx(1)
    assert drawn.chances[90:].sum() == pytest.approx(0.25), "sqrt(10) : sqrt(90) = 1 : 3"


def test_a_line_is_learnt_exported_and_read_by_the_station(line, tmp_path):
    run = PhotoRun((line,), tmp_path / "run", steps=30, photo=SIZE, batch=12, full_attention=(0,))
    samples, test = (read_samples(line, split, (56, 56)) for split in ("train", "test"))
    torch.manual_seed(0)
    trainer, _ = photos.build_trainer(run, samples)
    with torch.no_grad():
        before = float(trainer.photo_loss(test)[0])
    card = photos.train_photos(run)
    assert (card["steps"], card["train_photos"]) == (30, 18)
    trainer.model.load_state_dict(torch.load(run.out / "state.pt")["model"])
    with torch.no_grad():
        after = float(trainer.photo_loss(test)[0])
    assert after < before / 2, "on photos that were not trained on"
    odds = photos.class_odds(trainer, test)

    bundle = tmp_path / "bundle"
    photo_lines.run_module(
        "export.bundle", "--checkpoint", run.out, "--out", bundle, "--precision", "fp32"
    )
    with VisionLanguageModel.open(bundle) as model:
        assert model.manifest.photo == SIZE
        assert model.manifest.vocabulary.classes == ("normal", "blowhole", "uneven")
        for sample, chances in zip(test, odds, strict=True):
            picture = photo.photo_picture(sample.image, SIZE)
            read = checks.read_photo(model, picture, "A", "plate", Thresholds(), 5.0)
            found = [read.probabilities[name] for name in model.manifest.vocabulary.classes]
            np.testing.assert_allclose(found, chances, atol=0.01)


def test_an_interrupted_run_goes_on_to_the_same_weights(block, tmp_path):
    places = Variation(places=(2, 2))
    whole = PhotoRun((block,), tmp_path / "whole", steps=6, photo=SIZE, variation=places, batch=4)
    photos.train_photos(whole)
    half = PhotoRun((block,), tmp_path / "half", steps=6, photo=SIZE, variation=places, batch=4)
    samples = read_samples(block, "train", (56, 56))
    torch.manual_seed(0)
    trainer, _ = photos.build_trainer(half, samples)
    drawn = PhotoSet(samples, places)
    for step in range(3):
        trainer.set_rate(photos.rate_at(step / 6, half.decay))
        loss, _ = trainer.photo_loss(drawn.draw(4, trainer.generator))
        trainer.step(loss)
    half.out.mkdir()
    photos.save_state(half.out / "state.pt", trainer, 1.0, 3)
    photos.train_photos(PhotoRun(**{**half.__dict__, "resume": True}))
    first = torch.load(tmp_path / "whole" / "state.pt")["model"]
    for name, value in torch.load(tmp_path / "half" / "state.pt")["model"].items():
        torch.testing.assert_close(value, first[name])


def test_a_start_keeps_old_words_and_sets_new_ones_to_the_mean():
    torch.manual_seed(0)
    old = nano.build_model(**TINY)
    own = [f"word_{letter}" for letter in "abcdefghijklmnopqrst"]
    new = nano.build_model(**TINY, own=own)
    photos.start_from(new, old.state_dict())
    known = len(nano.vocabulary())
    before = old.model.language_model.embed_tokens.weight
    after = new.model.language_model.embed_tokens.weight
    assert torch.equal(after[:known], before[:known])
    assert (after[known:] - before[:known].mean(0)).std() < 0.04
    with pytest.raises(ValueError, match="does not fit"):
        photos.start_from(nano.build_model(**{**TINY, "text_width": 128}), old.state_dict())


def test_the_test_split_becomes_cases_of_the_evaluation(line, block, tmp_path):
    assert write_cases(line, tmp_path / "plates") == 6
    surface = case_files.read_cases(tmp_path / "plates")
    assert [case.truth.defect for case in surface[:3]] == ["normal", "blowhole", "uneven"]
    assert len(surface[1].truth.grids["photo"]) == 4
    assert surface[0].truth.grids["photo"] == ()
    assert (tmp_path / "plates" / surface[0].input.photo).is_file()
    assert surface[0].product.part == "plate"
    assert write_cases(block, tmp_path / "blocks") == 1
    (case,) = case_files.read_cases(tmp_path / "blocks")
    assert case.input.marks == tuple("ABCD")
    assert case.product.parts == {"screw": 3}, "nothing ever stands at D"
    assert case.truth.readings == {"A": "screw", "B": "screw", "C": "screw", "D": "none"}
    assert (case.truth.missing, case.truth.expected) == ((), "PASS")


def test_the_mean_map_is_the_grid_that_agrees_best():
    blank = np.zeros((56, 56, 3), np.uint8)
    grids = np.zeros((3, 16, 16), bool)
    grids[:, 0, 0] = grids[0, 5, 5] = True
    samples = [PhotoSample(str(i), blank, "f", {"class:": "crack"}, g) for i, g in enumerate(grids)]
    assert np.argwhere(baselines.mean_map(samples)).tolist() == [[0, 0]]


def test_the_patch_classifier_reads_bright_places(block):
    train = read_samples(block, "train", (56, 56))
    classifier = baselines.PatchClassifier(train, ("screw", "none"), (2, 2))
    assert [classifier(sample) for sample in train] == [sample.places for sample in train]
    assert baselines.usual_places(train)["D"] == "none"


def test_the_unet_learns_where_a_plate_is_dark(line):
    samples = read_samples(line, "train", (56, 56))
    classes = photos.vocabulary_of(samples).classes
    model = baselines.train_unet(samples, classes, SIZE, STILL, 1, steps=60, batch=12)
    odds, cells = baselines.unet_answers(model, samples, SIZE)
    assert odds.shape == (18, 3) and cells.shape == (18, 16, 16)
    truth = np.array([classes.index(sample.defect) for sample in samples])
    assert (odds.argmax(1) == truth).mean() > 0.5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only-fold", "5"], "screws has folds 0 to 4, got \\[5\\]"),
        (["--minutes", "0"], "expected more than 0"),
    ],
)
def test_a_photo_line_refuses_what_it_cannot_do(words, said, tmp_path, monkeypatch, capsys):
    line = [
        "photo_lines",
        "screws",
        "--data",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        *words,
    ]
    monkeypatch.setattr("sys.argv", line)
    with pytest.raises(SystemExit) as stopped:
        photo_lines.main()
    assert stopped.value.code == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
