"""Processor time of a connection to a peer."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest

from forestage.config import ServiceAddress
from forestage.features.peers import connection
from forestage.features.peers.connection import POLL_INTERVAL, PeerConnection, ResponseDeadline

PIECE, PIECES = 1024, 256
HEAD = b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\n\r\n" % (PIECE * PIECES)


def trickle(server: socket.socket) -> None:
    line, _ = server.accept()
    with line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.recv(4096)
        line.sendall(HEAD)
        for number in range(PIECES):
            line.sendall(bytes([number]) * PIECE)
            time.sleep(0.001)  # a packet of its own for each


def test_slowly_arriving_chunk_does_not_wake_its_thread_for_each_packet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It did: that was most of what many copies on one machine took of its processors."""
    woken: list[int] = []
    receive = socket.socket.recv_into

    def counted(self: socket.socket, *args: Any) -> int:
        count = receive(self, *args)
        woken.append(count)
        return count

    monkeypatch.setattr(socket.socket, "recv_into", counted)
    for patience in ("CONNECT_TIMEOUT", "SILENCE_TIMEOUT"):
        monkeypatch.setattr(connection, patience, 600.0)
    start = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=[server])
        thread.start()
        line = PeerConnection(ServiceAddress("127.0.0.1", server.getsockname()[1]))
        try:
            answer = line.fetch_response(
                "GET", "/", {}, ResponseDeadline(5.0, start + 600, lambda: False)
            )
            got = bytearray(PIECE * PIECES)
            assert answer.readinto(got) == len(got)
        finally:
            line.close()
            thread.join()
    assert got == b"".join(bytes([number]) * PIECE for number in range(PIECES))
    # Where the packets come slowly, each moment of waiting ends once.
    assert len(woken) < PIECES / 4 + (time.monotonic() - start) / POLL_INTERVAL
