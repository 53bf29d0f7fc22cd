"""A bell wakes its loop, and rings that come after its end reach nobody."""

from __future__ import annotations

import os
import select
import socket

from qmflask.bell import Bell


def rings(bell: Bell) -> bool:
    poller = select.poll()
    poller.register(bell.fileno(), select.POLLIN)
    return bool(poller.poll(0))


def test_rings_are_one_until_answered() -> None:
    bell = Bell()
    try:
        assert not rings(bell)
        bell.ring()
        bell.ring()
        assert rings(bell)
        bell.answer()
        bell.answer()
        assert not rings(bell)
    finally:
        bell.close()


def test_a_late_ring_writes_to_no_one() -> None:
    """The leader's term ends, a client's connection gets the number of its bell, and a prober rings."""
    ours, theirs = socket.socketpair()
    bell = Bell()
    number = bell.fileno()
    bell.close()
    bell.close()
    os.dup2(ours.fileno(), number)
    try:
        bell.ring()
        theirs.setblocking(False)
        try:
            got = theirs.recv(64)
        except BlockingIOError:
            got = b""
        assert got == b""
        assert bell.fileno() == -1
    finally:
        os.close(number)
        ours.close()
        theirs.close()
