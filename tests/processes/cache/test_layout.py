"""The cache on disk: a crash at any step leaves no half entry, and nothing that blocks the next."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forestage.cache import layout as module
from forestage.cache.layout import Cache, Entry
from forestage.cache.source_image import SourceImage
from node import until
from parking import Park

Publish = Callable[[SourceImage], Entry]
Make = Callable[..., SourceImage]


def test_crash_while_publishing_leaves_no_entry_and_a_second_publish_succeeds(
    cache: Cache, publish: Publish, make_image: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Cache, "evict_entry", crash)
        with pytest.raises(KeyboardInterrupt):
            publish(make_image())
    assert cache.find_entry(make_image()) is None
    assert cache.list_entries() == []
    cache.drop_part(make_image().key)
    publish(make_image())


def test_evicted_entry_is_not_found_but_stays_readable_for_a_process_that_has_it_open(
    cache: Cache, publish: Publish, make_image: Make
) -> None:
    key = make_image().key
    publish(make_image())
    with cache.image_path(key).open("rb") as late:
        cache.evict_entry(key)
        assert cache.find_entry_by_key(key) is None
        cache.delete_evicted()
        assert list(cache.evicted.iterdir()) == []
        assert late.read() == b"xxxxx"


def test_evicted_entry_with_a_hanging_reader_does_not_delay_other_deletions(
    cache: Cache,
    publish: Publish,
    make_image: Make,
    park: Park,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """unlink(2) waits for the inode, where no signal ends it, and has the directory's lock."""
    monkeypatch.setattr(module, "DELETION", 0.2)
    held, other = make_image(), make_image(path="/mnt/shared/other.sqsh")
    for one in (held, other):
        publish(one)
    cache.image_path(held.key).write_bytes(bytes(4 * 4096))
    park(cache.image_path(held.key), "read")
    for one in (held, other):
        cache.evict_entry(one.key)
    cache.delete_evicted()
    assert [path.name for path in cache.evicted.iterdir()] == [f"{held.key}.0"]
    monkeypatch.setattr(module, "DELETION", 60.0)  # who hangs with it is known: nobody waits again
    cache.delete_evicted()
    park.let_go()

    def is_gone() -> bool:
        cache.delete_evicted()
        return not list(cache.evicted.iterdir())

    until(is_gone, "what was held to be deleted")
