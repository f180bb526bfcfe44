"""The OPC UA server, as a client of the Machine Vision companion specification meets it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("asyncua", reason="the server needs the extra opcua")

from asyncua import Client, ua
from asyncua.crypto.security_policies import SecurityPolicyBasic256Sha256
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from forge_station.contract.error import ContractError
from forge_station.errors import ConfigError, LinkError, StationError
from forge_station.mes import opcua
from forge_station.mes.opcua import OpcUaServer
from forge_station.mes.opcua_model import CONTENT, MACHINE_VISION
from forge_station.mes.settings import OpcUaConfig
from tests.mes.rig import verdict, wait_for

EVENTS = ("ResultReadyEventType", "JobStartedEventType", "ReadyEventType")
BUSY = StationError("the trigger is refused", got="a part is in work")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Line:
    """A station whose parts are finished by the test."""

    def __init__(self) -> None:
        self.started: list[tuple[str, str, Callable[[str | None], None]]] = []
        self.refusal: StationError | None = None

    def start(self, part_number: str, serial: str, ended: Callable[[str | None], None]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.started.append((part_number, serial, ended))


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[OpcUaServer, Line, str]]:
    line, port = Line(), free_port()
    config = OpcUaConfig(port=port)
    with OpcUaServer(config, "s1", ("BOLT", "NUT"), line.start) as server:
        yield server, line, f"opc.tcp://127.0.0.1:{port}/"


class Host:
    """A client in a thread of its own: `do(coroutine)` from the test's thread."""

    def __init__(self, url: str, prepare: Callable[[Client], Any] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.events: list[Any] = []
        self.client = Client(url, timeout=10)
        try:
            if prepare is not None:
                self.do(prepare(self.client))
            self.do(self.client.connect())
        except BaseException:
            self._end()
            raise
        self.do(self.client.load_data_type_definitions())
        self.space = self.do(self.client.get_namespace_index(MACHINE_VISION))
        self.system = self.do(self.client.nodes.objects.get_child([f"{self.space + 1}:s1"]))

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def node(self, *path: str) -> Any:
        names = [name if ":" in name else f"{self.space}:{name}" for name in path]
        return self.do(self.system.get_child(names))

    def state(self) -> tuple[str, str]:
        """CurrentState of both machines; the inner one is not active outside of Operational."""
        outer = self.node("VisionStateMachine", "0:CurrentState")
        inner = self.node("VisionStateMachine", "AutomaticModeStateMachine", "0:CurrentState")
        found = self.do(inner.read_data_value(raise_on_bad_status=False))
        inactive = found.StatusCode.value == ua.StatusCodes.BadStateNotActive
        return self.do(outer.read_value()).Text, "-" if inactive else found.Value.Value.Text

    def subscribe(self) -> None:
        async def run() -> None:
            base = self.client.get_node(ua.ObjectIds.BaseEventType)
            types = [await base.get_child([f"{self.space}:{name}"]) for name in EVENTS]
            subscription = await self.client.create_subscription(20, self)
            await subscription.subscribe_events(self.system, types)

        self.do(run())

    def event_notification(self, event: Any) -> None:
        self.events.append(event)

    def heard(self) -> list[str]:
        async def run() -> list[str]:
            return [
                (await self.client.get_node(event.EventType).read_browse_name()).Name
                for event in self.events
            ]

        return list(self.do(run()))

    def call(self, path: tuple[str, ...], method: str, *arguments: Any) -> Any:
        owner = self.node(*path)
        return self.do(owner.call_method(self.node(*path, method), *arguments))

    def start(self, product: str = "BOLT", part: str = "p1", meas: str = "m1") -> Any:
        return self.call(
            ("VisionStateMachine", "AutomaticModeStateMachine"), "StartSingleJob",
            ua.MeasIdDataType(Id=meas), ua.PartIdDataType(Id=part),
            ua.RecipeIdExternalDataType(Id=""), ua.ProductIdDataType(Id=product),
            ua.Variant([], ua.VariantType.Variant, is_array=True),
        )  # fmt: skip

    def close(self) -> None:
        self.do(self.client.disconnect())
        self._end()

    def _end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def host(served: tuple[OpcUaServer, Line, str]) -> Iterator[Host]:
    server, line, url = served
    line.started.clear()
    line.refusal = None
    server.state("OPERATIONAL", "READY")
    found = Host(url)
    yield found
    found.close()


def done(
    server: OpcUaServer, serial: str, ended: Callable[[str], None] = str, **views: Any
) -> dict[str, Any]:
    found = {**verdict(**views).to_dict(), "serial": serial, "product": "BOLT"}
    ended(found["result_id"])
    server.result(found)
    return found


def test_a_client_drives_one_job(served: tuple[OpcUaServer, Line, str], host: Host) -> None:
    server, line, _ = served
    host.subscribe()
    assert host.state() == ("Operational", "Ready")
    job, error = host.start()
    assert error == 0 and job.Id
    assert [item[:2] for item in line.started] == [("BOLT", "p1")]
    assert host.state() == ("Operational", "SingleExecution")
    with pytest.raises(ua.UaStatusCodeError) as refused:
        host.start(part="p2")
    assert refused.value.code == ua.StatusCodes.BadInvalidState
    found = done(server, "p1", line.started[0][2], front=[(4, 5), (4, 6)])
    assert wait_for(lambda: len(host.events) == 3)
    assert host.heard() == ["JobStartedEventType", "ResultReadyEventType", "ReadyEventType"]
    started, ready, _ = host.events
    assert started.JobId.Id == ready.JobId.Id == job.Id and ready.MeasId.Id == "m1"
    assert ready.ResultId.Id == found["result_id"] and ready.ResultState == 1
    assert (ready.PartId.Id, ready.ProductId.Id) == ("p1", "BOLT")
    assert ready.IsSimulated and not ready.IsPartial
    assert ready.InternalRecipeId.Id == "nano-demo" and ready.InternalRecipeId.Version == "0.1.0"
    content = dict(zip(CONTENT, [item.Value for item in ready.ResultContent], strict=True))
    assert content == {
        "verdict": "FAIL", "reason": "SURFACE_DENT", "score": 3.0,
        "defectiveCells": 2, "text": "a dent on 2 cells",
    }  # fmt: skip
    times = ready.ProcessingTimes
    assert (times.EndTime - times.StartTime).total_seconds() == 1.0
    assert ready.CreationTime == times.EndTime and times.ProcessingDuration == 700.2
    assert host.state() == ("Operational", "Ready")


def test_a_result_is_of_its_job_by_id_not_by_serial(
    served: tuple[OpcUaServer, Line, str], host: Host
) -> None:
    """Another source may have asked for the same serial, and a verdict may cut a long one."""
    server, line, _ = served
    host.subscribe()
    job, _ = host.start(part="p" * 300)
    done(server, "p" * 300)
    assert wait_for(lambda: len(host.events) == 2)
    assert host.events[1].JobId.Id == "" and host.state() == ("Operational", "SingleExecution")
    done(server, "p" * 200, line.started[0][2])
    assert wait_for(lambda: len(host.events) == 4)
    assert host.events[2].JobId.Id == job.Id and host.state() == ("Operational", "Ready")


def test_results_can_be_read_and_fetched(served: tuple[OpcUaServer, Line, str], host: Host) -> None:
    server, *_ = served
    first, second = done(server, "a1"), done(server, "a2", front=[(0, 0)])
    latest = host.node("ResultManagement", "Results", f"{host.space + 1}:Latest")
    assert wait_for(
        lambda: (
            getattr(host.do(latest.read_value()), "ResultId", None) is not None
            and host.do(latest.read_value()).ResultId.Id == second["result_id"]
        )
    )
    for name in ("PartId", "ResultContent", "CreationTime", "IsPartial", "ResultState"):
        node = host.do(latest.get_child([f"{host.space}:{name}"]))
        assert host.do(node.read_value()) == getattr(host.do(latest.read_value()), name), name
    no_wait = ua.Variant(0, ua.VariantType.Int32)
    handle, found, error = host.call(
        ("ResultManagement",), "GetResultById", ua.ResultIdDataType(Id=first["result_id"]), no_wait
    )
    assert (handle, found.PartId.Id, error) == (0, "a1", 0)
    fields = host.call(
        ("ResultManagement",), "GetResultComponentsById",
        ua.ResultIdDataType(Id=first["result_id"]), no_wait,
    )  # fmt: skip
    assert len(fields) == 17 and fields[6].Id == "a1" and fields[-1] == 0
    with pytest.raises(ua.UaStatusCodeError) as missing:
        host.call(("ResultManagement",), "GetResultById", ua.ResultIdDataType(Id="x"), no_wait)
    assert missing.value.code == ua.StatusCodes.BadNotFound

    def listed(part: str, most: int, first: int) -> Any:
        counts = [ua.Variant(item, ua.VariantType.UInt32) for item in (most, first)]
        return host.call(
            ("ResultManagement",), "GetResultListFiltered", no_wait, ua.MeasIdDataType(Id=""),
            ua.PartIdDataType(Id=part), ua.RecipeIdExternalDataType(Id=""),
            ua.RecipeIdInternalDataType(Id=""), ua.ConfigurationIdDataType(Id=""),
            ua.ConfigurationIdDataType(Id=""), ua.ProductIdDataType(Id=""),
            ua.JobIdDataType(Id=""), *counts, no_wait,
        )  # fmt: skip

    complete, count, _, results, _ = listed("", 1, 0)
    assert (complete, count, results[0].PartId.Id) == (False, 1, "a2")
    complete, count, _, results, _ = listed("a1", 0, 0)
    assert (complete, count, results[0].ResultId.Id) == (True, 1, first["result_id"])


OTHER = """
import asyncio, sys
from asyncua import Client, ua

async def main(url):
    async with Client(url, timeout=20) as client:
        await client.load_data_type_definitions()
        space = await client.get_namespace_index("http://opcfoundation.org/UA/MachineVision")
        path = [f"{space + 1}:s1", f"{space}:ResultManagement", f"{space}:Results"]
        latest = await client.nodes.objects.get_child([*path, f"{space + 1}:Latest"])
        result = await latest.read_value()
        recipe = ua.RecipeIdExternalDataType(Id="r", Version="2")
        print(result.PartId.Id, result.InternalRecipeId.Version, recipe.Version)

asyncio.run(main(sys.argv[1]))
"""


def test_a_client_learns_the_types_from_the_server_alone(
    served: tuple[OpcUaServer, Line, str],
) -> None:
    """In a process of its own: here the server has registered its types for everybody."""
    server, _, url = served
    done(server, "b1")
    got = subprocess.run(
        [sys.executable, "-c", OTHER, url], capture_output=True, text=True, timeout=100, check=True
    )
    assert got.stdout.split() == ["b1", "0.1.0", "2"] and "Traceback" not in got.stderr


def test_jobs_that_are_not_taken(served: tuple[OpcUaServer, Line, str], host: Host) -> None:
    server, line, _ = served
    with pytest.raises(ua.UaStatusCodeError) as unknown:
        host.start(product="WASHER")
    assert unknown.value.code == ua.StatusCodes.BadInvalidArgument
    line.refusal = BUSY
    job, error = host.start()
    assert (job.Id, error) == ("", 1) and host.state() == ("Operational", "Ready")
    line.refusal = None
    host.start(part="lost")
    line.started[-1][2](None)
    assert wait_for(lambda: host.state() == ("Operational", "Ready")), "the part was given up"
    server.state("ERROR")
    assert wait_for(lambda: host.state() == ("Error", "-"))
    with pytest.raises(ua.UaStatusCodeError) as stopped:
        host.start()
    assert stopped.value.code == ua.StatusCodes.BadInvalidState


@pytest.mark.parametrize(
    ("path", "method", "arguments"),
    [
        (("VisionStateMachine",), "Halt", (0, "")),
        (("VisionStateMachine",), "Reset", (0, "")),
        (("VisionStateMachine", "AutomaticModeStateMachine"), "Abort", (0, "")),
        (("VisionStateMachine", "AutomaticModeStateMachine"), "Stop", (0, "")),
    ],
)
def test_what_the_station_does_not_do_is_refused_and_not_faked(
    host: Host, path: tuple[str, ...], method: str, arguments: tuple[Any, ...]
) -> None:
    number, text = arguments
    with pytest.raises(ua.UaStatusCodeError) as refused:
        host.call(path, method, ua.Variant(number, ua.VariantType.Int32), text)
    assert refused.value.code == ua.StatusCodes.BadNotSupported
    assert host.state() == ("Operational", "Ready")


def test_a_client_cannot_write(host: Host) -> None:
    node = host.node("VisionStateMachine", "0:CurrentState")
    with pytest.raises(ua.UaStatusCodeError):
        host.do(node.write_value(ua.LocalizedText("Halted")))
    with pytest.raises(ua.UaStatusCodeError):
        host.do(host.client.nodes.objects.add_object(ua.NodeId("x", 1), "1:x"))


# Security


def certificate(folder: Path, name: str, uri: str, days: float = 30) -> tuple[Path, Path]:
    key = rsa.generate_private_key(65537, 2048)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(timezone.utc)
    usage = dict.fromkeys(
        ("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"), False
    )
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=60))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=True, content_commitment=True, key_encipherment=True,
                data_encipherment=True, **usage,
            ),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    files = folder / f"{name}.der", folder / f"{name}-key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.DER))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


def encrypted(own: tuple[Path, Path], server: Path) -> Callable[[Client], Any]:
    async def prepare(client: Client) -> None:
        await client.set_security(
            SecurityPolicyBasic256Sha256, own[0], own[1], server_certificate=server
        )
        await client.load_client_certificate(own[0])
        await client.load_private_key(own[1])

    return prepare


def test_from_another_machine_only_encrypted_and_only_trusted_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server believes that its host is not this machine."""
    monkeypatch.setattr(opcua, "is_loopback", lambda _: False)
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    (trusted / "notes.txt").write_text("no certificate")
    server = certificate(tmp_path, "server", "urn:forge-station:s1")
    friend = certificate(tmp_path, "friend", "urn:freeopcua:client")
    stranger = certificate(tmp_path, "stranger", "urn:freeopcua:client")
    expired = certificate(tmp_path, "expired", "urn:freeopcua:client", days=-1)
    for file in (friend[0], expired[0]):
        (trusted / file.name).write_bytes(file.read_bytes())
    config = OpcUaConfig(port=free_port(), certificate=server[0], key=server[1], trusted=trusted)
    url = f"opc.tcp://127.0.0.1:{config.port}/"
    with OpcUaServer(config, "s1", ("BOLT",)):
        host = Host(url, encrypted(friend, server[0]))
        assert host.state() == ("Preoperational", "-")
        host.close()
        for other in (stranger, expired):
            with pytest.raises(ua.UaError):
                Host(url, encrypted(other, server[0]))
        with pytest.raises(ua.UaError):
            Host(url)
        (trusted / friend[0].name).unlink()
        with pytest.raises(ua.UaError):
            Host(url, encrypted(friend, server[0]))


def test_a_port_that_is_taken_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        before = threading.active_count()
        with (
            pytest.raises(LinkError, match=f"127.0.0.1:{port}"),
            OpcUaServer(OpcUaConfig(port=port), "s1"),
        ):
            pass
        assert wait_for(lambda: threading.active_count() <= before)


def test_a_machine_too_busy_to_bring_it_up_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def busy(_: OpcUaServer) -> None:
        time.sleep(0.5)  # as loading the nodeset does: the loop answers nobody

    monkeypatch.setattr(OpcUaServer, "_begin", busy)
    monkeypatch.setattr(opcua, "START_TIMEOUT_S", 0.05)
    monkeypatch.setattr(opcua, "END_TIMEOUT_S", 0.05)
    before = threading.active_count()
    with (
        pytest.raises(LinkError, match="does not come up"),
        OpcUaServer(OpcUaConfig(port=free_port()), "s1"),
    ):
        pass
    assert wait_for(lambda: threading.active_count() <= before)


def test_a_certificate_that_cannot_be_loaded_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "c.der").write_bytes(b"no certificate")
    (tmp_path / "k.pem").write_bytes(b"no key")
    config = OpcUaConfig(port=free_port(), certificate=tmp_path / "c.der", key=tmp_path / "k.pem")
    with pytest.raises(ConfigError, match="certificate or key"), OpcUaServer(config, "s1"):
        pass


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0"},
        {"host": "0.0.0.0", "certificate": Path("c"), "key": Path("k")},
        {"certificate": Path("c")},
        {"key": Path("k")},
        {"port": 0},
    ],
)
def test_settings_that_would_leave_it_open(settings: dict[str, Any]) -> None:
    with pytest.raises(ContractError):
        OpcUaConfig(**settings)
