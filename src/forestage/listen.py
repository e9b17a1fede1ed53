"""Where does the peer service listen? Sockets on what `peers.listen` names.

One configuration serves all nodes: `{node}` in it is this node's name.
"""

import contextlib
import errno
import os
import socket

from forestage.config import Peering
from forestage.errors import PeerError

BACKLOG = 1024  # connections that nodes of a large job open in the same moment
# A client that neither takes nor acknowledges bytes for so long is gone (tcp(7)); milliseconds.
USER_TIMEOUT = 10_000
SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; Python has no name for it


def sockets(config: Peering, node: str) -> list[socket.socket]:
    """Listens where the others will ask, and where `listen` says. Raises PeerError.

    The port is that of this node's own address, so that several services on one host can differ.
    """
    port = config.of(node).port
    where = config.listen.replace("{node}", node)
    device = where if where in _interfaces() else ""
    with contextlib.ExitStack() as undo:
        found = []
        for family, address in _addresses("" if device else where, port):
            try:
                one = undo.enter_context(_listening(family, address, device, config.bandwidth))
            except OSError as error:
                # A kernel without IPv6, or with all of it switched off, has no such addresses.
                if not where and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    continue
                raise _told(error, where or "any address", port) from None
            found.append(one)
        undo.pop_all()
    return found


def _addresses(where: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Both families' own word for all addresses, or what a name or address stands for."""
    if not where:
        return [(socket.AF_INET6, ("::", port)), (socket.AF_INET, ("0.0.0.0", port))]  # noqa: S104
    try:
        found = socket.getaddrinfo(where, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise PeerError(
            f"`peers.listen: {where}` is no interface, name or address here: {error}",
            "ip address shows what there is",
        ) from None
    # Two names in /etc/hosts may lead to one address.
    return list(dict.fromkeys((family, (str(to[0]), port)) for family, *_, to in found))


def _listening(
    family: socket.AddressFamily, address: tuple[str, int], device: str, rate: int | None
) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        undo.callback(one.close)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if device:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        # Both are handed down to the connections.
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT)
        if rate is not None:
            one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, min(rate, 2**32 - 1))
        one.bind(address)
        one.listen(BACKLOG)
        one.setblocking(False)
        undo.pop_all()
    return one


def _told(error: OSError, where: str, port: int) -> PeerError:
    if error.errno == errno.EADDRINUSE:
        return PeerError(
            f"port {port} of {where} is taken by another program",
            "ss -ltnp shows which; set `peers.port` or end it",
        )
    return PeerError(
        f"port {port} of {where}: {os.strerror(error.errno or 0)}",
        "see `peers.listen`",
    )


def _interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}
