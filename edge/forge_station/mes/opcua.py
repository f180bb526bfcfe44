"""An OPC UA server with the Machine Vision interface of OPC 40100-1. Needs the extra `opcua`.

The same verdicts as the MES gets, and one method that triggers: StartSingleJob. The server has an
event loop in a thread of its own; nothing here waits for a client. On this machine anonymous
clients may connect; from others only with a trusted certificate, signed and encrypted
(Basic256Sha256). What was modelled and what was not: docs/SPARKPLUG_OPCUA.md.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes

from forge_station.errors import ConfigError, LinkError, StationError
from forge_station.mes.settings import OpcUaConfig
from forge_station.mes.stamp import uuid7
from forge_station.mes.topics import is_loopback

try:
    from asyncua import Node, Server, ua
    from asyncua.common.utils import ServiceError
    from asyncua.crypto.permission_rules import User, UserRole
except ImportError as error:
    raise ImportError("the OPC UA server needs asyncua: install forge-station[opcua]") from error

from forge_station.mes import opcua_model

log = logging.getLogger(__name__)

KEPT_RESULTS = 100
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 10.0
URI = "urn:forge-station:{station}"
OK, FAILED = 0, 1
"""Output argument Error of the methods: 0 is OK."""

T = TypeVar("T")


class Start(Protocol):
    """Triggers one part: (part number, serial, told of its end).

    `ended` gets the id of the part's result, before `OpcUaServer.result` gets that result; None
    when the part was given up. Raises StationError when the station does not take it now.
    """

    def __call__(
        self, part_number: str, serial: str, ended: Callable[[str | None], None]
    ) -> None: ...


class _Job:
    def __init__(self, job: str, meas: str) -> None:
        self.id, self.meas = job, meas


class OpcUaServer:
    """A context manager: serves while the block runs. Any thread may call `state` and `result`.

    `products` are the part numbers that a job may ask for. `start` None: jobs are not taken here.
    Raises ConfigError when a certificate cannot be used, LinkError when the port cannot be had or
    the server does not come up in time: what may be better at the next start.
    """

    def __init__(
        self,
        config: OpcUaConfig,
        station: str,
        products: Sequence[str] = (),
        start: Start | None = None,
    ) -> None:
        self._config = config
        self._station = station
        self._products = tuple(products)
        self._start = start
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self._server: Server
        self._model: opcua_model.Model
        self._state: tuple[str, str | None] = ("PREOPERATIONAL", None)
        self._jobs: set[_Job] = set()
        self._ended: dict[str, _Job] = {}
        """Result id -> the job it is for: two parts may have the same serial."""
        self._results: OrderedDict[str, Any] = OrderedDict()

    def __enter__(self) -> OpcUaServer:
        try:  # before the nodeset is loaded, which takes seconds
            socket.create_server((self._config.host, self._config.port)).close()
        except OSError as error:
            raise self._cannot_listen(error) from error
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="opcua", daemon=True)
        self._thread.start()
        begun = self._call(self._begin())
        try:
            begun.result(START_TIMEOUT_S)
        except BaseException as error:
            begun.cancel()
            self._end_loop()
            if isinstance(error, FutureTimeout):
                raise self._cannot_listen(f"nothing in {START_TIMEOUT_S:g} s") from error
            if isinstance(error, OSError) and error.filename is None:
                raise self._cannot_listen(error) from error
            if isinstance(error, (OSError, ua.UaError, ValueError)):
                raise self._cannot_start(error) from error
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._call(self._server.stop()).result(END_TIMEOUT_S)
        except FutureTimeout:
            log.error("opcua: the server does not stop in %g s", END_TIMEOUT_S)
        self._end_loop()

    def state(self, state: str, mode: str | None = None) -> None:
        """The machine state of the station, as in its `state` message."""
        self._call(self._tell_state(state, mode))

    def result(self, verdict: Mapping[str, Any]) -> None:
        """Publish one result (`Verdict.to_dict()`), whoever has triggered it."""
        self._call(self._publish(verdict))

    def _cannot_listen(self, got: object) -> LinkError:
        return LinkError(
            "the OPC UA server does not come up",
            which=f"{self._config.host}:{self._config.port}",
            expected=f"a free port of this machine, and to be up in {START_TIMEOUT_S:g} s",
            got=got,
            action="set opcua.port to a free port; a machine that is busy needs longer",
        )

    def _cannot_start(self, error: Exception) -> ConfigError:
        return ConfigError(
            "the OPC UA server cannot use its certificate or key",
            which=f"{self._config.certificate}, {self._config.key}",
            expected="a certificate (DER or PEM) and its private key (PEM)",
            got=repr(error),
        )

    # In the event loop

    async def _begin(self) -> None:
        config = self._config
        server = self._server = Server(user_manager=_Users(config))
        server.name = "forge-station"
        server.manufacturer_name = "forge-station"
        await server.init()
        await server.set_application_uri(URI.format(station=self._station))
        server.set_endpoint(f"opc.tcp://{config.host}:{config.port}/")
        policies, tokens = [], []
        if config.certificate is not None and config.key is not None:
            policies += [ua.SecurityPolicyType.Basic256Sha256_SignAndEncrypt]
            tokens += [ua.X509IdentityToken]
            await server.load_certificate(config.certificate)
            await server.load_private_key(config.key)
            server.set_certificate_validator(self._validate)
        if is_loopback(config.host):
            policies += [ua.SecurityPolicyType.NoSecurity]
            tokens += [ua.AnonymousIdentityToken]
        server.set_security_policy(policies)
        server.set_identity_tokens(tokens)
        uri = f"{URI.format(station=self._station)}:vision"
        self._model = model = await opcua_model.build(server, uri, self._station)
        await self._link(model.machine, Halt=_refuse, Reset=_refuse)
        await self._link(
            model.automatic,
            StartSingleJob=self._start_single_job,
            StartContinuous=_refuse, Abort=_refuse, Stop=_refuse,
        )  # fmt: skip
        await self._link(
            model.management,
            GetResultById=self._get_result,
            GetResultComponentsById=self._get_components,
            GetResultListFiltered=self._get_list,
        )
        await model.tell_state(*self._state)
        await server.start()

    async def _link(self, owner: Node, **methods: Callable[..., Any]) -> None:
        for name, method in methods.items():
            self._server.link_method(await self._model.child(owner, name), method)

    async def _tell_state(self, state: str, mode: str | None) -> None:
        busy = self._jobs and mode == "READY"
        told = (state, "SINGLE" if busy else mode)
        if told != self._state:
            self._state = told
            await self._model.tell_state(*told)

    async def _start_single_job(self, _: ua.NodeId, *given: ua.Variant) -> Any:
        """MeasId, PartId, RecipeId, ProductId, Parameters -> JobId, Error."""
        if self._state != ("OPERATIONAL", "READY"):
            return ua.StatusCode(ua.StatusCodes.BadInvalidState)
        if self._start is None:
            return ua.StatusCode(ua.StatusCodes.BadNotSupported)
        meas, part, product = (_id_of(given[place]) for place in (0, 1, 3))
        if not product and len(self._products) == 1:
            product = self._products[0]
        if product not in self._products:
            log.warning("opcua: no product %r; known: %s", product, ", ".join(self._products))
            return ua.StatusCode(ua.StatusCodes.BadInvalidArgument)
        job = _Job(uuid7(), meas)
        self._jobs.add(job)
        try:
            self._start(product, part or job.id, lambda result: self._end(job, result))
        except StationError as error:
            self._jobs.discard(job)
            log.warning("opcua: job refused: %s", error)
            return [
                ua.Variant(ua.JobIdDataType(Id=""), ua.VariantType.ExtensionObject),
                _error(FAILED),
            ]
        await self._tell_state("OPERATIONAL", "READY")
        await self._model.tell_job("JobStartedEventType", job.id)
        found = ua.JobIdDataType(Id=job.id)
        return [ua.Variant(found, ua.VariantType.ExtensionObject), _error(OK)]

    def _end(self, job: _Job, result_id: str | None) -> None:
        """The part of a job is done; None: it was given up, and there will be no result."""

        async def note() -> None:
            if result_id is not None:
                self._ended[result_id] = job
            else:
                await self._ready(job)

        self._call(note())

    async def _publish(self, verdict: Mapping[str, Any]) -> None:
        job = self._ended.pop(verdict["result_id"], None)
        found = opcua_model.result_of(verdict, job.id if job else "", job.meas if job else "")
        self._results[verdict["result_id"]] = found
        while len(self._results) > KEPT_RESULTS:
            self._results.popitem(last=False)
        text = f"{verdict['serial']}: {verdict['outcome']}"
        try:
            await self._model.tell_result(found, text)
        finally:
            if job is not None:
                await self._ready(job)

    async def _ready(self, job: _Job) -> None:
        self._jobs.discard(job)
        state, mode = self._state
        await self._tell_state(state, "READY" if mode == "SINGLE" else mode)
        await self._model.tell_job("ReadyEventType", job.id)

    async def _get_result(self, _: ua.NodeId, wanted: ua.Variant, __: ua.Variant) -> Any:
        """ResultId, Timeout -> ResultHandle, Result, Error. What is not there is not waited for."""
        found = self._results.get(_id_of(wanted))
        if found is None:
            return ua.StatusCode(ua.StatusCodes.BadNotFound)
        return [_handle(), ua.Variant(found, ua.VariantType.ExtensionObject), _error(OK)]

    async def _get_components(self, _: ua.NodeId, wanted: ua.Variant, __: ua.Variant) -> Any:
        """ResultId, Timeout -> the fields of a result one by one, Error."""
        found = self._results.get(_id_of(wanted))
        if found is None:
            return ua.StatusCode(ua.StatusCodes.BadNotFound)
        structure, boolean = ua.VariantType.ExtensionObject, ua.VariantType.Boolean
        empty_recipe = ua.RecipeIdExternalDataType(Id="")
        empty_configuration = ua.ConfigurationIdDataType(Id="")
        return [
            ua.Variant(False, boolean), _handle(), ua.Variant(found.IsPartial, boolean),
            ua.Variant(found.IsSimulated, boolean),
            ua.Variant(found.ResultState, ua.VariantType.Int32),
            ua.Variant(found.MeasId, structure),
            ua.Variant(found.PartId, structure), ua.Variant(empty_recipe, structure),
            ua.Variant(found.InternalRecipeId, structure), ua.Variant(found.ProductId, structure),
            ua.Variant(empty_configuration, structure),
            ua.Variant(found.InternalConfigurationId, structure),
            ua.Variant(found.JobId, structure),
            ua.Variant(found.CreationTime, ua.VariantType.DateTime),
            ua.Variant(found.ProcessingTimes, structure),
            ua.Variant(found.ResultContent, ua.VariantType.Variant), _error(OK),
        ]  # fmt: skip

    async def _get_list(self, _: ua.NodeId, *given: ua.Variant) -> Any:
        """Filters, MaxResults, StartIndex, Timeout -> IsComplete, ResultCount, ResultHandle,
        ResultList, Error. An empty filter admits everything; the newest come first."""
        state = given[0].Value or 0
        wanted = {
            "MeasId": _id_of(given[1]), "PartId": _id_of(given[2]),
            "InternalRecipeId": _id_of(given[4]), "ProductId": _id_of(given[7]),
            "JobId": _id_of(given[8]),
        }  # fmt: skip
        most, first = int(given[9].Value or 0), int(given[10].Value or 0)
        found = [
            item
            for item in reversed(self._results.values())
            if state in (0, item.ResultState)
            and all(not text or getattr(item, name).Id == text for name, text in wanted.items())
        ]
        page = found[first : first + most] if most else found[first:]
        return [
            ua.Variant(first + len(page) >= len(found), ua.VariantType.Boolean),
            ua.Variant(len(page), ua.VariantType.UInt32), _handle(),
            ua.Variant(page, ua.VariantType.ExtensionObject, is_array=True), _error(OK),
        ]  # fmt: skip

    async def _validate(self, certificate: x509.Certificate, _: Any) -> None:
        if not _trusted(certificate, self._config.trusted):
            log.warning("opcua: the certificate %s is not trusted", certificate.subject)
            raise ServiceError(ua.StatusCodes.BadCertificateUntrusted)

    # Between the threads

    def _call(self, work: Coroutine[Any, Any, T]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(_report)
        return future

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _end_loop(self) -> None:
        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        ended = asyncio.run_coroutine_threadsafe(cancel(), self._loop)
        ended.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        try:
            ended.result(END_TIMEOUT_S)
        except FutureTimeout:
            log.error("opcua: open connections do not end in %g s", END_TIMEOUT_S)
        self._thread.join(END_TIMEOUT_S)  # one that does not end, ends with the process


class _Users:
    """Who may open a session: on this machine everybody, else holders of a trusted certificate.
    Nobody may change the address space."""

    def __init__(self, config: OpcUaConfig) -> None:
        self._config = config

    def get_user(
        self, _: Any, username: str | None = None, password: str | None = None,
        certificate: Any = None,
    ) -> User | None:  # fmt: skip
        if is_loopback(self._config.host):
            return User(role=UserRole.User)
        if isinstance(certificate, bytes):
            certificate = x509.load_der_x509_certificate(certificate)
        trusted = certificate is not None and _trusted(certificate, self._config.trusted)
        return User(role=UserRole.User) if trusted else None


def _trusted(certificate: x509.Certificate, folder: Path | None) -> bool:
    """Whether this very certificate lies in the folder (.pem, .der, .crt) and is valid now. The
    folder is read each time: a certificate can be put in or taken out while the station runs."""
    now = datetime.now(timezone.utc)
    if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
        return False
    wanted = certificate.fingerprint(hashes.SHA256())
    for file in sorted(folder.iterdir()) if folder is not None and folder.is_dir() else ():
        try:
            content = file.read_bytes()
            pem = content.startswith(b"-----BEGIN")
            load = x509.load_pem_x509_certificate if pem else x509.load_der_x509_certificate
            if load(content).fingerprint(hashes.SHA256()) == wanted:
                return True
        except (OSError, ValueError) as error:
            log.warning("opcua: %s is no certificate: %s", file, error)
    return False


async def _refuse(_: ua.NodeId, *__: ua.Variant) -> Any:
    """A method that the specification demands and this station does not carry out."""
    return ua.StatusCode(ua.StatusCodes.BadNotSupported)


def _id_of(given: ua.Variant) -> str:
    """The Id of an identifier structure; empty when none was given."""
    return str(getattr(given.Value, "Id", None) or "")


def _error(code: int) -> ua.Variant:
    return ua.Variant(code, ua.VariantType.Int32)


def _handle() -> ua.Variant:
    """No result handle: nothing is held for a client, so there is nothing to release."""
    return ua.Variant(0, ua.VariantType.UInt32)


def _report(future: Any) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.error("opcua: %r", error)
