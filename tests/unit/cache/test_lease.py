"""Leases: one that is written protects its entry, and a damaged one is never taken for none."""

from __future__ import annotations

import contextlib
import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forestage.cache.job_notes import DirectoryCopyState, JobData, JobNotes
from forestage.cache.lease import MAX_BYTES, EntryUse, Lease, LeaseDirectory
from forestage.errors import Declined, Failed
from forestage.slurm.hints import Request
from forestage.system.as_user import User

ALICE = User("alice", 1000, 100)


def lease(job: int = 1, *uses: EntryUse) -> Lease:
    return Lease(job, ALICE, 5.0, "/cache", uses)


def test_lease_directory_of_a_fresh_boot_has_no_leases(leases: LeaseDirectory) -> None:
    assert leases.list_leases() == []
    assert leases.find_lease(1) is None
    assert (leases.leased_keys(), leases.list_redirected_paths()) == (frozenset(), frozenset())
    leases.drop_lease(1)


def test_written_leases_are_read_back_and_listed(leases: LeaseDirectory) -> None:
    one, two = lease(1, EntryUse("k", "/a")), lease(2, EntryUse("k"), EntryUse("l", "/b"))
    leases.write_lease(one)
    leases.write_lease(two)
    assert (leases.find_lease(1), leases.find_lease(2)) == (one, two)
    assert leases.list_leases() == [one, two]
    assert leases.leased_keys() == {"k", "l"}
    assert leases.list_redirected_paths() == {"/a", "/b"}


def test_lease_files_are_readable_by_root_only(leases: LeaseDirectory) -> None:
    leases.write_lease(lease())
    assert leases.directory.stat().st_mode & 0o777 == 0o700
    assert leases.lease_file(1).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"null", b"[]", b"\xff", b'{"job": 1}', b'{"job": "1"}', b"\0" * 100]
)
def test_damaged_lease_raises_instead_of_counting_as_no_lease(
    leases: LeaseDirectory, damage: bytes
) -> None:
    leases.write_lease(lease(1, EntryUse("k", "/a")))
    leases.write_lease(lease(2, EntryUse("l", "/b")))
    leases.lease_file(1).write_bytes(damage)
    # It may protect any entry, but a redirect that is taken off hurts nobody.
    assert leases.list_redirected_paths() == {"/b"}
    for asked in (lambda: leases.find_lease(1), leases.list_leases, leases.leased_keys):
        with pytest.raises(Failed) as caught:
            asked()
        assert caught.value.reason == "lease-damaged"
    assert leases.find_lease(2) is not None
    leases.drop_lease(1)
    assert leases.leased_keys() == {"l"}


def test_lease_without_an_entry_keeps_its_other_entries_and_an_empty_lease_is_deleted(
    leases: LeaseDirectory,
) -> None:
    held = lease(1, EntryUse("k"), EntryUse("k", "/a"), EntryUse("l"))
    leases.write_or_drop(held.without_entry("k"))
    assert leases.find_lease(1) == lease(1, EntryUse("l"))
    leases.write_or_drop(held.without_entry("k").without_entry("l"))
    assert leases.find_lease(1) is None
    assert not leases.lease_file(1).exists()


@pytest.mark.parametrize("what", ["saves", "uses"])
def test_lease_is_declined_beyond_its_maximal_size_in_bytes(
    leases: LeaseDirectory, what: str
) -> None:
    """As many as a job likes, of 4 KiB each; what it holds stays, and may be given up."""
    grown = lease(1, EntryUse("k"))
    for number in range(100):
        path = f"/{number}/{'d' * 3800}"
        grown = (
            grown.with_save_path(path) if what == "saves" else grown.with_use(EntryUse("k", path))
        )
        with contextlib.suppress(Declined):
            leases.write_lease(grown)
    with pytest.raises(Declined, match="holds what one may hold"):
        leases.write_lease(grown)
    assert MAX_BYTES - 4000 < leases.lease_file(1).stat().st_size <= MAX_BYTES
    assert leases.leased_keys() == {"k"}


def test_lease_with_a_save_path_stays_without_entries(leases: LeaseDirectory) -> None:
    leases.write_or_drop(lease(1, EntryUse("k")).with_save_path("/x").without_entry("k"))
    assert leases.list_leases() == [lease(1).with_save_path("/x")]
    assert leases.leased_keys() == frozenset()


def test_unredirected_path_leaves_its_entry_leased() -> None:
    held = lease(1, EntryUse("k", "/a"), EntryUse("k", "/b"), EntryUse("l", "/a"), EntryUse("l"))
    assert held.without_redirect("/a").uses == (EntryUse("k"), EntryUse("k", "/b"), EntryUse("l"))


def test_half_written_lease_file_of_a_crash_is_ignored(leases: LeaseDirectory) -> None:
    leases.write_lease(lease(1, EntryUse("k")))
    (leases.directory / ".2.json.x7z").write_bytes(b"{")
    assert len(leases.list_leases()) == 1


def test_lease_with_a_redirect_of_an_entry_replaces_its_plain_use() -> None:
    plain = lease(1, EntryUse("k"), EntryUse("l"))
    assert plain.with_use(EntryUse("k", "/a")).uses == (EntryUse("l"), EntryUse("k", "/a"))


USES = st.builds(EntryUse, key=st.sampled_from("kl"), path=st.sampled_from(["", "/a", "/b"]))


@given(st.lists(USES))
def test_uses_of_a_lease_only_grow_and_never_repeat(uses: list[EntryUse]) -> None:
    held = lease()
    for use in uses:
        before = held
        held = held.with_use(use)
        assert use in held.uses
        assert {u.key for u in before.uses} <= {u.key for u in held.uses}
        assert {u.path for u in before.uses} - {""} <= {u.path for u in held.uses}
    assert len(set(held.uses)) == len(held.uses)


def test_lease_mark_changes_when_a_hook_confirms_the_lease(leases: LeaseDirectory) -> None:
    """By that a sweep knows that its question to Slurm is out of date."""
    assert leases.find_version(1) is None
    leases.write_lease(lease(1))
    written = leases.find_version(1)
    assert leases.find_version(1) == written
    leases.write_lease(lease(1))
    again = leases.find_version(1)
    assert again != written
    for _ in range(1000):  # the kernel's clock ticks in milliseconds
        leases.touch_lease(1)
        if leases.find_version(1) != again:
            return
    pytest.fail("it was not confirmed")


def test_jobs_with_a_damaged_lease_are_listed(leases: LeaseDirectory) -> None:
    assert leases.list_jobs() == ()
    for job in (12, 3):
        leases.write_lease(lease(job))
    leases.lease_file(3).write_bytes(b"{")
    for name in (".4.json.x7z", "x.json", "5.txt", "²2.json"):
        (leases.directory / name).touch()
    assert leases.list_jobs() == (3, 12)


WANTED = JobData(
    (Request("/lustre/set/", "hint"),), room=1 << 30, trees={"/a/": DirectoryCopyState("looking")}
)
RAW = (("stage-made-up", "é"),)
SAID = JobNotes(True, 3.0, True, (b"/lustre/\xff.sqsh",), WANTED, ("a line",), True, 1.5, RAW)
WORDS = {name: word for name, word in msgspec.structs.asdict(SAID).items() if name != "uid"}


def test_job_notes_are_read_back_and_keep_a_lease_without_entries(
    leases: LeaseDirectory,
) -> None:
    leases.add_notes_and_keep_lease(lease(), **WORDS)
    assert (leases.read_notes(1), leases.find_lease(1)) == (SAID, lease())
    assert leases.list_hinted_images(1) == ("/lustre/\udcff.sqsh",)
    assert leases.notes_file(1).stat().st_mode & 0o777 == 0o600
    leases.add_notes_and_keep_lease(lease(), wait=None, off=False)
    assert leases.read_notes(1) == msgspec.structs.replace(SAID, wait=None, off=False)


@pytest.mark.parametrize("name", WORDS)
def test_lease_without_notes_and_entries_is_deleted(leases: LeaseDirectory, name: str) -> None:
    leases.add_notes_and_keep_lease(lease(), **{name: getattr(SAID, name)})
    assert leases.find_lease(1) is not None
    leases.add_notes_and_keep_lease(lease(), **{name: getattr(JobNotes(), name)})
    assert [*leases.directory.iterdir()] == []


@pytest.mark.parametrize("damage", [b"", b"{", b"null", b"\xff", b'{"off": 1}', b"\0" * 100])
def test_damaged_job_notes_raise_instead_of_counting_as_none(
    leases: LeaseDirectory, damage: bytes
) -> None:
    """The job may have said stage=off."""
    leases.add_notes_and_keep_lease(lease(), off=True)
    leases.notes_file(1).write_bytes(damage)
    with pytest.raises(Failed) as caught:
        leases.read_notes(1)
    assert caught.value.reason == "lease-damaged"
    leases.drop_lease(1)
    assert leases.read_notes(1) == JobNotes()


def test_job_notes_without_a_lease_are_not_read_by_the_next_run(leases: LeaseDirectory) -> None:
    leases.add_notes(1, lease().user.uid, off=True)
    leases.add_notes_and_keep_lease(lease(), told=True)
    assert leases.read_notes(1) == JobNotes(told=True)


def of_bob(*uses: EntryUse) -> Lease:
    """The lease of another user's job with the same number."""
    return msgspec.structs.replace(lease(1, *uses), user=User("bob", 4242, 4242))


def test_lease_and_notes_of_another_users_job_with_the_same_number_are_not_read(
    leases: LeaseDirectory,
) -> None:
    leases.add_notes_and_keep_lease(lease(1, EntryUse("k")), **WORDS)
    (leases.directory / "1.nodes").write_text("n[1-2]\n65534 0")
    own, bob = lease().user.uid, of_bob().user.uid
    assert leases.find_own_lease(1, own) == lease(1, EntryUse("k"))
    assert (leases.read_notes(1, own), leases.read_nodelist(1, 65534)) == (SAID, "n[1-2]")
    assert (leases.find_own_lease(1, bob), leases.read_notes(1, bob)) == (None, JobNotes())
    assert (leases.list_hinted_images(1, bob), leases.has_data(1, bob)) == ((), False)
    assert leases.read_nodelist(1, bob) == ""


def test_lease_of_another_user_takes_over_no_notes_of_the_first_user(
    leases: LeaseDirectory,
) -> None:
    """As where a hook was killed between the two files."""
    leases.add_notes_and_keep_lease(lease(), **WORDS)
    leases.lease_file(1).unlink()
    leases.write_lease(of_bob(EntryUse("k")))
    assert leases.read_notes(1, of_bob().user.uid) == JobNotes()
    leases.add_notes_and_keep_lease(of_bob(EntryUse("k")), told=True)
    assert leases.read_notes(1, of_bob().user.uid) == JobNotes(told=True)
    assert leases.read_notes(1, lease().user.uid) == JobNotes()


def test_old_node_lists_of_jobs_without_a_lease_are_listed_and_dropped(
    leases: LeaseDirectory,
) -> None:
    leases.write_lease(lease(1))
    for job, when in ((1, 5), (2, 5), (3, 50)):
        file = leases.directory / f"{job}.nodes"
        file.write_text("n[1-2]")
        os.utime(file, (when, when))
    assert leases.list_jobs_without_lease(10) == (2,)
    for job in (1, 2, 3):
        leases.drop_nodelist(job, 10)
    assert sorted(file.name for file in leases.directory.glob("*.nodes")) == ["1.nodes", "3.nodes"]


@pytest.mark.parametrize(
    ("start", "uid", "is_of"),
    [(100, 1, True), (0, 1, True), (200, 1, False), (100, 2, False), (0, 2, False)],
)
def test_lease_belongs_to_a_job_by_user_and_by_start_time_if_both_know_the_start(
    start: int, uid: int, is_of: bool
) -> None:
    own = Lease(1, User("u", 1, 1), 0.0, "/c", start=100)
    assert own.belongs_to(uid, start) is is_of
    assert Lease(1, User("u", 1, 1), 0.0, "/c").belongs_to(1, start)


def test_dropping_a_lease_deletes_all_files_of_the_job_but_the_prologs_mark(
    leases: LeaseDirectory,
) -> None:
    """But the mark of its Prolog, which that may have locked."""
    leases.add_notes_and_keep_lease(lease(1), told=True)
    for kind in ("nodes", "shown", "whatever", "prolog"):
        (leases.directory / f"1.{kind}").touch()
    leases.write_lease(lease(11, EntryUse("k")))
    leases.drop_lease(1)
    assert {file.name for file in leases.directory.iterdir()} == {"1.prolog", "11.json"}


def test_drop_unfinished_deletes_notes_without_a_lease_but_keeps_node_lists(
    leases: LeaseDirectory,
) -> None:
    leases.add_notes_and_keep_lease(lease(2), told=True)
    for name in ("1.said", "1.shown", "1.whatever", "1.nodes"):
        (leases.directory / name).touch()
    leases.drop_unfinished()
    left = {file.name for file in leases.directory.iterdir()}
    assert left == {"2.json", "2.said", "1.nodes"}  # which a job has that may hold something later
