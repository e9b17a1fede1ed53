"""A write that began before a copy from NFS and lands after it: where it is parked decides."""

from __future__ import annotations

import collections
import json
import os
from pathlib import Path
from typing import Any

import pytest
from compute import IMAGES, Compute

ROUNDS = int(os.environ.get("FORESTAGE_PARKED", "4"))
SECOND, OTHER = "/mnt/second", "/mnt/other"
# To the server the one is the same client by another mount, the other is another client: a client
# has a name for each minor version.
MOUNTS = {SECOND: "vers=4.2", OTHER: "vers=4.1"}
SHARE = "/export/images"


@pytest.fixture
def farfs_there(node: Compute, farfs: Path) -> str:
    """The program, in the machine; and more mounts of the share."""
    path = "/tmp/farfs"
    node.vm.put(path, farfs.read_bytes())
    node.run(f"chmod 755 {path}")
    for point, version in MOUNTS.items():
        mount = f"mount -t nfs4 -o {version},hard,nosharecache 127.0.0.1:/ {point}"
        node.run(f"mkdir -p {point}; mountpoint -q {point} || {mount}")
    return path


def rounds(node: Compute, farfs: str, where: str) -> list[dict[str, Any]]:
    """What each round's copy came to (parking.py)."""
    name = node.image("parked", mib=3, mode="666").path.rsplit("/", 1)[1]
    script = Path(__file__).with_name("parking.py").read_text()
    words = f"{farfs} {where}/{name} {IMAGES}/{name} {SHARE}/{name} {ROUNDS}"
    done = node.run(f"cat >/tmp/parking.py; python3 /tmp/parking.py {words}", stdin=script)
    found = [json.loads(line) for line in done.out.splitlines()]
    assert len(found) == ROUNDS
    print(where, collections.Counter(str(one) for one in found))
    return found


@pytest.mark.parametrize(
    "where",
    [IMAGES, f"{SECOND}/images", f"{OTHER}/images"],
    ids=["node", "second_mount", "other"],
)
def test_copy_made_during_a_write_parked_on_an_nfs_client_is_no_hit_afterwards(
    node: Compute, farfs_there: str, where: str
) -> None:
    """What was copied before it shows by the times that the server gives it, once it is there."""
    assert [one for one in rounds(node, farfs_there, where) if one.get("next") == "hit"] == []


def test_wrong_copy_of_a_write_parked_on_the_server_is_found_only_by_verify(
    node: Compute, farfs_there: str
) -> None:
    """Its times are those of its beginning: docs/security.md, Writes under way."""
    wrong = [one for one in rounds(node, farfs_there, SHARE) if one["wrong"]]
    assert {one["next"] for one in wrong} == {"hit"}
    assert [one for one in wrong if one["dropped"] != ["bad"]] == []
