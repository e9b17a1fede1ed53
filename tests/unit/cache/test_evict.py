"""Eviction: nothing that is leased or pinned, nothing in vain, and in the right order."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures import half
from forestage.cache import evict
from forestage.cache.evict import (
    CacheSpace,
    EvictionGoal,
    EvictionPlan,
    goal_at_rest,
    goal_for_copy,
    plan,
)
from forestage.cache.layout import Cache, Entry, StoredEntry
from forestage.cache.lease import LeaseDirectory
from forestage.cache.part import boot_id
from forestage.cache.source_image import AccessRights, FileIdentity, ImageKind, SourceImage
from forestage.config import Config
from forestage.errors import Declined
from forestage.system import lock
from forestage.units import SizeOrShare

Make = Callable[..., SourceImage]
Publish = Callable[[SourceImage], Entry]

NO_LIMIT = 10**12
ALL_MAY_STAY = Config(
    max_size=SizeOrShare(size=NO_LIMIT),
    min_free=SizeOrShare(size=0),
    low_watermark=SizeOrShare(share=1.0),
)
ALL_MUST_GO = Config(max_size=SizeOrShare(size=1), min_free=SizeOrShare(size=0))


def stored(
    key: str,
    used: float = 0,
    path: str = "",
    created: float = 0,
    size: int = 10,
    pinned: bool = False,
    damaged: bool = False,
    user: int | None = None,
    kind: ImageKind = "image",
) -> StoredEntry:
    identity = FileIdentity(path or f"/lustre/{key}", 1, size, 0, 0)
    access = AccessRights(0, 0, 0o644)
    entry = None if damaged else Entry(key, identity, access, created, "rsync", kind=kind)
    return StoredEntry(key, size, used, pinned, entry, user)


def room(free: int = 0, used: int = 100) -> CacheSpace:
    return CacheSpace(free, used, max_size=NO_LIMIT, min_free=0, low=NO_LIMIT, share=50)


def want(free: int) -> EvictionGoal:
    return EvictionGoal(free=free, used=NO_LIMIT)


@pytest.mark.parametrize("step", [3600.0, 40 * 86400.0])
def test_entry_dated_in_the_future_is_superseded_by_a_newer_entry_of_the_path(
    step: float,
) -> None:
    now = 1e9
    both = [stored("old", now + step, "/x", now + step), stored("new", now - 1, "/x", now - 1)]
    assert evict.list_superseded_keys(both, now=now) == {"old"}
    other = stored("other", 1)
    assert plan([*both, other], frozenset(), room(), want(1), now=now).victims == ("old",)


@pytest.mark.parametrize(
    ("things", "leased", "goal", "path", "expected"),
    [
        pytest.param([], "", want(0), "", EvictionPlan((), 0, True), id="nothing to do"),
        pytest.param([], "", want(1), "", EvictionPlan((), 0, False), id="nothing to evict"),
        pytest.param(
            [stored("a", 2), stored("b", 1)],
            "",
            want(10),
            "",
            EvictionPlan(("b",), 10, True),
            id="lru",
        ),
        pytest.param(
            [stored("a", 2), stored("b", 1)],
            "",
            want(11),
            "",
            EvictionPlan(("b", "a"), 20, True),
            id="stops only when the goal is met",
        ),
        pytest.param(
            [stored("a", 1), stored("b", 2)],
            "a",
            want(10),
            "",
            EvictionPlan(("b",), 10, True),
            id="leased",
        ),
        pytest.param(
            [stored("a", 1, pinned=True), stored("b", 2)],
            "",
            want(20),
            "",
            EvictionPlan(("b",), 10, False),
            id="pinned",
        ),
        pytest.param(
            [stored("a", 1), stored("b", 9, damaged=True)],
            "",
            want(1),
            "",
            EvictionPlan(("b",), 10, True),
            id="damaged first",
        ),
        pytest.param(
            [stored("a", 1), stored("old", 8, "/x", 1), stored("new", 9, "/x", 2)],
            "",
            want(1),
            "",
            EvictionPlan(("old",), 10, True),
            id="superseded by a newer entry of its path",
        ),
        pytest.param(
            [stored("new", 8, "/x", 2), stored("old", 9, "/x", 1)],
            "",
            want(1),
            "",
            EvictionPlan(("old",), 10, True),
            id="superseded by an entry listed before",
        ),
        pytest.param(
            [stored("a", 1), stored("old", 8, "/x", 1)],
            "",
            want(1),
            "/x",
            EvictionPlan(("old",), 10, True),
            id="superseded by the image being staged",
        ),
        pytest.param(
            [stored("old", 8, "/x", 1), stored("new", 9, "/x", 2), stored("a", 1)],
            "new",
            want(20),
            "",
            EvictionPlan(("old", "a"), 20, True),
            id="superseded, then lru, but not leased",
        ),
    ],
)
def test_eviction_plan_picks_the_expected_victims(
    things: list[StoredEntry], leased: str, goal: EvictionGoal, path: str, expected: EvictionPlan
) -> None:
    assert plan(things, frozenset(leased.split()), room(), goal, path) == expected


ALICE, BOB = 1, 2


@pytest.mark.parametrize(
    ("things", "copies", "user", "goal", "expected"),
    [
        pytest.param(
            [stored("b", 1, user=BOB)],
            {ALICE: 50},
            ALICE,
            want(10),
            EvictionPlan(("b",), 10, True),
            id="within the share: another user's entry goes",
        ),
        pytest.param(
            [stored("b", 1, user=BOB)],
            {ALICE: 51},
            ALICE,
            want(10),
            EvictionPlan((), 0, False),
            id="above the share: no other user's entry goes",
        ),
        pytest.param(
            [stored("b", 1, user=BOB), stored("s", 2), stored("a", 3, user=ALICE)],
            {ALICE: 41},
            ALICE,
            want(20),
            EvictionPlan(("a", "b"), 20, True),
            id="own entries first, until within the share",
        ),
        pytest.param(
            [stored("s", 1), stored("b", 2, user=BOB)],
            {ALICE: 51},
            ALICE,
            want(10),
            EvictionPlan((), 0, False),
            id="above the share: no common entry goes",
        ),
        pytest.param(
            [stored("s", 1, size=100), stored("t", 2)],
            {ALICE: 50},
            ALICE,
            want(1),
            EvictionPlan(("s",), 100, True),
            id="common entry counts for no share",
        ),
        pytest.param(
            [stored("a", 1, size=60, user=ALICE), stored("b", 2, user=BOB)],
            {},
            ALICE,
            want(0),
            EvictionPlan((), 0, True),
            id="free room is not limited by the share",
        ),
        pytest.param(
            [stored("a", 1, user=ALICE), *(stored(f"b{n}", 2 + n, user=BOB) for n in range(6))],
            {ALICE: 20},
            ALICE,
            want(20),
            EvictionPlan(("b0", "a"), 20, True),
            id="user above the share first",
        ),
        pytest.param(
            [stored("a", 1, user=ALICE), *(stored(f"b{n}", 2 + n, user=BOB) for n in range(6))],
            {},
            None,
            want(10),
            EvictionPlan(("b0",), 10, True),
            id="user above the share first, without a requesting user",
        ),
        pytest.param(
            [stored("old", 9, "/x", 1, user=BOB), stored("new", 1, "/x", 2, user=BOB)],
            {ALICE: 99},
            ALICE,
            want(10),
            EvictionPlan(("old",), 10, True),
            id="superseded entry of another user goes",
        ),
        pytest.param(
            [stored("w", 1, size=99, user=0), stored("b", 2, user=BOB)],
            {0: 99},
            0,
            want(109),
            EvictionPlan(("w", "b"), 109, True),
            id="root has no share to keep to",
        ),
    ],
)
def test_user_above_the_share_evicts_own_entries_not_those_of_other_users(
    things: list[StoredEntry],
    copies: dict[int, int],
    user: int | None,
    goal: EvictionGoal,
    expected: EvictionPlan,
) -> None:
    assert plan(things, frozenset(), room(), goal, "", copies, user) == expected


@pytest.mark.parametrize(
    ("things", "free", "data", "expected"),
    [
        pytest.param(
            [stored("a", 1), stored("b", 2)],
            10,
            5,
            EvictionPlan((), 0, False),
            id="no image goes for data",
        ),
        pytest.param(
            [stored("a", 1), stored("d", 2, kind="data"), stored("e", 3, kind="data")],
            10,
            5,
            EvictionPlan(("d",), 10, True),
            id="data goes for data, by last use",
        ),
        pytest.param(
            [stored("d", 2, kind="data"), stored("e", 3, kind="data")],
            0,
            15,
            EvictionPlan(("d",), 10, True),
            id="data keeps within its share, however much is free",
        ),
        pytest.param(
            [stored("d", kind="data")], 0, 31, EvictionPlan(("d",), 10, False), id="above the share"
        ),
        pytest.param(
            [stored("a", 1), stored("d", 9, kind="data", size=40)],
            10,
            0,
            EvictionPlan(("d",), 40, True),
            id="data above its share goes before images",
        ),
        pytest.param(
            [stored("a", 1), stored("d", 9, kind="data")],
            10,
            0,
            EvictionPlan(("a",), 10, True),
            id="data within its share goes by last use",
        ),
        pytest.param(
            [stored("old", 1, "/x", 1), stored("new", 2, "/x", 2), stored("d", 3, kind="data")],
            10,
            5,
            EvictionPlan(("old",), 10, True),
            id="an image that was superseded goes first",
        ),
    ],
)
def test_data_evicts_data_only_and_stays_within_its_share(
    things: list[StoredEntry], free: int, data: int, expected: EvictionPlan
) -> None:
    at = CacheSpace(0, 100, max_size=NO_LIMIT, min_free=0, low=NO_LIMIT, share=NO_LIMIT, data=30)
    assert plan(things, frozenset(), at, want(free), data=data) == expected


THINGS = st.lists(
    st.builds(
        stored,
        key=st.text("abcdefghijkl", min_size=1, max_size=3),
        used=st.integers(0, 5),
        path=st.sampled_from(["/x", "/y", "/z", ""]),
        created=st.integers(0, 5),
        size=st.integers(0, 100),
        pinned=st.booleans(),
        damaged=st.booleans(),
        user=st.sampled_from([None, 0, ALICE, BOB]),
    ),
    max_size=12,
    unique_by=lambda one: one.key,
)
KEYS = st.frozensets(st.text("abcdefghijkl", min_size=1, max_size=1))
ROOMS = st.builds(room, free=st.integers(0, 300), used=st.integers(0, 1000))
GOALS = st.builds(EvictionGoal, free=st.integers(0, 800), used=st.integers(-100, 1000))


COPIES = st.dictionaries(st.sampled_from([0, ALICE, BOB]), st.integers(0, 100))


@given(THINGS, KEYS, ROOMS, GOALS, st.sampled_from(["", "/x"]), COPIES, st.sampled_from([None, 1]))
def test_any_eviction_plan_spares_leased_and_pinned_entries_and_evicts_nothing_in_vain(
    things: list[StoredEntry],
    leased: frozenset[str],
    at: CacheSpace,
    goal: EvictionGoal,
    path: str,
    copies: dict[int, int],
    user: int | None,
) -> None:
    made = plan(things, leased, at, goal, path, copies, user)
    by_key = {one.key: one for one in things}

    def met(victims: tuple[str, ...]) -> bool:
        freed = sum(by_key[key].bytes for key in victims)
        return at.free + freed >= goal.free and at.used - freed <= goal.used

    assert len(set(made.victims)) == len(made.victims)
    assert not leased & set(made.victims)
    assert not any(by_key[key].pinned for key in made.victims)
    assert made.freed == sum(by_key[key].bytes for key in made.victims)
    assert made.is_enough == met(made.victims)
    # Stops as soon as the goal is met, and gives up only when all that may go is gone.
    assert not made.victims or not met(made.victims[:-1])
    evictable = {one.key for one in things if one.key not in leased and not one.pinned}
    taken = copies.get(ALICE, 0) + sum(
        one.bytes for one in things if one.user == ALICE and one.key not in made.victims
    )
    above = user == ALICE and taken > at.share
    assert made.is_enough or above or set(made.victims) == evictable
    # Whatever has to go for one above their share: others keep theirs up to their own.
    worthless = evict.list_superseded_keys(things, path) | {
        one.key for one in things if one.entry is None
    }
    lost = sum(by_key[key].bytes for key in made.victims if by_key[key].user == BOB)
    if above and lost and not worthless:
        before = copies.get(BOB, 0) + sum(one.bytes for one in things if one.user == BOB)
        last = next(key for key in reversed(made.victims) if by_key[key].user == BOB)
        assert before - lost + by_key[last].bytes > at.share


def test_eviction_goal_for_a_copy_keeps_min_free_and_max_size() -> None:
    at = CacheSpace(free=100, used=50, max_size=80, min_free=7, low=60, share=40)
    assert goal_for_copy(at, 20) == EvictionGoal(free=27, used=60)
    assert goal_at_rest(at) == EvictionGoal(free=7, used=60)
    # Larger than the cache may ever be: no eviction can help, so there is none.
    assert not plan([stored("a", size=50)], frozenset(), at, goal_for_copy(at, 81)).is_enough


def test_make_room_that_cannot_succeed_evicts_nothing(
    cache: Cache, leases: LeaseDirectory, publish: Publish, make_image: Make
) -> None:
    key = publish(make_image()).key
    with pytest.raises(Declined) as caught:
        evict.make_room(cache, leases, ALL_MUST_GO, "/lustre/b", 2)
    assert caught.value.reason == "no-room"
    assert cache.find_entry_by_key(key) is not None


def test_lock_files_of_keys_without_entry_or_part_are_removed_unless_held(
    cache: Cache, publish: Publish, make_image: Make
) -> None:
    entry = publish(make_image()).key
    half(cache, "part", boot_id())
    for key in (entry, "part", "gone", "begins"):
        cache.key_lock(key).touch()
    cache.space_lock.touch()
    (cache.locks / "folder.lock").mkdir()
    with lock.held(cache.key_lock("begins"), 0):
        evict.drop_dead_locks(cache)
    names = {file.name for file in cache.locks.iterdir()}
    keys = (entry, "part", "begins", "space", "folder")
    assert names == {f"{key}.lock" for key in keys}


def test_space_of_a_copy_under_way_counts_as_used(cache: Cache) -> None:
    """Two copies at once must not both take the same room."""
    before = evict.measure_space(cache, [], ALL_MAY_STAY).used
    cache.part_dir("key").mkdir()
    fd = os.open(cache.part("key").image, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, 1 << 20)
    os.close(fd)
    assert evict.measure_space(cache, [], ALL_MAY_STAY).used - before >= 1 << 20


def test_data_copies_under_way_count_against_the_share_of_data() -> None:
    at = CacheSpace(0, 100, NO_LIMIT, 0, NO_LIMIT, NO_LIMIT, data=30, data_under_way=15)
    things = [stored("a", 1), stored("d", 2, kind="data")]
    assert plan(things, frozenset(), at, want(0), data=5) == EvictionPlan((), 0, True)
    assert plan(things, frozenset(), at, want(0), data=6) == EvictionPlan(("d",), 10, True)
    assert plan(things, frozenset(), at, want(0), data=16) == EvictionPlan(("d",), 10, False)
