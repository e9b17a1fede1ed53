"""What does the peer service answer? Chunks of images, for other nodes. It knows keys, not paths.

    GET  /v1/challenge             what a credential has to answer
    POST /v1/session               a credential; gives the session's name, sealed
    GET  /v1/chunk/<key>/<number>  Range: the chunk's place in the image; sealed both ways

A chunk of a copy under way is waited for, as long as the client likes, up to WAIT. The bytes go
from the page cache to the network by sendfile(2). Nothing else is answered, and nothing listed.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import msgspec
from aiohttp import web

from forestage import credential, log, shelf
from forestage.cache.node import Node
from forestage.cache.part import ENTRY_BYTES, MAX_SHARED
from forestage.connections import Connections
from forestage.counters import Counters
from forestage.credential import MAX_TEXT, Challenges, Prover, Refused
from forestage.errors import ForestageError
from forestage.sessions import Session, Sessions
from forestage.shelf import Absent, Coming, Found, Held
from forestage.turns import Arrivals, Pace

WAIT = 5.0  # seconds for a chunk on its way, at most
DECODERS = 4  # unmunge at once: who has nothing to show must not take the node's processors
SLOWEST = 1 << 20  # bytes a second; who takes a chunk more slowly than that,
GRACE = 30.0  # after so many seconds, is cut off
_CHUNK = re.compile(r"/v1/chunk/([0-9a-f]{32})/(0|[1-9][0-9]{0,8})")
_COUNTER = re.compile(r"[0-9]{1,18}")
_SECONDS = re.compile(r"[0-9]{1,2}(\.[0-9]{1,3})?")


class Opened(msgspec.Struct, frozen=True):
    """The answer to a credential; the seal shows that this server could read it."""

    session: str
    seal: str


class _Ask(NamedTuple):
    """A request that is known to be a client's own; `wait` in seconds."""

    session: Session
    counter: int
    number: int
    span: str
    wait: float


class _No(Exception):
    """An answer without a chunk; `why` is for our own log where it is a refusal."""

    def __init__(self, status: int, why: str = "") -> None:
        super().__init__(why)
        self.status = status


class Service:
    """What all requests share."""

    def __init__(self, node: Node, prover: Prover, counters: Counters) -> None:
        self.cache = node.cache
        self.now: Callable[[], float] = node.clock.monotonic
        self.prover = prover
        self.counters = counters
        self.challenges = Challenges()
        self.sessions = Sessions()
        self.connections = Connections(self.now)
        self.arrivals = Arrivals(node.cache)
        self.pace = Pace(node.config.peers.bandwidth, self.now)
        self.uploads = asyncio.Semaphore(node.config.peers.uploads)
        self.decoders = asyncio.Semaphore(DECODERS)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every request begins here, and every expected error ends here."""
        with self.connections.busy(request.protocol):
            try:
                return await self._answer(request)
            except _No as no:
                if no.args[0]:
                    self.counters.refused(request.remote or "", no.args[0])
                return web.Response(status=no.status)
            except OSError as error:  # the cache's disk, or the client has gone
                if not isinstance(error, ConnectionError):
                    self.counters.refused(request.remote or "", str(error))
                if request.transport is not None:  # half an answer may be out already
                    request.transport.abort()
                return web.Response(status=500)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        # As it was sent: percent signs are no way round the pattern.
        where = (request.method, request.raw_path)
        if where == ("GET", "/v1/challenge"):
            return web.Response(text=self.challenges.fresh(self.now()))
        if where == ("POST", "/v1/session"):
            return await self._open(request)
        chunk = _CHUNK.fullmatch(request.raw_path)
        if chunk is None or request.method != "GET":
            raise _No(404)
        ask = self._known(request, chunk[1], int(chunk[2]))
        self.connections.proven(request.protocol)
        try:
            return await self._give(request, ask)
        except _No as no:
            has = self._has(ask)
            seal = credential.of_answer(ask.session.secret, ask.counter, no.status, has)
            return web.Response(
                status=no.status, headers={"Forestage-Has": has, "Forestage-Seal": seal}
            )

    async def _open(self, request: web.BaseRequest) -> web.Response:
        """A credential for a session."""
        length = request.content_length
        if length is None or not 0 < length <= MAX_TEXT:
            raise _No(413)
        try:
            text = (await request.content.readexactly(length)).decode(errors="replace")
        except asyncio.IncompleteReadError:
            raise _No(400) from None
        async with self.decoders:
            # Who has gone while waiting is not worth it; nobody else ends his request.
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError
            try:
                claim = await asyncio.to_thread(self.prover.read, text)
                self.challenges.spend(claim.challenge, self.now())
            except Refused as refused:
                raise _No(403, str(refused)) from None
            except ForestageError as failed:  # munge is not installed any more
                raise _No(503, str(failed)) from None
        session = Session(claim, request.remote or "", self.now())
        self.end(self.sessions.add(session))
        self.counters.opened()
        self.connections.proven(request.protocol)
        seal = credential.of_session(session.secret, session.id)
        return web.Response(body=msgspec.json.encode(Opened(session.id, seal)))

    def _known(self, request: web.BaseRequest, key: str, number: int) -> _Ask:
        """Who asks, if it is a session's own request and none that was heard before."""
        said = request.headers
        counter, span = said.get("Forestage-Counter", ""), said.get("Range", "")
        session = self.sessions.find(said.get("Forestage-Session", ""), self.now())
        if session is None or not _COUNTER.fullmatch(counter):
            raise _No(401)
        right = credential.of_request(
            session.secret, request.method, request.raw_path, span, int(counter)
        )
        if not credential.same(right, said.get("Forestage-Seal", "")):
            raise _No(403, "a wrong seal on a request")
        if not session.is_new(int(counter)):
            raise _No(403, "a request a second time")
        if session.key != key:
            raise _No(403, f"a session for {session.key} asks for {key}")
        wait = said.get("Forestage-Wait", "")
        seconds = float(wait) if _SECONDS.fullmatch(wait) else 0.0
        return _Ask(session, int(counter), number, span, min(WAIT, seconds))

    async def _give(self, request: web.BaseRequest, ask: _Ask) -> web.StreamResponse:
        end = self.now() + ask.wait
        held = await self._held(ask, end)
        try:
            async with self._turn(held.size, end):
                return await self._send(request, ask, held)
        finally:
            os.close(held.file)

    async def _held(self, ask: _Ask, end: float) -> Held:
        """The chunk, at once or when it arrives. Raises _No."""
        found: Found = shelf.look(self.cache, ask.session.key, ask.number)
        if isinstance(found, Coming):
            self._must_fit(ask, found)
            await self.arrivals.wait(ask.session.key, ask.number, end - self.now())
            found = shelf.look(self.cache, ask.session.key, ask.number)
        if not isinstance(found, Held):
            raise _No(416 if isinstance(found, Absent) and found.beyond else 404)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, found.file)
            self._must_fit(ask, found)
            undo.pop_all()
        return found

    def _must_fit(self, ask: _Ask, found: Held | Coming) -> None:
        """A node with another `chunk_size` means other bytes by the same number."""
        if ask.span != f"bytes={found.start}-{found.start + found.size - 1}":
            raise _No(416)

    def _has(self, ask: _Ask) -> str:
        """Hex, bit 5 for chunk 5; "" without a copy. It spares the client to ask in vain.

        A `!` behind it: nothing is read here any more, others are to do so in our stead. "" as well
        where it would be longer than clients take a header.
        """
        digests = shelf.arrived(self.cache, ask.session.key)
        fits = 0 < len(digests) <= MAX_SHARED * ENTRY_BYTES
        blind = "!" if shelf.is_blind(self.cache, ask.session.key) else ""
        return f"{shelf.has(digests):x}{blind}" if fits else ""

    @contextlib.asynccontextmanager
    async def _turn(self, size: int, end: float) -> AsyncIterator[None]:
        """One of the uploads at once, and within the bandwidth. Raises _No when it is too late."""
        try:
            await asyncio.wait_for(self.uploads.acquire(), max(0.0, end - self.now()) + 0.01)
        except asyncio.TimeoutError:
            raise _No(503) from None
        try:
            if not await self.pace.take(size, end):
                raise _No(503)
            yield
        finally:
            self.uploads.release()

    async def _send(self, request: web.BaseRequest, ask: _Ask, held: Held) -> web.StreamResponse:
        digest = held.told or await asyncio.to_thread(shelf.taken, held)
        has = self._has(ask)
        seal = credential.of_answer(ask.session.secret, ask.counter, 206, has, digest, held.size)
        response = web.StreamResponse(
            status=206,
            headers={"Forestage-Digest": digest, "Forestage-Has": has, "Forestage-Seal": seal},
        )
        response.content_length = held.size
        limit = GRACE + held.size / SLOWEST
        try:
            await asyncio.wait_for(self._bytes(request, response, held), limit)
        except asyncio.TimeoutError:
            raise ConnectionResetError from None
        ask.session.chunks += 1
        ask.session.bytes += held.size
        self.counters.served(ask.session.key, held.size)
        return response

    async def _bytes(
        self, request: web.BaseRequest, response: web.StreamResponse, held: Held
    ) -> None:
        os.posix_fadvise(held.file, held.start, held.size, os.POSIX_FADV_WILLNEED)
        await response.prepare(request)
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError
        # Not web.FileResponse: it would obey If-Range and the like, and open the file by a path.
        with os.fdopen(os.dup(held.file), "rb") as file:
            loop = asyncio.get_running_loop()
            await loop.sendfile(request.transport, file, held.start, held.size)
        await response.write_eof()

    def end(self, sessions: list[Session]) -> None:
        """One line for each session, when it is over."""
        for session in sessions:
            log.say(f"peer {session.told()}", by_slurm=False)

    def tidy(self) -> None:
        """What is due once a second."""
        self.connections.sweep()
        self.end(self.sessions.expire(self.now()))
        self._write_counts()

    def close(self) -> None:
        self.end(self.sessions.end())
        self._write_counts()

    def _write_counts(self) -> None:
        # A full /run is no reason to stop serving.
        with contextlib.suppress(OSError):
            self.counters.flush()
