"""MODEL_CARD.md of a bundle from its manifest, the training card and evaluation figures.

It invents no figure: what was not measured is not in the card.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from export.drift import Drift
from forge_station.contract.manifest import Manifest


def render(
    manifest: Manifest,
    card: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    detectable: Sequence[Mapping[str, Any]] = (),
    drift: Drift | None = None,
) -> str:
    """Markdown text; `card` and `evaluation` may be empty or nested.

    `detectable`: reports of `training.calibrate pod`, one a unit. `drift`: what the gate measured.
    """
    model = manifest.model
    parameters = float(model.get("parameters", 0)) / 1e6
    lines = [
        f"# {manifest.name} {manifest.version}",
        "",
        "Reads which part lies at each mark and where a surface is defective. Whether that is "
        "allowed is decided by the line's specification, not by the model.",
        "",
        "| | |",
        "| --- | --- |",
        "| architecture | Qwen2.5-VL |",
        f"| parameters | {parameters:.2f} M |",
        f"| vision | {model.get('vision_layers')} layers x {model.get('vision_hidden_size')}, "
        f"window {model.get('window')} px, patch {model.get('patch')} px |",
        f"| decoder | {model.get('layers')} layers x {model.get('hidden_size')}, "
        f"vocabulary {manifest.tokens.get('vocab_size')} |",
        f"| precision | {manifest.precision}{_quantizer(manifest)} |",
        f"| target | {model.get('target', 'cpu')} |",
        f"| contract | {manifest.contract_version} |",
        f"| line | {manifest.line or 'any'} |",
        f"| release | {manifest.release_counter} ({manifest.created or 'not dated'}) |",
    ]
    lines += [
        f"| picture `{name}` | {size[0]} x {size[1]} px |"
        for name, size in sorted(manifest.images.items())
    ]
    if manifest.thresholds:
        lines += ["", "## Operating point", "", "| threshold | value |", "| --- | --- |"]
        lines += [f"| {name} | {value:g} |" for name, value in sorted(manifest.thresholds.items())]
    lines += ["", "## Training", ""]
    lines += _table(card) or ["No training card came with the checkpoint."]
    lines += ["", "## Evaluation", ""]
    lines += _table(brief(evaluation)) or [
        "No evaluation figures came with this export. The figures of the checkpoint, if any, are "
        "under Training; figures of quantised weights must be measured on the bundle."
    ]
    lines += _promised(detectable)
    lines += _against_full_precision(manifest.precision, drift)
    lines += [
        "",
        "## Limits",
        "",
        "Trained on simulated scans of the catalogue's parts unless the figures above say "
        "otherwise. Parts outside the catalogue are read as the nearest known part: a low "
        "probability is the only hint. Probabilities are not calibrated unless the figures say so.",
        "",
    ]
    return "\n".join(lines)


def _quantizer(manifest: Manifest) -> str:
    name = manifest.model.get("quantizer")
    return f" ({name})" if name else ""


def _against_full_precision(precision: str, drift: Drift | None) -> list[str]:
    """What quantisation changed, and whether a person accepted more than the limits allow."""
    if precision == "fp32":
        return []
    title = ["", "## Against full precision", ""]
    if drift is None:
        return [*title, "Not measured: this bundle was written without the gate."]
    lines = [f"| {what} | {value} | {limit} |" for what, value, limit in drift.table()]
    lines = [*title, "| figure | value | limit |", "| --- | --- | --- |", *lines]
    if drift.accepted:
        faults = "; ".join(drift.faults())
        lines += ["", f"**Over the limit: {faults}. Accepted all the same: {drift.accepted}**"]
    return lines


def _promised(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """The smallest defect of each class that the station finds, and that it promises no smaller."""
    lines: list[str] = []
    for report in reports:
        unit = {"mm": "mm", "px": "camera pixels"}.get(report["unit"], report["unit"])
        lines += ["", f"| class | flaws | found | a90, {unit} | a90/95, {unit} |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        for name, one in report["curves"].items():
            sizes = [one.get("a90"), one.get("a90_95")]
            most = one.get("largest", math.inf)
            shown = [f"{s:.3g}" if s is not None and s <= most else "-" for s in sizes]
            note = f" ({one['reason']})" if "reason" in one else ""
            lines.append(
                f"| {name} | {one['flaws']} | {one['hits']} | {shown[0]}{note} | {shown[1]} |"
            )
    if not lines:
        return []
    return [
        "",
        "## Promised sizes",
        "",
        "Size of a defect (crack: width; cut and dent: depth; deformation: bend) at which nine of "
        "ten are found, that is do not pass (a90), and the upper end of its 95 % interval "
        "(a90/95). From there on a class is promised by itself, below it nothing is; - lies "
        "beyond the largest size tested: not shown by so few flaws. A certificate promises for "
        "the mix of all defects from the sizes that it names.",
        *lines,
    ]


def _table(figures: Mapping[str, Any]) -> list[str]:
    rows = [f"| {name} | {value} |" for name, value in _flat(figures, "")]
    return ["| figure | value |", "| --- | --- |", *rows] if rows else []


# Matrices, curves and breakdowns of an evaluation: its report shows them.
_TOO_LONG = frozenset({"detail", "without_sizes"})


def brief(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures without what only a report can show."""
    return {
        name: brief(value) if isinstance(value, Mapping) else value
        for name, value in figures.items()
        if name not in _TOO_LONG
    }


def _flat(figures: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in figures.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}.")
        elif isinstance(value, float):
            yield path, f"{value:.4g}"
        elif isinstance(value, (list, tuple)):
            yield path, ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value)
        else:
            yield path, str(value).replace("|", "\\|").replace("\n", " ")
