"""How fast a node reads an image's source: measured by a copy, or not known."""

import msgspec
import pytest

from commands import Site
from forestage.cache import baseline, hot_pieces
from forestage.cache.layout import Entry
from forestage.cache.part import HOT_PIECE
from forestage.system import records


@pytest.fixture
def key(site: Site) -> str:
    """An entry of 8 MiB whose source gave 1 MiB a second."""
    key = site.publish(site.image("a.sqsh", bytes(8 << 20)))
    file = site.node.cache.entry_dir(key) / "entry.json"
    entry = msgspec.structs.replace(records.load(file, Entry), rate=1048576)
    records.write(file, msgspec.json.encode(entry))
    return key


def seconds(site: Site, key: str, **config: object) -> float:
    node = site.node
    return baseline.estimate_read_seconds(
        node.cache, msgspec.structs.replace(node.config, **config), key
    )


def test_baseline_of_an_unpacking_start_is_reading_the_whole_image(site: Site, key: str) -> None:
    assert seconds(site, key) == 8.0


def test_baseline_of_a_mounting_start_is_reading_the_hot_pieces(site: Site, key: str) -> None:
    wanted = site.look(site.lustre / "a.sqsh")
    hot_pieces.save_hot_map(site.node.cache, wanted, {0, 7})
    assert seconds(site, key) == 2 * HOT_PIECE / 1048576
    assert seconds(site, key, unpack_ratio=0) == 2.0


def test_baseline_is_zero_without_unpack_ratio_and_hot_map(site: Site, key: str) -> None:
    assert seconds(site, key, unpack_ratio=0) == 0.0


def test_baseline_of_an_entry_that_has_no_rate_or_is_missing_is_zero(site: Site) -> None:
    assert seconds(site, site.publish(site.image("b.sqsh"))) == 0.0
    assert seconds(site, "f" * 32) == 0.0


@pytest.mark.parametrize("text", [b"", b"[", b'{"a":1}', b'["x"]'])
def test_damaged_hot_map_is_ignored_in_the_baseline(site: Site, key: str, text: bytes) -> None:
    (site.node.cache.entry_dir(key) / "hot").write_bytes(text)
    assert seconds(site, key) == 8.0
