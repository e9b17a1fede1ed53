"""`forestage peer`: the process that serves, from its sockets to its end."""

import asyncio
import contextlib
import logging
import signal
import socket
from typing import Any

from aiohttp import http_exceptions, web

from forestage import credential, listen, log
from forestage.cache.node import Node
from forestage.connections import IDLE
from forestage.counters import Counters
from forestage.credential import MAX_TEXT, Prover
from forestage.errors import ConfigError, Problem
from forestage.service import Service

SHUTDOWN = 2.0  # seconds for what is being sent when the service is stopped


class _Complaints(logging.Handler):
    """What aiohttp says: of what is no HTTP, a word in our own line about the refused."""

    def __init__(self, counters: Counters) -> None:
        super().__init__(logging.WARNING)
        self.counters = counters

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, http_exceptions.HttpProcessingError):
            self.counters.refused("", type(error).__name__)
        else:  # a fault of ours: with its traceback
            log.say(self.format(record), by_slurm=False)


def _logger(counters: Counters) -> logging.Logger:
    logger = logging.Logger("peer")  # of no tree: nobody else listens
    logger.addHandler(_Complaints(counters))
    return logger


class _Server(web.Server):
    """aiohttp's own, which tells the service of each connection."""

    def __init__(self, service: Service) -> None:
        super().__init__(
            service.handle,
            access_log=None,
            logger=_logger(service.counters),
            keepalive_timeout=IDLE,
            lingering_time=0,
            max_line_size=1024,
            max_field_size=1024,
            read_bufsize=2 * MAX_TEXT,
            auto_decompress=False,
        )
        self.service = service

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.service.connections.made(handler, transport)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.service.connections.lost(handler)


def run(node: Node, name: str) -> None:
    """Serves until SIGTERM or SIGINT. `name` is this node's, as Slurm has it.

    Raises ConfigError where peers are off, PeerError for want of munge or the port, OSError.
    """
    peers = node.config.peers
    if not peers.enabled:
        raise ConfigError((Problem("", "peers.enabled", "is false: set it on every node"),))
    prover = credential.prover(peers.key_file, node.places.munge)
    credential.check(prover)
    sockets = listen.sockets(peers, name)
    asyncio.run(_serve(node, prover, sockets))


async def _serve(node: Node, prover: Prover, sockets: list[socket.socket]) -> None:
    service = Service(node, prover, Counters(node.places.peer, node.clock.wall()))
    runner = web.ServerRunner(_Server(service), shutdown_timeout=SHUTDOWN)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await runner.setup()
    for one in sockets:
        await web.SockSite(runner, one, backlog=listen.BACKLOG).start()
    where = " ".join(str(one.getsockname()[:2]) for one in sockets)
    log.say(f"peer serves at {where}", by_slurm=False)
    while not stop.is_set():
        service.tidy()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)
    service.arrivals.end()
    await runner.cleanup()
    service.close()
