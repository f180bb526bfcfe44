"""A bundle carried to a station without a network, and what became of it carried back.

    FOLDER/rollout-<job>/order.json     who is meant, and which bundle it is
    FOLDER/rollout-<job>/<file>.fsb     the bundle
    FOLDER/rollout-<job>/report.json    the station's word: a `job` message, with the digest of
                                        the bundle (`sha256`) and, where it has a key, `sig`

The order is not signed; the bundle is, and a station takes no other. The signature of a report is
Ed25519 over its canonical form without `sig`: JSON with sorted keys, no spaces, ASCII. The id of
the deployment in it is of one rollout and one station. A report that nobody signed is worth as much
as the hands that carried it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_station import private_key
from forge_station.bundles import local
from forge_station.bundles.archive import Progress
from forge_station.bundles.jobs import FINAL, JobRecord
from forge_station.bundles.trust import Trust
from forge_station.contract import record
from forge_station.contract.error import ContractError
from forge_station.errors import InputError
from forge_station.mes import schema, state_file
from forge_station.mes.stamp import utc_now
from forge_station.private_key import PrivateKey
from forge_station.rollout.record import StationRecord
from forge_station.signing import PublicKey

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


@dataclass(frozen=True)
class Report:
    """What a station wrote of its deployment."""

    message: Mapping[str, Any]
    """Fields of `job/1.0`, and `sha256` of the manifest that it is about."""
    doubt: str = ""
    """Why it may not be the station's word; empty: the station's key signed it."""
    forged: bool = False
    """It is not: the signature is wrong, or of another key than the station's."""
    digest: str = ""
    """SHA-256 of the file."""


def read_reports(folder: Path, key: PublicKey | None) -> dict[str, Report]:
    """Id of a deployment -> its report, of all that lie there and can be read. `key`: of the
    station."""
    found = {}
    for path in folder.glob(f"{_PREFIX}*/{REPORT}"):
        try:
            body = path.read_bytes()
            content = {**json.loads(body)}
            doubt, forged = _doubt(content, key)
            message = {name: value for name, value in content.items() if name != "sig"}
            schema.require({"time": utc_now(), **message, **_ENVELOPE}, stamped=False)
            if path.parent != place_of(folder, message["jobId"]):
                raise ValueError(f"it is of {message['jobId']}, and belongs to that one")
            digest = hashlib.sha256(body).hexdigest()
            found[message["jobId"]] = Report(message, doubt, forged, digest)
        except (OSError, ValueError, TypeError, RecursionError, ContractError) as error:
            log.error("%s cannot be read: %s", path, error)
    return found


def _doubt(content: Mapping[str, Any], key: PublicKey | None) -> tuple[str, bool]:
    """Why a report may not be the station's, and whether it is certain that it is not. Raises
    ValueError, TypeError for what is no signature."""
    if "sig" not in content:
        return "it is not signed", False
    sig = {**content["sig"]}
    key_id, value = str(sig.get("keyId"))[:16], base64.b64decode(str(sig.get("value")))
    if key is None:
        return f"it is signed with the key {key_id}, and the plan names none (key)", False
    if key_id != key.id:
        return f"it is signed with the key {key_id}, the station's is {key.id}", True
    if not key.verifies(value, _canonical(content)):
        return "its signature is wrong: it was altered after it was signed", True
    return "", False


def _canonical(content: Mapping[str, Any]) -> bytes:
    unsigned = {name: value for name, value in content.items() if name != "sig"}
    return json.dumps(unsigned, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def rollout_of(order: Order) -> str:
    """Id of the rollout that an order is of."""
    return order.job.removesuffix(f".{order.station}")


def open_orders(folder: Path, station: str, key: PublicKey | None) -> list[Order]:
    """Orders on the stick for this station whose end no report there tells. Raises InputError."""
    reports = read_reports(folder, key)
    found = []
    for _, order in _all_orders(folder):
        report = reports.get(order.job)
        over = report is not None and not report.forged and report.message["state"] in FINAL
        if order.station == station and not over:
            found.append(order)
    return found


def _all_orders(folder: Path) -> list[tuple[Path, Order]]:
    found = []
    for path in sorted(folder.glob(f"{_PREFIX}*/{ORDER}")):
        try:
            order = record.read(Order, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError, ContractError) as error:
            raise InputError("the order cannot be read", which=path, got=error) from error
        found.append((path.parent, order))
    return found


def require_alone(folder: Path, station: str, job: str, key: PublicKey | None) -> None:
    """Raise InputError where the deployment `job` is not over, and another rollout has an order on
    the stick for the same station that is not over either: the station would take both."""
    left = open_orders(folder, station, key)
    others = [rollout_of(order) for order in left if order.job != job]
    over = (place_of(folder, job) / ORDER).is_file() and job not in {order.job for order in left}
    if others and not over:
        raise InputError(
            "another rollout is not over on this stick", which=folder,
            expected=f"no other order for {station} without a final report",
            got=f"one of rollout {', '.join(others)}",
            action="end it (`rollout apply` at the station, then `resume`), abort it, or take the "
            f"folder {_PREFIX}{others[0]}.{station} off the stick",
        )  # fmt: skip


def read_orders(folder: Path, station: str) -> list[tuple[Path, Order]]:
    """Orders on the stick for this station, oldest id first. Raises InputError."""
    orders = _all_orders(folder)
    found = [(place, order) for place, order in orders if order.station == station]
    others = {order.station for _, order in orders}
    if not found:
        raise InputError(
            "no order for this station on the stick",
            which=folder,
            expected=f"{_PREFIX}*/{ORDER} for {station}",
            got=f"orders for {', '.join(sorted(others))}" if others else "none",
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


def write_report(place: Path, job: JobRecord, key: PrivateKey | None = None) -> None:
    """Put the station's word on the stick, signed where it has a key. Raises InputError."""
    content: dict[str, Any] = {**job.message(), "sha256": job.sha256}
    if key is not None:
        content["sig"] = {
            "keyId": private_key.public_half(key).id,
            "alg": "ed25519",
            "value": private_key.sign(key, _canonical(content)),
        }
    try:
        state_file.write(place / REPORT, content)
    except OSError as error:
        raise InputError(
            "the report cannot be written", which=place / REPORT, got=error.strerror
        ) from error
