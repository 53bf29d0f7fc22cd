#!/usr/bin/env python3
"""A model server for tests that answers every request with what it was sent: `echo_server.py PORT`.

The answer is JSON: method, path (as spelled), headers (list of pairs), body (latin-1 text, at most 64 KiB) and length.
It takes uploads without holding them, `GET /bytes?N` gives N bytes, and `GET /silence` begins an answer that never
goes on. Standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEPT = 64 * 1024


class Echo(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        """Whatever the method and path."""
        if self.path == "/health":
            self._send(b"{}")
        elif self.path.partition("?")[0].endswith("/bytes"):
            self._bytes(int(self.path.partition("?")[2]))
        elif self.path == "/silence":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"listen")
            self.rfile.read(1)  # until the client leaves
            self.close_connection = True
        else:
            head, length = self._body()
            shown = {
                "method": self.command,
                "path": self.path,
                "headers": [list(pair) for pair in self.headers.items()],
                "body": head.decode("latin-1"),
                "length": length,
            }
            self._send(json.dumps(shown).encode())

    def __getattr__(self, name: str) -> object:
        if name.startswith("do_"):
            return self.answer
        raise AttributeError(name)

    def _body(self) -> tuple[bytes, int]:
        kept, length = b"", 0
        for piece in self._pieces():
            length += len(piece)
            kept += piece[: KEPT - len(kept)]
        return kept, length

    def _pieces(self) -> Iterator[bytes]:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            while size := int(self.rfile.readline(), 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length", 0))
        while left > 0 and (piece := self.rfile.read(min(left, 1 << 20))):
            left -= len(piece)
            yield piece

    def _bytes(self, count: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(count))
        self.end_headers()
        block = bytes(range(256)) * 4096
        while count > 0:
            self.wfile.write(block[:count])
            count -= len(block)

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Echo).serve_forever()
