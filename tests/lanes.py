"""Several pytest processes that share the tests: each takes what no other has taken yet.

Tests on a cluster mostly wait for it, so that others can run meanwhile. What is shared out are
groups: the tests of one file, or those of them that are on the same cluster. See ./test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

TAKEN = "FORESTAGE_TEST_TAKEN"  # a directory that the processes have in common
CLUSTERS_FIRST = "FORESTAGE_TEST_CLUSTERS_FIRST"  # set: this one begins with those
# These take longest; what begins last should be over soon.
LONGEST = ["load", "suites", "peers", "job_waits", "step_waits", "step_sees", "bad_input"]
LONGEST += ["job_stages", "linters", "source_hangs", "stager_killed", "waiting"]


def taken_here() -> Path | None:
    return Path(os.environ[TAKEN]) if TAKEN in os.environ else None


def run(session: pytest.Session, taken: Path) -> None:
    """As pytest's own loop, with those tests only that fall to this process."""
    items = _falling_here(in_order(session.items, CLUSTERS_FIRST in os.environ), taken)
    item = next(items, None)
    while item is not None:
        # An item is told what follows, so that what both need is kept.
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following


def group_of(item: pytest.Item) -> str:
    """What must stay together: a file, or what is on one cluster of several that it starts."""
    call = getattr(item, "callspec", None)  # only what has parameters has one
    cluster = call.indices.get("cluster_spec", 0) if call else 0
    return f"{item.path.parent.name}-{item.path.stem}-{cluster}"


def in_order(items: Sequence[pytest.Item], clusters_first: bool) -> list[pytest.Item]:
    """The tests on clusters before all others, or after them; the longest first."""

    def rank(item: pytest.Item) -> tuple[bool, int]:
        on_cluster = item.get_closest_marker("slurm") is not None
        places = {name: place for place, name in enumerate(LONGEST)}
        place = places.get(item.path.stem.removeprefix("test_"), len(LONGEST))
        return on_cluster != clusters_first, place

    return sorted(items, key=rank)


def _falling_here(items: Sequence[pytest.Item], taken: Path) -> Iterator[pytest.Item]:
    mine: dict[str, bool] = {}
    for item in items:
        group = group_of(item)
        if group not in mine:
            mine[group] = _take(taken / group)
        if mine[group]:
            yield item


def _take(group: Path) -> bool:
    """Whether it was there to be had: of all processes one only can make the directory."""
    try:
        group.mkdir()
    except FileExistsError:
        return False
    return True
