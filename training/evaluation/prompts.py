"""The papers' questions in plain words, for models that know nothing of the station.

WORKVERI, ASSYVERI, the missing part, SURFINSP, the 16 x 16 grid with a score, and two grounding
questions. The wording is ours: the published one is not public. It knows no pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge_station.contract import tasks
from forge_station.contract.views import VIEWS

SYSTEM = (
    "You inspect parts on a production line. Look closely: parts that look alike may differ only "
    "in size. Answer in the format that is asked for."
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """One question: `options` are its possible answers, `meanings` what a letter stands for."""

    name: str
    text: str
    options: tuple[str, ...] = ()
    meanings: Mapping[str, str] | None = None


_VIEWS = {
    "metric": "Every column of the picture shows one part under its letter: front view, below it "
    "the side view, below that the top view. All are drawn at one scale, {scale:.3g} mm per pixel.",
    "channels": "Every column of the picture shows one part under its letter: front view, below it "
    "the side view, below that the top view, at one scale, {scale:.3g} mm per pixel. Red is "
    "shading, green is relief, blue is height.",
    "forge": "The picture shows the front view, side view and top view of the parts. Each part has "
    "a colour and a letter.",
    "coordinates": "Instead of a picture you are given points on the surface of every part, x y z "
    "in millimetres, z upwards from the tray.",
    "photo": "The picture is a photo. The letters {marks} are drawn on it or name its places from "
    "left to right, top to bottom.",
}
_SURFACE_VIEWS = {
    "metric": "The picture shows one part from the front, from the side and from the top, side by "
    "side, at one scale, {scale:.3g} mm per pixel.",
    "channels": "The picture shows one part from the front, from the side and from the top, at one "
    "scale, {scale:.3g} mm per pixel. Red is shading, green is relief, blue is height.",
    "forge": "The picture shows the front view, side view and top view of one part.",
    "coordinates": "Instead of a picture you are given points on the surface of the part, x y z in "
    "millimetres, z upwards from the tray.",
    "photo": "The picture is a photo of a surface.",
}


def view_text(style: str, *, surface: bool, mm_per_px: float, marks: Sequence[str] = ()) -> str:
    """What the picture of a style shows."""
    words = (_SURFACE_VIEWS if surface else _VIEWS)[style]
    return words.format(scale=mm_per_px, marks=", ".join(marks))


def sizes_text(sizes: Mapping[str, tuple[float, float, float]]) -> str:
    """Measured length, width and height by mark."""
    lines = [f"{mark}: {tasks.size_text(size)}" for mark, size in sorted(sizes.items())]
    return "Measured length, width and height in mm:\n" + "\n".join(lines)


def parts_text(parts: Mapping[str, int]) -> str:
    return "\n".join(f"- {count} x {_words(part)}" for part, count in parts.items())


def _words(part: str) -> str:
    return part.replace("_", " ")


def _answer_line(options: Sequence[str]) -> str:
    return f"Options: {', '.join(options)}. End with one line:\nAnswer: <option>"


def workveri(marks: Sequence[str], expected: str | None) -> Question:
    """Which part does not belong to the batch?"""
    if expected:
        rule = f"Every part of this batch should be a {_words(expected)}."
    else:
        rule = "All parts of this batch should be the same; the majority is right."
    options = (*marks, tasks.NONE)
    text = (
        f"{rule} Which part does not belong to the batch, because it is another workpiece or "
        f"another model number (size)? If all belong, answer none.\n{_answer_line(options)}"
    )
    return Question("WORKVERI", text, options)


def assyveri(marks: Sequence[str], parts: Mapping[str, int]) -> Question:
    """Which part is extra, mismatched or should not be there?"""
    options = (*marks, tasks.NONE)
    text = (
        f"The assembly needs exactly these parts:\n{parts_text(parts)}\n"
        "Which part that is there is extra, of a wrong size, or should not be there? If there is "
        f"no such part, answer none.\n{_answer_line(options)}"
    )
    return Question("ASSYVERI", text, options)


def missing(parts: Mapping[str, int]) -> Question:
    """Which required part is absent? The options are numbered with letters of their own."""
    named = [*parts, tasks.NONE]
    meanings = dict(zip(LETTERS, named, strict=False))
    listed = "\n".join(f"{letter}) {_words(name)}" for letter, name in meanings.items())
    text = (
        f"The assembly needs exactly these parts:\n{parts_text(parts)}\n"
        f"Which required part is missing?\n{listed}\n"
        "(These letters are the options, not the letters on the picture.) End with one line:\n"
        "Answer: <letter>"
    )
    return Question("MISSING", text, tuple(meanings), meanings)


def surfinsp(part: str, classes: Sequence[str]) -> Question:
    """The two-part surface question; `classes` are the defects, without normal."""
    listed = ", ".join(
        f"{letter} {name.replace('_', ' ').capitalize()}"
        for letter, name in zip(LETTERS, classes, strict=False)
    )
    text = (
        f"The part is a {_words(part)}.\n"
        "Part 1: is its surface normal? Yes or No.\n"
        f"Part 2: if not, which defect does it have: {listed}?\n"
        "Answer in these lines, the second only if the first is No:\n"
        f"Part 1: <Yes or No>\nPart 2: <letter>"
    )
    return Question("SURFINSP", text, tuple(classes))


def grid(part: str, views: Sequence[str], request: str) -> Question:
    """The defect grid and the score of the surface, as far as `request` asks for them."""
    wanted = []
    if request in ("score", "joint"):
        wanted.append(
            "a line `score: N/10` with a whole number, 10 for a perfect surface, 0 for a ruined one"
        )
    if request in ("grid", "joint"):
        where = (
            "the picture"
            if len(views) == 1
            else f"each of the {len(views)} views, front, side, top"
        )
        wanted.append(
            f"the defective cells: divide {where} into 16 rows and 16 columns, counted from the "
            "upper left from 1. Write one line `r<row>: <column>,<column>` for each row that has "
            "defective cells, such as `r5: 8,9`, or the word `none` if no cell is defective"
        )
        if len(views) > 1:
            wanted[-1] += (
                "; put the name of each view before its rows in a line of its own: "
                + ", ".join(f"`{view}:`" for view in VIEWS)
            )
    text = f"The part is a {_words(part)}. Write {'; then '.join(wanted)}. Write nothing else."
    return Question("GRID", text, tuple(views))


def mark_to_place(mark: str, columns: int) -> Question:
    """Where is the part of a letter? Columns are lettered, so that one parser reads all."""
    options = tuple(LETTERS[:columns])
    text = (
        f"Number the columns of the picture from the left: {', '.join(options)}. In which column "
        f"stands the part marked with the letter {mark}?\n{_answer_line(options)}"
    )
    return Question("MARK_TO_PLACE", text, options)


def place_to_mark(column: int, marks: Sequence[str]) -> Question:
    """Which letter stands in a column (0-based)?"""
    options = tuple(marks)
    text = (
        f"Count the columns of the picture from the left, the first is 1. Which letter marks the "
        f"part in column {column + 1}?\n{_answer_line(options)}"
    )
    return Question("PLACE_TO_MARK", text, options)


def surfinsp_answer(defect: str, classes: Sequence[str]) -> str:
    """The right answer, for a solved example."""
    if defect == tasks.NORMAL:
        return "Part 1: Yes"
    return f"Part 1: No\nPart 2: {LETTERS[list(classes).index(defect)]}"


def letter_answer(question: Question, answer: str) -> str:
    """The right answer of a letter question, for a solved example; `answer` is what is meant."""
    if question.meanings is not None:
        answer = next(key for key, value in question.meanings.items() if value == answer)
    return f"Answer: {answer}"
