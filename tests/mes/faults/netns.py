"""Three network namespaces in a row, so that the one in the middle can swallow every packet.

station 10.77.1.1 - 10.77.1.2 router 10.77.2.2 - 10.77.2.1 broker. No cable is pulled and nobody is
told: packets go in and do not come out, as with a dead switch or a firewall that forgot.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

from tests.mes.faults.table import Skip
from tests.mes.rig import MOSQUITTO

BROKER = "10.77.2.1"
PORT = 1883


class BlackHole:
    """`with BlackHole(folder) as net:` a mosquitto at `net.host`; `net.swallow(True)` cuts it off.
    Its namespaces are called `net.station` and `net.broker`. Raises Skip without the rights."""

    def __init__(self, folder: Path) -> None:
        self.station, self.router, self.broker = (
            f"forge-{name}-{os.getpid()}" for name in ("s", "r", "b")
        )
        self.host, self.port = BROKER, PORT
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> BlackHole:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise Skip("network namespaces need root and the command ip")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self._remove()
            raise Skip(f"network namespaces cannot be made: {error}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._remove()

    def swallow(self, everything: bool) -> None:
        """Stop (or go on) forwarding in the middle."""
        value = "0" if everything else "1"
        command = f"echo {value} > /proc/sys/net/ipv4/ip_forward"
        _ip("netns", "exec", self.router, "sh", "-c", command)

    def _make(self) -> None:
        for name in (self.station, self.router, self.broker):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for end, net, host in ((self.station, 1, "s"), (self.broker, 2, "b")):
            outer, inner = f"fg{host}0", f"fg{host}1"
            _ip("link", "add", outer, "netns", end, "type", "veth", "peer", "name", inner,
                "netns", self.router)  # fmt: skip
            for name, link, number in ((end, outer, 1), (self.router, inner, 2)):
                _ip("-n", name, "addr", "add", f"10.77.{net}.{number}/24", "dev", link)
                _ip("-n", name, "link", "set", link, "up")
            _ip("-n", end, "route", "add", "default", "via", f"10.77.{net}.2")
        self.swallow(False)
        file = self._folder / "netns.conf"
        file.write_text(
            f"listener {PORT} {BROKER}\nallow_anonymous true\npersistence false\nlog_dest none\n"
            "user root\nmax_queued_messages 0\n"
        )
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", self.broker, str(MOSQUITTO), "-c", str(file)],
            stderr=subprocess.DEVNULL,
        )
        time.sleep(0.5)

    def _remove(self) -> None:
        for name in (self.station, self.router, self.broker):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
