"""Which entry is meant, and what is said of it: never another one than the user named."""

from collections.abc import Callable

import pytest

from forestage.admin.inventory import Item, items_of, pick
from forestage.cache.evict import Goal, Room, plan
from forestage.cache.image import Access, Identity, Image
from forestage.cache.layout import Entry, Stored
from forestage.cache.lease import Lease, Use
from forestage.errors import NotFound
from forestage.stage.source import compared
from forestage.system.as_user import User


def stored(key: str, path: str = "/a", created: float = 1.0, used: float = 1.0) -> Stored:
    entry = Entry(key, Identity(path, 1, 2, 3, 4), Access(0, 0, 0o644), created, "rsync")
    return Stored(key, 4096, used, False, entry)


def items(*found: Stored) -> tuple[Item, ...]:
    return items_of(found, [])


def nowhere(path: str) -> str:
    return "/nowhere"


def test_superseded_items_are_what_evict_takes_first() -> None:
    found = [stored("k1", created=1, used=9), stored("k2", created=2, used=1), stored("k3", "/b")]
    assert [item.key for item in items(*found) if item.superseded] == ["k1"]
    room = Room(free=0, used=1 << 40, max_size=1 << 40, min_free=0, low=0)
    assert plan(found, frozenset(), room, Goal(free=1, used=1 << 40)).victims == ("k1",)


def test_ambiguous_prefix_is_refused_with_its_keys() -> None:
    both = items(stored("abcd1" + "0" * 27), stored("abcd2" + "0" * 27))
    with pytest.raises(NotFound, match=r"abcd10.*abcd20"):
        pick(both, "abcd", nowhere)
    assert [item.key[:5] for item in pick(both, "abcd2", nowhere)] == ["abcd2"]


def test_short_prefix_is_not_found() -> None:
    with pytest.raises(NotFound):
        pick(items(stored("abcd" + "0" * 28)), "abc", nowhere)


def test_whole_key_wins_over_longer_ones() -> None:
    both = items(stored("abcd"), stored("abcd" + "0" * 28))
    assert [item.key for item in pick(both, "abcd", nowhere)] == ["abcd"]


def test_listed_path_is_found_without_resolving() -> None:
    def hangs(path: str) -> str:
        raise AssertionError("resolved")

    assert pick(items(stored("k1", "/lustre/a")), "/lustre/a", hangs)[0].key == "k1"


def test_damaged_entry_has_no_path() -> None:
    damaged = Stored("k1", 4096, 1.0, False, None)
    with pytest.raises(NotFound):
        pick(items(damaged), "/x", lambda path: "")


def test_job_with_two_uses_is_listed_once() -> None:
    user = User("alice", 1000, 1000)
    lease = Lease(7, user, 0.0, "/nvme", (Use("k1"), Use("k1", "/a"), Use("k1", "/b")))
    assert items_of([stored("k1")], [lease])[0].jobs == (7,)


IMAGE = Image(Identity("/a", 1, 2, 3, 4), Access(0, 0, 0o644))
ENTRY = Entry(IMAGE.key, IMAGE.identity, IMAGE.access, 1.0, "rsync")


def identity(**changes: object) -> Callable[[], Image]:
    facts = {"path": "/a", "inode": 1, "size": 2, "mtime_ns": 3, "ctime_ns": 4, **changes}
    return lambda: Image(Identity(**facts), IMAGE.access)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (identity(path="/b"), "leads to /b"),
        (identity(inode=9), "another file"),
        (identity(size=9), "size is 9 B"),
        (identity(mtime_ns=9), "written to"),
        (identity(ctime_ns=9), "change time"),
        (lambda: Image(IMAGE.identity, Access(0, 0, 0o600)), "owner, mode or ACL"),
        (lambda: Image(IMAGE.identity, Access(0, 0, 0o644, b"acl")), "owner, mode or ACL"),
    ],
)
def test_every_difference_is_a_changed_source(now: Callable[[], Image], expected: str) -> None:
    found = compared(ENTRY, now())
    assert found.state == "changed"
    assert expected in found.detail


def test_same_image_is_unchanged() -> None:
    assert compared(ENTRY, IMAGE).state == "unchanged"
