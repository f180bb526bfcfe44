"""The page's texts: the same in every language; one for every fault that an operator may see."""

from __future__ import annotations

import json
import re

import pytest

from forge_station import errors
from forge_station.contract.verdict import REASONS
from forge_station.hmi.app import LOCALES
from forge_station.mes.alarms import CODES as ALARMS

LANGUAGES = ("en", "de", "zh")
OF_THE_PART = re.compile(
    r"SURFACE_|WRONG_(WORKPIECE|MODEL|COUNT)|(MISSING|EXTRA)_PART|LOW_(CONFORMITY|SURFACE|PROB)"
    r"|NO_MAJORITY|SIZE_CONTRADICTS|ANSWERS_DISAGREE|GRID_CONTRADICTS|ABOVE_LIMIT"
)
"""Reasons that say what a part is, not what to do about a station."""
FAULTS = {
    *(code for code in REASONS if not OF_THE_PART.match(code)),
    *(item.code for item in vars(errors).values() if hasattr(item, "code")),
}


def texts(language: str) -> dict[str, str]:
    found: dict[str, str] = json.loads((LOCALES / f"{language}.json").read_text())
    return found


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_every_text_is_there_in_every_language_with_the_same_fields(language: str) -> None:
    english, own = texts("en"), texts(language)
    assert own.keys() == english.keys()
    fields = re.compile(r"\{\w+\}")
    for key, text in english.items():
        assert set(fields.findall(own[key])) == set(fields.findall(text)), key


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_fault_says_what_it_is_and_what_to_do(language: str) -> None:
    own = texts(language)
    for code in FAULTS:
        assert own[f"reason.{code}"] and own[f"reason.{code}.do"], code
    for code in ALARMS:
        assert own[f"alarm.{code}"] and own[f"alarm.{code}.do"], code
    told = {key.split(".")[1] for key in own if key.startswith("reason.")}
    assert told >= set(REASONS)
    assert {key.split(".")[1] for key in own if re.fullmatch(r"reason\.\w+\.do", key)} <= told
