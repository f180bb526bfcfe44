"""The station file and the line file: YAML -> frozen dataclasses, all problems in one message.

An unknown key is an error. Relative paths resolve against the file they stand in. A secret is never
in a file of this kind: `mqtt.password_file` names the file that has it. Reference for people:
station_config/README.md. Knows nothing of what the settings do.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from forge_station.assurance.drift import DriftConfig
from forge_station.bundles.settings import ReleaseConfig
from forge_station.bundles.trust import Trust, release_trust
from forge_station.capture.fusion import Fusion
from forge_station.capture.settings import DepthHeadSettings, HeadSettings
from forge_station.contract import record
from forge_station.contract.certificate import Change
from forge_station.contract.error import ContractError, Fault
from forge_station.contract.record import Count, Limit, NotNegative, Probability
from forge_station.contract.spec import LineSpec, parse_line
from forge_station.errors import ConfigError
from forge_station.hmi.settings import HmiConfig
from forge_station.mes.command import CommandConfig
from forge_station.mes.settings import MonitorConfig, OpcUaConfig, SparkplugConfig
from forge_station.mes.topics import MqttConfig
from forge_station.signing import PublicKey, public_key
from forge_station.triggers.settings import SoftwareSource, TriggerSettings

_MAX_BYTES = 1_000_000
Positive = Annotated[float, Limit(1e-9)]
Exposures = tuple[Positive, ...]


@dataclass(frozen=True)
class SimScanner:
    """The simulated head of the demo: parts of the line's products, laid out at random."""

    driver: Literal["sim"]
    seed: Count = 1
    """Same seed, same trays, same noise."""
    poses: Literal["turntable4", "overhead_front_side", "front_side", "overhead"] = "turntable4"
    """From where the head looks."""
    image_size: tuple[Annotated[int, Limit(64)], Annotated[int, Limit(64)]] = (640, 480)
    """Width and height of the camera image in pixels."""
    exposures: Exposures = (1.0, 0.35)
    """Relative exposure times, merged per pixel."""
    wrong_share: Probability = 0.5
    """Share of trays on which something is wrong."""

    def __post_init__(self) -> None:
        record.check(self)
        if not self.exposures:
            fault = Fault("exposures", "none", "one or more")
            raise ContractError("settings of the simulated head", faults=[fault])


@dataclass(frozen=True)
class ReplayScanner:
    """Recorded pattern stacks instead of a head."""

    driver: Literal["replay"]
    folder: Path
    """A recorded scan, or a folder of such."""
    mode: Literal["once", "loop"] = "once"
    """What to do after the last: stop, or start again."""


@dataclass(frozen=True)
class HeadScanner:
    """Real scan heads. Each sees the tray from its place; a part is scanned by all, in order."""

    driver: Literal["head"]
    heads: tuple[HeadSettings, ...]
    trigger_age_s: Annotated[float, Limit(0.1, 3600.0)] = 5.0
    """An older trigger is refused: another part may be there by then."""

    def __post_init__(self) -> None:
        names = [head.name for head in self.heads]
        if not names or "" in names or len(set(names)) != len(names):
            fault = Fault("heads", ", ".join(names) or "none", "one or more, of different names")
            raise ContractError("the scanner is not valid", faults=[fault])


@dataclass(frozen=True)
class DepthScanner:
    """3D heads that measure by themselves (GenICam 3D): nothing is projected or decoded here."""

    driver: Literal["depth"]
    heads: tuple[DepthHeadSettings, ...]
    trigger_age_s: Annotated[float, Limit(0.1, 3600.0)] = 5.0
    """An older trigger is refused: another part may be there by then."""

    def __post_init__(self) -> None:
        names = [head.name for head in self.heads]
        faults = []
        if not names or "" in names or len(set(names)) != len(names):
            faults = [Fault("heads", ", ".join(names) or "none", "one or more, of different names")]
        if len(names) > 1:
            faults += [
                Fault(f"heads[{k}].tray_from_camera", "none", "the place of each of several heads")
                for k, head in enumerate(self.heads)
                if head.tray_from_camera is None
            ]
        if faults:
            raise ContractError("the scanner is not valid", faults=faults)


@dataclass(frozen=True)
class Runtime:
    """How the model runs."""

    threads: Annotated[int, Limit(1, 256)] = 2
    """Threads of ONNX Runtime."""
    provider: str = "auto"
    """ONNX Runtime execution provider, e.g. CPUExecutionProvider; auto: the best installed."""
    time_budget_s: NotNegative = 10.0
    """Of the model for one part; beyond it the outcome is UNSURE."""
    spinning: bool = False
    """Idle threads burn their cores: quicker where the station has the box for itself."""
    grid: Literal["rows", "soft"] = "rows"
    """How the defect grid is read: rows written in parallel, or the probability of every cell."""
    keep_warm_s: NotNegative = 0.0
    """Run the model on a blank picture after so many seconds without a part; 0: never."""
    part_limit_s: Annotated[float, Limit(1.0, 3600.0)] = 120.0
    """A part that takes longer means that the station hangs: watchdog and heartbeat stop."""
    stop_grace_s: NotNegative = 30.0
    """When told to stop, wait so long for the part in work; then it becomes an ERROR."""


@dataclass(frozen=True)
class Gates:
    """What a scan must reach, stricter than the defaults where wanted; never looser.

    The bundle's certificate was made with the defaults.
    """

    motion_px: Annotated[float, Limit(0.05, 0.5)] = 0.5
    """Camera pixels that anything may have moved by while the patterns were shown."""
    blur_px: Annotated[float, Limit(0.3, 3.0)] = 3.0
    """Blur of the patterns' edges, standard deviation in camera pixels."""
    min_part_points: Annotated[int, Limit(400, 10_000_000)] = 400
    """Points that a part must have."""
    min_part_width_px: Annotated[float, Limit(10.0, 10_000.0)] = 10.0
    """Camera pixels that a part must be wide."""
    max_unseen_share: Annotated[float, Limit(0.0, 0.35)] = 0.35
    """Share of a part's outline in which nothing was seen."""
    min_tray_share: Annotated[float, Limit(0.05, 1.0)] = 0.05
    """Share of the points that must lie on the tray: it shows whether the calibration holds."""
    max_reprojection_px: Annotated[float, Limit(0.1, 2.0)] = 2.0
    """What camera and projector may disagree by, with codes of columns and rows."""


@dataclass(frozen=True)
class OutboxLimits:
    """Room for results that are not delivered yet, and how long delivered ones are kept."""

    max_mb: Annotated[int, Limit(1, 1_000_000)] = 1024
    """Quota of the outbox file in MiB."""
    min_free_mb: Annotated[int, Limit(0, 1_000_000)] = 512
    """The file does not grow while its disk has less free (or less than a 16th of the disk)."""
    keep_days: NotNegative = 7.0
    """Delivered results can be sent again for so long, as far as the quota allows."""
    when_full: Literal["refuse", "overwrite"] = "refuse"
    """refuse: the line stops, nothing is lost. overwrite: the oldest undelivered result goes."""


@dataclass(frozen=True)
class EvidenceConfig:
    """Where and how long the evidence of parts is kept (docs/EVIDENCE.md)."""

    folder: Path
    """On a local disk, of one station alone."""
    quota_gb: Annotated[float, Limit(0.001, 1_000_000.0)] = 50.0
    """Evidence takes at most so much, in 10^9 bytes."""
    min_free_gb: Annotated[float, Limit(0.0, 1_000_000.0)] = 2.0
    """So much of the disk stays free (or a 16th of the disk, if that is less)."""
    keep_days: NotNegative = 0.0
    """Older evidence goes though there is room; 0: it stays as long as there is room."""
    pass_share: Probability = 0.02
    """Share of PASS parts, drawn at random, that is kept longer than the others, for audits."""
    stacks: Literal["never", "fail", "always"] = "never"
    """Keep the pattern images too: of no part, of those that are not PASS, of all."""


@dataclass(frozen=True)
class StationConfig:
    """station.yaml. The station's id and its ISA-95 place are levels of `mqtt`."""

    line: LineSpec
    """In the file: path of the line file."""
    bundle: Path
    """Folder of the model bundle, or a bundle store, whose active bundle is opened."""
    scanner: SimScanner | ReplayScanner | HeadScanner | DepthScanner
    outbox: Path
    """SQLite file of results not yet delivered; on a local disk."""
    evidence: EvidenceConfig
    """What is kept of each part; a path alone is its folder."""
    outbox_limits: OutboxLimits = OutboxLimits()
    """Room for the outbox."""
    mqtt: MqttConfig = field(default_factory=MqttConfig)
    broker: Literal["external", "embedded", "none"] = "external"
    """embedded: the station starts a demo broker on 127.0.0.1. none: results stay in the outbox."""
    commands: CommandConfig = field(default_factory=CommandConfig)
    """Who may command the station through the broker."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Metrics and probes over HTTP."""
    hmi: HmiConfig = field(default_factory=HmiConfig)
    """The operator's page; its own process, `forge-station hmi`."""
    sparkplug: SparkplugConfig | None = None
    """Mirror the results for Sparkplug B hosts; None: no mirror."""
    opcua: OpcUaConfig | None = None
    """Serve results and jobs over OPC UA; None: no server."""
    trigger: TriggerSettings = field(default_factory=lambda: SoftwareSource("software"))
    """What tells `forge-station run` that a part is there."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """Operating points that replace those of the bundle, by name."""
    runtime: Runtime = Runtime()
    fusion: Fusion = field(default_factory=Fusion)
    """How the head poses of a scan are put together."""
    gates: Gates = field(default_factory=Gates)
    """What a scan must reach to be judged at all."""
    trusted_keys: tuple[PublicKey, ...] = ()
    """Whose certificates count: PEM files or base64. None: the station only advises."""
    changed_since_certificate: tuple[Change, ...] = ()
    """What was changed since the bundle was certified; voids a certificate that names it."""
    drift: DriftConfig | None = None
    """Watch readings, scores and scans for drift; None: nobody does."""
    release: ReleaseConfig = field(default_factory=ReleaseConfig)
    """Whose bundles the station takes, and how a new one must prove itself."""
    product_bundles: Mapping[str, Path] = field(default_factory=dict)
    """Part number -> bundle folder or store, for products that `bundle` does not judge."""

    def __post_init__(self) -> None:
        faults = []
        if self.line.line != self.mqtt.line:
            allowed = f"{self.line.line}, as the line file says"
            faults.append(Fault("mqtt.line", self.mqtt.line, allowed))
        if self.broker == "embedded" and self.mqtt.host not in ("127.0.0.1", "localhost"):
            allowed = "127.0.0.1 with the embedded broker"
            faults.append(Fault("mqtt.host", self.mqtt.host, allowed))
        known = [product.part_number for product in self.line.products]
        for name in self.product_bundles:
            if name not in known:
                faults.append(Fault(f"product_bundles.{name}", name, ", ".join(known)))
        if faults:
            raise ContractError("the station file is not valid", faults=faults)

    @property
    def station(self) -> str:
        """The station's id."""
        return self.mqtt.station

    @property
    def simulated(self) -> bool:
        """Whether the parts are not real: no MES must take them for such."""
        heads = self.scanner.heads if isinstance(self.scanner, HeadScanner) else ()
        return isinstance(self.scanner, SimScanner) or any(h.camera.driver == "sim" for h in heads)

    @property
    def trust(self) -> Trust:
        """Whose bundles it takes."""
        own = self.release
        return release_trust(own.keys, self.trusted_keys, own.threshold, own.unsigned)


def load_station(path: Path | str) -> StationConfig:
    """Read a station file and the line file it names. Raises ConfigError with every problem."""
    file = Path(path)
    data = read_yaml(file)
    converters = {
        Path: lambda value: _path(value, file.parent),
        LineSpec: lambda value: _line(value, file.parent),
        PublicKey: lambda value: _key(value, file.parent),
        EvidenceConfig: lambda value: _evidence(value, file.parent),
    }
    try:
        return record.read(StationConfig, data, converters=converters)
    except ContractError as error:
        raise ConfigError("wrong station file", which=file, faults=error.faults) from error


def load_line(path: Path | str) -> LineSpec:
    """Read a line file. Raises ConfigError with every problem."""
    file = Path(path)
    try:
        return parse_line(read_yaml(file), "")
    except ConfigError:
        raise
    except ContractError as error:
        raise ConfigError("wrong line file", which=file, faults=error.faults) from error


def read_yaml(path: Path) -> object:
    """Plain data of a YAML file; a key given twice is an error. Raises ConfigError."""
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise ConfigError(
                "file too large", which=path, expected=f"{_MAX_BYTES} bytes", got=size
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("cannot read file", which=path, got=error.strerror) from error
    except UnicodeDecodeError as error:
        raise ConfigError("file is not UTF-8 text", which=path, got=str(error)) from error
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a 31 February
        raise ConfigError("not valid YAML", which=path, got=_one_line(error)) from error


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} given twice", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return problem if mark is None else f"{problem}, line {mark.line + 1}, column {mark.column + 1}"


def _path(value: object, folder: Path) -> Path:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a path")
    return (folder / Path(value).expanduser()).resolve()


def _evidence(value: object, folder: Path) -> EvidenceConfig:
    """A path alone, or the table."""
    if not isinstance(value, Mapping):
        return EvidenceConfig(_path(value, folder))
    converters = {Path: lambda item: _path(item, folder)}
    return record.read(EvidenceConfig, value, "evidence", converters)


def _key(value: object, folder: Path) -> PublicKey:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a PEM file of an Ed25519 public key, or its 32 bytes as base64")
    try:
        return public_key(value, folder)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _line(value: object, folder: Path) -> LineSpec:
    file = _path(value, folder)
    try:
        return load_line(file)
    except ConfigError as error:
        listed = [
            Fault(f"{file.name}: {item.path}", item.got, item.allowed) for item in error.faults
        ]
        if not listed:
            raise
        raise ConfigError("wrong line file", which=file, faults=listed) from error
