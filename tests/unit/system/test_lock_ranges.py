"""Which bytes of the file in /run a process locks, by its kind and its user."""

from __future__ import annotations

from itertools import pairwise

from forestage.system.lock_ranges import LOCK_RANGES, UIDS, LockRange

LAST_OFFSET = (1 << 63) - 1  # of a file, and of a lock


def last_byte(one: LockRange) -> int:
    return one.first_byte(UIDS - 1) + one.width - 1


def test_lock_ranges_of_all_users_and_process_kinds_are_disjoint() -> None:
    ordered = sorted(LOCK_RANGES, key=lambda one: one.start)
    assert ordered[0].start >= 0
    assert last_byte(ordered[-1]) <= LAST_OFFSET
    for one in ordered:
        assert one.first_byte(1) - one.first_byte(0) >= one.width > 0
    for before, after in pairwise(ordered):
        assert last_byte(before) < after.start
