"""Peer service, `forestage peer`: gives chunks of images to other nodes. It knows keys, not paths.

protocol.py has the requests, sessions.py the limits of clients, auth.py what proves a client. A
chunk of a copy under way is waited for, as long as the client likes, up to MAX_CHUNK_WAIT, and the
copy is told that it is wanted. The bytes go from the page cache to the network by sendfile(2).
Everything else is 404, and nothing is listed.

One event loop does it all, but for munge, which has threads.
"""

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import re
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import msgspec
from aiohttp import http_exceptions, web

from forestage import log
from forestage.cache import arrival_map, disk_errors
from forestage.cache.node import Node
from forestage.config import switch
from forestage.errors import Failed, ForestageError
from forestage.features.contexts import PeerServiceFacts, ServiceRoute
from forestage.features.doors import SERVICE_ROUTES, load_doors
from forestage.features.peers import (
    activation,
    addresses,
    auth,
    known_copies,
    listen_sockets,
    local_chunks,
    node_list,
    proven_node,
    sessions,
    wrong_data_notices,
)
from forestage.features.peers.auth import (
    MAX_CREDENTIAL_BYTES,
    Authenticator,
    BadCredential,
    SessionReply,
    VerifiedClaim,
)
from forestage.features.peers.local_chunks import (
    AbsentChunk,
    ChunkArrivalPoller,
    ChunkState,
    LocalCopyState,
    PendingChunk,
    PresentChunk,
)
from forestage.features.peers.sessions import ClientSession, SessionTable, UnprovenConnections
from forestage.features.peers.upload_counts import UploadCountWriter
from forestage.slurm.slurm_client import SlurmClient
from forestage.system import records

MAX_CHUNK_WAIT = 5.0  # seconds for a chunk on its way, at most
MAX_UPLOADS = 16  # chunks that this node sends at once
MAX_DECODERS = 4  # unmunge at once: whoever reaches the port could start any number of them
# A client has so many seconds for a chunk, and one more for each SLOWEST bytes of it.
GRACE = 30.0
SLOWEST = 1 << 20
CONNECTION_IDLE = 60.0  # seconds between two requests
SHUTDOWN = 2.0  # seconds for what is being uploaded when the service is stopped
OPEN_FILES = 65536  # as its unit has it
NOTE_EVERY = 60.0  # seconds between two notes of who has proven itself
MAX_TAKERS = (
    64  # nodes that got chunks of a key last: they are told where these turn out to be wrong
)
_CHUNK = re.compile(r"/v1/chunk/([0-9a-f]{32})/(0|[1-9][0-9]{0,8})")
_COUNTER = re.compile(r"[0-9]{1,18}")
_SECONDS = re.compile(r"[0-9]{1,2}(\.[0-9]{1,3})?")


class _AuthenticatedRequest(NamedTuple):
    """A request whose MAC was right; `wait` in seconds; `reach` and `node` are Forestage-Reach."""

    session: ClientSession
    counter: int
    number: int
    span: str
    wait: float
    reach: str
    node: str


class _HttpRefusal(Exception):
    """A response without a chunk. With a `why` it is counted and logged as a refusal."""

    def __init__(self, status: int, why: str = "") -> None:
        super().__init__(why)
        self.status = status
        self.why = why


class PeerService:
    """The service's state, and its answer to each request."""

    def __init__(
        self, node: Node, authenticator: Authenticator, counters: UploadCountWriter, name: str
    ) -> None:
        self.name = name
        self.cache = node.cache
        self.places = node.places
        self.service_facts = PeerServiceFacts(node.cache, node.places)
        self.routes = [route for routes in load_doors(SERVICE_ROUTES) for route in routes()]
        self.clock = node.clock
        self.through = node.places.through
        self.now: Callable[[], float] = node.clock.monotonic
        self.authenticator = authenticator
        self.counters = counters
        self.sessions = SessionTable()
        self.unproven = UnprovenConnections()
        self.arrivals = ChunkArrivalPoller(node.cache)
        self.reach = node.config.peers.reach
        self.peering = node.config.peers
        self.requesters = known_copies.RequesterTable()
        self.first_requesters = known_copies.RequesterTable(
            known_copies.READERS, known_copies.SPECULATIVE_SECONDS, first=True
        )
        self.recent_takers = known_copies.RequesterTable(MAX_TAKERS)
        self.recent_notices = known_copies.RequesterTable(
            wrong_data_notices.MAX_READERS, wrong_data_notices.REPEAT_AFTER
        )
        self.next_proof_note = 0.0  # not before, see _record_proof
        self.upload_rate = UploadRateLimit(node.config.peers.bandwidth, self.now)
        self.uploads = asyncio.Semaphore(MAX_UPLOADS)
        self.decoders = asyncio.Semaphore(MAX_DECODERS)

    async def handle_request(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers any request. Every expected error ends here."""
        try:
            return await self._dispatch_request(request)
        except _HttpRefusal as refused:
            if refused.why:
                self.counters.count_refusal(request.remote or "", refused.why)
            return web.Response(status=refused.status)
        except OSError as error:  # of the cache's disk, or the client has gone
            if error.errno == errno.EIO:  # it may not read the kernel's log, nor write to the cache
                with contextlib.suppress(OSError, Failed):
                    disk_errors.start_doubt(
                        self.places, self.clock, "the peer service could not read a chunk"
                    )
            if not isinstance(error, ConnectionError):
                self.counters.count_refusal(request.remote or "", str(error))
            if request.transport is not None:  # half of the response may be sent already
                request.transport.abort()
            return web.Response(status=500)

    async def _dispatch_request(self, request: web.BaseRequest) -> web.StreamResponse:
        # raw_path as it was sent: no decoding of percent signs goes round the pattern.
        if (request.method, request.raw_path) == ("POST", "/v1/session"):
            return await self._open_session(request)
        if request.method != "GET":
            raise _HttpRefusal(404)
        for route in self.routes:
            if found := route.path.fullmatch(request.raw_path):
                return await self._answer_route(request, route, found)
        chunk = _CHUNK.fullmatch(request.raw_path)
        if copies := known_copies.PATH.fullmatch(request.raw_path):
            return self._answer_copies(request, copies[1], copies[2])
        if wrong := wrong_data_notices.PATH.fullmatch(request.raw_path):
            return self._answer_notice(request, wrong[1], wrong[2])
        if chunk is None:
            raise _HttpRefusal(404)
        ask = self._authenticate(request, chunk[1], int(chunk[2]))
        self.unproven.discard(request.protocol)
        try:
            return await self._answer_chunk(request, ask)
        except _HttpRefusal as refused:
            has = self._format_has_header(ask)
            mac = auth.response_mac(ask.session.secret, ask.counter, refused.status, has)
            return web.Response(
                status=refused.status, headers={"Forestage-Has": has, "Forestage-Mac": mac}
            )

    async def _open_session(self, request: web.BaseRequest) -> web.Response:
        """Decodes a credential and opens the session that it asks for."""
        claim = await self._read_claim(request)
        session = ClientSession(claim, request.remote or "", self.now())
        try:
            self.sessions.add(session)
        except BadCredential as refused:
            raise _HttpRefusal(403, str(refused)) from None
        self.counters.count_session()
        self.unproven.discard(request.protocol)
        opened = SessionReply(session.id, auth.session_mac(session.secret, session.id))
        return web.Response(body=msgspec.json.encode(opened))

    async def _read_claim(self, request: web.BaseRequest) -> VerifiedClaim:
        """What the credential says that is the request's body. Raises _HttpRefusal."""
        length = request.content_length
        if length is None or not 0 < length <= MAX_CREDENTIAL_BYTES:
            raise _HttpRefusal(413)
        try:
            # What a proven connection sends slowly, aiohttp would wait for without end.
            body = request.content.readexactly(length)
            text = (await asyncio.wait_for(body, sessions.PROOF_TIMEOUT)).decode(errors="replace")
        except (asyncio.IncompleteReadError, TimeoutError):
            raise _HttpRefusal(400) from None
        async with self.decoders:
            # A client that has gone meanwhile is worth no unmunge, and aiohttp does not tell us.
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError
            try:
                return await asyncio.to_thread(self.authenticator.read_credential, text)
            except BadCredential as refused:
                raise _HttpRefusal(403, str(refused)) from None
            except ForestageError as failed:  # munge is not installed (any more)
                raise _HttpRefusal(503, str(failed)) from None

    def _authenticate(
        self, request: web.BaseRequest, key: str, number: int
    ) -> _AuthenticatedRequest:
        """The request, if its MAC is right and it did not come before. Raises _HttpRefusal."""
        headers = request.headers
        counter, span = headers.get("Forestage-Counter", ""), headers.get("Range", "")
        session = self.sessions.find(headers.get("Forestage-Session", ""))
        if session is None or not _COUNTER.fullmatch(counter):
            raise _HttpRefusal(401)
        right = auth.request_mac(
            session.secret, session.id, request.method, request.raw_path, span, int(counter)
        )
        if not auth.is_same_mac(right, headers.get("Forestage-Mac", "")):
            raise _HttpRefusal(403, "a wrong MAC on a request")
        self.sessions.touch(session, self.now())
        self._record_proof(request, session)
        if not session.try_use_counter(int(counter)):
            raise _HttpRefusal(403, "a request a second time")
        if session.key != key:
            raise _HttpRefusal(403, f"a session for {session.key} asks for {key}")
        wait = headers.get("Forestage-Wait", "")
        reach, _, node = headers.get("Forestage-Reach", "").partition(" ")
        # What this node takes from others it may not have read itself: nobody of another job waits.
        seconds = float(wait) if _SECONDS.fullmatch(wait) and reach != "cluster" else 0.0
        return _AuthenticatedRequest(
            session, int(counter), number, span, min(MAX_CHUNK_WAIT, seconds), reach, node
        )

    def _record_proof(self, request: web.BaseRequest, session: ClientSession) -> None:
        """Note, now and then, that another node has this one's key: its MAC was right."""
        transport = request.transport
        own = transport.get_extra_info("sockname") if transport else None
        # A connection from one address of this host to another one has the same at both ends.
        if own is None or own[0] == session.client or self.now() < self.next_proof_note:
            return
        self.next_proof_note = self.now() + NOTE_EVERY
        names: dict[str, str] = {}
        with contextlib.suppress(OSError):
            listed = node_list.read_addresses(self.places, self.clock.wall())
            names = {address: name for name, address in listed.items()}
        node = names.get(session.client, session.client)
        proven_node.record_proven_node(self.places, node, self.clock.wall())

    async def _answer_route(
        self, request: web.BaseRequest, route: ServiceRoute, found: re.Match[str]
    ) -> web.Response:
        """Give what another feature's service.py finds for a session of this key."""
        ask = self._authenticate(request, found["key"], 0)
        self.unproven.discard(request.protocol)
        try:
            body = route.open_reply(self.service_facts, found)
            if isinstance(body, bytes):
                return self._make_proven_response(ask, body)
            with body as file:
                size = os.fstat(file.fileno()).st_size
                async with self._upload_slot(size, self.now() + MAX_CHUNK_WAIT):
                    return self._make_proven_response(ask, file.read())
        except (FileNotFoundError, NotADirectoryError, records.DamagedRecord):
            mac = auth.response_mac(ask.session.secret, ask.counter, 404, "")
            return web.Response(status=404, headers={"Forestage-Mac": mac})

    def _answer_copies(self, request: web.BaseRequest, key: str, node: str | None) -> web.Response:
        """Says who may have a copy, and remembers who asks."""
        ask = self._authenticate(request, key, 0)
        self.unproven.discard(request.protocol)
        if self.reach != "cluster":
            raise _HttpRefusal(404)
        known = local_chunks.read_copy_state(self.cache, key)
        has = bool(known.chunks_for_other_jobs(known.chunks_here())) and not self._is_off()
        about = key, node, self.now()
        answer = known_copies.KnownCopiesReply(
            has,
            self.requesters.record_and_list(*about),
            self.first_requesters.record_and_list(*about),
        )
        return self._make_proven_response(ask, msgspec.json.encode(answer))

    def _answer_notice(self, request: web.BaseRequest, key: str, reader: str) -> web.Response:
        """Gives on nothing more of what the reader read, and tells those who got any of it."""
        ask = self._authenticate(request, key, 0)
        self.unproven.discard(request.protocol)
        if reader not in self.recent_notices.record_and_list(key, None, self.now()):
            self.recent_notices.record_and_list(key, reader, self.now())
            if wrong_data_notices.chunks_read_by(
                local_chunks.read_copy_state(self.cache, key).read_by, reader, self.name
            ):
                wrong_data_notices.record_notice(self.places, key, reader)
            takers = self.recent_takers.record_and_list(key, None, self.now())
            log.write_log_line(f"peer key={key} reader={reader} read wrong bytes", by_slurm=False)
            said = (
                addresses.load_addresses(self.peering, self.places),
                takers,
                key,
                reader,
                self.authenticator,
            )
            asyncio.get_running_loop().run_in_executor(None, wrong_data_notices.send_notices, *said)
        return self._make_proven_response(ask, b"{}")

    def _wrong_chunks(self, key: str) -> int:
        """The chunks that are known to be wrong; -1 is all."""
        found = 0
        for reader in wrong_data_notices.read_wrong_readers(self.places, key):
            known = local_chunks.read_copy_state(self.cache, key)
            found |= wrong_data_notices.chunks_read_by(known.read_by, reader, self.name)
        return found

    def _make_proven_response(self, ask: _AuthenticatedRequest, body: bytes) -> web.Response:
        digest = hashlib.sha256(body).hexdigest()
        mac = auth.response_mac(ask.session.secret, ask.counter, 200, "", digest, len(body))
        headers = {"Forestage-Digest": digest, "Forestage-Mac": mac}
        return web.Response(status=200, body=body, headers=headers)

    async def _answer_chunk(
        self, request: web.BaseRequest, ask: _AuthenticatedRequest
    ) -> web.StreamResponse:
        end = self.now() + ask.wait
        found = await self._wait_for_chunk(ask, end)
        with found.file:
            self._check_same_span(ask, found)
            async with self._upload_slot(found.size, end):
                return await self._send_chunk(request, ask, found)

    async def _wait_for_chunk(self, ask: _AuthenticatedRequest, end: float) -> PresentChunk:
        """The chunk, at once or when it arrives. Raises _HttpRefusal."""
        known = local_chunks.read_copy_state(self.cache, ask.session.key)
        # What arrives only after this look may be anybody's.
        if (
            not self._chunks_for_requester(ask, known, known.chunks_here(ask.number)) >> ask.number
            & 1
        ):
            raise _HttpRefusal(404)
        found: ChunkState = local_chunks.locate_chunk(self.cache, ask.session.key, ask.number)
        if isinstance(found, PendingChunk):
            self._check_same_span(ask, found)
            if ask.wait:  # else it only wants to know what is here
                arrival_map.request_chunk_soon(self.through / ask.session.key, ask.number)
            await self.arrivals.wait_for_chunk(ask.session.key, ask.number, end - self.now())
            found = local_chunks.locate_chunk(self.cache, ask.session.key, ask.number)
        if not isinstance(found, PresentChunk):
            raise _HttpRefusal(
                416 if isinstance(found, AbsentChunk) and found.is_beyond_end else 404
            )
        return found

    def _chunks_for_requester(
        self, ask: _AuthenticatedRequest, known: LocalCopyState, here: int
    ) -> int:
        """Of what is here, the chunks that who asks may have; its own job also what comes later."""
        if self._is_off():
            return 0
        right = ~self._wrong_chunks(ask.session.key)
        if ask.reach != "cluster":
            return right
        return known.chunks_for_other_jobs(here & right) if self.reach == "cluster" else 0

    def _is_off(self) -> bool:
        """Return whether the admin has switched this node's staging off: its bytes may be why."""
        return bool(switch.find_off_file_reason(self.places, self.clock.wall()))

    def _check_same_span(
        self, ask: _AuthenticatedRequest, found: PresentChunk | PendingChunk
    ) -> None:
        """Raise _HttpRefusal if the client has another `chunk_size`, and means other bytes."""
        if ask.span != f"bytes={found.start}-{found.start + found.size - 1}":
            raise _HttpRefusal(416)

    def _format_has_header(self, ask: _AuthenticatedRequest) -> str:
        """The chunks that are in: hex, bit 5 for chunk 5; "" without a copy.

        A `!` behind it says that the source fails here, so that others read in this node's stead,
        and `@n7` who read the chunk from the source.
        """
        known = local_chunks.read_copy_state(self.cache, ask.session.key)
        failed = "!" if local_chunks.has_source_failed(self.cache, ask.session.key) else ""
        if not known.digests:
            return ""
        here = known.chunks_here()
        reader = (known.read_by and known.read_by.find_reader(ask.number)) or self.name
        return f"{here & self._chunks_for_requester(ask, known, here):x}{failed}@{reader}"

    @contextlib.asynccontextmanager
    async def _upload_slot(self, size: int, end: float) -> AsyncIterator[None]:
        """Around one upload: bounds their number and bandwidth. Raises _HttpRefusal at `end`."""
        try:
            await asyncio.wait_for(self.uploads.acquire(), max(0.0, end - self.now()) + 0.01)
        except asyncio.TimeoutError:
            raise _HttpRefusal(503) from None
        try:
            if not await self.upload_rate.wait_for_turn(size, end):
                raise _HttpRefusal(503)
            yield
        finally:
            self.uploads.release()

    async def _send_chunk(
        self, request: web.BaseRequest, ask: _AuthenticatedRequest, found: PresentChunk
    ) -> web.StreamResponse:
        digest = found.digest.hex()
        has = self._format_has_header(ask)
        mac = auth.response_mac(ask.session.secret, ask.counter, 206, has, digest, found.size)
        response = web.StreamResponse(
            status=206,
            headers={"Forestage-Digest": digest, "Forestage-Has": has, "Forestage-Mac": mac},
        )
        response.content_length = found.size
        limit = GRACE + found.size / SLOWEST
        try:
            await asyncio.wait_for(self._send_file_range(request, response, found), limit)
        except asyncio.TimeoutError:
            raise ConnectionResetError from None
        ask.session.chunks += 1
        ask.session.bytes += found.size
        if ask.node:
            self.recent_takers.record_and_list(ask.session.key, ask.node, self.now())
        self.counters.count_chunk(ask.session.key, found.size)
        return response

    async def _send_file_range(
        self, request: web.BaseRequest, response: web.StreamResponse, found: PresentChunk
    ) -> None:
        os.posix_fadvise(found.file.fileno(), found.start, found.size, os.POSIX_FADV_WILLNEED)
        await response.prepare(request)
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError
        # Not web.FileResponse: it would obey If-Range and the like, and open the file by its path.
        loop = asyncio.get_running_loop()
        await loop.sendfile(request.transport, found.file, found.start, found.size)
        await response.write_eof()

    def expire_and_flush(self) -> None:
        """Ends what is due; called once a second."""
        self.unproven.cut_expired(self.now())
        self.sessions.end_expired(self.now())
        self.counters.flush()

    def close(self) -> None:
        """Ends all sessions, and writes the last counts."""
        self.sessions.end_sessions()
        self.counters.flush()


class UploadRateLimit:
    """Rate limit of all uploads together, in bytes a second; None is no limit."""

    def __init__(self, rate: int | None, now: Callable[[], float]) -> None:
        self._rate = rate
        self._now = now
        self._free_at = 0.0

    async def wait_for_turn(self, size: int, end: float) -> bool:
        """Waits until `size` bytes may go; False, at once, where that is later than `end`."""
        if self._rate is None:
            return True
        now = self._now()
        start = max(self._free_at, now)
        if start > max(end, now):
            return False
        self._free_at = start + size / self._rate
        await asyncio.sleep(start - now)
        return True


class _HttpLogHandler(logging.Handler):
    """aiohttp's log. What is no HTTP counts as refused; all else is a fault of ours."""

    def __init__(self, counters: UploadCountWriter) -> None:
        super().__init__(logging.WARNING)
        self.counters = counters

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, http_exceptions.HttpProcessingError):
            self.counters.count_refusal("", type(error).__name__)
        else:  # with its traceback
            log.write_log_line(self.format(record), by_slurm=False)


class _HttpServer(web.Server):
    """aiohttp's server, with the service's limits on connections."""

    def __init__(self, service: PeerService) -> None:
        logger = logging.Logger("peer")  # has no parent: nobody else gets its records
        logger.addHandler(_HttpLogHandler(service.counters))
        super().__init__(
            service.handle_request,
            access_log=None,
            logger=logger,
            keepalive_timeout=CONNECTION_IDLE,
            lingering_time=0,
            max_line_size=1024,
            max_field_size=1024,
            read_bufsize=2 * MAX_CREDENTIAL_BYTES,
            auto_decompress=False,
        )
        self.service = service

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.service.unproven.add(handler, transport, self.service.now())

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.service.unproven.discard(handler)


def run_service(node: Node, name: str, slurm: SlurmClient) -> None:
    """Runs the service until SIGTERM or SIGINT. `name` is this node's, as Slurm has it.

    Where peers are off, or on by default and there is no credential, it logs that and returns: a
    service without work is no failure. Raises ConfigError where this node has no such address,
    PeerError if munge does not answer, for want of the port, or of a credential with
    `peers.enabled: true`, LockTimeout, OSError.
    """
    peers = node.config.peers
    if not activation.may_serve(node.config):
        log.write_log_line(
            f"peer serves nobody: {activation.explain_no_service(node.config)}", by_slurm=False
        )
        return
    try:
        prover = auth.make_authenticator(peers.key_file, node.places)
    except auth.NoCredential as none:
        if not activation.is_automatic(node.config):
            raise  # an admin has asked for peers: its unit starts it again, and alerts say so
        log.write_log_line(f"peer serves nobody: {none}", by_slurm=False)
        return
    auth.check_authenticator(prover)
    counters = UploadCountWriter(node.places.peer_counts, node.clock.wall())
    service = PeerService(node, prover, counters, name)
    _raise_open_file_limit(OPEN_FILES)
    sockets = listen_sockets.open_service_sockets(peers, node.places, name, slurm)
    with activation.hold_sign(node.places) as renew_sign:
        asyncio.run(_serve_until_stopped(service, sockets, renew_sign))


async def _serve_until_stopped(
    service: PeerService, sockets: list[socket.socket], renew_sign: Callable[[], None]
) -> None:
    runner = web.ServerRunner(_HttpServer(service), shutdown_timeout=SHUTDOWN)
    _report_loop_errors(
        asyncio.get_running_loop(), lambda why: service.counters.count_refusal("", why)
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await runner.setup()
    for one in sockets:
        await web.SockSite(runner, one, backlog=listen_sockets.BACKLOG).start()
    where = " ".join(str(one.getsockname()[:2]) for one in sockets)
    log.write_log_line(f"peer serves at {where}", by_slurm=False)
    while not stop.is_set():
        service.expire_and_flush()
        with contextlib.suppress(OSError):  # of a full /run: the lock says it as well
            renew_sign()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)
    service.arrivals.wake_waiters()
    await runner.cleanup()
    service.close()


def _report_loop_errors(loop: asyncio.AbstractEventLoop, report: Callable[[str], None]) -> None:
    """Have the loop's own errors reported as text, without a traceback.

    For each connection that it cannot accept for want of descriptors asyncio would write one, and
    it tries as many in a row as its backlog has (_accept_connection of selector_events.py).
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        # It tries each of them again after a second: the socket may have been closed by then.
        is_late = isinstance(error, ValueError) and "handle" in context
        if isinstance(error, OSError) or is_late:
            report(str(error))
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def _raise_open_file_limit(most: int) -> None:
    """Raise the soft limit of open files to the hard one, to `most` at most: shells have 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft not in (resource.RLIM_INFINITY, max(soft, wanted)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
