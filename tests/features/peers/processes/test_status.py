"""What `forestage status` says of peers."""

from __future__ import annotations

from commands import Site


def test_bytes_sent_by_peer_service_are_shown(site: Site) -> None:
    assert "served" not in site.run("status").output
    assert site.json("status")["served"] is None
    site.places.peer.parent.mkdir(parents=True, exist_ok=True)
    site.places.peer.write_text('{"since": 1, "bytes": 1048576, "chunks": 1}')
    assert "1 MiB in 1 chunk to other nodes" in site.run("status").output
    assert site.json("status")["served"]["bytes"] == 1048576
