"""The sweep: what is cleaned up after a crash, and above all what is kept."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from commands import CHUNK, NOW, Frozen, Site
from forestage import events
from forestage.bind import redirect as redirects
from forestage.bind import unmount
from forestage.bind.unmount import ClaimedBind, RedirectBind, UnmountError
from forestage.cache import disk_errors, disk_probe, entry_sum
from forestage.cache.layout import PROVEN, Cache
from forestage.cache.lease import EntryUse, Lease
from forestage.cache.node import Node
from forestage.cache.part import ABANDONED_AFTER, boot_id
from forestage.commands import copy_comparison, entry_sources, sweep, verify
from forestage.commands.command_context import ExitStatus
from forestage.commands.inventory import InventoryItem
from forestage.commands.main import CommandContext
from forestage.commands.sweep import SweepReport
from forestage.errors import Failed, SlurmError
from forestage.features.registry import store_commands as registry
from forestage.features.registry.store_collection import CollectionResult
from forestage.slurm.slurm_client import JobState, SlurmClient
from forestage.system import lock, mounts, probe
from forestage.system.as_user import ChildTimeout, User
from forestage.system.terminal import TextLine
from made_up import around_all, calls_of

ALICE = User("alice", 1000, 1000)
ANOTHER_BOOT = "00000000-0000-0000-0000-000000000000"


class Answers(SlurmClient):
    """A Slurm that knows these jobs, and what happens while it thinks."""

    jobs: dict[int, JobState | None]
    working: frozenset[int]
    nodes: tuple[str, ...]
    questions: list[int]
    meanwhile: Callable[[], None]

    def find_job(self, job: int) -> JobState | None:
        self.questions.append(job)
        self.meanwhile()
        if job not in self.jobs:
            raise SlurmError("Unable to contact slurm controller")
        return self.jobs[job]

    def has_node(self, node: str) -> bool:
        return node in self.nodes

    def list_jobs_with_steps(self) -> frozenset[int]:
        return self.working


def slurm(
    jobs: dict[int, JobState | None] | None = None,
    working: Iterable[int] = (),
    nodes: tuple[str, ...] = ("n1",),
    meanwhile: Callable[[], None] = lambda: None,
) -> Answers:
    asked = Answers("")
    asked.jobs, asked.working, asked.nodes = jobs or {}, frozenset(working), nodes
    asked.questions, asked.meanwhile = [], meanwhile
    return asked


def swept(site: Site, asked: SlurmClient | None = None, dry_run: bool = False) -> SweepReport:
    return sweep.run_sweep(site.node, asked or slurm(), dry_run, lambda text: None)


def hold(site: Site, job: int, *uses: EntryUse, node: str = "n1") -> Lease:
    lease = Lease(job, ALICE, NOW - 90, str(site.node.cache.root), uses, node=node)
    site.node.leases.write_lease(lease)
    return lease


def jobs(site: Site) -> tuple[int, ...]:
    return site.node.leases.list_jobs()


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[RedirectBind]:
    """What the kernel's table shows; who takes a redirect off takes it out of here."""
    table: list[RedirectBind] = []

    def claim(
        cache: Cache, wanted: list[RedirectBind], claims: object, now: float | None = None
    ) -> list[ClaimedBind]:
        return [ClaimedBind(bind, cache) for bind in wanted]

    def take_off(going: list[ClaimedBind], whose: object, total: float = 0) -> None:
        for one in going:
            table.remove(one.bind)

    for module in (redirects, unmount):
        monkeypatch.setattr(module, "list_binds", lambda cache, _table=None: list(table))
    monkeypatch.setattr(unmount, "claim_binds", claim)
    monkeypatch.setattr(unmount, "unmount_binds", take_off)
    return table


def bind(path: str, key: str = "k" * 32, number: int = 1) -> RedirectBind:
    from forestage.system.mounts import MountInfo

    return RedirectBind(MountInfo(number, 0, "0:1", f"/entries/{key}/image", path), key)


class Watching(Frozen):
    """Notes each pause, and whether the lock of the space was free then."""

    def __init__(self, site: Site) -> None:
        self.space_lock = site.node.cache.space_lock
        self.paused: list[bool] = []

    def sleep(self, seconds: float) -> None:
        assert seconds > lock.POLL, "who polls might miss it"
        self.paused.append(lock.is_free(self.space_lock))


def watch(site: Site) -> list[bool]:
    site.node.cache.prepare(False)
    clock = Watching(site)
    site.world = CommandContext(site.places, clock)
    return clock.paused


# --- leases


def test_sweep_keeps_every_lease_if_one_answer_of_slurm_is_unclear(site: Site) -> None:
    """Of a slurmctld that answers only some questions, no answer counts."""
    for job in (7, 8, 9):
        hold(site, job)
    done = swept(site, slurm({7: None, 9: None}))
    assert (done.released, done.kept) == ((), 3)
    assert "Unable to contact" in done.doubt
    assert jobs(site) == (7, 8, 9)


def test_sweep_releases_no_lease_if_slurm_does_not_know_this_node(site: Site) -> None:
    """It knows none of our jobs."""
    hold(site, 7)
    done = swept(site, slurm({7: None}, nodes=("x1", "x2")))
    assert "has no node n1" in done.doubt
    assert jobs(site) == (7,)


def test_sweep_keeps_the_lease_of_a_job_with_a_step_manager_on_this_node(site: Site) -> None:
    """slurmctld may have given the node up, and the job's processes run on."""
    hold(site, 7)
    asked = slurm({7: JobState("NODE_FAIL", "n1")}, working=[7])
    assert swept(site, asked).released == ()
    assert asked.questions == []
    assert jobs(site) == (7,)


def test_sweep_without_leases_does_not_query_slurm_and_writes_no_event(site: Site) -> None:
    asked = slurm()
    assert swept(site, asked) == SweepReport(False)
    assert asked.questions == []
    assert not site.places.events.exists()


@pytest.mark.parametrize("touch", ["again", "confirm", "new"])
def test_sweep_keeps_a_lease_that_was_renewed_while_slurm_answers(site: Site, touch: str) -> None:
    """The job of this number was requeued, and begins here at this very moment."""
    lease = hold(site, 7)

    def meanwhile() -> None:
        leases = site.node.leases
        if touch == "again":
            leases.write_lease(lease)
        elif touch == "confirm":
            before = leases.find_version(7)
            while leases.find_version(7) == before:  # the kernel's clock ticks in milliseconds
                leases.touch_lease(7)
        else:
            leases.write_lease(msgspec.structs.replace(lease, job=8))

    released = swept(site, slurm({7: None, 8: None}, meanwhile=meanwhile)).released
    assert [one.job for one in released] == ([7] if touch == "new" else [])
    assert jobs(site) == ((8,) if touch == "new" else (7,))


def test_sweep_releases_the_lease_of_a_job_requeued_to_other_nodes(site: Site) -> None:
    hold(site, 7, node="n1")
    hold(site, 8, node="")
    elsewhere = JobState("RUNNING", "n[2-3]")
    done = swept(site, slurm({7: elsewhere, 8: elsewhere}))
    assert [one.job for one in done.released] == [7]


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\0"])
def test_damaged_lease_is_released_only_once_its_job_is_over(site: Site, damage: bytes) -> None:
    for job in (7, 8):
        hold(site, job)
        site.node.leases.lease_file(job).write_bytes(damage)
    site.node.cache.prepare(False)
    done = swept(site, slurm({7: None, 8: JobState("RUNNING", "n1")}))
    assert [one.job for one in done.released] == [7]
    assert jobs(site) == (8,)
    assert done.problems, "it protects everything, and nobody can tell what it was"


def test_lease_of_missing_cache_is_released_and_no_cache_created(site: Site) -> None:
    gone = site.places.root / "gone/forestage"
    site.node.leases.write_lease(Lease(7, ALICE, 0.0, str(gone), (EntryUse("0a", "/a"),)))
    done = swept(site, slurm({7: None}))
    assert ([one.job for one in done.released], done.problems) == ([7], ())
    assert not gone.parent.exists()
    assert not site.node.cache.root.exists()


def test_sweep_deletes_an_unfinished_lease_file(site: Site) -> None:
    hold(site, 7)
    site.node.cache.prepare(False)
    directory = site.node.leases.directory
    (directory / ".8.json.x7z").write_bytes(b"{")
    swept(site, slurm({7: JobState("RUNNING", "n1")}))
    assert [file.name for file in directory.iterdir()] == ["7.json"]


def test_sweep_deletes_the_temporary_file_of_a_killed_cache_creation_after_an_hour(
    site: Site,
) -> None:
    site.node.cache.prepare(False)
    here = set(site.node.cache.root.iterdir())
    old, young = (site.node.cache.root / f".format.{16 * digit}" for digit in "01")
    for file, age in ((old, 3601), (young, 3599)):
        file.write_bytes(b"1")
        since = site.node.clock.wall() - age
        os.utime(file, (since, since))
    swept(site, slurm({}))
    here.add(site.node.cache.instances)
    assert set(site.node.cache.root.iterdir()) - here == {young}


def test_sweep_reports_a_lease_behind_a_busy_space_lock_and_releases_the_other_leases(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(site, 7)
    other = site.places.root / "other"
    (other / "locks").mkdir(parents=True)
    site.node.leases.write_lease(Lease(8, ALICE, 0.0, str(other)))
    monkeypatch.setattr(lock, "SPACE_TIMEOUT", 0.05)
    with lock.held(other / "locks/space.lock", 0):
        done = swept(site, slurm({7: None, 8: None}))
    assert [one.job for one in done.released] == [7]
    assert "space.lock is held" in done.problems[0]
    assert jobs(site) == (8,)


def test_sweep_frees_the_space_lock_between_two_releases(site: Site) -> None:
    """It looks every 20 ms, and a sweep that never paused would hold the lock whenever it does."""
    paused = watch(site)
    for job in (7, 8, 9):
        hold(site, job)
    asked = slurm({7: None, 8: None, 9: None})
    swept(site, asked, dry_run=True)
    assert paused == []
    swept(site, asked)
    assert paused == [True] * 3


@pytest.mark.parametrize(
    "error", [Failed("program", "setpriv is not installed"), OSError(12, "Cannot allocate memory")]
)
def test_sweep_keeps_leases_if_slurm_cannot_be_queried(
    site: Site, bound: list[RedirectBind], error: Exception
) -> None:
    def raises() -> None:
        raise error

    hold(site, 7)
    bound.append(bind("/lustre/stray"))
    done = swept(site, slurm({7: None}, meanwhile=raises))
    assert (done.doubt, jobs(site)) == (str(error), (7,))
    assert done.redirects == ("/lustre/stray",)


# --- redirects


def test_sweep_unmounts_a_stray_redirect_as_the_entrys_owner(
    site: Site, bound: list[RedirectBind], monkeypatch: pytest.MonkeyPatch, as_root: None
) -> None:
    """Where root is squashed, nobody else may be able to walk there."""
    image = site.image("a.sqsh")
    os.chown(image, 4242, 4242)
    one = bind(str(image), site.publish(image))
    bound.append(msgspec.structs.replace(one, cache=site.node.cache.real_root))
    asked: list[int] = []

    def take_off(
        going: list[ClaimedBind], whose: Callable[[RedirectBind], User], total: float = 0
    ) -> None:
        for one in going:
            asked.append(whose(one.bind).uid)
            bound.remove(one.bind)

    monkeypatch.setattr(unmount, "unmount_binds", take_off)
    assert swept(site).redirects == (str(image),)
    assert asked == [4242]


def test_sweep_releases_a_lease_though_its_redirects_path_hangs(
    site: Site, bound: list[RedirectBind], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(going: list[ClaimedBind], whose: object, total: float = 0) -> None:
        if going:
            raise UnmountError([f"{going[0].bind.path} (hangs)"], 0)

    hold(site, 7, EntryUse("k", "/lustre/a"))
    bound.append(bind("/lustre/a"))
    monkeypatch.setattr(unmount, "unmount_binds", hangs)
    done = swept(site, slurm({7: None}))
    assert (jobs(site), "hangs" in done.problems[0]) == ((), True)


# --- parts


def part(site: Site, name: str, boot: str = "", age: float = 0.0) -> str:
    """A part whose stager is dead, last written `age` seconds ago."""
    made, owner = site.part(site.image(name, name.encode() * CHUNK))
    if boot:
        made.write_record(msgspec.structs.replace(owner, boot=boot))
    for file in made.directory.iterdir():
        os.utime(file, (NOW - age, NOW - age))
    return owner.image.key


def test_sweep_deletes_parts_of_an_earlier_boot_and_abandoned_parts(site: Site) -> None:
    old = part(site, "a", boot=ANOTHER_BOOT)
    abandoned = part(site, "b", age=ABANDONED_AFTER + 60)
    resumable = part(site, "c", age=ABANDONED_AFTER - 60)
    wanted = part(site, "d", age=ABANDONED_AFTER + 60)
    live = part(site, "e", boot=ANOTHER_BOOT, age=2 * ABANDONED_AFTER)
    hold(site, 7, EntryUse(wanted))
    asked = slurm({7: JobState("RUNNING", "n1")})
    with lock.held(site.node.cache.key_lock(live), 0):
        assert set(swept(site, asked, dry_run=True).parts) == {old, abandoned}
        assert set(swept(site, asked).parts) == {old, abandoned}
    assert {path.name for path in site.node.cache.parts.iterdir()} == {resumable, wanted, live}


# --- what an earlier boot wrote


def from_earlier_boot(site: Site, name: str = "a.sqsh") -> str:
    key: str = site.publish(site.image(name, b"squashfs" * CHUNK))
    (site.node.cache.entry_dir(key) / "boot").write_text(ANOTHER_BOOT)
    return key


def spoil(site: Site, key: str) -> None:
    with site.node.cache.image_path(key).open("r+b") as file:
        file.seek(CHUNK + 5)
        file.write(b"\0")


def test_entry_that_lost_bytes_in_crash_is_evicted_even_if_leased(site: Site) -> None:
    bad, good = from_earlier_boot(site, "a.sqsh"), from_earlier_boot(site, "b.sqsh")
    spoil(site, bad)
    hold(site, 7, EntryUse(bad))
    done = swept(site, slurm({7: JobState("RUNNING", "n1")}))
    assert {one.key: one.result for one in done.verified} == {bad: "bad", good: "ok"}
    assert site.keys() == {good}


def test_sweep_verifies_only_entries_of_an_earlier_boot_and_only_once(site: Site) -> None:
    new = site.publish(site.image("new.sqsh", b"squashfs" * CHUNK))
    assert (site.node.cache.entry_dir(new) / "boot").read_text() == boot_id()
    spoil(site, new)
    old, noteless = from_earlier_boot(site, "a.sqsh"), from_earlier_boot(site, "b.sqsh")
    (site.node.cache.entry_dir(noteless) / "boot").unlink()  # the crash may have taken it
    done = swept(site)
    assert {one.key: one.result for one in done.verified} == {old: "ok", noteless: "ok"}
    assert (site.node.cache.entry_dir(old) / "boot").read_bytes() == PROVEN
    spoil(site, old)  # what happens from now on is for `forestage verify`
    assert swept(site).verified == ()


def test_sweep_adds_an_entry_with_a_hot_map_to_the_hot_index(site: Site) -> None:
    cache = site.node.cache
    key = site.publish(site.image("a.sqsh"))
    (cache.entry_dir(key) / "hot").write_bytes(b"[0]")  # of an image that has no name
    swept(site)
    (index,) = cache.hot_names.iterdir()
    assert msgspec.json.decode(index.read_bytes()) == [key]


def test_entry_of_earlier_boot_is_verified_without_its_source(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand nodes may have restarted at once."""
    key = from_earlier_boot(site)
    monkeypatch.setattr(entry_sources, "open_if_unchanged", pytest.fail)
    monkeypatch.setattr(entry_sources, "read_source_state", pytest.fail)
    spoil(site, key)
    (verdict,) = swept(site).verified
    assert (verdict.result, verdict.against) == ("bad", "digests")


@pytest.fixture
def copies_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of each copy holds a lease on it (F_SETLEASE)."""

    def refuse(_: Path) -> None:
        raise BlockingIOError

    monkeypatch.setattr(verify, "open_copy", refuse)


def test_entry_under_a_file_lease_of_its_owner_is_kept_as_unverifiable(
    site: Site, copies_leased: None
) -> None:
    key = from_earlier_boot(site)
    (verdict,) = swept(site).verified
    assert verdict.result == "unverifiable"
    assert site.keys() == {key}
    assert (site.node.cache.entry_dir(key) / "boot").read_text() == ANOTHER_BOOT


def test_entry_replaced_while_the_old_bytes_are_verified_is_not_marked_as_verified(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note lies beside the bytes that were read, not beside whatever has their name."""
    key = from_earlier_boot(site)
    real = verify.verify_entries

    def slowly(*arguments: object, **more: object) -> verify.VerifyReport:
        found = real(*arguments, **more)  # type: ignore[arg-type]
        directory = site.node.cache.entry_dir(key)
        directory.rename(site.places.root / "old")
        shutil.copytree(site.places.root / "old", directory)
        return found

    monkeypatch.setattr(verify, "verify_entries", slowly)
    assert [one.result for one in swept(site).verified] == ["ok"]
    assert (site.node.cache.entry_dir(key) / "boot").read_text() == ANOTHER_BOOT
    assert (site.places.root / "old/boot").read_bytes() == PROVEN


def test_entry_is_not_verified_if_the_result_cannot_be_stored(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk gone read-only, each sweep would read the whole cache."""

    def read_only(here: int) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    from_earlier_boot(site)
    monkeypatch.setattr(sweep, "_open_proof_file", read_only)
    monkeypatch.setattr(verify, "verify_entries", pytest.fail)
    done = swept(site)
    assert done.verified == ()
    assert "Read-only file system" in done.problems[0]


@pytest.fixture
def calling_first(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], None]], None]:
    """Has something happen with the key of each entry that has been read."""

    def put(then: Callable[[str], None]) -> None:
        real = verify.verify_entries

        def verified(node: Node, items: list[InventoryItem], *rest: Any) -> verify.VerifyReport:
            found = real(node, items, *rest)
            then(items[0].key)
            return found

        monkeypatch.setattr(verify, "verify_entries", verified)

    return put


def test_entry_evicted_before_the_sweep_verifies_it_is_no_problem(
    site: Site, calling_first: Callable[[Callable[[str], None]], None]
) -> None:
    keys = {from_earlier_boot(site, "a.sqsh"), from_earlier_boot(site, "b.sqsh")}

    def the_other_goes(key: str) -> None:
        (other,) = keys - {key}
        site.node.cache.evict_entry(other)

    calling_first(the_other_goes)
    done = swept(site)
    assert [one.result for one in done.verified] == ["ok"]
    assert done.problems == ()


# --- what a disk loses later


def read_before(site: Site, key: str, seconds: float) -> None:
    """The entry was last read so long ago."""
    os.utime(site.node.cache.entry_dir(key) / "boot", (NOW - seconds, NOW - seconds))


def test_sweep_verifies_entries_again_each_week_at_a_bounded_rate_oldest_first(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []
    real = copy_comparison.compare_copy

    def noted(*given: Any) -> copy_comparison.ComparisonResult:
        rates.append(given[-1])
        return real(*given)

    monkeypatch.setattr(copy_comparison, "compare_copy", noted)
    keys = [site.publish(site.image(f"{name}.sqsh", b"squashfs" * CHUNK)) for name in "abc"]
    for key, days in zip(keys, (8, 9, 6), strict=True):
        read_before(site, key, days * 86400)
    spoil(site, keys[0])
    done = swept(site)
    assert [(one.key, one.result) for one in done.verified] == [(keys[1], "ok"), (keys[0], "bad")]
    assert rates == [sweep.PROOF_BYTES_PER_SECOND] * 2
    assert swept(site).verified == ()
    assert site.keys() == {keys[1], keys[2]}


def doubted(site: Site) -> bool:
    return bool(disk_errors.read_state(site.places).since)


def test_disk_doubt_ends_after_the_sweep_has_verified_every_entry(site: Site) -> None:
    keys = [site.publish(site.image(f"{name}.sqsh", b"squashfs" * CHUNK)) for name in "abc"]
    spoil(site, keys[0])
    disk_errors.start_doubt(site.places, site.world.clock, "a bad block")
    done = swept(site)
    assert {one.key: one.result for one in done.verified} == {
        keys[0]: "bad", keys[1]: "ok", keys[2]: "ok"
    }  # fmt: skip
    assert not doubted(site)
    assert swept(site).verified == ()


@pytest.mark.parametrize("step", [-40 * 86400.0, -3600.0, 3600.0, 40 * 86400.0])
def test_disk_doubt_ends_after_every_entry_was_verified_though_the_clock_was_set(
    site: Site, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """Set before the error, an entry seems read since; set after it, read before, for 40 days."""
    keys = [site.publish(site.image(f"{name}.sqsh", b"squashfs" * CHUNK)) for name in "ab"]
    spoil(site, keys[0])
    for moved in (step, 0.0):
        monkeypatch.setattr(site.node.clock, "wall", lambda moved=moved: NOW + moved)
        monkeypatch.setattr(site.world.clock, "wall", lambda moved=moved: NOW - moved)
        disk_errors.start_doubt(site.places, site.world.clock, "a bad block")
        done = swept(site)
        assert {one.key for one in done.verified} == set(keys)
        assert not doubted(site)
        keys = keys[1:]


@pytest.mark.parametrize("step", [-3600.0, -40 * 86400.0])
def test_entry_used_before_the_clock_was_set_back_counts_as_older_than_a_later_use(
    site: Site, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    early, late = (site.publish(site.image(f"{name}.sqsh")) for name in "ab")
    site.node.cache.record_use(early, NOW)
    monkeypatch.setattr(site.node.clock, "wall", lambda: NOW + step)
    swept(site)
    site.node.cache.record_use(late, NOW + step + 1)
    used = {one.key: one.used for one in site.node.cache.list_entries()}
    assert used[early] == NOW + step
    assert used[late] > used[early]


def test_sweep_corrects_the_sum_of_the_entries(site: Site) -> None:
    cache = site.node.cache
    site.publish(site.image("a.sqsh"))
    wrong = entry_sum.EntrySum(boot_id(), bytes=1 << 40, counted=1)
    cache.entry_sum.write_bytes(msgspec.json.encode(wrong))
    swept(site)
    (one,) = cache.list_entries()
    assert entry_sum.read_sum(cache.entry_sum) == entry_sum.EntrySum(boot_id(), one.bytes, 2)


@pytest.mark.parametrize("step", [-40 * 86400.0, 40 * 86400.0])
def test_entry_verified_under_a_wrong_clock_is_verified_again(site: Site, step: float) -> None:
    key = site.publish(site.image("a.sqsh", b"squashfs" * CHUNK))
    read_before(site, key, step)
    assert [one.key for one in swept(site).verified] == [key]
    assert swept(site).verified == ()


def test_entry_under_a_file_lease_of_its_owner_is_evicted_during_a_disk_doubt(
    site: Site, copies_leased: None
) -> None:
    """It would keep the doubt, and hits away, for ever."""
    site.publish(site.image("a.sqsh", b"squashfs" * CHUNK))
    disk_errors.start_doubt(site.places, site.world.clock, "a bad block")
    (verdict,) = swept(site).verified
    assert (verdict.result, verdict.evicted) == ("bad", True)
    assert not doubted(site)


def test_entry_without_checksums_is_evicted_during_a_disk_doubt(site: Site) -> None:
    site.forget_checksums(site.publish(site.image("a.sqsh", b"squashfs" * CHUNK)))
    assert [one.result for one in swept(site).verified] == []
    disk_errors.start_doubt(site.places, site.world.clock, "a bad block")
    (verdict,) = swept(site).verified
    assert (verdict.result, verdict.evicted) == ("bad", True)
    assert not doubted(site)


def test_disk_doubt_stays_while_an_entry_cannot_be_verified(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.publish(site.image("a.sqsh"))
    disk_errors.start_doubt(site.places, site.world.clock, "a bad block")
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "_open_proof_file", lambda here: os.open("/nowhere", os.O_RDONLY))
        assert swept(site).problems
        assert doubted(site)
    swept(site)
    assert not doubted(site)


def test_sweep_dry_run_does_not_end_a_disk_doubt(site: Site) -> None:
    key = site.publish(site.image("a.sqsh"))
    disk_errors.start_doubt(site.places, site.world.clock, "a bad block")
    assert swept(site, dry_run=True).unproven == (key,)
    assert doubted(site)


# --- features

SWEEP = tuple(
    f"sweep.{one}"
    for one in ("without_cache", "in_each_cache", "with_cache", "afterwards", "ask_slurm")
)


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_exception_in_a_feature_stops_neither_other_features_nor_the_sweep(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    raising, quiet, called = calls_of(SWEEP, error)
    around_all(monkeypatch, raising, quiet)
    key = from_earlier_boot(site)
    hold(site, 7)
    if error is OSError:  # as any work of a sweep may
        assert swept(site, slurm({7: None})).problems == SWEEP
    else:
        with pytest.raises(error, match=SWEEP[-1]):
            swept(site, slurm({7: None}))
    assert called == [name for one in SWEEP for name in (one, f"{one}, too")]
    assert jobs(site) == ()
    assert site.node.cache.is_proven(key), "entries were read"
    assert site.places.hook_call_mark("sweep").exists()
    assert [one.job for one in events.read_events(site.places.events)] == [7]


def test_keyboard_interrupt_in_a_feature_ends_the_sweep(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising, quiet, called = calls_of(SWEEP, KeyboardInterrupt)
    around_all(monkeypatch, raising, quiet)
    with pytest.raises(KeyboardInterrupt):
        swept(site)
    assert called == [SWEEP[0]]
    assert not site.places.hook_call_mark("sweep").exists()


# --- room


def test_sweep_evicts_unleased_entries_down_to_watermark(site: Site) -> None:
    key, other = site.publish(site.image("a.sqsh")), site.publish(site.image("b.sqsh"))
    hold(site, 7, EntryUse(key))
    hold(site, 8, EntryUse(other))
    site.configure("low_watermark: 0%\n")
    asked = slurm({7: None, 8: JobState("RUNNING", "n1")})
    assert swept(site, asked, dry_run=True).evicted == (key,)
    assert swept(site, asked).evicted == (key,)
    assert site.keys() == {other}


# --- a dry run


def everything(site: Site) -> dict[str, bytes]:
    root = site.places.root
    return {
        str(path): (path.read_bytes() if path.is_file() else b"") + str(path.stat().st_ino).encode()
        for path in sorted(root.rglob("*"))
        if path.suffix != ".lock"
    }


@pytest.mark.parametrize("dry_run", [True, False])
def test_sweep_reports_images_deleted_from_a_store_and_a_dry_run_deletes_none(
    site: Site, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    done = CollectionResult("alice", ("a", "b"), 3 << 20, 1, "")
    monkeypatch.setattr(registry, "collect_some_users", lambda *_: [done])
    found = swept(site, dry_run=dry_run)
    assert found.added == ({} if dry_run else {"collected": (done,)})
    line = TextLine("store of alice: deleted 2 images, 3 MiB; 1 file left over")
    assert (line in sweep.format_output(found)) != dry_run


def test_image_store_that_hangs_is_a_problem_and_does_not_end_the_sweep(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(*_: object) -> list[CollectionResult]:
        raise ChildTimeout("no answer after 20 s")

    monkeypatch.setattr(registry, "collect_some_users", hangs)
    assert "no answer" in swept(site).problems[-1]


def test_sweep_dry_run_reports_everything_and_changes_nothing(
    site: Site, bound: list[RedirectBind], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = from_earlier_boot(site)
    spoil(site, key)
    old = part(site, "a", boot=ANOTHER_BOOT)
    hold(site, 7, EntryUse("k", "/lustre/a"))
    hold(site, 8)
    (site.node.leases.directory / ".9.json.x").write_bytes(b"")
    bound += [bind("/lustre/a"), bind("/lustre/b", number=2)]
    monkeypatch.setattr(probe, "GOOD", 600.0)
    assert (
        disk_probe.probe_disk(site.places, site.node.cache) is None
    )  # its answer is the one thing noted
    before = everything(site)
    done = swept(site, slurm({7: None, 8: JobState("PENDING", "")}), dry_run=True)
    assert [one.job for one in done.released] == [7]
    assert (done.kept, set(done.redirects)) == (1, {"/lustre/a", "/lustre/b"})
    assert (done.parts, done.unproven) == ((old,), (key,))
    assert everything(site) == before
    assert len(bound) == 2


# --- what is on record


def test_sweep_of_leftovers_and_sweep_of_entries_run_separately(site: Site) -> None:
    old = from_earlier_boot(site, "a.sqsh")
    hold(site, 7)
    asked = slurm({7: None})

    def only(what: sweep.SweepPart) -> SweepReport:
        return sweep.run_sweep(site.node, asked, False, lambda text: None, what)

    first = only("entries")
    assert ([one.key for one in first.verified], first.kept, jobs(site)) == ([old], 1, (7,))
    assert not site.places.hook_call_mark("sweep").exists(), "the alert is about leases"
    assert only("entries").is_empty
    again = from_earlier_boot(site, "b.sqsh")
    second = only("leftovers")
    assert ([one.job for one in second.released], second.verified, jobs(site)) == ([7], (), ())
    assert only("leftovers").is_empty
    assert [one.key for one in only("entries").verified] == [again]


def test_quiet_sweep_without_work_prints_nothing(site: Site, squeue: Callable[[str], None]) -> None:
    assert "0 leases released" in site.run("sweep").stdout
    assert site.run("sweep", "--quiet").output == ""


def test_sweep_writes_the_time_of_its_last_run(site: Site) -> None:
    mark = site.places.hook_call_mark("sweep")
    assert not mark.exists()
    swept(site)
    os.utime(mark, (5.0, 5.0))
    swept(site)
    assert mark.stat().st_mtime > 5.0


def test_released_lease_is_an_event_that_explain_prints(site: Site) -> None:
    hold(site, 7)
    swept(site, slurm({7: JobState("NODE_FAIL", "n1")}))
    (event,) = events.read_events(site.places.events)
    assert (event.hook, event.job, event.user, event.node) == ("sweep", 7, "alice", "n1")
    assert event.outcome.result == "released"
    printed = site.run("explain", "7").stdout
    assert "Sweep" in printed
    assert "released the job's lease: the job is NODE_FAIL" in printed


def test_stray_redirects_and_bad_entries_are_events_of_job_0(
    site: Site, bound: list[RedirectBind]
) -> None:
    key = from_earlier_boot(site)
    spoil(site, key)
    bound.append(bind("/lustre/stray"))
    swept(site)
    bad, rest = events.read_events(site.places.events)
    assert (bad.job, bad.hook, bad.outcome.result) == (0, "sweep", "bad")
    assert (bad.outcome.key, bad.outcome.evicted, bad.outcome.chunks) == (key, (key,), 1)
    assert (rest.job, rest.outcome.unmounted, rest.outcome.evicted) == (0, 1, ())


# --- the command


@pytest.fixture
def squeue(programs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A squeue that does what is said."""
    monkeypatch.setattr(SlurmClient, "list_jobs_with_steps", lambda self: frozenset())

    def put(script: str) -> None:
        programs(squeue=script, scontrol="echo 'NodeName=n1 '")

    return put


UNKNOWN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


def test_sweep_command_prints_the_released_leases(
    site: Site, squeue: Callable[[str], None]
) -> None:
    squeue(UNKNOWN)
    hold(site, 7)
    done = site.run("sweep", "--dry-run")
    assert (done.exit_code, jobs(site)) == (ExitStatus.OK, (7,))
    assert "job 7 of alice: lease would be released (Slurm does not know" in done.stdout
    assert "1 lease would be released, 0 kept." in done.stdout
    done = site.run("sweep")
    assert (done.exit_code, jobs(site)) == (ExitStatus.OK, ())
    assert "1 lease released, 0 kept." in done.stdout
    assert json.loads(site.run("sweep", "--json").stdout)["released"] == []


@pytest.mark.parametrize(
    ("script", "trouble", "code", "printed"),
    [
        ("echo '7|RUNNING|n1'", "", ExitStatus.OK, "0 leases released, 1 kept."),
        ("exit 1", "", ExitStatus.SLURM, "Slurm gave no clear answer"),
        ("exit 1", "bad entry", ExitStatus.BAD, "evicted"),
        (UNKNOWN, "open cache", ExitStatus.FAILED, "Problem: "),
    ],
)
def test_sweep_command_exits_with_the_status_of_the_worst_problem(
    site: Site,
    squeue: Callable[[str], None],
    script: str,
    trouble: str,
    code: ExitStatus,
    printed: str,
) -> None:
    squeue(script)
    hold(site, 7)
    if trouble == "bad entry":
        spoil(site, from_earlier_boot(site))
    elif trouble:
        site.node.cache.prepare(False)
        site.node.cache.root.chmod(0o755)
    done = site.run("sweep")
    assert done.exit_code == code
    assert printed in done.stdout
    # A lease goes also where the cache must not be used.
    assert jobs(site) == (() if script == UNKNOWN else (7,))


@pytest.mark.parametrize(
    ("script", "code"), [(UNKNOWN, ExitStatus.UNMOUNTED), ("exit 1", ExitStatus.SLURM)]
)
def test_sweep_releases_leases_and_reports_no_problem_if_the_disk_is_not_mounted(
    site: Site,
    squeue: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    code: ExitStatus,
) -> None:
    """The array may come later than systemd has waited; leases are released all the same."""
    squeue(script)
    hold(site, 7)
    site.file.write_text("cache: /nvme/forestage\nrequire_mount: true\n")
    monkeypatch.setattr(mounts, "list_mounts", lambda: [mounts.MountInfo(1, 0, "8:1", "/", "/")])
    done = site.run("sweep")
    assert done.exit_code == code
    assert "The cache was left alone: " in done.stdout
    assert "its disk is not mounted" in done.stdout
    assert "Problem: " not in done.stdout
    assert jobs(site) == (() if code is ExitStatus.UNMOUNTED else (7,))
    assert site.run("evict").exit_code == ExitStatus.UNMOUNTED
