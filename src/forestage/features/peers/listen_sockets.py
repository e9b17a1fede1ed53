"""The peer service's sockets: where other nodes find this one, or where `peers.listen` says.

By default that is the name that the site's pattern makes, else NodeAddr, where slurmd is found: no
other network of the node is served. NodeAddr is what slurm.conf has of a node that is always there,
else what root's list has, or slurmctld, which is asked once. A name that leads to nothing but
loopback on this node (Debian's 127.0.1.1) or to nothing says not where others find it: then the
service listens on all addresses.

Where other nodes find this one by an address that no interface has (NAT), only an admin can know
better: the service waits PATIENCE for an interface that is late, then ends as with a wrong
configuration, which its unit does not start again.
"""

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from forestage import log
from forestage.config.keys import PeersSection
from forestage.errors import ConfigError, ConfigProblem, ForestageError, PeerError
from forestage.features.peers import node_list, slurm_nodes
from forestage.paths import NodePaths
from forestage.slurm.slurm_client import SlurmClient

PATIENCE = 30.0  # seconds for an interface, or a name, that is not there yet
RETRY_INTERVAL = 1.0  # seconds between two looks
BACKLOG = 1024  # connections that nodes of a large job open in the same moment
# A client that neither takes nor acknowledges bytes for so long is gone (tcp(7)); milliseconds.
USER_TIMEOUT = 10_000
SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; Python has no name for it

Wait = Callable[[float], None]


def open_service_sockets(
    config: PeersSection, places: NodePaths, node: str, slurm: SlurmClient, wait: Wait = time.sleep
) -> list[socket.socket]:
    """Return the sockets of this node's service, which listen. `node` is its name in Slurm.

    Raises PeerError; ConfigError where it is no address of this node.
    """
    if config.listen is not None:
        return open_sockets_at(config, node, config.listen.replace("{node}", node))
    left = PATIENCE
    hosts: Iterable[str] = list_own_hosts(config, places, node, slurm)
    while True:
        tried = []
        for host in hosts:
            if (where := _find_listen_host(host, config.node_address(node).host == node)) is None:
                tried.append(host)
                continue
            with contextlib.suppress(_AddressNotHere):
                return open_sockets_at(config, node, where)
            tried.append(host)
        hosts = tuple(dict.fromkeys(tried))
        if left <= 0:
            what = _explain_not_here(" or ".join(hosts), node)
            raise ConfigError((ConfigProblem("", "peers.listen", what),))
        left -= RETRY_INTERVAL
        wait(RETRY_INTERVAL)


def list_own_hosts(
    config: PeersSection, places: NodePaths, node: str, slurm: SlurmClient
) -> Iterator[str]:
    """Return where other nodes find this one, the surest first; slurmctld is asked last."""
    named = config.node_address(node).host
    if named != node:
        yield named
        return
    if found := slurm_nodes.find_configured_address(slurm.conf, places.root, node):
        yield found
    with contextlib.suppress(OSError):
        listed = node_list.read_addresses(places, time.time())
        if node in listed:
            found = listed[node] or node
            yield found
    try:
        found = slurm_nodes.query_node_address(slurm, node) or found
    except ForestageError as error:  # it may not run yet, or not be found from here
        log.write_log_line(f"peer asked Slurm for its NodeAddr in vain: {error}", by_slurm=False)
    yield found or node


def _find_listen_host(host: str, may_be_all: bool) -> str | None:
    """Return what to listen at for a host, "" for all addresses; None where it is unknown.

    `may_be_all`: the host is NodeAddr, which by itself is no wish for one network.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return host
    try:
        found = {to[4][0] for to in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        found = set()
    if any(not ipaddress.ip_address(str(one).partition("%")[0]).is_loopback for one in found):
        return host
    if may_be_all:
        what = f"{host} leads to loopback alone" if found else f"{host} does not resolve"
        log.write_log_line(f"peer listens on all addresses: {what} on this node", by_slurm=False)
        return ""
    return None


def _explain_not_here(names: str, node: str) -> str:
    return (
        f"is null, and other nodes find {node} at {names}, which is no address of this node:"
        ' set it to an address or an interface here, or to "" for all'
    )


class _AddressNotHere(PeerError):
    """No interface of this node has the address."""


def open_sockets_at(config: PeersSection, node: str, where: str) -> list[socket.socket]:
    """Sockets on an address, a name or an interface; "" is all addresses. Raises PeerError.

    The port is the one that other nodes use for this node, so that several services on one host can
    differ.
    """
    port = config.node_address(node).port
    device = where if where in {name for _, name in socket.if_nameindex()} else ""
    host = None if device or not where else where
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise PeerError(
            f"`peers.listen: {where}` is no interface, name or address here: {error}",
            "ip address shows what there is",
        ) from None
    # Two names in /etc/hosts may lead to one address.
    addresses = dict.fromkeys((family, to[:2]) for family, *_, to in found)
    with contextlib.ExitStack() as undo:
        sockets: list[socket.socket] = []
        absent: OSError | None = None
        for family, address in addresses:
            try:
                one = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                _bind_and_listen(one, address, device, config.bandwidth)
            except OSError as error:
                # A kernel without IPv6, or with all of it switched off, has no such addresses, and
                # a name may have some of another network's.
                if error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    absent = error
                    continue
                at = f"port {port} of {where or 'any address'}"
                if error.errno == errno.EADDRINUSE:
                    raise PeerError(
                        f"{at} is taken by another program",
                        "ss -ltnp shows which; set `peers.port` or end it",
                    ) from None
                raise PeerError(f"{at}: {error.strerror}", "see `peers.listen`") from None
            sockets.append(one)
        if absent is not None and not sockets:
            raise _AddressNotHere(
                f"port {port} of {where}: {absent.strerror}", "see `peers.listen`"
            )
        undo.pop_all()
    return sockets


def _bind_and_listen(
    one: socket.socket, address: tuple[Any, ...], device: str, rate: int | None
) -> None:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if one.family == socket.AF_INET6:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    if device:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    # Connections inherit both.
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT)
    if rate is not None:
        one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, min(rate, 2**32 - 1))
    one.bind(address)
    one.listen(BACKLOG)
    one.setblocking(False)
