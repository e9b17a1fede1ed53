"""What `forestage status` says of peers."""

from __future__ import annotations

from commands import CHUNK, Site
from forestage.commands import copies
from forestage.system import lock


def test_status_shows_the_bytes_and_chunks_sent_to_other_nodes(site: Site) -> None:
    assert "served" not in site.run("status").output
    assert site.json("status")["served"] is None
    site.places.peer_counts.parent.mkdir(parents=True, exist_ok=True)
    site.places.peer_counts.write_text('{"since": 1, "bytes": 1048576, "chunks": 1}')
    assert "1 MiB in 1 chunk to other nodes" in site.run("status").output
    assert site.json("status")["served"]["bytes"] == 1048576


def test_status_of_a_running_copy_shows_the_bytes_sent_to_other_nodes(site: Site) -> None:
    _, owner = site.part(site.image("a.sqsh", b"x" * CHUNK), phase="copying")
    site.places.peer_counts.parent.mkdir(parents=True, exist_ok=True)
    site.places.peer_counts.write_text(f'{{"since": 1, "keys": {{"{owner.image.key}": 4096}}}}')
    with lock.held(site.node.cache.key_lock(owner.image.key), 0):
        (copy,) = copies.list_copies(site.node)
    assert copy.served == 4096
