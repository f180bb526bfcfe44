"""The station's TLS certificate: whose it is, how long it holds, and when it was renewed.

It knows no broker. Every new connection reads the files anew (`link`); the watch only says when a
new connection is worth making.
"""

from __future__ import annotations

import logging
import stat
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from cryptography import x509
from cryptography.x509.oid import NameOID

from forge_station.errors import LinkError
from forge_station.mes.topics import MqttConfig

log = logging.getLogger(__name__)

LOOK_S = 5.0
_Stamp = tuple[tuple[str, int, int, int], ...]


def require(config: MqttConfig) -> None:
    """Raise LinkError unless the certificate is this station's, holds now, and its key is kept.

    Broker rules go by the name in the certificate (CN): with another station's, this one would
    speak in its name, or be refused without a word.
    """
    if config.tls_cert is None or config.tls_key is None:
        return
    certificate = read(config.tls_cert)
    name = common_name(certificate)
    if name != config.station:
        raise LinkError(
            "the TLS certificate is another station's",
            which=config.tls_cert,
            expected=f"CN={config.station}, as mqtt.station says",
            got=f"CN={name}",
        )
    days = days_until(certificate)
    if days <= 0:
        raise LinkError(
            "the TLS certificate has ended",
            which=config.tls_cert,
            got=f"{-days:.1f} days ago",
            action="renew it; the station takes the new one as soon as it is in place",
        )
    try:
        mode = stat.S_IMODE(config.tls_key.stat().st_mode)
    except OSError as error:
        raise LinkError(
            "the TLS key cannot be read", which=config.tls_key, got=error.strerror
        ) from error
    if mode & 0o007:
        raise LinkError(
            "the TLS key can be read by everybody on this machine",
            which=config.tls_key,
            expected="mode 600 or 640",
            got=f"mode {mode:o}",
            action=f"run chmod 600 {config.tls_key}",
        )


def read(path: Path) -> x509.Certificate:
    """The first certificate of a PEM file. Raises LinkError."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LinkError(
            "the TLS certificate cannot be read", which=path, expected="PEM", got=error
        ) from error


def common_name(certificate: x509.Certificate) -> str:
    """The CN of the subject; empty when it has none, or several."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if len(names) == 1 else ""


def days_until(certificate: x509.Certificate, now: datetime | None = None) -> float:
    """Days until it ends, negative after that."""
    left = certificate.not_valid_after_utc - (now or datetime.now(timezone.utc))
    return left.total_seconds() / 86400.0


class Watch:
    """A context manager: calls `renewed` when the files of the connection were replaced.

    Only once they fit together: between the new certificate and its key nothing is called, and the
    old connection lives on.
    """

    def __init__(
        self, config: MqttConfig, renewed: Callable[[str], None], look_s: float = LOOK_S
    ) -> None:
        named = (config.tls_ca, config.tls_cert, config.tls_key, config.password_file)
        self._files = tuple(item for item in named if item is not None)
        self._config = config
        self._renewed = renewed
        self._look_s = look_s
        self._seen = self._stamp()
        self._complaint = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if self._files:
            self._thread = threading.Thread(target=self._run, name="credentials", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> bool:
        """Whether they were replaced since the last call, and fit; then `renewed` is told."""
        now = self._stamp()
        if now == self._seen:
            return False
        try:
            _usable(self._config)
        except LinkError as error:
            if str(error) != self._complaint:
                log.warning("new credentials cannot be used yet: %s", error)
            self._complaint = str(error)
            return False
        self._seen, self._complaint = now, ""
        log.info("credentials were replaced: connecting with the new ones")
        self._renewed("the credentials were replaced")
        return True

    def _run(self) -> None:
        while not self._stop.wait(self._look_s):
            self.look()

    def _stamp(self) -> _Stamp:
        found = []
        for path in self._files:
            try:
                status = path.stat()  # follows links: secrets are often replaced by a new link
            except OSError:
                continue
            found.append((str(path), status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)


def _usable(config: MqttConfig) -> None:
    from forge_station.mes.link import password_of, tls_context

    require(config)
    password_of(config)
    if config.tls:
        tls_context(config)
