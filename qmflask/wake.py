"""Wake-ups between processes: one datagram socket per worker in the state directory.

A datagram only says "look at your rows"; the receiver re-reads the store and never trusts the message, so a lost or
forged one costs at most the next regular look.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

#: What the receiver should look at first.
ROWS = b"r"  # outcomes of its waiting requests
LEADER = b"l"  # the queue, if it leads
CANCEL = b"c"  # its requests that somebody cancelled
CONFIG = b"g"  # the configuration's generation, and who leads
EVENT = b"e"  # something pages show has changed


class Mailbox:
    """The receiving end of one worker and its means to reach the others. Build it after fork; `close` ends it."""

    def __init__(self, directory: Path, name: str) -> None:
        self._name = name
        # Names are bound through this descriptor: a Unix socket's path may have 107 bytes only, state directories more.
        self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender.setblocking(False)
        self._remove(name)
        self._socket.bind(self._address(name))

    def _file(self, name: str) -> str:
        return f"{name}.sock"

    def _address(self, name: str) -> str:
        return f"/proc/self/fd/{self._directory}/{self._file(name)}"

    def receive(self, timeout: float) -> bytes:
        """Wait for datagrams at most `timeout` seconds; returns the kinds that came, b"" if none did."""
        self._socket.settimeout(timeout)
        try:
            kinds = self._socket.recv(16)
        except TimeoutError:
            return b""
        self._socket.setblocking(False)
        try:
            while True:  # one look serves all that came together
                kinds += self._socket.recv(16)
        except BlockingIOError:
            return bytes(set(kinds))

    def send(self, name: str, kind: bytes) -> None:
        """Wake the worker `name`. Never blocks; whoever is gone or full looks at its rows anyway."""
        try:
            self._sender.sendto(kind, self._address(name))
        except OSError:
            return

    def sweep(self, lives: Callable[[str], bool]) -> None:
        """Remove the socket files of workers that were killed: nobody else does."""
        for file in os.listdir(self._directory):
            name = file.removesuffix(".sock")
            if name != file and not lives(name):
                self._remove(name)

    def _remove(self, name: str) -> None:
        try:
            os.unlink(self._file(name), dir_fd=self._directory)
        except FileNotFoundError:
            return

    def lost(self, directory: Path) -> bool:
        """True when `directory` is no longer the folder in which our socket lies (it was removed or replaced)."""
        try:
            return not os.path.samestat(os.fstat(self._directory), directory.stat())
        except FileNotFoundError:
            return True

    def close(self) -> None:
        """Remove our file and close the sockets."""
        self._remove(self._name)
        self._socket.close()
        self._sender.close()
        os.close(self._directory)
