"""How a rollout reaches one station: through its broker, or by a stick that is carried there.

A way gives orders and looks what became of them. It remembers nothing that matters: what a station
says stays at its broker (retained), or on the stick.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from forge_station.contract.error import ContractError
from forge_station.errors import ConfigError, InputError, LinkError
from forge_station.mes import schema
from forge_station.mes.command_client import Commander
from forge_station.mes.listen import Listener
from forge_station.mes.topics import MqttConfig, jobs_filter, topic_of
from forge_station.private_key import PrivateKey
from forge_station.rollout import stick
from forge_station.rollout.record import StationRecord
from forge_station.signing import PublicKey

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""A command is valid, and its answer waited for, so long."""
AGAIN_S = 5.0
"""After a failure a station is tried again so much later."""


@dataclass(frozen=True)
class Answer:
    """What a station said to an order. `later`: nothing; the order may be sent again."""

    taken: bool
    code: str = ""
    detail: str = ""
    later: bool = False


@dataclass(frozen=True)
class Seen:
    """What is known of a station now."""

    online: bool | None = None
    """None: nobody can say."""
    born: bool = False
    """Its birth message is known: what it runs, and what it takes."""
    running: str = ""
    """Digest of the manifest of the bundle in use; empty: unknown."""
    commands: bool = False
    """It says that it takes commands,"""
    deploys: bool = False
    """and among them deployments."""
    jobs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Id of a deployment -> the newest `job` message."""
    doubted: Mapping[str, stick.Report] = field(default_factory=dict)
    """Id of a deployment -> a report of which nobody can say that the station wrote it."""
    trouble: str = ""
    """Why nothing is known."""


class Way(Protocol):
    """Of one station."""

    def look(self) -> Seen:
        """Returns at once."""
        ...

    def deploy(self, item: StationRecord, url: str, downgrade: bool) -> Answer: ...

    def take_back(self, item: StationRecord, job: str) -> Answer:
        """End the deployment `job`; under a new id: back to the bundle before."""
        ...

    def close(self) -> None: ...


class MqttWay:
    """Through the broker: signed commands there, `job`, `conn` and `birth` messages back. Without
    a key it only looks."""

    def __init__(self, config: MqttConfig, key: PrivateKey | None, issuer: str) -> None:
        self._config, self._key, self._issuer = config, key, issuer
        self._listener: Listener | None = None
        self._retry_at = 0.0
        self._seen = Seen(trouble="not asked yet")

    def look(self) -> Seen:
        if self._listener is None and time.monotonic() >= self._retry_at:
            self._connect()
        while self._listener is not None and (arrived := self._listener.arrived(0.0)) is not None:
            self._take(arrived[0], arrived[1])
        return self._seen

    def deploy(self, item: StationRecord, url: str, downgrade: bool) -> Answer:
        args: dict[str, Any] = {"jobId": item.job, "url": url, "sha256": item.release.sha256}
        if downgrade:
            args["allowDowngrade"] = item.release.release_counter
        return self._send("deploy", args)

    def take_back(self, item: StationRecord, job: str) -> Answer:
        return self._send("rollback", {"jobId": job})

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _send(self, name: str, args: Mapping[str, Any]) -> Answer:
        if self._key is None:
            raise ConfigError("no key to sign an order with", expected="--key")
        try:
            with Commander(self._config, self._key, self._issuer, ANSWER_S) as commander:
                reply = commander.send(name, args, ANSWER_S)
        except LinkError as error:
            return Answer(False, error.code, " ".join(str(error).split()), later=True)
        taken = reply["status"] == "SUCCEEDED"
        return Answer(taken, str(reply.get("code", "")), str(reply["detail"]))

    def _connect(self) -> None:
        config = self._config
        filters = [topic_of(config, "conn"), topic_of(config, "birth"), jobs_filter(config)]
        listener = Listener(config, filters=filters, timeout_s=ANSWER_S)
        try:
            listener.start()
        except LinkError as error:
            self._retry_at = time.monotonic() + AGAIN_S
            self._seen = replace(self._seen, trouble=" ".join(str(error).split()))
            return
        self._listener = listener
        self._seen = replace(self._seen, trouble="")

    def _take(self, topic: str, body: bytes) -> None:
        kind = {topic_of(self._config, name): name for name in ("conn", "birth")}.get(topic, "job")
        try:
            message = json.loads(body)
            if not isinstance(message, dict) or message.get("schema") != f"{kind}/1.0":
                raise ContractError("another message than belongs there", expected=f"{kind}/1.0")
            schema.require(message)
        except (ValueError, RecursionError, ContractError) as error:
            log.error("%s cannot be read: %s", topic, error)
            return
        seen = self._seen
        if kind == "conn":
            self._seen = replace(seen, online=message["state"] == "ONLINE")
        elif kind == "birth":
            capabilities = message.get("capabilities", ())
            self._seen = replace(
                seen,
                born=True,
                running=message.get("bundle", {}).get("sha256", ""),
                commands=any(name.startswith("command:") for name in capabilities),
                deploys="command:deploy" in capabilities,
            )
        else:
            known = seen.jobs.get(message["jobId"])
            if known is None or message["version"] >= known["version"]:
                self._seen = replace(seen, jobs={**seen.jobs, message["jobId"]: message})


class StickWay:
    """By a folder that is carried there and back. Nobody can say what goes on meanwhile. `key`
    signs the station's reports; None: the plan names none."""

    def __init__(self, folder: Path, bundle: Path, key: PublicKey | None = None) -> None:
        self._folder, self._bundle, self._key = folder, bundle, key

    def look(self) -> Seen:
        found = stick.read_reports(self._folder, self._key)
        return Seen(
            jobs={job: report.message for job, report in found.items() if not report.doubt},
            doubted={job: report for job, report in found.items() if report.doubt},
        )

    def deploy(self, item: StationRecord, url: str, downgrade: bool) -> Answer:
        if not self._folder.is_dir():
            detail = f"{self._folder} is not there: plug the stick in, or make the folder"
            return Answer(False, "NO_STICK", detail, later=True)
        try:
            stick.require_alone(self._folder, item.name, item.job, self._key)
            stick.write_order(self._folder, item, self._bundle)
        except InputError as error:
            return Answer(False, "NOT_ALONE", " ".join(str(error).split()), later=True)
        except OSError as error:
            return Answer(False, "NO_STICK", f"{error.filename}: {error.strerror}", later=True)
        return Answer(
            True, detail=f"carry {self._folder} there: forge-station rollout apply FOLDER"
        )

    def take_back(self, item: StationRecord, job: str) -> Answer:
        if not self._folder.is_dir():
            return Answer(False, "NO_STICK", f"{self._folder} is not there", later=True)
        place = stick.place_of(self._folder, item.job)
        if not item.taken and not (place / stick.REPORT).exists():
            shutil.rmtree(place, ignore_errors=True)
            return Answer(True, "NEVER_TAKEN", "the order was taken off the stick")
        detail = "by hand there: forge-station bundle rollback, then start the station again"
        return Answer(False, "BY_HAND", detail)

    def close(self) -> None: ...


__all__ = ["AGAIN_S", "ANSWER_S", "Answer", "MqttWay", "Seen", "StickWay", "Way"]
