"""The peers of a copy: the nodes of its job, or none."""

from __future__ import annotations

import subprocess
import sys

ALONE = """
import sys
from forestage.features import peers
from forestage.config import Config
from forestage.config.keys import PeersSection
config = Config(peers=PeersSection(enabled=True))
for nodes in ("n1", ""):
    assert peers.find_peer_client(config, "n1", nodes, "k") is None
costly = {"ClusterShell", "http.client", "asyncio", "aiohttp", "hmac", "ssl", "socket"}
print(sorted(costly & set(sys.modules)))
"""


def test_copy_without_peers_imports_no_peer_modules() -> None:
    ran = subprocess.run(
        [sys.executable, "-BIc", ALONE], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[]\n"
