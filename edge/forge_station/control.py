"""What commands do to a running station: the handlers, and the service that calls them.

It knows no message: `mes/commands.py` has verified who asks and that the arguments are well-formed.
Whatever changes the inspection waits for the part in work, so that no part sees two settings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge_station.bundles.deploy import Deployer, Host
from forge_station.bundles.jobs import JobRecord
from forge_station.bundles.store import BundleStore, in_use, is_store
from forge_station.capture.base import Trigger
from forge_station.checks import Thresholds
from forge_station.contract.error import ContractError
from forge_station.errors import OutboxError, StationError
from forge_station.mes import payloads
from forge_station.mes.alarms import Alarms
from forge_station.mes.command_store import CommandStore
from forge_station.mes.commands import CommandServer, Handler
from forge_station.mes.link import Outgoing
from forge_station.mes.topics import topic_of
from forge_station.permit import read_permit
from forge_station.pipeline import Inspector
from forge_station.station import Station, birth_of, open_station_inspector

log = logging.getLogger(__name__)

PART_WAIT_S = 30.0
"""A command waits so long for the part in work."""
Args = Mapping[str, Any]


@dataclass(frozen=True)
class Control:
    """The handlers of one station. What it is not given, it does not offer.

    `capture` puts a part to be inspected, and returns it with its serial. `stopped(why)` is told of
    stop (a reason) and start (None).
    """

    station: Station
    alarms: Alarms | None = None
    capture: Callable[[Trigger], Trigger] | None = None
    stopped: Callable[[str | None], None] | None = None
    deployer: Deployer | None = None

    def handlers(self) -> dict[str, Handler]:
        """Command -> what it does here."""
        found: dict[str, Handler] = {
            "ping": self._ping,
            "rebirth": self._rebirth,
            "replay": self._replay,
            "start": self._start,
            "stop": self._stop,
            "selectRecipe": self._select_recipe,
        }
        if self.station.config.commands.thresholds:
            found["setThreshold"] = self._set_threshold
        if self.alarms is not None:
            found["ackAlarm"] = self._acknowledge
        if self.capture is not None:
            found["capture"] = self._capture
        if self.deployer is not None:
            found["deploy"], found["rollback"] = self._deploy, self._rollback
        return found

    def _ping(self, _: Args) -> Args:
        outbox = self.station.outbox
        stopped = self.station.stopped
        return {"bootId": outbox.boot_id, "stopped": stopped is not None, "pending": outbox.pending}

    def _rebirth(self, _: Args) -> None:
        self.station.publisher.rebirth()

    def _replay(self, args: Args) -> Args:
        first, last = args["fromSeq"], args["toSeq"]
        if first > last:
            raise ContractError(
                "no range", which="fromSeq, toSeq", expected="the smaller first", got=(first, last)
            )
        found = self.station.publisher.replay(from_seq=first, to_seq=last, epoch=args["epoch"])
        return {"rows": found.rows, "missing": [list(item) for item in found.missing]}

    def _start(self, _: Args) -> Args:
        return self._stopped(None)

    def _stop(self, args: Args) -> Args:
        return self._stopped(args.get("reason") or "by a command")

    def _stopped(self, why: str | None) -> Args:
        before = self.station.stopped
        self.station.stopped = why
        if self.stopped is not None:
            self.stopped(why)
        state = self.station.state  # a line that holds its parts goes on holding them
        self.station.tell(str(state["text"]) if state["state"] == "ERROR" else None)
        return {"before": {"stopped": before}, "after": {"stopped": why}}

    def _select_recipe(self, args: Args) -> Args:
        product = self.station.config.line.product(args["productId"]).part_number
        with self._between_parts():
            before, self.station.selected = self.station.selected, product
            self.station.change_over(product)
        return {"before": {"productId": before}, "after": {"productId": product}}

    def _set_threshold(self, args: Args) -> Args:
        """Within the bounds of the station file. Counts as a changed recipe for the certificate."""
        config, name, value = self.station.config, args["name"], float(args["value"])
        bounds = config.commands.thresholds.get(name)
        if bounds is None or not bounds[0] <= value <= bounds[1]:
            open_to = ", ".join(
                f"{key} from {low:g} to {high:g}"
                for key, (low, high) in config.commands.thresholds.items()
            )
            raise ContractError(
                "not open to commands", which=name, expected=open_to, got=f"{value:g}"
            )
        with self._between_parts():
            inspector = self.station.inspector
            before = getattr(inspector.thresholds, name)
            released = Thresholds.read(inspector.model.manifest.thresholds)
            used = replace(inspector.thresholds, **{name: value})
            if used.look_again < 1.0 and not inspector.model.manifest.training.get("closer_looks"):
                raise ContractError(
                    "this bundle's model was not trained on closer looks",
                    which="look_again",
                    expected="1 (never)",
                    got=f"{used.look_again:g}",
                )
            changed = (*config.changed_since_certificate, "recipe")
            permit = read_permit(
                self._folder_in_use(),
                inspector.model.manifest,
                config.trusted_keys,
                released,
                used,
                changed,
            )
            self.station.inspector = replace(inspector, thresholds=used, permit=permit)
        self.station.tell(None)
        return {"before": {name: before}, "after": {name: value}, "permit": permit.text}

    def _folder_in_use(self) -> Path:
        station = self.station
        if station.judging:
            return in_use(station.config.product_bundles[station.judging])
        return station.bundle or in_use(station.config.bundle)

    def _acknowledge(self, args: Args) -> None:
        if self.alarms is None or not self.alarms.acknowledge(args["instanceId"]):
            raise ContractError(
                "no alarm to acknowledge",
                expected="the instanceId of an active one that is not acknowledged",
                got=args["instanceId"],
            )

    def _capture(self, args: Args) -> Args:
        if self.capture is None:
            raise StationError("this station has no place for parts by command")
        product = args.get("productId") or self.station.selected
        if not product:
            known = [item.part_number for item in self.station.config.line.products]
            if len(known) != 1:
                raise ContractError("which product?", expected=f"productId: {', '.join(known)}")
            product = known[0]
        part_number = self.station.config.line.product(product).part_number
        part = self.capture(Trigger(args.get("partId", ""), part_number, time.time_ns()))
        return {"partId": part.serial, "productId": part_number}

    def _deploy(self, args: Args) -> Args:
        """Begins it; how it goes is told on the topic of the job."""
        if self.deployer is None or "url" not in args:
            raise ContractError("no bundle is named", expected="url: where the bundle file is")
        job = self.deployer.deploy(
            args["jobId"],
            args["url"],
            sha256=args.get("sha256", ""),
            allow_downgrade=args.get("allowDowngrade"),
        )
        return {"jobId": job.id, "state": job.state}

    def _rollback(self, args: Args) -> Args:
        if self.deployer is None:
            raise StationError("this station has no bundle store")
        job = self.deployer.rollback(args["jobId"])
        return {"jobId": job.id, "state": job.state}

    def _between_parts(self) -> AbstractContextManager[None]:
        return between_parts(self.station)


@contextmanager
def between_parts(station: Station) -> Iterator[None]:
    """While the block runs, no part is in work. Raises StationError when one does not end."""
    if not station.in_work.acquire(timeout=PART_WAIT_S):
        raise StationError(
            "the part in work does not end",
            expected=f"an end within {PART_WAIT_S:g} s",
            action="send the command again",
        )
    try:
        yield
    finally:
        station.in_work.release()


def deployer_of(station: Station) -> Deployer | None:
    """What brings new bundles into a running station; None where its bundle is a plain folder."""
    config = station.config
    if not is_store(config.bundle):
        return None

    def use(inspector: Inspector, folder: Path) -> None:
        with between_parts(station):
            station.main, station.bundle = inspector, folder
            station.publisher.add_birth({**birth_of(station.inspector), **_bundle_of(inspector)})
        held = station.state["state"] == "ERROR"  # a line that holds its parts goes on doing so
        station.tell(str(station.state["text"]) if held else None)

    told: dict[str, int] = {}

    def tell(job: JobRecord, progress: float | None) -> None:
        """A new state goes out by itself as well: of what is retained, only the newest does."""
        topic = topic_of(config.mqtt, "job", job.id)
        body = payloads.status_body("job", config.mqtt.root, job.message(progress))
        station.publisher.set_retained(topic, body)
        if told.get(job.id) != job.version:
            told[job.id] = job.version
            station.publisher.send(Outgoing(topic, body, 1, retain=True))
        if job.over:
            _tell_end(station, job)

    station.publisher.add_birth(_bundle_of(station.main))
    return Deployer(
        BundleStore(config.bundle),
        config.trust,
        config.release,
        Host(
            lambda: station.main,
            lambda folder: open_station_inspector(config, folder),
            use,
            tell,
        ),
        golden_p99_ms=config.runtime.time_budget_s * 1000,
    )


def _bundle_of(inspector: Inspector) -> dict[str, Any]:
    """What the birth message says of the bundle that deployments replace."""
    manifest = inspector.model.manifest
    return {
        "bundle": {
            "name": manifest.name,
            "version": manifest.version,
            "releaseCounter": manifest.release_counter,
            "sha256": manifest.sha256,
        }
    }


def _tell_end(station: Station, job: JobRecord) -> None:
    """The end of a deployment as an audit event, which is delivered for sure, and once."""
    outcome = job.state if job.state in ("SUCCEEDED", "REJECTED") else "FAILED"
    if job.state == "ROLLED_BACK" and not job.code:  # a command asked for just that
        outcome = "SUCCEEDED"
    message = payloads.audit_message(
        station.config.mqtt.root,
        {
            "action": "deploy" if job.url else "rollback",
            "outcome": outcome,
            "code": job.code or None,
            "detail": f"{job.state}: {job.detail}"[:1000],
            "args": {"jobId": job.id},
            "before": {"bundle": job.before} if job.before else None,
            "after": {"bundle": job.bundle} if job.state == "SUCCEEDED" else None,
        },
    )
    topic = topic_of(station.config.mqtt, "audit")
    try:
        station.outbox.put(message.stream, topic, message.body, f"job.{job.id}"[:64])
    except OutboxError as error:
        log.error("the end of deployment %s is not told: %s", job.id, error)


@contextmanager
def served(control: Control) -> Iterator[CommandServer | None]:
    """Take commands while the block runs; nothing happens where no key is enrolled.

    Commands already taken are carried out before it ends. Raises OutboxError when their memory
    cannot be opened, ConfigError when the extra `commands` is missing or an open threshold does not
    exist.
    """
    station = control.station
    settings = station.config.commands
    Thresholds.read({name: low for name, (low, _) in settings.thresholds.items()}, {})
    if not settings.keys:
        yield None
        return
    outbox = station.outbox
    path = outbox.path.with_name(f"{outbox.path.stem}-commands.sqlite")
    with ExitStack() as stack:
        store = stack.enter_context(CommandStore(path))
        server = CommandServer(
            station.config.mqtt,
            settings,
            control.handlers(),
            station.publisher,
            outbox,
            store,
            alarm=None if control.alarms is None else control.alarms.event,
        )
        stack.enter_context(server)
        station.publisher.add_birth({"capabilities": list(server.capabilities)})
        yield server
