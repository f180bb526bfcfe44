"""Published figures to stand beside ours where the question is the same. On other data, always.

FORGE's tables as its project page shows them (2026), in the settings zero-shot / reference /
demonstration, and VIEScore2's grid figures. Never mixed with ours: they are shown in a table of
their own, with their source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from training.evaluation.rows import Row

FORGE = "FORGE, project page, 2026 (arXiv 2604.07413)"
VIESCORE2 = "VIEScore2 (arXiv 2610.00994)"
_SETTINGS = ("zero-shot", "reference", "demonstration")


@dataclass(frozen=True)
class Published:
    """One published figure. `figure`: the name of ours that asks the same question."""

    task: str
    figure: str
    model: str
    value: float
    setting: str
    source: str
    remark: str = ""


def _forge(
    task: str, figure: str, remark: str, rows: dict[str, tuple[float, float, float]]
) -> list[Published]:
    return [
        Published(task, figure, model, round(value / 100, 4), setting, FORGE, remark)
        for model, values in rows.items()
        for setting, value in zip(_SETTINGS, values, strict=True)
    ]


_OPTIONS = "letters only, no `none`: every published case has a wrong part"
_THREE_VIEWS = f"three views; {_OPTIONS}"
_PHOTOS = f"photos; {_OPTIONS}"

SCANS: tuple[Published, ...] = (
    *_forge("workpiece", "letter_direct", _THREE_VIEWS, {
        "random": (25.0, 25.0, 25.0), "Gemini-3-Flash": (69.6, 65.1, 67.3),
        "GPT-5.2": (61.3, 28.2, 61.7), "Qwen3-VL-235B": (51.4, 32.9, 34.3),
        "Qwen3-VL-8B": (41.3, 26.8, 26.2),
    }),
    *_forge("surface", "five_class", "three views, six workpieces", {
        "random": (20.0, 20.0, 20.0), "Gemini-3-Flash": (18.5, 29.6, 47.1),
        "GPT-5": (22.0, 35.7, 38.3), "Qwen3-VL-235B": (19.2, 18.7, 32.2),
        "Qwen3-VL-8B": (19.4, 21.3, 25.8),
    }),
    *_forge("assembly", "letter_direct", _THREE_VIEWS, {
        "random": (29.5, 29.5, 29.5), "Gemini-3-Flash": (47.2, 46.3, 47.6),
        "GPT-5.2": (54.0, 57.0, 53.7), "Qwen3-VL-235B": (41.1, 28.8, 39.5),
        "Qwen3-VL-8B": (39.2, 33.0, 38.8),
    }),
    Published("workpiece", "letter_direct", "Qwen2.5-VL-3B, before SFT", 0.282, "zero-shot",
              "FORGE, paper", "three views, nuts; trained on cup-head screws"),
    Published("workpiece", "letter_direct", "Qwen2.5-VL-3B, after SFT", 0.538, "zero-shot",
              "FORGE, paper", "three views, nuts; trained on cup-head screws"),
    Published("assembly", "missing_part_direct", "Gemini-3-Flash", 0.907, "zero-shot",
              "FORGE, paper", "specification in the prompt; flat washers alone 0.367"),
    Published("assembly", "missing_part_direct", "Qwen3-VL-235B", 0.862, "zero-shot",
              "FORGE, paper", "specification in the prompt"),
)  # fmt: skip

PHOTOS: tuple[Published, ...] = (
    *_forge("workpiece", "letter_direct", _PHOTOS, {
        "random": (25.0, 25.0, 25.0), "Gemini-3-Flash": (72.2, 76.3, 82.3),
        "GPT-5": (74.7, 64.2, 85.2), "Qwen3-VL-8B": (35.3, 23.9, 25.1),
    }),
    *_forge("assembly", "letter_direct", _PHOTOS, {
        "random": (29.5, 29.5, 29.5), "Gemini-3-Flash": (58.1, 70.4, 71.4),
        "GPT-5.2": (43.2, 53.5, 63.2), "Qwen3-VL-8B": (31.9, 28.4, 30.3),
    }),
    Published("surface", "grid_iou", "VIEScore2", 0.324, "zero-shot", VIESCORE2,
              "generated images, primary suite"),
    Published("surface", "grid_f1", "VIEScore2", 0.506, "zero-shot", VIESCORE2,
              "generated images, primary suite"),
    Published("surface", "grid_iou", "SegFormer-b0 on the same grids", 0.272, "zero-shot",
              VIESCORE2, "generated images, primary suite"),
    Published("surface", "grid_iou", "Qwen3-VL-8B", 0.070, "zero-shot", VIESCORE2,
              "generated images, primary suite"),
)  # fmt: skip


def beside(rows: Sequence[Row]) -> list[Published]:
    """What was published for the questions, kind of picture and settings of these rows.

    The grid figures are VIEScore2's own question, one grid over a picture, so they stand beside
    photos only.
    """
    asked = {(row.task, row.setting, row.source == "photo") for row in rows}
    found = []
    for photo, table in ((False, SCANS), (True, PHOTOS)):
        found += [item for item in table if (item.task, item.setting, photo) in asked]
    return found
