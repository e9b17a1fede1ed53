"""A job on a node: what its path shows from the Prolog to the Epilog, also to its neighbours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from node import ALICE, BOB, Node, content, read_as


def test_cold_image_is_copied_and_its_path_shows_the_copy(node: Node) -> None:
    path = node.put("alice/image.sqsh", content(1))
    source = path.stat()

    ran = node.prolog(7, path)

    assert (ran.code, *ran.said, ran.outcome.redirect) == (0, "copied", "", "mounted")
    assert ran.outcome.bytes == ran.outcome.size == len(content(1))
    key = node.identity(path).key
    assert ran.outcome.key == key
    assert node.shows_entry(path, key)
    shown = path.stat()
    assert path.read_bytes() == content(1)
    assert (shown.st_uid, shown.st_gid, shown.st_mode) == (
        source.st_uid,
        source.st_gid,
        source.st_mode,
    )
    assert shown.st_mtime_ns == source.st_mtime_ns
    lease = node.held(7)
    assert (lease.job, lease.user, lease.cache) == (7, ALICE, str(node.cache.root))
    assert [(use.key, use.path) for use in lease.uses] == [(key, str(path))]
    assert os.listdir(node.places.leases) == ["7.json"]


def test_job_can_read_a_redirected_image_but_not_write(node: Node) -> None:
    path = node.staged(7)
    assert read_as(ALICE, path) == content()
    for flags in (os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
        with pytest.raises(OSError, match="Read-only file system"):
            os.open(path, flags)


def test_image_in_the_cache_is_not_copied_again(node: Node) -> None:
    path = node.staged(1)
    copy = node.cache.image_path(node.identity(path).key)
    before = copy.stat()
    node.epilog(1)

    ran = node.prolog(2, path, user=BOB)

    assert (*ran.said, ran.outcome.bytes, ran.outcome.redirect) == ("hit", "", 0, "mounted")
    assert (copy.stat().st_ino, copy.stat().st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
    assert node.shows_entry(path, ran.outcome.key)


def test_epilog_removes_redirect_and_lease_and_keeps_the_entry(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    key = node.prolog(7, path).outcome.key

    ran = node.epilog(7)

    assert (ran.code, *ran.said, ran.outcome.unmounted) == (0, "released", "", 1)
    assert node.binds() == {}
    assert node.shows_source(path)
    assert node.lease(7) is None
    assert node.entries() == {key}
    for empty in (node.cache.parts, node.cache.evicted, node.places.leases, node.places.redirects):
        assert list(empty.iterdir()) == []


def test_redirect_stays_until_the_last_job_with_a_lease_ends(node: Node) -> None:
    path = node.put("alice/image.sqsh")
    key = node.prolog(1, path).outcome.key
    assert node.prolog(2, path, user=BOB).outcome.redirect == "kept"
    node.epilog(1)
    assert node.shows_entry(path, key)
    assert node.epilog(2).outcome.unmounted == 1
    assert node.shows_source(path)


def test_requeued_job_with_its_own_old_lease_is_served_again(node: Node) -> None:
    path = node.staged(7)
    ran = node.prolog(7, path)
    assert (ran.outcome.result, ran.outcome.redirect) == ("hit", "kept")
    lease = node.held(7)
    assert len(lease.uses) == 1
    node.epilog(7)
    assert node.binds() == {}


def test_all_images_of_a_job_are_staged_and_released(node: Node) -> None:
    option = node.put("alice/one.sqsh", content(1))
    hinted = node.put("alice/two,too.sqsh", content(2))
    hint = str(hinted).replace(",", "%2C")

    ran = node.prolog(7, option, comment=f"mine; stage={hint},{option} thanks")

    assert [(o.result, o.via, o.image) for o in ran.outcomes] == [
        ("copied", "option", str(option)),
        ("copied", "hint", str(hinted)),
    ]
    assert set(node.binds()) == {str(option), str(hinted)}
    assert hinted.read_bytes() == content(2)
    assert node.epilog(7).outcome.unmounted == 2
    assert node.binds() == {}


def test_path_with_blanks_and_backslashes_is_redirected_and_released(node: Node) -> None:
    path = node.put("alice/a b\\tü\x0cx.sqsh")
    link = node.server / "alice/link"
    link.symlink_to(node.shared / path.relative_to(node.shared))
    key = node.prolog(7, node.shared / "alice/link").outcome.key
    assert node.shows_entry(path, key)
    assert node.epilog(7).outcome.unmounted == 1
    assert node.shows_source(path)


@pytest.mark.parametrize("asked", ["./alice/image.sqsh", "../shared/alice/image.sqsh", "link"])
def test_relative_path_or_symlink_is_followed_and_its_target_redirected(
    node: Node, asked: str
) -> None:
    path = node.put("alice/image.sqsh")
    (node.server / "link").symlink_to("alice/image.sqsh")
    asked = str(node.shared / asked) if asked == "link" else asked
    ran = node.prolog(7, asked)
    assert ran.outcome.image == str(path)
    assert set(node.binds()) == {str(path)}
    assert node.shows_entry(node.shared / asked, ran.outcome.key)


def _in_place(node: Node, path: Path) -> None:
    (node.server / path.relative_to(node.shared)).write_bytes(content(2))


def _by_rename(node: Node, path: Path) -> None:
    new = node.put("alice/.new", content(2))
    file = node.server / path.relative_to(node.shared)
    node.elsewhere(lambda: os.replace(node.server / new.relative_to(node.shared), file))


@pytest.mark.parametrize("change", [_in_place, _by_rename])
def test_next_job_sees_a_changed_source_while_an_older_lease_exists(
    node: Node, change: object
) -> None:
    assert callable(change)
    path = node.put("alice/image.sqsh", content(1))
    old = node.prolog(1, path).outcome.key
    with path.open("rb") as late:
        change(node, path)

        ran = node.prolog(2, path)

        assert (ran.outcome.result, ran.outcome.redirect) == ("copied", "mounted")
        assert ran.outcome.key != old
        assert path.read_bytes() == content(2)
        # The first job's bytes: what it has open, and its leased entry.
        assert late.read() == content(1)
        assert node.cache.image_path(old).read_bytes() == content(1)
    node.epilog(1)
    assert path.read_bytes() == content(2)
    node.epilog(2)
    assert node.binds() == {}


def test_source_with_other_bytes_but_same_size_and_mtime_is_another_image(node: Node) -> None:
    path = node.put("alice/image.sqsh", content(1))
    old = node.prolog(1, path).outcome.key
    source = node.server / "alice/image.sqsh"
    before = source.stat()
    source.write_bytes(content(2))
    # What a careless tool leaves: other bytes under the same size and time.
    os.utime(source, ns=(before.st_mtime_ns, before.st_mtime_ns))
    ran = node.prolog(2, path)
    assert ran.outcome.key != old
    assert path.read_bytes() == content(2)


def test_image_deleted_under_a_redirect_is_declined_as_missing_for_the_next_job(node: Node) -> None:
    path = node.staged(1)
    node.elsewhere((node.server / "alice/image.sqsh").unlink)
    assert node.prolog(2, path).said == ("declined", "missing")
    assert node.binds() == {}
    assert not path.exists()
    assert node.epilog(1).code == 0


def test_redirect_none_stages_and_leases_but_mounts_nothing(node: Node) -> None:
    node.configure(redirect="none")
    path = node.put("alice/image.sqsh")
    ran = node.prolog(7, path)
    assert (ran.outcome.result, ran.outcome.redirect) == ("copied", "none")
    assert node.shows_source(path)
    lease = node.held(7)
    assert [use.path for use in lease.uses] == [""]
    assert node.epilog(7).said == ("released", "")


@pytest.mark.parametrize(
    ("asked", "saves"),
    [
        ("alice", "{}"),
        ("alice", "alice/image.sqsh"),
        ("alice", "./alice/../alice/image.sqsh"),
        ("home", "{}"),
    ],
)
def test_job_that_saves_to_its_own_image_is_not_redirected(
    node: Node, asked: str, saves: str
) -> None:
    path = node.put("alice/image.sqsh")
    (node.server / "home").symlink_to(node.shared / "alice")
    image = node.shared / asked / "image.sqsh"
    assert node.prolog(7, image, saves=saves.format(image)).outcome.redirect == "none"
    assert node.shows_source(path)


@pytest.mark.cases(2)
@pytest.mark.parametrize("saves", ["{}", "alice/image.sqsh", "./alice/image.sqsh"])
def test_path_that_a_job_saves_to_is_not_redirected_while_the_job_runs(
    node: Node, saves: str
) -> None:
    path = node.staged(1)
    assert (
        node.prolog(2, saves=saves.format(path)).code == 0
    )  # srun --container-name --container-save
    assert node.shows_source(path)
    assert node.prolog(3, path).said == ("declined", "saved")
    assert node.shows_source(path)
    node.epilog(2)
    assert node.prolog(4, path).outcome.redirect == "mounted"


def test_job_that_saves_to_an_image_unmounts_another_jobs_redirect(node: Node) -> None:
    path = node.staged(1)
    node.prolog(2, path, saves=str(path))
    assert node.shows_source(path)
