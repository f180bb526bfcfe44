"""The report of a study: one HTML file without anything from outside, with a CSV and a JSON beside.

It lays out; what is said stands in the commands. Figures are formatted here and nowhere else.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_station import version
from forge_station.assurance import study_files
from forge_station.assurance.agreement import Kappa, Rate
from forge_station.assurance.error import AssuranceError
from forge_station.mes.stamp import utc_now

_STYLE = """
body{font:14px/1.45 sans-serif;color:#1a1a1a;max-width:1000px;margin:24px auto;padding:0 16px}
h1{font-size:22px}h2{font-size:17px;margin-top:28px;border-bottom:1px solid #d4d7da}
table{border-collapse:collapse;margin:8px 0}td,th{border:1px solid #d4d7da;padding:3px 8px;
text-align:right}th{background:#f1f2f3}td:first-child,th:first-child{text-align:left}
.decision{font-size:18px;font-weight:bold;padding:8px 12px;border:3px solid #1a1a1a;
display:inline-block}
.acceptable{background:#9fd3b6}.marginal{background:#ffc400}.unacceptable{background:#b00020;
color:#fff}.charts svg{margin:4px;border:1px solid #d4d7da}.note{color:#4a4f54}
@media print{body{margin:0}.charts svg{break-inside:avoid}}
"""


def percent(value: float | None) -> str:
    """'91.7 %'; a dash of nothing."""
    return "\u2013" if value is None else f"{100 * value:.1f} %"


def rate(found: Rate | None) -> str:
    """'91.7 % (55/60; 81.6 to 97.2)'."""
    if found is None or found.share is None:
        return "\u2013"
    low, high = found.interval
    span = f"{100 * low:.1f} to {100 * high:.1f}"
    return f"{percent(found.share)} ({found.count}/{found.of}; {span})"


def kappa(found: Kappa | None) -> str:
    """'0.86 (0.71 to 1.00)'."""
    if found is None:
        return "\u2013"
    if found.value is None:
        return "not defined: all decisions are the same"
    span = (
        "" if found.interval is None else f" ({found.interval[0]:.2f} to {found.interval[1]:.2f})"
    )
    return f"{found.value:.2f}{span}"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An HTML table; a cell (text, class) has that class."""

    def cell(item: object) -> str:
        if isinstance(item, tuple):
            return f'<td class="{html.escape(str(item[1]))}">{html.escape(str(item[0]))}</td>'
        return f"<td>{html.escape(str(item))}</td>"

    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def decision(text: str, band: str) -> str:
    return f'<p class="decision {band}">{html.escape(text)}</p>'


def charts(found: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(found)}</div>'


def page(title: str, facts: Mapping[str, str], sections: Sequence[str]) -> str:
    """The whole file; `facts` stand at the top, with when and by what it was made."""
    told = {**facts, "made": f"{utc_now()}, forge-station {version()}"}
    rows = table(("study", ""), list(told.items()))
    signed = table(
        ("", "name", "date", "signature"), [("made", "", "", ""), ("checked", "", "", "")]
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}'
        f"</title><style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>{rows}"
        f"{''.join(sections)}{heading('Released')}{signed}</body></html>\n"
    )


def write(
    folder: Path,
    name: str,
    text: str,
    rows: Sequence[Mapping[str, object]],
    result: Mapping[str, Any],
) -> dict[str, str]:
    """NAME.html, NAME.csv, NAME.json in `folder`; kind -> path. Raises AssuranceError."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    contents = {
        "html": text,
        "csv": study_files.to_csv(rows, columns),
        "json": json.dumps(result, indent=1) + "\n",
    }
    return {kind: str(put(folder / f"{name}.{kind}", own)) for kind, own in contents.items()}


def put(path: Path, text: str) -> Path:
    """Write a file, whole or not at all. Raises AssuranceError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise AssuranceError("cannot be written", which=path, got=error.strerror) from error
    return path
