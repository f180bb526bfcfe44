"""The page in a server of its own, a station to look at, and one real browser for all tests."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.hmi.stage import REPOSITORY, Stage

try:
    import starlette  # noqa: F401
except ModuleNotFoundError:  # without the extra `hmi` there is nothing to test here
    collect_ignore_glob = ["test_*.py"]

BEGIN_S = 30.0


def wait_for(found: Callable[[], object], seconds: float = 10.0) -> Any:
    """Its first true value; the last one when none comes in time."""
    end = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < end:
        time.sleep(0.01)
    return value


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Served:
    """A page that is served by a process of its own."""

    process: subprocess.Popen[str]
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextmanager
def served(stage: Stage, port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[Served]:
    """`forge-station hmi` on the stage's station, until the block ends."""
    port = port or free_port()
    process = subprocess.Popen(
        [sys.executable, "-B", "-m", "forge_station.cli", "hmi",
         "--station", str(stage.file), "--port", str(port)],
        stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'edge'}:{REPOSITORY}"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        page = Served(process, port, "https" if tls else "http")
        assert f"the page: {page.scheme}://" in process.stdout.readline()

        def answers() -> bool:
            try:
                with urllib.request.urlopen(f"{page.url}api/page", timeout=5, context=tls):
                    return True
            except OSError:
                return False

        assert wait_for(answers, BEGIN_S)
        yield page
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def in_thread(stage: Stage, context: Any = None) -> Iterator[str]:
    """The page of a station, served by a thread of this process; its address.

    `context`: what its routes are given, where a test wants to meddle with it.
    """
    import uvicorn

    from forge_station.hmi.app import build
    from forge_station.hmi.context import Context

    port = free_port()
    config = uvicorn.Config(
        build(context or Context.of(stage.config)),
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    assert wait_for(lambda: server.started, BEGIN_S)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join(10.0)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Stage(tmp_path / "station") as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium. Without it the test is skipped, in CI it fails.

    Not for the whole session: Playwright's event loop runs in this thread until it is closed, and
    tests of others have loops of their own.
    """
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        message = "chromium is not installed (Debian: apt install chromium)"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with api.sync_playwright() as playwright:
        # Chromium as root needs --no-sandbox; without it no process of a container starts.
        opened = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--enable-precise-memory-info",
                  "--js-flags=--expose-gc"],
        )  # fmt: skip
        try:
            yield opened
        finally:
            opened.close()
