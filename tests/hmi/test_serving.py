"""How the page is served: its units, and to other machines only with TLS and users."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_station import cli
from forge_station.hmi import context
from forge_station.hmi.context import folder_of
from forge_station.hmi.listener import HEAD_S, MOST_OF_ONE
from forge_station.hmi.users import Role, Users
from tests.hmi.conftest import in_thread, served, wait_for
from tests.hmi.stage import REPOSITORY, Stage
from tests.mes.certificates import Authority

UNITS = REPOSITORY / "deploy" / "systemd"
MOST_EXPOSED = 2.0
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def test_other_machines_reach_it_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("page")
    lan = {"host": "0.0.0.0", "tls_cert": str(certificate), "tls_key": str(key)}
    with Stage(tmp_path / "station", lan) as stage:
        users = Users(folder_of(stage.config) / "users.json")
        users.add("anna", Role.ADMIN, "246801")
        trusted = ssl.create_default_context(cafile=str(authority.file))
        with served(stage, tls=trusted) as page:
            assert page.url.startswith("https://")
            with urllib.request.urlopen(f"{page.url}api/page", context=trusted) as answer:
                told = json.load(answer)
            assert told["has_users"] and told["names"] == []  # names are for the panel itself
            request = urllib.request.Request(
                f"{page.url}api/session/login",
                json.dumps({"name": "anna", "pin": "246801"}).encode(),
                {"origin": page.url.rstrip("/")},
            )
            with urllib.request.urlopen(request, context=trusted) as answer:
                assert "secure" in answer.headers["set-cookie"].lower()


@pytest.mark.parametrize(
    ("inches", "px", "told"),
    [
        (12.1, (1280, 800), ""),
        (10.1, (1280, 800), "136 mm high"),
        (7.0, (1024, 600), "too small for a verdict that is read at 5 m (hmi.panel)"),
        (9.0, (800, 600), "got 183 x 137 mm"),
    ],
)
def test_a_panel_that_is_too_low_or_too_small_is_told(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    inches: float,
    px: tuple[int, int],
    told: str,
) -> None:
    panel = {"panel": {"diag_in": inches, "px": list(px)}}
    with socket.socket() as taken, Stage(tmp_path / "station", panel) as stage:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main(["hmi", "--station", str(stage.file), "--port", port]) == 64  # it is taken
    said = capfd.readouterr().err
    assert told in said and ("mm" in said) == bool(told)
    assert ("cannot be served" in said) == (px == (1280, 800))


def test_a_taken_port_is_one_clear_error(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main(["hmi", "--station", str(stage.file), "--port", port]) == 64
    told = capfd.readouterr().err
    assert "the page cannot be served" in told and port in told and "Traceback" not in told


@contextlib.contextmanager
def silent(port: int, most: int, said: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections that say this and nothing more."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(most):
            item = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            item.sendall(said)
            found.append(item)
        yield found


def ended(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("said", [b"", b"GET /api/page HTTP/1.1\r\nhost: x\r\n"])
def test_a_page_is_reached_beside_300_connections_that_say_nothing(
    stage: Stage, said: bytes
) -> None:
    with (
        served(stage) as page,
        urllib.request.urlopen(f"{page.url}api/events", timeout=10) as stream,
        silent(page.port, 300, said) as connections,
    ):
        for path in ("", "api/page", "static/app.js"):
            with urllib.request.urlopen(f"{page.url}{path}", timeout=10) as answer:
                assert answer.status == 200
        assert stream.readline().startswith(b"event: ")  # who was there before, stays
        while b"beat" not in stream.readline():
            pass
        assert all(ended(item, 10) for item in connections[: 300 - MOST_OF_ONE])
        if said:
            assert not ended(connections[-1], 0.01)  # there was no need yet
            assert all(ended(item, 1.5 * HEAD_S) for item in connections)


def test_handshakes_that_stop_half_way_hold_no_panel_up(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("page")
    trusted = ssl.create_default_context(cafile=str(authority.file))
    tls = {"tls_cert": str(certificate), "tls_key": str(key)}
    with (
        Stage(tmp_path / "station", tls) as stage,
        served(stage, tls=trusted) as page,
        silent(page.port, 300, b"\x16\x03\x01") as connections,
    ):
        with urllib.request.urlopen(f"{page.url}api/page", timeout=10, context=trusted) as answer:
            assert answer.status == 200
        assert all(ended(item, 10) for item in connections[: 300 - MOST_OF_ONE])


def test_one_address_has_so_many_connections_and_no_more(stage: Stage) -> None:
    with served(stage) as page, contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(urllib.request.urlopen(f"{page.url}api/events", timeout=10))
            for _ in range(MOST_OF_ONE)
        ]
        # None of them is silent, so nobody is let go for one more.
        with pytest.raises(OSError, match=r"reset|closed|Remote"):
            urllib.request.urlopen(f"{page.url}api/page", timeout=10)
        streams.pop().close()

        def again() -> bool:
            try:
                with urllib.request.urlopen(f"{page.url}api/page", timeout=10):
                    return True
            except OSError:
                return False

        assert wait_for(again)


def test_a_body_that_does_not_come_is_not_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "BODY_S", 0.2)
    with in_thread(stage) as url:
        port = int(url.rstrip("/").rsplit(":", 1)[1])
        head = (
            f"POST /api/session/login HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n"
            f"origin: {url.rstrip('/')}\r\ncontent-length: 30\r\n\r\n{{"
        )
        with silent(port, 1, head.encode()) as (connection,):
            told = connection.recv(4096)
            assert b" 409 " in told.splitlines()[0]
            while b"too slow" not in told and (more := connection.recv(4096)):
                told += more
            assert b"too slow" in told


@pytest.mark.parametrize("name", ["forge-station-hmi", "forge-station-panel"])
@needs_systemd
def test_systemd_accepts_the_units_without_a_word(tmp_path: Path, name: str) -> None:
    done = _analyze("verify", _here(tmp_path, name))
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_the_unit_of_the_page_exposes_little(tmp_path: Path) -> None:
    done = _analyze("security", "--offline=true", _here(tmp_path, "forge-station-hmi"))
    found = re.search(r"exposure level for forge-station-hmi\.service: ([\d.]+)", done.stdout)
    if found is None:
        pytest.skip("this systemd-analyze cannot judge a file")
    assert float(found[1]) <= MOST_EXPOSED


def test_the_unit_runs_a_command_that_there_is() -> None:
    text = (UNITS / "forge-station-hmi.service").read_text()
    (command,) = re.findall(r"(?m)^ExecStart=\S+/forge-station (.+)$", text)
    args = cli.build_parser().parse_args(command.split())
    assert args.station == Path("/etc/forge-station/station.yaml")
    assert f"RestartPreventExitStatus={cli.USAGE_ERROR}" in text


def _here(folder: Path, name: str) -> Path:
    """The unit with a program that this machine has: systemd looks whether it is there."""
    text = (UNITS / f"{name}.service").read_text()
    path = folder / f"{name}.service"
    path.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", text))
    return path


def _analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    assert ANALYZE is not None
    return subprocess.run(
        [ANALYZE, "--no-pager", *arguments], capture_output=True, text=True, timeout=60
    )
