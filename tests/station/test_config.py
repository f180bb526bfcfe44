"""Station and line files: the demo's load, and every wrong one ends in one clear message."""

from __future__ import annotations

import base64
import dataclasses
import typing
from pathlib import Path

import pytest
import yaml

from forge_station import config
from forge_station.bundles.settings import ReleaseConfig
from forge_station.capture.camera import CameraSettings
from forge_station.capture.projector import ProjectorSettings
from forge_station.capture.settings import DepthHeadSettings, HeadSettings
from forge_station.checks import Thresholds
from forge_station.contract.spec import LineSpec, Product, Rules
from forge_station.errors import ConfigError, ContractError, StationError
from forge_station.hmi.review.settings import ReviewSettings
from forge_station.mes.command import CommandConfig, CommandKey
from forge_station.mes.settings import MonitorConfig, OpcUaConfig, SparkplugConfig
from forge_station.mes.topics import FlatTopic, MqttConfig
from forge_station.triggers import settings as trigger

LINE = """
line: l1
products:
  - {part_number: NUTS, kind: batch, checks: [workpiece], parts: {hex_nut M8: 4}}
"""


@pytest.fixture
def station(tmp_path):
    """Write a station file (changes: key -> value, None drops it) beside a good line file."""

    def write(**changes: object) -> Path:
        data: dict[str, object] = {
            "line": "line.yaml",
            "bundle": "bundle",
            "scanner": {"driver": "sim"},
            "outbox": "out/outbox.sqlite",
            "evidence": "/var/evidence",
            "mqtt": {"line": "l1"},
        }
        data.update(changes)
        file = tmp_path / "station.yaml"
        file.write_text(yaml.safe_dump({k: v for k, v in data.items() if v is not None}))
        if not (tmp_path / "line.yaml").exists():
            (tmp_path / "line.yaml").write_text(LINE)
        return file

    return write


def problems(file: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.load_station(file)
    assert str(file) in str(caught.value), "the message names the file"
    return [str(fault) for fault in caught.value.faults]


def test_paths_resolve_against_the_file_not_the_working_directory(station, tmp_path, monkeypatch):
    file = station()
    monkeypatch.chdir("/")
    loaded = config.load_station(file)
    assert loaded.bundle == tmp_path / "bundle"
    assert loaded.outbox == tmp_path / "out/outbox.sqlite"
    assert loaded.evidence == config.EvidenceConfig(Path("/var/evidence"))
    assert loaded.line.product("NUTS").pieces == 4


def test_what_is_left_out_has_its_default(station):
    loaded = config.load_station(station())
    assert loaded.scanner == config.SimScanner("sim")
    assert loaded.runtime == config.Runtime() and loaded.broker == "external"
    assert loaded.thresholds == {} and loaded.station == "station"
    assert loaded.trigger == trigger.SoftwareSource("software", queue=0)


def test_evidence_is_a_folder_or_a_table_with_one(station, tmp_path):
    table = {"folder": "parts", "quota_gb": 4, "stacks": "fail"}
    loaded = config.load_station(station(evidence=table)).evidence
    assert loaded == config.EvidenceConfig(tmp_path / "parts", quota_gb=4.0, stacks="fail")
    wrong = {"folder": 5, "quota_gb": 0, "stacks": True, "quota": 4}
    assert [text.split(";")[0] for text in problems(station(evidence=wrong))] == [
        "evidence.quota: unknown key",
        "evidence.folder: 5",
        "evidence.quota_gb: 0",
        "evidence.stacks: True",
    ]
    assert problems(station(evidence={"quota_gb": 4}))[0].startswith("evidence.folder: missing")


def test_the_driver_picks_the_scanners_keys(station, tmp_path):
    loaded = config.load_station(station(scanner={"driver": "replay", "folder": "scans"}))
    assert loaded.scanner == config.ReplayScanner("replay", tmp_path / "scans", "once")
    assert problems(station(scanner={"driver": "sim", "folder": "scans"}))[0].startswith(
        "scanner.folder: unknown key"
    )
    assert problems(station(scanner={"driver": "laser"})) == [
        "scanner.driver: 'laser'; allowed: sim, replay, head, depth"
    ]
    assert problems(station(scanner={"seed": 1})) == [
        "scanner.driver: missing; allowed: sim, replay, head, depth"
    ]


def test_heads_with_camera_projector_and_calibration(station, tmp_path):
    head = {
        "name": "front",
        "camera": {
            "driver": "aravis",
            "address": "192.168.7.20",
            "options": {"GevSCPSPacketSize": 9000},
        },
        "projector": {"driver": "window", "settle_frames": 3},
        "calibration": "front.yaml",
        "exposures_us": [20000, 7000],
    }
    loaded = config.load_station(station(scanner={"driver": "head", "heads": [head]})).scanner
    assert loaded == config.HeadScanner(
        "head",
        (
            HeadSettings(
                "front",
                CameraSettings("aravis", "192.168.7.20", options={"GevSCPSPacketSize": 9000}),
                ProjectorSettings("window", settle_frames=3),
                tmp_path / "front.yaml",
                (20000.0, 7000.0),
            ),
        ),
    )
    wrong = {
        "heads": [
            head | {"exposures_us": [7000, 20000]},
            head | {"camera": {"driver": "aravis", "fps": 0, "adress": "x"}},
        ]
    }
    found = problems(station(scanner={"driver": "head", **wrong}))
    assert [text.split(":")[0] for text in found] == [
        "scanner.heads[0].exposures_us",
        "scanner.heads[1].camera.adress",
        "scanner.heads[1].camera.fps",
    ]
    for heads in ([], [head, head]):
        assert problems(station(scanner={"driver": "head", "heads": heads}))[0].startswith(
            "scanner.heads: "
        )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"colour": 1}, "colour: unknown key"),
        ({"evidences": "x"}, "did you mean evidence?"),
        ({"bundle": None}, "bundle: missing"),
        ({"bundle": 5}, "bundle: 5; allowed: a path"),
        ({"bundle": ""}, "bundle: ''; allowed: a path"),
        ({"scanner": {"driver": "sim", "seed": -1}}, "scanner.seed: -1; allowed: at least 0"),
        (
            {"scanner": {"driver": "sim", "wrong_share": 2}},
            "scanner.wrong_share: 2; allowed: 0.0 to 1.0",
        ),
        ({"scanner": {"driver": "sim", "exposures": [1, 0]}}, "scanner.exposures[1]: 0"),
        ({"scanner": {"driver": "sim", "exposures": []}}, "exposures: none"),
        ({"scanner": {"driver": "sim", "image_size": [640]}}, "scanner.image_size: 1 items"),
        ({"scanner": {"driver": "replay"}}, "scanner.folder: missing"),
        ({"mqtt": {"line": "l1", "port": 0}}, "mqtt.port: 0; allowed: 1 to 65535"),
        ({"mqtt": {"line": "l1", "password": "secret"}}, "mqtt.password: unknown key"),
        ({"mqtt": {"line": "l1", "site": "a/b"}}, "mqtt.site: 'a/b'"),
        ({"mqtt": {"line": "l2"}}, "mqtt.line: l2; allowed: l1, as the line file says"),
        ({"mqtt": {"line": "l1", "host": "mes.example"}}, "mqtt.tls"),
        ({"broker": "mosquitto"}, "broker: 'mosquitto'; allowed: external, embedded, none"),
        ({"thresholds": {"surface": "high"}}, "thresholds.surface: 'high'; allowed: a number"),
        ({"trigger": {"source": "bell"}}, "trigger.source: 'bell'; allowed: software, stdin"),
        ({"trigger": {"source": "timer"}}, "trigger.period_s: missing"),
        (
            {"trigger": {"source": "plc", "host": "192.0.2.7"}},
            "trigger.clients: none, with host 192.0.2.7",
        ),
        (
            {"trigger": {"source": "plc", "clients": ["the-plc"]}},
            "trigger.clients[0]: 'the-plc'; allowed: an IP address",
        ),
        ({"runtime": {"threads": 0}}, "runtime.threads: 0; allowed: 1 to 256"),
        ({"line": "absent.yaml"}, "No such file"),
    ],
)
def test_a_wrong_key_is_named_with_what_is_allowed(station, changes, problem):
    file = station(**changes)
    with pytest.raises(ConfigError) as caught:
        config.load_station(file)
    assert problem in str(caught.value)


def test_an_embedded_broker_listens_on_this_machine_only(station):
    mqtt = {"line": "l1", "host": "10.0.0.5", "insecure": True}
    assert problems(station(broker="embedded", mqtt=mqtt)) == [
        "mqtt.host: 10.0.0.5; allowed: 127.0.0.1 with the embedded broker"
    ]


def test_problems_of_both_files_are_in_one_message(station, tmp_path):
    (tmp_path / "line.yaml").write_text(
        LINE.replace("hex_nut M8: 4", "hex_nut M7: 4") + "extra: 1\n"
    )
    found = problems(station(bundle=5, colour=1))
    assert [item.split(": ")[0] for item in found] == ["colour", "line.yaml", "line.yaml", "bundle"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a table with the keys"),
        ("- 1\n", "a table with the keys"),
        ("line: [", "not valid YAML"),
        ("line: a\nline: b\n", "key 'line' given twice, line 2"),
        ("a: {b: 1, b: 2}\n", "key 'b' given twice"),
        ("line: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("a: &x [1]\nb: *y\n", "not valid YAML"),
        ("\x00", "not valid YAML"),
        ("a: 2026-02-31\n", "not valid YAML"),
        ("? [a]\n: 1\n", "not valid YAML"),
        ("a: " + "[" * 3000, "not valid YAML"),
        ("line: " + "9" * 5000 + "\n", "not valid YAML"),
        ("line: {a: 1}\n", "line: {'a': 1}; allowed: a path"),
    ],
)
def test_a_file_that_is_not_plain_yaml_is_refused(tmp_path, text, message):
    file = tmp_path / "station.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load_station(file)
    assert message in str(caught.value) and str(file) in str(caught.value)


def test_a_file_of_other_bytes_a_large_one_and_a_folder_are_refused(tmp_path):
    file = tmp_path / "station.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        config.load_station(file)
    file.write_bytes(b"#" * 1_000_001)
    with pytest.raises(ConfigError, match="too large"):
        config.load_station(file)
    with pytest.raises(ConfigError, match="cannot read file"):
        config.load_station(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        config.load_station(tmp_path / "none.yaml")


def test_nested_aliases_do_not_blow_up_the_message(tmp_path):
    levels = ["l0: &l0 [x, x]"]
    levels += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 30)]
    file = tmp_path / "station.yaml"
    file.write_text("\n".join([*levels, "line: *l29"]))
    with pytest.raises(ConfigError) as caught:
        config.load_station(file)
    assert len(str(caught.value)) < 20_000


def test_yaml_merge_keys_are_no_duplicates(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("base: &b {x: 1}\nother: {<<: *b, x: 2}\n")
    assert config.read_yaml(file) == {"base": {"x": 1}, "other": {"x": 2}}


def test_a_config_error_is_a_contract_error_of_the_station(station):
    with pytest.raises(StationError):
        config.load_station(station(colour=1))
    assert issubclass(ConfigError, ContractError)


class TestDemo:
    def test_its_files_load(self, repository):
        loaded = config.load_station(repository / "station_config/demo/station.yaml")
        assert loaded.broker == "embedded" and isinstance(loaded.scanner, config.SimScanner)
        assert loaded.bundle == repository / "station_config/demo/bundle"
        assert [len(key.raw) for key in loaded.trusted_keys] == [32]
        assert "out" in loaded.outbox.relative_to(repository).parts

    def test_its_line_has_every_kind_and_every_check(self, repository):
        line = config.load_line(repository / "station_config/demo/line.yaml")
        assert {product.kind for product in line.products} == {"batch", "assembly", "single"}
        checks = {check for product in line.products for check in product.checks}
        assert checks == {"workpiece", "surface", "assembly"}


def sections() -> list[type]:
    return [
        config.StationConfig,
        config.EvidenceConfig,
        config.SimScanner,
        config.ReplayScanner,
        config.HeadScanner,
        HeadSettings,
        config.DepthScanner,
        DepthHeadSettings,
        CameraSettings,
        ProjectorSettings,
        config.Runtime,
        config.Fusion,
        config.Gates,
        ReleaseConfig,
        trigger.SoftwareSource,
        trigger.StdinSource,
        trigger.TimerSource,
        trigger.CameraSource,
        trigger.MqttSource,
        trigger.PlcSource,
        MqttConfig,
        FlatTopic,
        MonitorConfig,
        SparkplugConfig,
        OpcUaConfig,
        ReviewSettings,
        CommandConfig,
        CommandKey,
        LineSpec,
        Product,
        Rules,
    ]


@pytest.mark.parametrize("section", [*sections(), Thresholds], ids=lambda cls: cls.__name__)
def test_the_reference_has_a_row_for_every_key_with_its_default(repository, section):
    text = (repository / "station_config/README.md").read_text(encoding="utf-8")
    begin = text.index(f"<!-- {section.__name__} -->")
    table = text[begin : text.find("\n\n", text.index("|", begin))]
    rows = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            rows[cells[0].strip("`")] = cells
    hints = typing.get_type_hints(section)
    assert list(rows) == list(hints)
    for field in dataclasses.fields(section):
        default = rows[field.name][2]
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            assert default == "required", field.name
        elif isinstance(field.default, (bool, int, float, str)):
            shown = (
                str(field.default).lower()
                if isinstance(field.default, bool)
                else str(field.default)
            )
            assert default == (f"`{shown}`" if shown else "empty"), field.name
        else:
            assert default != "required", field.name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trusted_keys": ["none.pem"]}, "public key cannot be read"),
        ({"trusted_keys": ["line.yaml"]}, "not a public key"),
        ({"trusted_keys": [7]}, "a PEM file of an Ed25519 public key"),
        ({"trusted_keys": "AAAA"}, "a list"),
        ({"changed_since_certificate": ["bundle"]}, "camera, light, recipe, drift"),
    ],
)
def test_a_wrong_key_or_change_is_named(station, changes, message):
    with pytest.raises(ConfigError) as caught:
        config.load_station(station(**changes))
    assert message in str(caught.value)


def test_trusted_keys_are_read_from_base64_and_beside_the_file(station, repository):
    raw = bytes(range(32))
    text = base64.b64encode(raw).decode()
    pem = repository / "station_config/demo/certificate_key.pem"
    found = config.load_station(station(trusted_keys=[text, str(pem)])).trusted_keys
    assert found[0].raw == raw and len(found[1].raw) == 32
