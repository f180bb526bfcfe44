"""A small OpenAI-compatible server on this machine that answers by a function of the prompt."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Chat:
    """What was asked, and what to say: `answer(text, images)`; `failures` statuses come first."""

    def __init__(self, answer: Callable[[str, int], str]) -> None:
        self.answer = answer
        self.failures: list[int] = []
        self.requests: list[Mapping[str, Any]] = []
        self.keys: list[str] = []
        self.finish = "stop"
        self.url = ""
        self.lock = threading.Lock()

    def text_of(self, number: int) -> str:
        """All words of a request's user message."""
        content = self.requests[number]["messages"][-1]["content"]
        return "\n".join(part["text"] for part in content if part["type"] == "text")


@contextmanager
def serving(answer: Callable[[str, int], str]) -> Iterator[Chat]:
    chat = Chat(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with chat.lock:
                failure = chat.failures.pop(0) if chat.failures else 0
                if not failure:
                    chat.requests.append(body)
                chat.keys.append(self.headers.get("Authorization", ""))
            if failure or self.path != "/v1/chat/completions":
                self._send(failure or 404, {"error": {"message": "not now"}})
                return
            content = body["messages"][-1]["content"]
            words = "\n".join(part["text"] for part in content if part["type"] == "text")
            images = sum(part["type"] == "image_url" for part in content)
            text = chat.answer(words, images)
            message = {"role": "assistant", "content": text}
            self._send(200, {"choices": [{"message": message, "finish_reason": chat.finish}]})

        def _send(self, status: int, data: object) -> None:
            text = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    chat.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield chat
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
