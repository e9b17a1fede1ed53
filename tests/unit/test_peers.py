"""Whom a copy may ask: the nodes of its job, as Slurm writes them, and nobody a user invents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.config import Config, Peering
from forestage.errors import PeerError
from forestage.peers import MAX_NODES, Peers, expand


@pytest.fixture
def config(tmp_path: Path) -> Config:
    file = tmp_path / "key"
    file.write_bytes(b"k" * 64)
    file.chmod(0o600)
    return Config(peers=Peering(enabled=True, key_file=str(file)))


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("a1,b[2-3].example-x", ["a1", "b2.example-x", "b3.example-x"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("login", ["login"]),
    ],
)
def test_a_list_of_slurms_is_its_nodes(nodelist: str, names: list[str]) -> None:
    assert sorted(expand(nodelist)) == names


@pytest.mark.parametrize(
    "nodelist",
    [
        "",
        "(null)",
        "@all",
        "n[1-",
        "n[3-1]",
        "n[]",
        "n1:22",
        "n[1-2]:22",
        "n1/x",
        "n1 n2",
        "n1\n",
        "-n1",
        "n1,,n2",
        "*",
        "n[1-3]!n2",
        "n[1-999999999]",
        "n[1-999]x[1-999]",
        ",".join(["n[1-9999]"] * 7),
        "n[" + "1," * 70000 + "2]",
        "١",
    ],
)
def test_what_is_no_list_or_too_long_a_one_is_nobody(nodelist: str) -> None:
    assert expand(nodelist) == ()


@given(st.text(alphabet="n1[]-,.@:!&^% ", max_size=30))
def test_any_text_ends_in_names_of_hosts(text: str) -> None:
    for name in expand(text):
        assert name.replace(".", "").replace("-", "").isalnum()


def test_the_largest_list_is_taken() -> None:
    assert len(expand(f"n[1-{MAX_NODES}]")) == MAX_NODES
    assert expand(f"n[0-{MAX_NODES}]") == ()


@pytest.mark.parametrize("nodelist", ["", "n1", "n[1]", "n[1-2", "(null)"])
def test_a_job_of_one_node_asks_nobody(config: Config, nodelist: str) -> None:
    assert Peers.of(config, "n1", nodelist, "k") is None


def test_peers_that_are_off_are_not_asked(config: Config) -> None:
    assert Peers.of(Config(), "n1", "n[1-2]", "k") is None
    assert Peers.of(config, "", "n[1-2]", "k") is None


def test_the_nodes_are_the_jobs_and_this_one(config: Config) -> None:
    found = Peers.of(config, "n1", "n[1-3]", "k")
    assert found is not None
    assert (found.nodes, found.me) == (("n1", "n2", "n3"), "n1")
    found = Peers.of(config, "other", "n[1-2]", "k")
    assert found is not None
    assert found.nodes == ("n1", "n2", "other")


def test_a_key_file_that_cannot_be_used_is_our_fault(config: Config) -> None:
    Path(config.peers.key_file or "").chmod(0o644)
    with pytest.raises(PeerError):
        Peers.of(config, "n1", "n[1-2]", "k")


ALONE = """
import sys
from forestage.peers import Peers
from forestage.config import Config, Peering
for enabled, nodes in ((True, "n1"), (True, ""), (False, "n[1-9]")):
    assert Peers.of(Config(peers=Peering(enabled=enabled)), "n1", nodes, "k") is None
costly = {"ClusterShell", "http.client", "asyncio", "aiohttp", "hmac", "ssl", "socket"}
print(sorted(costly & set(sys.modules)))
"""


def test_a_copy_alone_loads_nothing_for_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-BIc", ALONE], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[]\n"
