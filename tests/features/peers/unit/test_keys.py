"""What `peers:` may say, and what it means."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from forestage.config import KEYS, REMOVED_KEYS, Config, ServiceAddress, load_config
from forestage.config.keys import PeersSection
from forestage.errors import ConfigError, ConfigProblem


def write(etc: Path, text: str, name: str = "forestage.yaml") -> Path:
    file = etc / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    file.chmod(0o644)
    return file


def refused(etc: Path, text: str) -> ConfigProblem:
    """What is wrong with the only file."""
    write(etc, text)
    with pytest.raises(ConfigError) as caught:
        load_config(etc)
    (problem,) = caught.value.problems
    return problem


def test_empty_peers_section_leaves_the_defaults(tmp_path: Path) -> None:
    write(tmp_path, "peers:")
    assert load_config(tmp_path).config == Config()


@pytest.mark.parametrize(
    ("text", "key", "what"),
    [
        ("peers: true", "peers", "expected keys and values"),
        ("peers: {enabeld: true}", "peers.enabeld", "did you mean peers.enabled?"),
        ("peers: {digest: false}", "peers.digest", "unknown key"),
        (
            "peers.enabled: true",
            "peers.enabled",
            "expected `peers:`, and `enabled:` indented below it",
        ),
        ("engine: rsync\npeers: {enabled: true}", "peers.enabled", "needs `engine: chunks`"),
    ],
)
def test_invalid_peers_section_is_refused_with_file_and_key(
    tmp_path: Path, text: str, key: str, what: str
) -> None:
    problem = refused(tmp_path, text)
    assert (problem.where, problem.key) == (str(tmp_path / "forestage.yaml"), key)
    assert what in problem.what


@pytest.mark.parametrize(
    ("key", "raw", "what"),
    [
        ("port", 0, "expected a whole number from 1 to 65535"),
        ("listen", "a" * 256, "expected null or an address, a name"),
        ("listen", "a\nb", "expected null or an address, a name"),
        ("address", "n1", "expected an address with {node} in it"),
        ("address", "{node}:x", "expected a port"),
        ("key_file", "key", "expected null or an absolute"),
        ("key_file", "/", "a path below /, got '/'"),
        ("key_file", "/a/../b", "'/b', got '/a/../b'"),
        ("key_file", "/a\nb", "without control characters"),
    ],
)
def test_invalid_value_of_a_peers_key_is_refused(key: str, raw: object, what: str) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        KEYS[f"peers.{key}"].parse_value(raw)


def test_peers_key_file_with_a_hash_round_trips_through_yaml() -> None:
    key = KEYS["peers.key_file"]
    assert yaml.safe_load(key.format_value(key.parse_value("/a #b"))) == "/a #b"


def test_later_configuration_file_overrides_single_keys_of_the_peers_section(
    tmp_path: Path,
) -> None:
    main = write(tmp_path, "peers: {port: 1, reach: cluster}")
    later = write(tmp_path, "peers: {port: 80}", "conf.d/10-a.yaml")
    found = load_config(tmp_path)
    assert found.config == Config(peers=PeersSection(port=80, reach="cluster"))
    assert found.origins["peers.port"] == str(later)
    assert found.origins["peers.reach"] == str(main)


def test_removed_peers_addresses_key_accepts_node_names_equal_to_keys(tmp_path: Path) -> None:
    write(tmp_path, "peers: {addresses: {deadline: 10.0.0.1, sources: 10.0.0.2}}")
    assert list(load_config(tmp_path).removed) == ["peers.addresses"]


def test_peers_enabled_and_reach_are_not_among_the_removed_keys() -> None:
    """Whoever takes one of these away has to say what becomes of what it excluded."""
    excluding = {"peers.enabled", "peers.reach"}
    assert excluding <= set(KEYS)
    assert excluding.isdisjoint(REMOVED_KEYS)


def test_peers_address_pattern_is_filled_with_the_node_name() -> None:
    assert PeersSection(address="{node}-ib:7000").node_address("n1") == ServiceAddress(
        "n1-ib", 7000
    )
    assert PeersSection(port=80).node_address("n2") == ServiceAddress("n2", 80)
