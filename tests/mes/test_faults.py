"""The failure matrix in short: `make faults` runs it whole (tests/mes/faults)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mes.faults.table import Row, Skip, all_rows, chosen
from tests.mes.rig import MOSQUITTO


@pytest.mark.parametrize("row", all_rows(), ids=lambda row: f"{row.number}-{row.fault}")
# paho leaves the socket of a failed handshake to the garbage collector, which closes it.
@pytest.mark.filterwarnings("ignore:.*SSLSocket:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_row(row: Row, tmp_path: Path) -> None:
    if row.needs_mosquitto and MOSQUITTO is None:
        pytest.skip("mosquitto is not installed")
    try:
        result = row.run(tmp_path, True)
    except Skip as reason:
        pytest.skip(str(reason))
    assert result.faults == ()
    assert not result.lost
    if result.committed is not None:
        assert result.committed > 0


def test_numbers_are_unique_and_an_unknown_one_is_an_error() -> None:
    numbers = [row.number for row in all_rows()]
    assert len(numbers) == len(set(numbers))
    with pytest.raises(ValueError, match="99"):
        chosen(all_rows(), "1,99")
