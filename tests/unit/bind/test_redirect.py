"""Redirects: the decisions, as tables. The mounts themselves are in tests/hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.bind import redirect
from forestage.bind.redirect import (
    RedirectBind,
    choose_redirect_step,
    list_stale_binds,
    list_unneeded_binds,
)
from forestage.cache.layout import Cache
from forestage.system import mounts
from forestage.system.mounts import MountInfo


def bind(path: str, key: str) -> RedirectBind:
    return RedirectBind(MountInfo(0, 0, "0:0", "", path), key)


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        ([], "mount"),
        ([bind("/other", "key")], "mount"),
        ([bind("/a", "key")], "keep"),
        ([bind("/a", "older")], "unmount"),
        ([bind("/a", "")], "unmount"),
        ([bind("/a", "older"), bind("/a", "key")], "keep"),
        # What lies on top is what the job would see.
        ([bind("/a", "key"), bind("/a", "older")], "unmount"),
    ],
)
def test_redirect_step_is_mount_keep_or_unmount_by_the_topmost_bind(
    bound: list[RedirectBind], expected: str
) -> None:
    assert choose_redirect_step(bound, "/a", "key") == expected


BINDS = st.lists(
    st.builds(bind, st.sampled_from(["/a", "/b", "/c"]), st.sampled_from(["k", "l", ""]))
)
PATHS = st.frozensets(st.sampled_from(["/a", "/b", "/c"]))


@given(BINDS, PATHS)
def test_unneeded_binds_are_those_of_paths_that_no_lease_needs(
    bound: list[RedirectBind], needed: frozenset[str]
) -> None:
    taken = list_unneeded_binds(bound, needed)
    assert all(one.path not in needed for one in taken)
    assert [one for one in bound if one not in taken] == [b for b in bound if b.path in needed]


@given(BINDS, PATHS)
def test_stale_binds_are_those_on_the_given_paths_that_show_another_key(
    bound: list[RedirectBind], paths: frozenset[str]
) -> None:
    taken = list_stale_binds(bound, paths, "k")
    assert all(one.path in paths and one.key != "k" for one in taken)
    # Taking the stale ones off is all that is needed before the next step.
    left = [one for one in bound if one not in taken]
    assert all(choose_redirect_step(left, path, "k") in ("mount", "keep") for path in paths)


@pytest.mark.parametrize(
    ("inside", "key"),
    [
        ("entries/0a/image", "0a"),
        ("entries/0a/image//deleted", ""),
        ("evicted/0a.0/image", ""),
        ("evicted/0a.0/image//deleted", ""),
        ("parts/0a/image", ""),
    ],
)
def test_bind_of_an_evicted_or_deleted_entry_has_no_key(
    monkeypatch: pytest.MonkeyPatch, inside: str, key: str
) -> None:
    table = [
        MountInfo(1, 0, "0:1", "/", "/"),
        MountInfo(2, 1, "0:1", f"/nowhere/cache/{inside}", "/lustre/a"),
    ]
    monkeypatch.setattr(mounts, "list_mounts", lambda: table)
    (found,) = redirect.list_binds(Cache(Path("/nowhere/cache")))
    assert (found.path, found.key) == ("/lustre/a", key)
