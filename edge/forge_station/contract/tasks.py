"""What is asked of the model and how its answers read: the text of the three checks, once.

Training, evaluation and the station use these functions, so a prompt exists in one place. Knows
nothing of tokens, images or decisions.

A conversation has up to two turns. Turn one shows a picture and measured facts; the assistant
answers in keyed lines, each of which can be decoded alone as a short branch behind the same trunk:

    marks sheet      A: hex_bolt M8x30          one line a mark: workpiece and model number
    surface picture  class: dent                normal, crack, cut, deformation or dent
                     score: 4/10                10 is a perfect surface
                     front r5: 5,6,9            one line a grid row of each view, or `none`

Turn two (marks sheet only) gives the readings back together with the specification and asks, mark
by mark, right or wrong, then for the benchmark's letter, a missing part and a conformity score. The
first turn never shows the specification: what a reader sees must not depend on what it is expected
to see.

Decision lines follow the FORGE tasks WORKVERI, SURFINSP and ASSYVERI; the grid lines are the text
grid of VIEScore2 (rows and columns 1..16 from the upper left), one grid a view.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from forge_station.contract.views import MARKS, VIEWS

SYSTEM_PROMPT = "Inspect the parts."
TRUNK_OPEN = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n<|im_start|>user\n"
IMAGE_OPEN, IMAGE_TOKEN, IMAGE_CLOSE = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"
GRID_KEY, GRID_END = "\n", "<|im_end|>"
"""What a grid written as one text stands behind (a branch feeds one token), and its end."""
NEXT_USER = "<|im_end|>\n<|im_start|>user\n"

TASKS = ("workpiece", "surface", "assembly")
NORMAL = "normal"
DEFECT_CLASSES: tuple[str, ...] = ("crack", "cut", "deformation", "dent")
SURFACE_CLASSES: tuple[str, ...] = (NORMAL, *DEFECT_CLASSES)
REQUESTS = ("score", "grid", "joint")
"""The three VIEScore2 requests on one set of weights."""
NONE = "none"
RIGHT, WRONG = "right", "wrong"
"""Turn two, one line a mark: does the specification allow this part?"""
GRID_ROWS = 16
SCORES: tuple[str, ...] = tuple(f"{n}/10" for n in range(11))


def sheet_facts(sizes: Mapping[str, tuple[float, float, float]], mm_per_px: float) -> str:
    """User text beside a marks sheet: scale and the measured (length, width, height) a mark, mm."""
    lines = [f"marks scale {mm_per_px:.2f}"]
    lines += [f"{mark}: {size_text(size)}" for mark, size in sorted(sizes.items())]
    return "\n".join(lines)


def surface_facts(part: str, size: tuple[float, float, float], request: str = "joint") -> str:
    """User text beside a surface picture: what the part is and how large it was measured."""
    if request not in REQUESTS:
        raise ValueError(f"surface request: expected one of {REQUESTS}, got {request!r}")
    return f"surface {request}\n{part}\n{size_text(size)}"


def photo_facts(part: str, request: str = "joint") -> str:
    """User text beside a photo of a surface: nothing is measured on a photo."""
    if request not in REQUESTS:
        raise ValueError(f"surface request: expected one of {REQUESTS}, got {request!r}")
    return f"surface {request}\n{part}"


def positions_facts(marks: Sequence[str]) -> str:
    """User text beside a photo with fixed places: `positions`, then their marks in order."""
    return f"positions\n{' '.join(marks)}"


def size_text(size: tuple[float, float, float]) -> str:
    """`30.1 13.0 6.8`: millimetres with one decimal."""
    return " ".join(f"{value:.1f}" for value in size)


def readings_text(readings: Mapping[str, str]) -> str:
    """The assistant's lines of turn one, in mark order."""
    return "".join(f"{mark}: {reading}\n" for mark, reading in sorted(readings.items()))


def judge_text(kind: str, required: Mapping[str, int] | None) -> str:
    """User text of turn two: a `batch` of one part (None: the majority rules) or an `assembly`."""
    if kind not in ("batch", "assembly"):
        raise ValueError(f"judge: expected batch or assembly, got {kind!r}")
    if not required:
        if kind == "assembly":
            raise ValueError("judge: an assembly needs its parts, got none")
        return "batch majority"
    if kind == "batch":
        return f"batch {next(iter(required))}"
    return "\n".join(["assembly", *(f"{n} {part}" for part, n in required.items())])


def mark_key(mark: str) -> str:
    return f"{mark}:"


def row_key(view: str, row: int) -> str:
    """Key of a grid row; `row` counts from 0 in arrays and from 1 in text."""
    return f"{view} r{row + 1}:"


ROW_KEYS: tuple[tuple[str, int], ...] = tuple(
    (view, row) for view in VIEWS for row in range(GRID_ROWS)
)
CLASS_KEY, SCORE_KEY, ANSWER_KEY, MISSING_KEY = "class:", "score:", "answer:", "missing:"
LETTER_OPTIONS: tuple[str, ...] = (*MARKS, NONE)


def row_text(columns: Sequence[int]) -> str:
    """Answer of one grid row: 0-based columns -> `5,6,9` (1-based, ascending) or `none`."""
    return ",".join(str(column + 1) for column in sorted(columns)) or NONE


def conformity_score(violations: int) -> int:
    """Conformity 0..10: three points less for every part that is missing, extra or wrong."""
    return max(0, 10 - 3 * violations)


def surface_score(defect_share: float) -> int:
    """Surface score 0..10 from the share of visible surface cells that are defective.

    10 for a clean part; a defect scores 7 at most and falls with the square root of its share, so
    that small defects differ: 1 % -> 6, 5 % -> 4, 25 % and more -> 0.
    """
    if defect_share <= 0:
        return 10
    return round(7 * (1 - min(1.0, math.sqrt(4 * defect_share))))


def parse_letter(text: str, options: Sequence[str], *, strict_first_letter: bool = False) -> str:
    """The chosen letter of a free answer, or "" when there is none.

    Order: the last explicit `answer: X` / `answer is X`, then a sole bare letter. The published
    protocol takes the first capital letter of the text, which reads "Answer: B" as A;
    `strict_first_letter` reproduces it for comparison.
    """
    letters = "".join(option for option in options if len(option) == 1)
    if strict_first_letter:
        found = re.search(f"[{letters}]", text.upper())
        return found.group(0) if found else ""
    words = "|".join(re.escape(option) for option in options if len(option) > 1) or "(?!)"
    # "The answer is a bolt" names no letter: a small letter counts only at the end of its line.
    choice = rf"[{letters}]\b|[{letters.lower()}](?=[^\w\n]*$)|(?i:{words})\b"
    explicit = re.findall(rf"(?i:answer[\s*]*(?:is|:))[\s*:(]*({choice})", text, re.MULTILINE)
    if explicit:
        last = str(explicit[-1])
        return last.upper() if len(last) == 1 else last.lower()
    bare = re.findall(rf"(?<![A-Za-z])([{letters}])(?![A-Za-z])", text)
    if len(set(bare)) == 1:
        return str(bare[0])
    return NONE if text.strip(" .\n").lower() == NONE and NONE in options else ""


def parse_surfinsp(text: str, classes: Sequence[str] = DEFECT_CLASSES) -> tuple[str, list[str]]:
    """The benchmark's two-part surface answer -> (class or "", warnings).

    `Part 1: Yes` is normal; `Part 1: No` takes the class of `Part 2: A..D`, in the order of
    `classes`. Yes with a letter is normal with a warning; No without a letter has no class.
    """
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(classes)]
    first = re.search(r"part\s*1\s*:\s*(yes|no)\b", text, re.IGNORECASE)
    second = re.search(rf"part\s*2\s*:\s*\(?([{letters}])\b", text, re.IGNORECASE)
    if first is None:
        return "", ["no `Part 1: Yes|No` line"]
    if first.group(1).lower() == "yes":
        return NORMAL, (["Part 1 is Yes but Part 2 names a defect"] if second else [])
    if second is None:
        return "", ["Part 1 is No but Part 2 names no defect"]
    return classes[letters.index(second.group(1).upper())], []
