"""TCP ports of this machine: who listens, and what can be bound."""

from __future__ import annotations

import errno
import os
import pwd
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from qmflask.proctree import Identity, file_links, read_stat, session_members, token_members

#: Programs that listen on behalf of something in a container or another network namespace.
_FORWARDERS = frozenset(
    {"docker-proxy", "rootlessport", "rootlesskit", "slirp4netns", "pasta", "passt", "conmon", "gvproxy"}
)

_LISTEN = b"0A"  # TCP_LISTEN in the text tables

# Constants and layouts of netlink(7) and sock_diag(7).
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NLM_F_REQUEST, _NLM_F_DUMP, _NLMSG_ERROR, _NLMSG_DONE = 0x1, 0x300, 2, 3
_TCP_LISTEN = 10
_NLMSG = struct.Struct("=IHHII")
_DIAG_REQUEST = struct.Struct("=BBBBI")  # followed by the socket id: port (network order) and 46 more bytes
_DIAG_UID = 64  # offset of the uid in inet_diag_msg, the inode follows


class Listener(NamedTuple):
    """One listening socket: its inode, and the user id it was made by."""

    inode: int
    uid: int


def parse_listeners(table: bytes, port: int) -> list[Listener]:
    """The sockets that listen on `port` in the text of `/proc/net/tcp` or `tcp6`."""
    found = []
    wanted = b":%04X" % port
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTEN and fields[1].endswith(wanted):
            found.append(Listener(inode=int(fields[9]), uid=int(fields[7])))
    return found


def parse_diag(data: bytes, port: int) -> tuple[list[Listener], bool]:
    """One datagram of the kernel's socket list: its sockets of `port`, and whether it was the last. Raises OSError."""
    found: list[Listener] = []
    at = 0
    while at + _NLMSG.size <= len(data):
        length, kind, _, _, _ = _NLMSG.unpack_from(data, at)
        if kind == _NLMSG_DONE or length < _NLMSG.size:
            return found, True
        if kind == _NLMSG_ERROR:
            raise OSError(-struct.unpack_from("=i", data, at + _NLMSG.size)[0], "the kernel does not list its sockets")
        (local_port,) = struct.unpack_from("!H", data, at + _NLMSG.size + 4)
        uid, inode = struct.unpack_from("=II", data, at + _NLMSG.size + _DIAG_UID)
        if local_port == port:
            found.append(Listener(inode, uid))
        at += (length + 3) & ~3
    return found, False


def _ask_kernel(family: int, port: int) -> list[Listener]:
    """Listening sockets by netlink (sock_diag(7)). Raises OSError where that is not to be had."""
    request = _DIAG_REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << _TCP_LISTEN)
    request += port.to_bytes(2, "big") + bytes(46)
    header = _NLMSG.pack(_NLMSG.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0)
    found: list[Listener] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(1.0)
        netlink.send(header + request)
        last = False
        while not last:
            more, last = parse_diag(netlink.recv(65536), port)
            found += more
    return found


def _listeners(port: int) -> list[Listener]:
    """By netlink, some ten microseconds; else from the text tables, for which the kernel walks all connections."""
    found: list[Listener] = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        try:
            found += _ask_kernel(family, port)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            found += _read_table(name, port)
    return found


def _read_table(name: str, port: int) -> list[Listener]:
    try:
        with open(f"/proc/self/net/{name}", "rb") as file:
            return parse_listeners(file.read(), port)
    except FileNotFoundError:  # no IPv6 here
        return []


def _owners(listeners: Iterable[Listener], candidates: Iterable[Identity]) -> Iterator[Identity]:
    """Those of the candidates that hold one of the sockets; a process we may not look into is left out."""
    wanted = {f"socket:[{listener.inode}]" for listener in listeners}
    for identity in candidates:
        try:
            if not wanted.isdisjoint(file_links(identity.pid)):
                yield identity
        except PermissionError:
            continue


def _everybody() -> Iterator[Identity]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (identity := Identity.of(int(name))):
            yield identity


def socket_owner(port: int) -> list[Identity]:
    """All processes we can see that hold a socket listening on `port`. Walks all descriptors: milliseconds."""
    listeners = _listeners(port)
    return list(_owners(listeners, _everybody())) if listeners else []


def listens(sid: int, token: str, port: int, root: Identity | None = None) -> bool | None:
    """Whether the listening socket of `port` belongs to the process tree (DESIGN section 3, Ports).

    True: a member holds it. False: a process that is surely not of the tree holds it. None: cannot be known, because
    nothing listens in our network namespace, or the owner is hidden, or it forwards for a container.
    """
    listeners = _listeners(port)
    if not listeners:
        return None
    if any(_owners(listeners, session_members(sid, root=root))) or any(_owners(listeners, token_members(token))):
        return True
    strangers = list(_owners(listeners, _everybody()))
    if not strangers or any(_may_act_for_others(stranger) for stranger in strangers):
        return None
    return False


def _may_act_for_others(identity: Identity) -> bool:
    """A port forwarder, init (socket activation), or a process inside a container."""
    stat = read_stat(identity.pid)
    if stat is None or identity.pid == 1 or stat.comm in _FORWARDERS:
        return True
    try:
        return os.readlink(f"/proc/{identity.pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:  # not ours to look at: then it is not ours to judge
        return True


def holder_of(port: int) -> str:
    """Who listens on `port`, for a message: "nginx (pid 12)"; "" if nobody does."""
    listeners = _listeners(port)
    names = []
    for owner in _owners(listeners, _everybody()) if listeners else ():
        stat = read_stat(owner.pid)
        if stat is not None:
            names.append(f"{stat.comm} (pid {owner.pid})")
    if listeners and not names:
        return f"a process of user {_user(listeners[0].uid)}"
    return ", ".join(names[:3])


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """True if a server could bind `port` now, on `host` and on all addresses.

    Binds as servers do (SO_REUSEADDR): connections in TIME_WAIT do not count, a listener on any address does.
    """
    if not 0 < port < 65536:
        return False
    return all(_can_bind(port, address) for address in dict.fromkeys((host, "0.0.0.0", "::")))


#: Not an obstacle: this machine lacks the address or the protocol, so no server on it can use them either.
_NO_SUCH_ADDRESS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


def _can_bind(port: int, address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((address, port))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return error.errno in _NO_SUCH_ADDRESS or isinstance(error, socket.gaierror)
    return True
