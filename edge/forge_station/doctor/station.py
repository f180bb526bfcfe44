"""Checks of one station file: bundle, certificate, heads and their calibration, broker, folders."""

from __future__ import annotations

import json
import secrets
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from forge_station.bundles import store
from forge_station.capture import calibration_io, camera, projector, replay
from forge_station.capture.settings import DepthHeadSettings, HeadSettings
from forge_station.checks import Thresholds
from forge_station.config import ReplayScanner, SimScanner, StationConfig
from forge_station.contract import CONTRACT_VERSION
from forge_station.doctor import machine
from forge_station.doctor.lines import Line, guarded, probe
from forge_station.errors import StationError
from forge_station.mes import credentials, link
from forge_station.permit import read_permit
from forge_station.vlm import bundle_files
from forge_station.vlm.engine import AUTO
from forge_station.vlm.providers import chosen

CAMERA_LIMIT_S = 30.0
EXPIRES_SOON_DAYS = 30
STALE_CALIBRATION_DAYS = 180
_DARK, _BRIGHT, _FLAT = 4.0, 250.0, 0.5
_PACKET_DRIVERS = ("aravis", "harvesters", "pylon", "gentl3d")


def checks(config: StationConfig) -> list[Line]:
    """All checks of the station, and those of the machine that depend on its file."""
    found = guarded("bundle", lambda: bundle(config))
    wanted = config.runtime.provider
    found += guarded("provider", lambda: machine.providers(_provider(config) or wanted))
    found += guarded("scanner", lambda: scanner(config))
    gige = any(head.camera.driver in _PACKET_DRIVERS for head in heads_of(config))
    found += guarded("network", lambda: machine.network(gige))
    found += guarded("outbox", lambda: machine.disk(config.outbox.parent, "outbox", durable=True))
    found += guarded("evidence", lambda: machine.disk(config.evidence.folder, "evidence"))
    found += guarded("broker", lambda: broker(config))
    found += guarded("secrets", lambda: secret_files(config))
    return found


def heads_of(config: StationConfig) -> tuple[HeadSettings | DepthHeadSettings, ...]:
    """The real heads of the station; none where its scanner is simulated or replayed."""
    found = config.scanner
    return () if isinstance(found, SimScanner | ReplayScanner) else found.heads


def _provider(config: StationConfig) -> str | None:
    """The provider that the bundle would be started with; None where there is no bundle."""
    try:
        found = chosen(
            bundle_files.read_manifest(store.in_use(config.bundle)), config.runtime.provider
        )
    except StationError:
        return None
    return None if found == AUTO else found


def bundle(config: StationConfig) -> Iterator[Line]:
    """Whole, of this contract, and certified for this station."""
    folder = store.in_use(config.bundle)
    manifest = bundle_files.read_manifest(folder)
    signed_by = bundle_files.verify_folder(folder, config.trust).signed_by
    text = f"{manifest.name} {manifest.version}, {manifest.precision}, {len(manifest.files)} files"
    if manifest.contract_version != CONTRACT_VERSION:
        yield Line("fail", "bundle", f"{text}: contract {manifest.contract_version}, this station "
                   f"has {CONTRACT_VERSION}", "Install the matching release.")  # fmt: skip
        return
    signed = f"signed by {', '.join(signed_by)}" if signed_by else "not signed"
    yield Line("pass", "bundle", f"{text}, all digests right, {signed}")
    if manifest.line and manifest.line != config.line.line:
        yield Line("warn", "bundle", f"made for line {manifest.line}, this is {config.line.line}",
                   "Check that it was meant.")  # fmt: skip
    own = Thresholds.read(manifest.thresholds)
    used = Thresholds.read(manifest.thresholds, config.thresholds)
    permit = read_permit(folder, manifest, config.trusted_keys, own, used,
                         config.changed_since_certificate)  # fmt: skip
    if permit.objection is not None or permit.certificate is None:
        yield Line("warn", "certificate", f"advisory: {permit.objection}",
                   "No part will be PASS until a certificate counts.")  # fmt: skip
        return
    expires = datetime.fromisoformat(permit.certificate.expires.replace("Z", "+00:00"))
    left = (expires - datetime.now(timezone.utc)).days
    soon = left < EXPIRES_SOON_DAYS
    yield Line("warn" if soon else "pass", "certificate", f"valid, {left} days left",
               "Have the bundle certified again before it expires." if soon else "")  # fmt: skip


def scanner(config: StationConfig) -> Iterator[Line]:
    """Can its devices be opened, and do they give a picture?"""
    settings = config.scanner
    if isinstance(settings, SimScanner):
        import forge_station.capture.sim  # noqa: F401  says which extra is missing

        yield Line("warn", "scanner", "simulated: nothing real is inspected",
                   "Name real heads in the station file for a line.")  # fmt: skip
        return
    if isinstance(settings, ReplayScanner):
        folder = settings.folder
        scans = [folder] if (folder / replay.MANIFEST).is_file() else sorted(
            path.parent for path in folder.glob(f"*/{replay.MANIFEST}")
        )  # fmt: skip
        if not scans:
            yield Line("fail", "scanner", f"{folder}: no recorded scan", "Correct scanner.folder.")
            return
        replay.read(scans[0])
        yield Line("warn", "scanner", f"replays {len(scans)} recorded scans; the first is whole",
                   "Name real heads in the station file for a line.")  # fmt: skip
        return
    for head in heads_of(config):
        topic, made = f"head {head.name}", [partial(eye, head)]
        if isinstance(head, HeadSettings):
            made += [partial(calibration, head), partial(light, head)]
        for check in made:
            yield from guarded(topic, check)


def calibration(head: HeadSettings) -> Iterator[Line]:
    """Readable, of a tray that is known, and not forgotten for half a year."""
    topic = f"head {head.name}"
    found = calibration_io.load(head.calibration)
    text = f"calibration {found.name} {found.digest[:12]}, rms {found.rms_px:.2f} px"
    if found.tray_from_camera is None:
        yield Line("fail", topic, f"{text}: the tray is not known",
                   "Lay a board on it: forge-station calibrate --tray.")  # fmt: skip
        return
    date = found.notes.get("date", "")
    try:
        age = (datetime.now(timezone.utc).date() - datetime.fromisoformat(date).date()).days
    except ValueError:
        yield Line("pass", topic, text)
        return
    old = age > STALE_CALIBRATION_DAYS
    yield Line("warn" if old else "pass", topic, f"{text}, {age} days old",
               "Check it on a board: forge-station calibrate --check." if old else "")  # fmt: skip


def light(head: HeadSettings) -> Iterator[Line]:
    """The projector's driver is there; nothing is projected."""
    topic = f"head {head.name}"
    if head.projector.driver in projector.drivers():
        yield Line("pass", topic, f"projector driver {head.projector.driver} is installed")
    else:
        yield Line("fail", topic, f"no projector driver {head.projector.driver}",
                   f"There are {', '.join(sorted(projector.drivers()))}.")  # fmt: skip


def eye(head: HeadSettings | DepthHeadSettings) -> Iterator[Line]:
    """One frame from the head's camera, of the size that it was calibrated with."""
    topic = f"head {head.name}"
    if head.camera.driver not in camera.drivers():
        yield Line("fail", topic, f"no camera driver {head.camera.driver}",
                   f"There are {', '.join(sorted(camera.drivers()))}.")  # fmt: skip
        return
    found = probe(["camera", json.dumps(asdict(head.camera))], CAMERA_LIMIT_S)
    if "busy" in found:
        yield Line("warn", topic, f"camera: {found['busy']}",
                   "Stop the station to test its camera.")  # fmt: skip
        return
    if "error" in found:
        yield Line("fail", topic, f"camera: {machine.short(found['error'])}",
                   "Check the settings, power, cable, and who else uses it.")  # fmt: skip
        return
    width, height = found["size"]
    text = (
        f"camera {found['model']} {found['serial']} ({found['driver']}): {width}x{height} in "
        f"{found['seconds']:.1f} s"
    )
    if not found["complete"]:
        yield Line("warn", topic, f"{text}, but the frame was incomplete",
                   "Packets are lost: packet size, receive buffers, cable.")  # fmt: skip
        return
    if isinstance(head, DepthHeadSettings):
        yield Line("pass", topic, text)
        return
    expected = calibration_io.load(head.calibration).camera.image_size
    if (width, height) != expected:
        yield Line("fail", topic, f"{text}, calibrated {expected[0]}x{expected[1]}",
                   "Set the size it was calibrated with, or calibrate again.")  # fmt: skip
    elif found["spread"] < _FLAT or not _DARK <= found["mean"] <= _BRIGHT:
        yield Line("warn", topic, f"{text}, but an empty picture (mean {found['mean']:.0f})",
                   "Take the cap off; check light and exposure.")  # fmt: skip
    else:
        yield Line("pass", topic, text)


def broker(config: StationConfig) -> Iterator[Line]:
    """Does it answer, and accept this user? As another client: the station's is not thrown out."""
    mine = config.mqtt
    if config.broker != "external":
        own = config.broker == "embedded"
        yield Line("pass", "broker", "the station starts its own" if own else "nothing is sent")
        return
    where = f"{mine.host}:{mine.port}"
    try:
        socket.create_connection((mine.host, mine.port), link.CONNECT_TIMEOUT_S).close()
    except OSError as error:
        yield Line("fail", "broker", f"{where}: {error}",
                   "Results wait in the outbox. Check address, network, firewall.")  # fmt: skip
        return
    client = mqtt.Client(
        CallbackAPIVersion.VERSION2,
        f"doctor-{secrets.token_hex(4)}",
        protocol=mqtt.MQTTv5 if mine.version == "5" else mqtt.MQTTv311,
        reconnect_on_failure=False,
    )
    client.connect_timeout = link.CONNECT_TIMEOUT_S
    link.equip(client, mine)
    answered, refusal = threading.Event(), [""]

    def on_connect(*arguments: object) -> None:
        reason = arguments[3]
        refusal[0] = str(reason) if getattr(reason, "is_failure", True) else ""
        answered.set()

    client.on_connect = on_connect
    try:
        client.connect(mine.host, mine.port, keepalive=10)
        client.loop_start()
        in_time = answered.wait(link.CONNECT_TIMEOUT_S)
    except (OSError, ValueError) as error:
        yield Line("fail", "broker", f"{where}: {error}",
                   "Check TLS: the CA, the host name, the client's certificate.")  # fmt: skip
        return
    finally:
        client.disconnect()
        client.loop_stop()
    if not in_time:
        yield Line("fail", "broker", f"{where}: open, but no answer to CONNECT",
                   f"Check that it is an MQTT {mine.version} port.")  # fmt: skip
    elif refusal[0]:
        yield Line("warn", "broker", f"{where} refuses the doctor: {refusal[0]}", "It may know "
                   f"client {mine.station} alone; else check user and password.")  # fmt: skip
    else:
        how = "TLS" if mine.tls else "in the clear"
        yield Line("pass", "broker", f"{where} answers, MQTT {mine.version}, {how}")


def secret_files(config: StationConfig) -> Iterator[Line]:
    """Password and key are for the station's eyes alone; the TLS certificate is its own."""
    if config.mqtt.tls_cert is not None:
        credentials.require(config.mqtt)
        left = credentials.days_until(credentials.read(config.mqtt.tls_cert))
        soon = left < EXPIRES_SOON_DAYS
        yield Line("warn" if soon else "pass", "tls", f"certificate of the station, {left:.0f} "
                   "days left", "Renew it." if soon else "")  # fmt: skip
    for path in (config.mqtt.password_file, config.mqtt.tls_key, config.release.report_key):
        if path is None:
            continue
        try:
            mode = Path(path).stat().st_mode
            with path.open("rb"):
                pass
        except OSError as error:
            yield Line("fail", "secrets", f"{path}: {error.strerror}", "The station needs it.")
            continue
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            yield Line("warn", "secrets", f"{path} can be read by others", f"chmod 600 {path}")
        else:
            yield Line("pass", "secrets", f"{path} is the station's alone")
