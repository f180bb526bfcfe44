"""An embedded MQTT broker for the demo: iotcore (rumqttd) in a child process, on this machine only.

It knows nothing of the station. Not for production: no authentication, everything in memory, and
what it confirms with nobody subscribed is gone. A real site sets `mqtt.host` to its own broker.

`python -m forge_station.mes.broker FILE` is the child: it serves until its stdin closes, so it
never outlives the process that started it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from forge_station.errors import LinkError

log = logging.getLogger(__name__)

MAX_PAYLOAD_BYTES = 1 << 20
START_TIMEOUT_S = 60.0

_LISTENER = """
[{version}.1]
name = "{version}"
listen = "{host}:{port}"
next_connection_delay_ms = 1
[{version}.1.connections]
connection_timeout_ms = 5000
max_payload_size = {max_payload}
max_inflight_count = 100
dynamic_filters = true
"""
_ROUTER = """id = 0
[router]
id = 0
max_connections = 100
max_outgoing_packet_count = 200
max_segment_size = 1048576
max_segment_count = 10
"""


def toml(host: str, port: int, port_v4: int) -> str:
    """The broker's configuration: MQTT 5 on `port`, MQTT 3.1.1 on `port_v4`, 1 MB messages."""
    listeners = [
        _LISTENER.format(version=version, host=host, port=number, max_payload=MAX_PAYLOAD_BYTES)
        for version, number in (("v5", port), ("v4", port_v4))
    ]
    return _ROUTER + "".join(listeners)


class EmbeddedBroker:
    """`with EmbeddedBroker() as broker:` listens on `broker.port` (MQTT 5) until the block ends.

    Port 0 takes a free one. Raises LinkError when iotcore is not installed, the host is not this
    machine, or the port is taken.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, port_v4: int = 0) -> None:
        if host not in ("127.0.0.1", "localhost"):
            raise LinkError(
                "the embedded broker has no access control and serves this machine only",
                expected="127.0.0.1",
                got=host,
                action="use a real broker for other machines",
            )
        self.host = "127.0.0.1"
        self.port = port or _free_port()
        self.port_v4 = port_v4 or _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> EmbeddedBroker:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the running broker."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Start and wait until it accepts connections; nothing happens when it runs already."""
        if self.pid is not None:
            return
        if find_spec("iotcore") is None:
            raise LinkError(
                "the embedded broker needs the package iotcore",
                action="install forge-station[demo], or set mqtt.host to a broker of yours",
            )
        for port in (self.port, self.port_v4):
            if _accepts(self.host, port):
                raise LinkError("the port of the embedded broker is taken", got=port)
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="forge-broker-")
        file = Path(self._folder.name) / "broker.toml"
        file.write_text(toml(self.host, self.port, self.port_v4), encoding="utf-8")
        source_root = str(Path(__file__).parents[2])
        paths = [source_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forge_station.mes.broker", str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the station, which then closes it
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (_accepts(self.host, self.port) and _accepts(self.host, self.port_v4)):
            if self._process.poll() is not None or time.monotonic() > deadline:
                code = self._process.poll()
                self.close()
                raise LinkError(
                    "the embedded broker did not start",
                    which=f"{self.host}:{self.port}",
                    expected=f"listening in {START_TIMEOUT_S:g} s",
                    got="nothing" if code is None else f"exit code {code}",
                    action="try again when the machine is less busy, or set `broker: external` "
                    "and mqtt.host, mqtt.port to a broker that runs",
                )
            time.sleep(0.02)
        log.info("embedded broker on %s:%d (MQTT 5) and :%d", self.host, self.port, self.port_v4)

    def close(self) -> None:
        """Stop it and free the ports. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _accepts(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=0.2):
            return True
    except OSError:
        return False


def _serve(config_path: str) -> None:
    """The child: run the broker in this process until stdin closes."""
    import iotcore  # only here: the station does not need it

    logging.basicConfig(level=logging.ERROR)
    # rumqttd reports every packet as an error span.
    logging.getLogger("rumqttd").setLevel(logging.CRITICAL)

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    iotcore.IotCoreBroker(config_path=config_path).run_forever()


if __name__ == "__main__":
    _serve(sys.argv[1])
