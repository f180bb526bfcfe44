"""Checks of the machine alone: packages, providers, drivers, clock, network, disk, permissions.

Reads what Linux tells; the only thing ever written is a small file that is removed again.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

from forge_station import version
from forge_station.capture import camera, projector
from forge_station.doctor.lines import Level, Line, probe
from forge_station.mes import machine as kernel
from forge_station.vlm import engine

PROVIDER_LIMIT_S = 60.0
GIGE_BUFFER_BYTES = 2_500_000  # a 5 megapixel frame at 9000 byte packets: half a frame
JUMBO_MTU = 8000
FREE_WARN_BYTES, FREE_FAIL_BYTES = 5_000_000_000, 500_000_000
FSYNC_WARN_S, FSYNC_FAIL_S = 0.05, 1.0
_NETWORK_FILES = ("nfs", "cifs", "smb", "9p", "ceph", "glusterfs", "lustre", "afs", "fuse.sshfs")
_CV2 = ("opencv-python", "opencv-python-headless", "opencv-contrib-python",
        "opencv-contrib-python-headless")  # fmt: skip
_ORT = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")
_TIME_DAEMONS = {"chronyd": "chrony", "ntpd": "ntpd", "systemd-timesyn": "systemd-timesyncd",
                 "ptp4l": "PTP (ptp4l)", "phc2sys": "PTP (phc2sys)"}  # fmt: skip


def versions() -> Iterator[Line]:
    """What is installed, and packages that own the same files."""
    yield Line(
        "pass",
        "versions",
        f"forge-station {version()}, Python {platform.python_version()}, numpy {np.__version__}, "
        f"ONNX Runtime {engine.VERSION}, {platform.system()} {platform.release()} "
        f"{platform.machine()}",
    )
    for topic, names in (("opencv", _CV2), ("onnxruntime", _ORT)):
        found = [f"{name} {_version(name)}" for name in names if _version(name)]
        if len(found) == 1:
            yield Line("pass", topic, found[0])
        elif found:
            yield Line(
                "fail",
                topic,
                f"{' and '.join(found)} share their files",
                "Uninstall all of them, then install the one that is wanted.",
            )
        else:
            yield Line("warn", topic, "not installed as a package", "Which one runs is not known.")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def providers(wanted: str = engine.AUTO) -> Iterator[Line]:
    """Each provider that ONNX Runtime lists, proved by a matrix product that runs there."""
    import onnxruntime

    listed = [str(name) for name in onnxruntime.get_available_providers()]
    # In every wheel from the package index; it sends single operators to a service, runs nothing.
    listed = [name for name in listed if name != "AzureExecutionProvider"]
    if wanted not in (engine.AUTO, *listed):
        yield Line(
            "fail",
            "provider",
            f"runtime.provider {wanted} is not among {', '.join(listed)}",
            "Install the ONNX Runtime that has it.",
        )
    for name in listed:
        found = probe(["provider", name], PROVIDER_LIMIT_S)
        if found.get("ran") == name:
            yield Line("pass", "provider", f"{name} runs ({found['seconds']:.1f} s to start)")
        else:
            yield Line(
                "fail" if name == wanted else "warn",
                "provider",
                f"{name} is listed but does not run: {short(found.get('error', found))}",
                "Look whether the machine is overloaded, and try again."
                if name == "CPUExecutionProvider"
                else "Check the GPU's driver and libraries, or name another provider.",
            )


def drivers() -> Iterator[Line]:
    """Which drivers of cameras and projectors are installed."""
    for topic, found in (("cameras", camera.drivers()), ("projectors", projector.drivers())):
        if found:
            yield Line("pass", topic, f"drivers {', '.join(sorted(found))}")
        else:
            yield Line("warn", topic, "no driver is installed", "Install forge-station anew.")


def clock(proc: Path = Path("/proc"), dev: Path = Path("/dev")) -> Iterator[Line]:
    """Whether the clock follows a reference, and who sees to it."""
    daemons = sorted({_TIME_DAEMONS[name] for name in _processes(proc) & _TIME_DAEMONS.keys()})
    by = ", ".join(daemons) or "no time daemon seen (it may run outside this container)"
    state = kernel.clock()
    if state is None:
        yield Line("warn", "clock", f"the kernel does not tell its state; {by}",
                   "Check on the host: timedatectl, or chronyc tracking.")  # fmt: skip
    elif state.synced:
        yield Line("pass", "clock", f"synchronised, {abs(state.offset_s) * 1e3:.2f} ms off; {by}")
    else:
        yield Line("warn", "clock", f"not synchronised; {by}",
                   "Start chrony or systemd-timesyncd: times may be wrong.")  # fmt: skip
    hardware = sorted(path.name for path in dev.glob("ptp*"))
    if hardware:
        led = any(name.startswith("PTP") for name in daemons)
        said = "led by ptp4l or phc2sys" if led else "not used by ptp4l or phc2sys"
        yield Line("pass", "ptp", f"{', '.join(hardware)} there, {said}")


def _processes(proc: Path) -> set[str]:
    names = set()
    for path in proc.glob("[0-9]*/comm"):
        try:
            names.add(path.read_text().strip())
        except OSError:
            continue
    return names


def network(
    gige: bool = False, sys_net: Path = Path("/sys/class/net"), proc: Path = Path("/proc")
) -> Iterator[Line]:
    """Interfaces and packet sizes; receive buffers matter where a GigE camera is used."""
    bad: Level = "warn" if gige else "pass"
    up = []
    for folder in sorted(sys_net.iterdir()) if sys_net.is_dir() else []:
        state, mtu = _read(folder / "operstate"), int(_read(folder / "mtu") or 0)
        if folder.name != "lo" and state in ("up", "unknown"):
            speed = _read(folder / "speed")
            fast = f", {speed} Mbit/s" if speed and int(speed) > 0 else ""
            up.append(mtu)
            yield Line("pass", "network", f"{folder.name} {state}, packets of {mtu} bytes{fast}")
    if not up:
        yield Line(bad, "network", "no interface is up but loopback", "Plug in the cable.")
    elif gige and max(up) < JUMBO_MTU:
        yield Line("warn", "network", f"largest packets {max(up)} bytes, for a GigE camera",
                   "Set MTU 9000 on the camera's interface, and GevSCPSPacketSize.")  # fmt: skip
    most = int(_read(proc / "sys/net/core/rmem_max") or 0)
    if most == 0:
        yield Line(bad, "network", "receive buffer limit (net.core.rmem_max) is not told")
    elif most < GIGE_BUFFER_BYTES:
        advice = f"For a GigE camera: sysctl -w net.core.rmem_max={4 * GIGE_BUFFER_BYTES}."
        yield Line(bad, "network", f"receive buffers {most} bytes at most", advice if gige else "")
    else:
        yield Line("pass", "network", f"receive buffers up to {most} bytes")
    yield Line("pass", "network", f"host name {socket.gethostname()}")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def disk(
    folder: Path, topic: str, *, durable: bool = False, mounts: Path = Path("/proc/mounts")
) -> Iterator[Line]:
    """Free space, a write, how long until it is on the disk. durable: results are kept there."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    space = kernel.disk(place)
    if space is None:
        yield Line("fail", topic, f"{place}: the free space cannot be asked")
    else:
        level: Level = "pass"
        if space.free_bytes < FREE_WARN_BYTES:
            level = "fail" if space.free_bytes < FREE_FAIL_BYTES else "warn"
        advice = "" if level == "pass" else "Free some space, or move the folder."
        yield Line(level, topic, f"{place}: {space.free_bytes / 1e9:.1f} GB free", advice)
    kind = file_system(place, mounts)
    if kind.startswith(_NETWORK_FILES):
        yield Line("fail" if durable else "warn", topic, f"{place} lies on a network ({kind})",
                   "Use a local disk: SQLite's locks do not hold on network shares."
                   if durable else "It is slow, and away when the network is.")  # fmt: skip
    elif durable and kind in ("tmpfs", "ramfs"):
        yield Line("warn", topic, f"{place} lies in memory ({kind})",
                   "Use a disk: results are lost when the machine restarts.")  # fmt: skip
    try:
        slowest = _fsync_s(place)
    except OSError as error:
        yield Line("fail", topic, f"{place} cannot be written: {error.strerror}",
                   f"Give user {os.getuid()} the right to write there.")  # fmt: skip
        return
    text = f"written to disk in {slowest * 1e3:.1f} ms (median of 5)"
    if slowest > FSYNC_WARN_S:
        advice = "Each verdict waits for it: use a faster disk (SSD, not a card)."
        yield Line("fail" if slowest > FSYNC_FAIL_S else "warn", topic, text, advice)
    else:
        yield Line("pass", topic, text)


def file_system(place: Path, mounts: Path) -> str:
    """Type of the file system that a path lies on; empty where it is not told."""
    best, kind = "", ""
    where = str(place.resolve())
    for line in _read(mounts).splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = where == point or where.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def _fsync_s(folder: Path) -> float:
    taken = []
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".forge-doctor-") as file:
        for _ in range(5):
            began = time.monotonic()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            taken.append(time.monotonic() - began)
            if sum(taken) > 5.0:
                break
    return statistics.median(taken)


def permissions(dev: Path = Path("/dev")) -> Iterator[Line]:
    """Who we are, and whether video devices may be opened."""
    if os.geteuid() == 0:
        yield Line("warn", "permissions", "runs as root",
                   "Give the station its own user: a fault then reaches less.")  # fmt: skip
    else:
        yield Line("pass", "permissions", f"runs as user {os.geteuid()}")
    closed = [path.name for path in sorted(dev.glob("video*")) if not os.access(path, os.R_OK)]
    if closed:
        yield Line("warn", "permissions", f"{', '.join(closed)} may not be opened",
                   "Add the user to the group video.")  # fmt: skip


def short(error: object) -> str:
    """An error on one line, cut where it is long."""
    text = " ".join(str(error).split())
    return text if len(text) < 200 else text[:200] + "..."
