"""Model servers written as functions that are given a socket, and requests to them."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from qmflask.hangup import Client
from qmflask.upstream import Upstream, UpstreamRequest

OK = b"HTTP/1.1 200 OK\r\n"
SHORT = OK + b"Content-Length: 2\r\n\r\nhi"

Handler = Callable[[socket.socket], None]


class Server:
    """Runs `handler` for each connection, each in a thread of its own, all joined at exit.

    What a handler raises fails the test, except that a peer's hang-up is no error of the server's.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.connections = 0
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._errors: list[BaseException] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join()
        for error in self._errors:
            raise error

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._sockets.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                sock.settimeout(30)
                self._handler(sock)
        except (ConnectionError, BrokenPipeError):
            pass
        except BaseException as error:
            self._errors.append(error)


def read_request(sock: socket.socket) -> tuple[bytes, bytes]:
    """One request: (head without the empty line, body as it came); (b"", b"") if the peer closed instead."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            return b"", b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)^content-length: (\d+)", head, re.MULTILINE)
    while length and len(body) < int(length[1]):
        body += sock.recv(65536)
    while b"chunked" in head.lower() and not body.endswith(b"0\r\n\r\n"):
        body += sock.recv(65536)
    return head, body


def answering(response: bytes) -> Handler:
    """A server that reads one request and sends these bytes."""

    def handler(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(response)

    return handler


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; of b"" the last one."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    """Wait until `condition` holds; for states that have no event to wait for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain for {what}"
        time.sleep(0.002)


def closed_by_peer(sock: socket.socket) -> bool:
    """Read until the peer's end; False if the socket's timeout passes first."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def framed(framing: str, pieces: list[bytes]) -> tuple[bytes, list[bytes]]:
    """(head, what to send for each piece) of a body in one of the framings."""
    if framing == "chunked":
        return OK + b"Transfer-Encoding: chunked\r\n\r\n", [chunk(p) for p in pieces]
    if framing == "length":
        return OK + b"Content-Length: %d\r\n\r\n" % sum(map(len, pieces)), pieces
    if framing == "http/1.0":
        return b"HTTP/1.0 200 OK\r\n\r\n", pieces
    return OK + b"Connection: close\r\n\r\n", pieces


def request(server: Server | str, path: str = "/v1/x", **more: Any) -> UpstreamRequest:
    url = server if isinstance(server, str) else server.url
    given = {"method": "POST", "headers": [("Host", "box")], "body": b'{"model":"m"}', **more}
    return UpstreamRequest(url=url + path, **given)


def fetch(upstream: Upstream, sent: UpstreamRequest, client: Client | None = None) -> tuple[int, bytes]:
    response = upstream.send(sent, client or Client())
    try:
        return response.status, b"".join(response)
    finally:
        response.close()
