"""Brings a bundle file from where a deployment says it is: HTTP(S) with resume, or a local path.

What comes is not trusted: `archive.take` verifies it. Whoever named the place has signed that.
"""

from __future__ import annotations

import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from forge_station.bundles.archive import MAX_BYTES, Progress
from forge_station.errors import BundleError

_CHUNK = 1 << 18
TIMEOUT_S = 30.0
_OK, _RANGE_WRONG, _SERVER_FAULT = 200, 416, 500


class UnreachableError(BundleError):
    """It may go better later: the network or the server is away."""


class Stopped(Exception):
    """The transfer was told to stop; what came so far is kept."""


def local(url: str) -> Path | None:
    """The path that a url means on this machine; None for one that must be fetched."""
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    if not parts.scheme and url.startswith("/"):
        return Path(url)
    if parts.scheme in ("http", "https") and parts.netloc:
        return None
    raise BundleError(
        "no place that a bundle can come from",
        which=url,
        expected="https://..., http://..., file:///... or an absolute path of the station",
    )


def fetch(
    url: str,
    target: Path,
    progress: Progress = lambda _done, _all: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Path:
    """Download to `target`, going on where an earlier try ended. Returns `target`.

    Raises BundleError; what came so far stays for the next try. `stopped`: asked between chunks.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    have = target.stat().st_size if target.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            if answer.status == _OK:
                have = 0  # the server does not know ranges: from the beginning
            total = have + int(answer.headers.get("Content-Length") or 0)
            free = shutil.disk_usage(target.parent).free
            if total > MAX_BYTES or total - have > free:
                raise BundleError(
                    "no room for the bundle",
                    which=target.parent,
                    expected=f"{total} bytes, and at most {MAX_BYTES}",
                    got=f"{free} bytes free",
                )
            with target.open("r+b" if target.exists() else "wb") as file:
                file.truncate(have)
                file.seek(have)
                while chunk := answer.read(_CHUNK):
                    file.write(chunk)
                    have += len(chunk)
                    if have > MAX_BYTES:
                        raise BundleError("the bundle is too large", which=url)
                    progress(have, total)
                    if stopped():
                        raise Stopped
                file.flush()
                os.fsync(file.fileno())
            if have < total:
                raise UnreachableError(
                    "the transfer broke off", which=url, expected=f"{total} bytes", got=have
                )
    except urllib.error.HTTPError as error:
        if error.code == _RANGE_WRONG and have:
            return target  # it was complete already
        kind = UnreachableError if error.code >= _SERVER_FAULT else BundleError
        raise kind("the bundle cannot be fetched", which=url, got=f"HTTP {error.code}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise UnreachableError("the bundle cannot be fetched", which=url, got=reason) from error
    return target
