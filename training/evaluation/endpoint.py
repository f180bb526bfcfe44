"""A model behind an OpenAI-compatible endpoint: messages in, text out, every reply kept.

Standard library only: one POST of a few fields needs no client package, whose own retries and
defaults would have to be switched off. Knows HTTP and the reply file; no prompts and no cases.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from forge_station.contract.error import StationError

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_LONGEST_WAIT_S = 60.0
Message = Mapping[str, Any]


class EndpointError(StationError):
    """The endpoint gave no usable reply."""

    code: ClassVar[str] = "ENDPOINT_FAILED"


class EndpointRefused(EndpointError):
    """The endpoint will refuse every request alike: wrong key, address or model."""

    code: ClassVar[str] = "ENDPOINT_REFUSED"


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask. `url`: the API's root, such as http://host:8000/v1."""

    url: str
    model: str
    key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; unset: none is sent (a server of one's own)."""
    max_tokens: int = 1024
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the request; a None takes a field out (`{"max_tokens": null, ...}`)."""
    timeout_s: float = 180.0
    tries: int = 6
    first_wait_s: float = 1.0

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        fields = {
            "model": self.model,
            "messages": list(messages),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **self.extra,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class Reply:
    """What came back. `finish`: why it ended (`length`: cut off). `stored`: from the file."""

    text: str
    finish: str = ""
    latency_ms: float = 0.0
    stored: bool = False
    usage: Mapping[str, Any] = field(default_factory=dict)


class ReplyFile:
    """Raw replies as JSON lines by the digest of their request: what was paid for is kept.

    A killed run may leave half a line; it is skipped. Safe for several threads of one process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._replies: dict[str, Reply] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self._torn = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            self._take(line)

    def _take(self, line: str) -> None:
        try:
            data = json.loads(line)
            self._replies[data["key"]] = Reply(
                str(data["reply"]), str(data["finish"]), float(data["latency_ms"]), True,
                data.get("usage") or {},
            )  # fmt: skip
        except (ValueError, KeyError, TypeError):
            return

    def __len__(self) -> int:
        return len(self._replies)

    def get(self, key: str) -> Reply | None:
        return self._replies.get(key)

    def put(self, key: str, about: Mapping[str, Any], reply: Reply) -> None:
        """Append one line; `about` says what was asked, without the pictures."""
        line = {
            "key": key, **about, "reply": reply.text, "finish": reply.finish,
            "latency_ms": round(reply.latency_ms, 1), "usage": dict(reply.usage),
        }  # fmt: skip
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                start = "\n" if self._torn else ""
                file.write(f"{start}{json.dumps(line, ensure_ascii=False)}\n")
            self._torn = False
            self._replies[key] = reply


class ChatClient:
    """Asks an endpoint; a context manager. `offline`: only what is in the reply file."""

    def __init__(self, endpoint: Endpoint, replies: ReplyFile, *, offline: bool = False) -> None:
        self.endpoint = endpoint
        self.replies = replies
        self.offline = offline
        self.asked = 0
        self._key = os.environ.get(endpoint.key_env, "")
        self._lock = threading.Lock()

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forget the key."""
        self._key = ""

    def ask(self, messages: Sequence[Message], about: Mapping[str, Any]) -> Reply:
        """The reply to `messages`, from the file if it was given before. Raises EndpointError."""
        body = self.endpoint.body(messages)
        told = json.dumps([self.endpoint.url, body], sort_keys=True)
        key = hashlib.sha256(told.encode()).hexdigest()
        known = self.replies.get(key)
        if known is not None:
            return known
        if self.offline:
            raise EndpointError(
                "no stored reply",
                which=self.replies.path,
                expected="a reply to exactly this prompt, picture, model and settings",
                action="run once without --offline",
            )
        begun = time.perf_counter()
        data = self._posted(json.dumps(body).encode())
        reply = _reply_of(data, (time.perf_counter() - begun) * 1e3)
        self.replies.put(key, {"model": self.endpoint.model, **about}, reply)
        with self._lock:
            self.asked += 1
        return reply

    def _posted(self, body: bytes) -> Any:
        url = f"{self.endpoint.url.rstrip('/')}/chat/completions"
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(url, body, headers, method="POST")
        said = ""
        for attempt in range(1, self.endpoint.tries + 1):
            wait_s = self.endpoint.first_wait_s * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
            try:
                with urllib.request.urlopen(request, timeout=self.endpoint.timeout_s) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as error:
                said = f"HTTP {error.code}: {error.read(400).decode(errors='replace').strip()}"
                if error.code not in _RETRIED:
                    raise _refusal(error.code, url, said, self.endpoint) from error
                wait_s = _seconds(error.headers.get("Retry-After")) or wait_s
            except (OSError, http.client.HTTPException, ValueError) as error:
                said = f"{type(error).__name__}: {error}"
            if attempt < self.endpoint.tries:
                time.sleep(min(wait_s, _LONGEST_WAIT_S))
        raise EndpointError(
            "the endpoint does not answer",
            which=url,
            expected=f"a chat completion within {self.endpoint.tries} tries",
            got=said,
        )


def _refusal(status: int, url: str, said: str, endpoint: Endpoint) -> EndpointError:
    if status in (401, 403):
        action = f"set the key in the environment variable {endpoint.key_env}"
        return EndpointRefused("the endpoint refuses the key", which=url, got=said, action=action)
    if status in (404, 405):
        action = "--endpoint is the API's root (…/v1), --model a name that it serves"
        return EndpointRefused("no such address or model", which=url, got=said, action=action)
    return EndpointError("the endpoint refuses the request", which=url, got=said)


def _seconds(text: str | None) -> float:
    """Retry-After in seconds; 0 where there is none or it is a date."""
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0


def _reply_of(data: Any, latency_ms: float) -> Reply:
    try:
        choice = data["choices"][0]
        content = choice["message"]["content"]
        if isinstance(content, list):  # some servers answer in parts
            content = "".join(part.get("text", "") for part in content)
        finish, usage = str(choice.get("finish_reason") or ""), data.get("usage") or {}
        return Reply(str(content or ""), finish, latency_ms, False, usage)
    except (LookupError, TypeError, AttributeError) as error:
        raise EndpointError(
            "the reply is no chat completion",
            expected="choices[0].message.content",
            got=json.dumps(data)[:200],
        ) from error
