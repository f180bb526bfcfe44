"""Run the rows of the failure matrix one after the other; exit code 1 when one is not as expected.

A table line a row as it ends, then one JSON object with the same figures and the load.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.mes.faults.table import HEAD, Result, Skip, all_rows, chosen, line_of, to_dict
from tests.mes.rig import MOSQUITTO


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mes.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", metavar="1,3,5", help="only these rows")
    parser.add_argument("--short", action="store_true", help="the form that `make test` runs")
    parser.add_argument("--list", action="store_true", help="list the rows and what is expected")
    parser.add_argument(
        "--folder", type=Path, help="where databases lie (default: a temporary folder on disk)"
    )
    options = parser.parse_args()
    try:
        rows = chosen(all_rows(), options.rows)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        for row in rows:
            print(f"{row.number:>4}  {row.fault}: {row.expected}")
        return 0
    logging.basicConfig(level=logging.CRITICAL)
    began, load = time.monotonic(), os.getloadavg()
    print(HEAD, flush=True)
    found = []
    for row in rows:
        print(f"{row.number:>4}  {row.fault} ...", end="\r", file=sys.stderr, flush=True)
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="forge-faults-", dir=options.folder) as name:
            result: Result | str
            if row.needs_mosquitto and MOSQUITTO is None:
                result = "mosquitto is not installed (apt-get install mosquitto)"
            else:
                try:
                    result = row.run(Path(name), options.short)
                except Skip as error:
                    result = str(error)
                except Exception as error:  # the other rows must still run
                    logging.getLogger(__name__).exception("row %s", row.number)
                    result = Result(faults=(f"the run ended with {error!r}",))
        seconds = time.monotonic() - started
        print(line_of(row, result, seconds), flush=True)
        found.append(to_dict(row, result, seconds))
    bad = [str(item["row"]) for item in found if item.get("ok") is False]
    summary = {
        "rows": found,
        "failed": bad,
        "skipped": [item["row"] for item in found if "skipped" in item],
        "seconds": round(time.monotonic() - began, 1),
        "load_before": [round(item, 2) for item in load],
        "load_after": [round(item, 2) for item in os.getloadavg()],
        "cpus": os.cpu_count(),
    }
    print(json.dumps(summary))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
