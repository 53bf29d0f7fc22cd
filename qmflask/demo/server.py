"""The demonstration model server's HTTP side: OpenAI's routes over `http.server`, one thread per connection."""

from __future__ import annotations

import json
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from qmflask.demo import words


class DemoServer(ThreadingHTTPServer):
    """One demonstration model; `load` makes it ready."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], voice: words.Voice, pace: float) -> None:
        self.voice = voice
        self.seconds_per_token = 1 / pace if pace > 0 else 0.0
        self.ready = threading.Event()
        self._answers = 0
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for our host name, which can take seconds offline."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def load(self, seconds: float) -> None:
        """Pretend to read weights for `seconds`, with a line in the log for each quarter, then be ready."""
        for quarter in range(1, 5):
            time.sleep(seconds / 4)
            self.log(f"loading ... {25 * quarter} %")
        self.ready.set()
        self.log(f"ready on port {self.server_address[1]}")

    def count_answer(self) -> int:
        """The number of answers given before this one."""
        with self._lock:
            self._answers += 1
            return self._answers - 1

    def log(self, text: str) -> None:
        """One line on stderr, as model servers do."""
        print(f"{self.voice.name}: {text}", file=sys.stderr, flush=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no error; everything else is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each token waits for the client's delayed ACK
    server: DemoServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            self._health()
        elif path == "/v1/models":
            name = self.server.voice.name
            self._json(200, {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "qmflask-demo"}]})
        else:
            self._error(404, f"no such path: {path}")

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        raw = self._read_body()
        route = {
            "/v1/chat/completions": self._complete,
            "/v1/completions": self._complete,
            "/v1/embeddings": self._embed,
        }.get(path)
        if route is None:
            self._error(404, f"no such path: {path}")
            return
        if not self.server.ready.is_set():
            self._error(503, "Loading model")
            return
        try:
            body = json.loads(raw)
        except ValueError as e:
            self._error(400, f"the body is not JSON: {e}")
            return
        if not isinstance(body, dict):
            self._error(400, "the body is not a JSON object")
            return
        route(path, body)

    # --- routes

    def _health(self) -> None:
        if self.server.ready.is_set():
            self._json(200, {"status": "ok"})
        else:
            self._error(503, "Loading model")

    def _complete(self, path: str, body: dict[str, Any]) -> None:
        prompt = words.last_prompt(body)
        text = self.server.voice.reply(prompt, self.server.count_answer())
        parts, reason = words.cut(text, body.get("max_tokens", body.get("max_completion_tokens")))
        reply = _Reply(self.server.voice.name, path == "/v1/chat/completions", prompt, parts, reason)
        if body.get("stream"):
            options = body.get("stream_options")
            self._stream(reply, bool(isinstance(options, dict) and options.get("include_usage")))
        else:
            time.sleep(self.server.seconds_per_token * len(parts))
            self._json(200, reply.whole())
        self.server.log(f"answered {len(parts)} words")

    def _embed(self, path: str, body: dict[str, Any]) -> None:
        given = body.get("input", "")
        texts = given if isinstance(given, list) else [given]
        name, encoding = self.server.voice.name, body.get("encoding_format")
        data = [
            {
                "object": "embedding",
                "index": i,
                "embedding": words.encode_vector(words.embedding(name, str(text)), encoding),
            }
            for i, text in enumerate(texts)
        ]
        count = sum(len(str(text).split()) for text in texts)
        used = {"prompt_tokens": count, "total_tokens": count}
        self._json(200, {"object": "list", "model": name, "data": data, "usage": used})

    # --- bytes

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(parts)

    def _json(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, message: str) -> None:
        kind = "unavailable_error" if status == 503 else "invalid_request_error"
        self._json(status, {"error": {"message": message, "type": kind, "code": status}})

    def _stream(self, reply: _Reply, with_usage: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in reply.events(with_usage):
            data = b"data: " + event + b"\n\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            time.sleep(self.server.seconds_per_token)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:
        """No line per request: health probes would fill the log."""


class _Reply:
    """One answer in OpenAI's two shapes."""

    def __init__(self, name: str, chat: bool, prompt: str, parts: list[str], reason: str) -> None:
        self.chat, self.prompt, self.parts, self.reason = chat, prompt, parts, reason
        now = time.time_ns()
        prefix = "chatcmpl" if chat else "cmpl"
        self.head = {"id": f"{prefix}-demo-{now}", "created": now // 10**9, "model": name}

    def whole(self) -> dict[str, Any]:
        text = "".join(self.parts)
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **content, "finish_reason": self.reason}
        kind = "chat.completion" if self.chat else "text_completion"
        used = words.usage(self.prompt, len(self.parts))
        return {**self.head, "object": kind, "choices": [choice], "usage": used}

    def events(self, with_usage: bool) -> Iterator[bytes]:
        """The payloads of the stream's `data:` lines, `[DONE]` included."""
        if self.chat:
            yield self._chunk({"delta": {"role": "assistant", "content": ""}}, None)
        for part in self.parts:
            yield self._chunk({"delta": {"content": part}} if self.chat else {"text": part}, None)
        yield self._chunk({"delta": {}} if self.chat else {"text": ""}, self.reason)
        if with_usage:
            yield self._dump({"choices": [], "usage": words.usage(self.prompt, len(self.parts))})
        yield b"[DONE]"

    def _chunk(self, content: dict[str, Any], reason: str | None) -> bytes:
        return self._dump({"choices": [{"index": 0, **content, "finish_reason": reason}]})

    def _dump(self, fields: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return json.dumps({**self.head, "object": kind, **fields}, ensure_ascii=False).encode()
