"""A bundle carried to a station without a network, and what became of it carried back.

    FOLDER/rollout-<job>/order.json     who is meant, and which bundle it is
    FOLDER/rollout-<job>/<file>.fsb     the bundle
    FOLDER/rollout-<job>/report.json    the station's word, a `job` message

Order and report are not signed. The bundle is, and a station takes no other; a report is worth as
much as the hands that carried it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_station.bundles import local
from forge_station.bundles.archive import Progress
from forge_station.bundles.jobs import JobRecord
from forge_station.bundles.trust import Trust
from forge_station.contract import record
from forge_station.contract.error import ContractError
from forge_station.errors import InputError
from forge_station.mes import schema, state_file
from forge_station.mes.stamp import utc_now
from forge_station.rollout.record import StationRecord

log = logging.getLogger(__name__)
_ENVELOPE = {"schema": "job/1.0", "source": "stick"}
"""What a message has that came by a broker."""
_PREFIX, ORDER, REPORT = "rollout-", "order.json", "report.json"


@dataclass(frozen=True)
class Order:
    """What the stick says is to be done at a station."""

    job: str
    station: str
    """Its name in the plan: the last level of its topic root."""
    file: str
    name: str
    version: str
    release_counter: int
    sha256: str


def place_of(folder: Path, job: str) -> Path:
    """Where on the stick a deployment is."""
    return folder / f"{_PREFIX}{job}"


def write_order(folder: Path, item: StationRecord, bundle: Path) -> None:
    """Bundle first, then the order. Done again, it does nothing. Raises OSError."""
    place = place_of(folder, item.job)
    release = item.release
    if (place / ORDER).is_file():
        return
    place.mkdir(exist_ok=True)
    draft = place / f".{release.file}.part"
    with bundle.open("rb") as source, draft.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        target.flush()
        os.fsync(target.fileno())
    draft.replace(place / release.file)
    order = Order(
        item.job, item.name, release.file,
        release.name, release.version, release.release_counter, release.sha256,
    )  # fmt: skip
    state_file.write(place / ORDER, record.write(order))


def read_report(folder: Path) -> dict[str, dict[str, Any]]:
    """Id of a deployment -> what its station wrote, of all that lie there and can be read."""
    found = {}
    for path in folder.glob(f"{_PREFIX}*/{REPORT}"):
        try:
            message = {**json.loads(path.read_text(encoding="utf-8"))}
            schema.require({"time": utc_now(), **message, **_ENVELOPE}, stamped=False)
            found[message["jobId"]] = message
        except (OSError, ValueError, TypeError, RecursionError, ContractError) as error:
            log.error("%s cannot be read: %s", path, error)
    return found


def read_orders(folder: Path, station: str) -> list[tuple[Path, Order]]:
    """Orders on the stick for this station, oldest id first. Raises InputError."""
    found, others = [], []
    for path in sorted(folder.glob(f"{_PREFIX}*/{ORDER}")):
        try:
            order = record.read(Order, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError, ContractError) as error:
            raise InputError("the order cannot be read", which=path, got=error) from error
        if order.station == station:
            found.append((path.parent, order))
        else:
            others.append(order.station)
    if not found:
        raise InputError(
            "no order for this station on the stick",
            which=folder,
            expected=f"{_PREFIX}*/{ORDER} for {station}",
            got=f"orders for {', '.join(sorted(set(others)))}" if others else "none",
            action="name the folder that the plan names (stick:)",
        )
    return found


def apply(place: Path, order: Order, store: Path, trust: Trust, progress: Progress) -> JobRecord:
    """Leave the deployment in the station's store; again: how far it is. Raises BundleError."""
    if "/" in order.file or order.file.startswith("."):
        raise InputError("the order names no file beside it", which=place / ORDER, got=order.file)
    return local.order(
        store, place / order.file, order.job, trust, sha256=order.sha256, progress=progress
    )


def write_report(place: Path, job: JobRecord) -> None:
    """Put the station's word on the stick. Raises InputError."""
    try:
        state_file.write(place / REPORT, job.message())
    except OSError as error:
        raise InputError(
            "the report cannot be written", which=place / REPORT, got=error.strerror
        ) from error
