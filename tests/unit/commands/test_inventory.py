"""Which entry is meant, and what is said of it: never another one than the user named."""

from collections.abc import Callable

import pytest

from forestage.cache.layout import Entry, StoredEntry
from forestage.cache.lease import EntryUse, Lease
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage
from forestage.commands.entry_sources import compare_with_source
from forestage.commands.inventory import InventoryItem, make_items, pick_items
from forestage.errors import NotFoundError
from forestage.system.as_user import User


def stored(key: str, path: str = "/a", created: float = 1.0, used: float = 1.0) -> StoredEntry:
    entry = Entry(key, FileIdentity(path, 1, 2, 3, 4), AccessRights(0, 0, 0o644), created, "rsync")
    return StoredEntry(key, 4096, used, False, entry)


def items(*found: StoredEntry) -> tuple[InventoryItem, ...]:
    return make_items(found, [])


ONE, OTHER, LISTED = "abcd1" + "0" * 27, "abcd2" + "0" * 27, "/lustre/a"


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("abcd2", OTHER),
        ("ABCD2", OTHER),
        ("abcd2" + "0" * 26, OTHER),
        ("abcd", "abcd"),  # a whole key wins over longer ones
        (LISTED, ONE),
    ],
)
def test_word_that_matches_one_entry_by_key_prefix_or_path_picks_that_entry(
    word: str, key: str
) -> None:
    def hangs(path: str) -> str:
        raise AssertionError("a path as `ls` prints it needs no look at the file server")

    held = items(stored(ONE, LISTED), stored(OTHER), stored("abcd"))
    assert [item.key for item in pick_items(held, word, hangs)] == [key]


@pytest.mark.parametrize(
    ("word", "why"),
    [("abcd", f"{ONE}, {OTHER}"), ("abc", "no entry"), ("/x", "no entry")],
)
def test_word_that_matches_no_entry_or_several_is_refused(word: str, why: str) -> None:
    damaged = StoredEntry("k1", 4096, 1.0, False, None)  # it has no path
    held = items(stored(ONE, LISTED), stored(OTHER), damaged)
    with pytest.raises(NotFoundError, match=why):
        pick_items(held, word, lambda path: "")


def test_inventory_lists_a_job_with_two_uses_of_an_entry_once() -> None:
    user = User("alice", 1000, 1000)
    lease = Lease(
        7, user, 0.0, "/nvme", (EntryUse("k1"), EntryUse("k1", "/a"), EntryUse("k1", "/b"))
    )
    assert make_items([stored("k1")], [lease])[0].jobs == (7,)


IMAGE = SourceImage(FileIdentity("/a", 1, 2, 3, 4), AccessRights(0, 0, 0o644))
ENTRY = Entry(IMAGE.key, IMAGE.identity, IMAGE.access, 1.0, "rsync")


def identity(**changes: object) -> Callable[[], SourceImage]:
    facts = {"path": "/a", "inode": 1, "size": 2, "mtime_ns": 3, "ctime_ns": 4, **changes}
    return lambda: SourceImage(FileIdentity(**facts), IMAGE.access)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (identity(path="/b"), "leads to /b"),
        (identity(inode=9), "another file"),
        (identity(size=9), "size is 9 B"),
        (identity(mtime_ns=9), "written to"),
        (identity(ctime_ns=9), "change time"),
        (lambda: SourceImage(IMAGE.identity, AccessRights(0, 0, 0o600)), "owner, mode or ACL"),
        (
            lambda: SourceImage(IMAGE.identity, AccessRights(0, 0, 0o644, b"acl")),
            "owner, mode or ACL",
        ),
    ],
)
def test_entry_is_changed_if_any_part_of_its_sources_identity_differs(
    now: Callable[[], SourceImage], expected: str
) -> None:
    found = compare_with_source(ENTRY, now())
    assert found.state == "changed"
    assert expected in found.detail


def test_entry_is_unchanged_if_its_source_is_the_same() -> None:
    assert compare_with_source(ENTRY, IMAGE).state == "unchanged"
