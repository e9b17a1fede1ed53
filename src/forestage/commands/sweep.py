"""Clean-up after crashes: stale leases, redirects and parts, and proof of what the disk kept.

Run by a timer or by hand as root, never by a hook. It does what the Epilog would have done, with
the Epilog's code and under the hooks' locks, each held no longer than a hook holds it: so it may
run beside hooks and other sweeps at any moment. A failure is noted and the sweep goes on.

A lease is released only if Slurm says that its job is over on this node. The order matters:

    1. note the lease file's mark (inode, ctime), then ask Slurm about the job
    2. any doubtful answer, or a Slurm that does not know this node: no lease is released
    3. under the space lock, release a lease only if its mark is still the same: a requeued job's
       Prolog may have begun with the same number while Slurm was answering
    4. pause between two holds of the lock, longer than waiting hooks poll

Entries that an earlier boot wrote are compared once with their own checksums: they were synced
before they were published, but disks have been seen to lose confirmed writes in a power cut. The
source is not read for that, since a whole cluster may have restarted at once. All others are read
again now and then, slowly, as blocks of a disk go bad; and all at once while there is doubt in the
disk (cache/disk_errors.py), which ends with that.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import click
import msgspec

from forestage import events
from forestage.bind import namespaces, redirect, unmount
from forestage.cache import disk_errors, disk_probe, earlier_caches, evict, hot_pieces
from forestage.cache.layout import PROVEN, Cache
from forestage.cache.lease import Lease, LeaseDirectory, LeaseVersion
from forestage.cache.node import Node
from forestage.cache.part import ABANDONED_AFTER, Part, boot_id
from forestage.commands import inventory, verify
from forestage.commands.command_context import as_json, insert_after, print_result
from forestage.commands.inventory import InventoryItem
from forestage.commands.unredirect import ROOT_USER, choose_bind_owner
from forestage.commands.verify import EntryVerdict, VerifyOptions, VerifyProgress
from forestage.config import directories
from forestage.errors import UNMOUNTED_REASONS, Failed, ForestageError, SlurmError
from forestage.events import EventRecord, losses, user_files
from forestage.features import doors, list_names_with_door
from forestage.features.contexts import SweepFacts
from forestage.features.doors import Door, load_door, load_doors
from forestage.hooks import epilog
from forestage.paths import NodePaths
from forestage.slurm.slurm_client import SlurmClient, find_end_reason
from forestage.system import folders, lock, mounts
from forestage.system import terminal as screen
from forestage.system.as_user import User
from forestage.system.terminal import OutputBlock, TextLine, format_count, short_key
from forestage.views.through import keeper_cleanup

if TYPE_CHECKING:
    from forestage.features.doors import SweepFunction

LOCK_PAUSE = 2 * lock.POLL  # seconds; a hook that polls for the lock gets it in between
PROOF_INTERVAL = 7 * 86400.0  # seconds between two times that an entry is read
PROOF_BYTES_PER_SECOND = 256 << 20  # bytes per second for that; jobs use the disk
MIN_NODELIST_AGE = (
    3600.0  # seconds for which nobody asks Slurm about a job that has noted its nodes
)

SweepPart = Literal["leftovers", "entries", "nodes"]
"""What crashes left, or the entries that are due: apart, as a whole cache may take an hour.

Or the list of nodes, which is due once a day and touches no disk.
"""

T = TypeVar("T")
R = TypeVar("R")


class StaleLease(msgspec.Struct, frozen=True):
    """A lease whose job is over here. `mark` is from before Slurm was asked.

    `lease` is None where its file is damaged.
    """

    job: int
    mark: LeaseVersion
    lease: Lease | None
    why: str


class ReleasedLease(msgspec.Struct, frozen=True):
    """A lease that was released, or would be, and how many redirects were unmounted with it.

    `user` and `node` are "", and `uid` is -1, where the lease is damaged.
    """

    job: int
    why: str
    user: str = ""
    uid: int = -1
    node: str = ""
    redirects: int = 0


class SweepReport(msgspec.Struct, frozen=True):
    """What one sweep did, or would do. `redirects` no lease asked for; `parts`, `evicted`: keys.

    `kept` is how many leases stay. `keepers` hung: their keys. `doubt` says why no lease was
    released. `unproven` are the entries that a dry run would read. `unmounted` says that the
    cache's disk is not mounted, and may come later. `added` is what features did, by fields of
    their own, where that is anything.
    """

    dry_run: bool
    unmounted: str = ""
    released: tuple[ReleasedLease, ...] = ()
    kept: int = 0
    redirects: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    keepers: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    verified: tuple[EntryVerdict, ...] = ()
    unproven: tuple[str, ...] = ()
    doubt: str = ""
    problems: tuple[str, ...] = ()
    added: Mapping[str, tuple[object, ...]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was done, or is to be said."""
        return self == SweepReport(self.dry_run, self.unmounted, kept=self.kept)

    @property
    def bad(self) -> int:
        """How many entries had lost bytes."""
        return sum(1 for one in self.verified if one.result == "bad")


class DueEntry(msgspec.Struct, frozen=True):
    """An entry that is to be read, and how."""

    item: InventoryItem
    manner: VerifyOptions


def run_sweep(
    node: Node,
    slurm: SlurmClient,
    dry_run: bool,
    progress: VerifyProgress,
    only: SweepPart | None = None,
) -> SweepReport:
    """Cleans up after crashes; as root. `progress` is called with what is being done.

    Raises PermissionError for users who may not read the cache; Declined while its disk hangs: all
    stays as it is for the next one.
    """
    start = node.clock.monotonic()
    run = _SweepRun(node, dry_run, slurm)
    if only == "nodes":
        run.call_features(doors.SWEEP_ASK_SLURM)
    else:
        run.sweep_node(only, progress, start)
    if run.feature_error:
        raise run.feature_error
    return msgspec.structs.replace(run.report, problems=tuple(run.problems))


def list_stale_leases(leases: LeaseDirectory, slurm: SlurmClient) -> tuple[StaleLease, ...]:
    """The leases of jobs that are over on this node. Raises SlurmError at the least doubt."""
    # Before Slurm is asked: a Prolog that begins while it answers leaves another mark.
    marks = {job: leases.find_version(job) for job in leases.list_jobs()}
    at_work = slurm.list_jobs_with_steps() if marks else frozenset()
    stale = []
    for job, mark in marks.items():
        if mark is None or job in at_work:
            continue
        lease = None
        with contextlib.suppress(Failed):  # a damaged lease goes with its job, and not before
            lease = leases.find_lease(job)
        why = find_end_reason(slurm.find_job(job), lease.node if lease else "")
        if why:
            stale.append(StaleLease(job, mark, lease, why))
    # Another cluster's Slurm knows none of our jobs.
    for node in sorted({one.lease.node for one in stale if one.lease and one.lease.node}):
        if not slurm.has_node(node):
            raise SlurmError(
                f"the Slurm that was asked has no node {node}", "is SLURM_CONF the one of slurmd?"
            )
    return tuple(stale)


def _raise_if_not_root(error: Exception) -> None:
    """Raises PermissionError for a user who may not read the cache; root reports a problem."""
    if isinstance(error, PermissionError) and os.geteuid() != 0:
        raise error


def record_sweep_time(node: Node) -> None:
    """Leaves when the last sweep was, for the alert about nodes without one. Raises OSError."""
    mark = node.places.hook_call_mark("sweep")
    folders.ensure_directory(mark.parent, folders.PASSABLE)
    mark.touch()


def make_config_unlistable(places: NodePaths) -> None:
    """Has users list no directory of the configuration, where hooks run. Raises OSError."""
    if directories.has_run_hooks(places):
        directories.make_directories_unlistable(places)


def clean_user_events(node: Node) -> None:
    """Removes the events of users who had none for long, and keeps the rest unread by others.

    Raises OSError.
    """
    user_files.restore_rights(node.places.users)
    user_files.remove_idle_users(node.places.users, node.clock.wall())


class _SweepRun:
    """One sweep at work.

    `release_jobs`, `sweep_cache` and `prove_entries` are its parts, in this order.

    `report`, `problems` and `unredirected` (paths) grow meanwhile. `feature_error` is what a
    feature raised last and nobody expected: that goes on once all is done.
    """

    def __init__(self, node: Node, dry_run: bool, slurm: SlurmClient) -> None:
        self.node = node
        self.slurm = slurm
        self.dry_run = dry_run
        self.report = SweepReport(dry_run)
        self.problems: list[str] = []
        self.unredirected: list[str] = []
        self.stale: tuple[StaleLease, ...] = ()
        self.doubt = ""
        self.feature_error: Exception | None = None

    def sweep_node(self, only: SweepPart | None, progress: VerifyProgress, start: float) -> None:
        """Does all of a sweep, or the leftovers or entries alone."""
        node = self.node
        disk_probe.check_writable(node.places, node.cache)
        caches = earlier_caches.list_earlier_caches(node)  # leases name some
        made = self.run_noting_errors(self.is_cache_made, node)
        self.add_to_report(kept=len(node.leases.list_jobs()))
        if only != "entries":
            self.find_stale_leases()
            self.release_jobs()
            self.sweep_earlier_caches(caches)
            if made:
                self.sweep_cache()
        if made and only != "leftovers":
            self.prove_entries(progress)
        if only != "entries":
            self.call_features(doors.SWEEP_AFTERWARDS)
        if not self.dry_run and only != "entries":
            self.run_noting_errors(record_sweep_time, node)
            self.run_noting_errors(make_config_unlistable, node.places)
            self.run_noting_errors(clean_user_events, node)
            if only is None:  # last, as Slurm may take long; the leftovers' run leaves it
                self.call_features(doors.SWEEP_ASK_SLURM)
            self.run_noting_errors(lambda done: _record_events(node, done, start), self.report)

    def add_to_report(self, **fields: object) -> None:
        """Puts what was done into the report."""
        self.report = msgspec.structs.replace(self.report, **fields)

    def add_feature_results(self, found: Mapping[str, tuple[object, ...]]) -> None:
        """Puts what a feature did into the report: into fields of the core's, or of its own."""
        added = dict(self.report.added)
        for field, more in found.items():
            if field in SweepReport.__struct_fields__:
                self.add_to_report(**{field: getattr(self.report, field) + more})
            else:
                added[field] = (*added.get(field, ()), *more)
        self.add_to_report(added=added)

    def call_features(self, door: Door[SweepFunction], node: Node | None = None) -> None:
        """Has the features clean up in their turn; `node`: with another cache than today's.

        One that fails stops no other, nor the core.
        """
        there = node or self.node
        staying = frozenset(there.leases.list_jobs()) - {one.job for one in self.stale}
        facts = SweepFacts(there, self.slurm, staying, self.dry_run)

        def clean_up(name: str) -> None:
            found = self.run_noting_errors(lambda facts: load_door(name, door)(facts), facts) or {}
            self.add_feature_results({field: more for field, more in found.items() if more})

        with contextlib.ExitStack() as stack:
            stack.push(self.keep_exception)
            epilog.run_parts(
                [functools.partial(clean_up, name) for name in list_names_with_door(door.name)]
            )

    def keep_exception(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Returns whether the sweep goes on before this error does: ^C ends it."""
        if isinstance(error, Exception):
            self.feature_error = error
        return isinstance(error, Exception)

    def release_jobs(self) -> None:
        """Releases what jobs that are over had beside the cache."""
        released = tuple(self.release_stale_leases())
        if not self.dry_run:
            self.run_noting_errors(self.drop_stale_nodelists, self.slurm)
        self.run_noting_errors(self.unmount_strays, self.node)
        keepers = self.run_noting_errors(self.end_hanging_keepers, self.node) or ()
        self.call_features(doors.SWEEP_WITHOUT_CACHE)
        self.add_to_report(
            released=released,
            kept=len(self.node.leases.list_jobs()) - (len(released) if self.dry_run else 0),
            redirects=tuple(self.unredirected),
            keepers=keepers,
            doubt=self.doubt,
        )

    def sweep_earlier_caches(self, caches: tuple[Cache, ...]) -> None:
        """Removes what jobs that are over had in caches that were configured before.

        Their entries stay: the configuration may be what is wrong.
        """
        for cache in caches:
            there = msgspec.structs.replace(self.node, cache=cache)
            with contextlib.suppress(ForestageError, OSError):  # not ours now, or not there
                earlier_caches.check_exclusive_use(self.node, cache)
                self.call_features(doors.SWEEP_IN_EACH_CACHE, there)

    def sweep_cache(self) -> None:
        """Deletes what lies in the cache and nobody needs; looks at the health of its disk."""
        node = self.node
        self.add_to_report(parts=self.run_noting_errors(self.delete_dead_parts, node) or ())
        self.call_features(doors.SWEEP_IN_EACH_CACHE)
        self.add_to_report(evicted=self.run_noting_errors(self.evict_to_watermark, node) or ())
        self.call_features(doors.SWEEP_WITH_CACHE)
        if not self.dry_run:
            node.cache.mark_in_use()
            node.cache.remember_disk()  # of a cache that another node made
            disk_errors.scan_kernel_log(node.places, node.cache, node.clock)
            self.run_noting_errors(evict.drop_dead_locks, node.cache)
            self.run_noting_errors(node.cache.drop_unfinished, node.clock.wall())
            self.run_noting_errors(node.cache.correct_future_uses, node.clock.wall())
            self.run_noting_errors(hot_pieces.repair_index, node.cache)

    def prove_entries(self, progress: VerifyProgress) -> None:
        """Reads the entries that are due; a dry run only names them."""
        due = self.run_noting_errors(list_due_entries, self.node) or ()
        if self.dry_run:
            self.add_to_report(unproven=tuple(one.item.key for one in due))
            return
        self.add_to_report(verified=tuple(self.prove_due_entries(due, progress)))
        self.run_noting_errors(end_doubt_if_proven, self.node)

    def find_stale_leases(self) -> None:
        """Finds the leases of jobs that are over; none, and `doubt`, if Slurm is not clear."""
        try:
            self.stale = list_stale_leases(self.node.leases, self.slurm)
        except (ForestageError, OSError) as error:
            _raise_if_not_root(error)
            self.doubt = str(error)

    def run_noting_errors(self, work: Callable[[T], R], subject: T) -> R | None:
        """What `work` returns; None, and a problem noted, where it fails in an expected way."""
        try:
            return work(subject)
        except (ForestageError, OSError) as error:
            _raise_if_not_root(error)
            self.problems.append(str(error))
            return None

    def is_cache_made(self, node: Node) -> bool:
        """Whether the cache exists; that its disk is not mounted is no problem of the sweep's."""
        try:
            return inventory.is_cache_made(node)
        except Failed as failed:
            if failed.reason not in UNMOUNTED_REASONS:
                raise
            self.add_to_report(unmounted=str(failed))
            return False

    def release_stale_leases(self) -> Iterator[ReleasedLease]:
        """Releases them one by one; a hook that waits gets the lock in between."""
        for one in self.stale:
            released = self.run_noting_errors(self.release_lease, one)
            if released is not None:
                yield released
            if not self.dry_run:
                self.pause_for_hooks()

    def pause_for_hooks(self) -> None:
        """Leaves the lock free for long enough that a hook that polls for it sees that."""
        self.node.clock.sleep(LOCK_PAUSE)

    def release_lease(self, one: StaleLease) -> ReleasedLease | None:
        """Does what the Epilog would have done. None where a hook has used the lease since."""
        node, leases = self.node, self.node.leases
        cache, user, released = node.cache, ROOT_USER, ReleasedLease(one.job, one.why)
        if one.lease:
            cache = Cache(Path(one.lease.cache), node.places.claims)
            user = one.lease.user
            released = ReleasedLease(one.job, one.why, user.name, user.uid, one.lease.node)
        if self.dry_run:
            return released
        if cache.root != node.cache.root:
            disk_probe.check_writable(node.places, cache)  # the sweep has asked the other one
        epilog.record_last_use(cache, one.lease, node.clock.wall())
        with contextlib.ExitStack() as claims:
            with lock.held_if_writable(cache.space_lock, lock.SPACE_TIMEOUT):
                if leases.find_version(one.job) != one.mark:
                    return None
                now = node.clock.wall()  # what hangs is tried once, with the strays
                table = mounts.list_mounts()
                going = epilog.drop_lease_and_claim_binds(
                    cache, leases, node.places, one.job, claims, table, now
                )
            number = self._unmount_claimed(going, lambda bind: user)
        return msgspec.structs.replace(released, redirects=number)

    def unmount_strays(self, node: Node) -> None:
        """Unmounts redirects that no lease asks for, each as its entry's owner."""
        if self.dry_run:
            needed = {use.path for lease in self._list_staying_leases() for use in lease.uses}
            bound = unmount.list_binds(node.cache)
            self.unredirected += [
                bind.path for bind in redirect.list_unneeded_binds(bound, frozenset(needed))
            ]
            return
        with contextlib.ExitStack() as claims:
            with lock.held_if_writable(node.cache.space_lock, lock.SPACE_TIMEOUT):
                node.leases.drop_unfinished()
                unmount.delete_old_claims(node.cache)
                table = mounts.list_mounts()
                going = redirect.claim_unneeded_binds(
                    node.cache, node.leases, node.places, claims, table
                )
            self._unmount_claimed(going, functools.partial(choose_bind_owner, node))
        left = {bind.mount.id for bind in unmount.list_binds(node.cache)}
        self.unredirected += [one.bind.path for one in going if one.bind.mount.id not in left]
        self.problems += namespaces.unmount_in_namespaces(
            node.cache, node.leases, total=unmount.SWEEP_TOTAL
        ).problems

    def drop_stale_nodelists(self, slurm: SlurmClient) -> None:
        """Deletes the nodes that Prologs noted of jobs that are over and never took a lease."""
        node, before = self.node, self.node.clock.wall() - MIN_NODELIST_AGE
        listed = node.leases.list_jobs_without_lease(before)
        try:
            if self.doubt or not listed or not slurm.has_node(slurm.node):
                return
            ended = sorted({*listed} - slurm.list_jobs_with_steps())
            over = [job for job in ended if find_end_reason(slurm.find_job(job), slurm.node)]
        except SlurmError as error:
            self.doubt = str(error)
            return
        for job in over:
            with lock.held_if_writable(node.cache.space_lock, lock.SPACE_TIMEOUT):
                node.leases.drop_nodelist(job, before)

    def _unmount_claimed(
        self, going: list[unmount.ClaimedBind], whose: Callable[[unmount.RedirectBind], User]
    ) -> int:
        """Returns how many have gone; a problem is noted for those that stay."""
        try:
            unmount.unmount_binds(going, whose, unmount.SWEEP_TOTAL)
        except unmount.UnmountError as stays:
            self.problems.append(str(stays))
            return stays.removed
        return len(going)

    def delete_dead_parts(self, node: Node) -> tuple[str, ...]:
        """Deletes parts that nobody will resume; returns their keys."""
        wanted = {use.key for lease in self._list_staying_leases() for use in lease.uses}
        boot, now = boot_id(), node.clock.wall()

        def unwanted(part: Part) -> bool:
            abandoned = part.idle_seconds(now) > ABANDONED_AFTER
            return (
                abandoned and part.directory.name not in wanted
            ) or not part.is_resumable_in_boot(boot)

        if not self.dry_run:
            return evict.drop_dead_parts(node.cache, unwanted)
        return evict.list_dead_parts(node.cache, unwanted)

    def end_hanging_keepers(self, node: Node) -> tuple[str, ...]:
        """Ends keepers that hang, and removes what dead ones left; returns the former's keys."""
        hanging = keeper_cleanup.list_hanging_keepers(node.places.through, node.clock)
        if not self.dry_run:
            for found in hanging:
                self.run_noting_errors(keeper_cleanup.kill_keeper, found)
            for spot in keeper_cleanup.list_dead_directories(
                node.places.through, node.cache, node.clock.wall()
            ):
                self.run_noting_errors(keeper_cleanup.remove_directory, spot)
        return tuple(found.spot.name for found in hanging)

    def evict_to_watermark(self, node: Node) -> tuple[str, ...]:
        """Evicts down to the low watermark, as the Epilog does; returns the keys."""
        if not self.dry_run:
            evict.recount_entries(node.cache)  # a crash may have left the sum wrong
            return evict.evict_to_watermark(node.cache, node.leases, node.config)
        leased = frozenset(use.key for lease in self._list_staying_leases() for use in lease.uses)
        return evict.plan_to_watermark(node.cache, lambda: leased, node.config).victims

    def prove_due_entries(
        self, due: tuple[DueEntry, ...], progress: VerifyProgress
    ) -> Iterator[EntryVerdict]:
        """Reads what is due; bad entries are evicted, healthy ones noted."""
        for one in due:
            verdict = self.run_noting_errors(lambda one: prove_entry(self.node, one, progress), one)
            if verdict is not None:
                yield verdict

    def _list_staying_leases(self) -> list[Lease]:
        """The leases that are not released. Raises Failed for a damaged one that stays."""
        over = {one.job for one in self.stale}
        leases = self.node.leases
        staying = (leases.find_lease(job) for job in leases.list_jobs() if job not in over)
        return [lease for lease in staying if lease is not None]


def _record_events(node: Node, done: SweepReport, start: float) -> None:
    """One event for each lease, and one, of job 0, for what belonged to no job."""
    now, total = round(node.clock.wall(), 3), round(node.clock.monotonic() - start, 4)

    def event(one: ReleasedLease, outcome: events.ReleaseOutcome) -> EventRecord:
        return EventRecord(now, "sweep", one.job, outcome, one.user, one.uid, one.node, total=total)

    found = [
        event(one, events.ReleaseOutcome("released", unmounted=one.redirects, detail=one.why))
        for one in done.released
    ]
    if done.redirects or done.evicted:  # what was bad has an event of its own
        rest = events.ReleaseOutcome(
            "released", unmounted=len(done.redirects), evicted=done.evicted
        )
        found.append(event(ReleasedLease(0, ""), rest))
    try:
        events.record_events(node.places, found)
    except OSError as error:
        losses.record_loss(node.places.lost_events, now, error)
        raise


def list_due_entries(node: Node) -> tuple[DueEntry, ...]:
    """What has to be read: what an earlier boot wrote, what is in doubt, what was not for long."""
    disk, now = disk_errors.read_state(node.places), node.clock.wall()
    proved = frozenset(disk.proved)
    unproven, doubted, old = [], [], []
    for item in inventory.read_inventory(node).items:
        read = node.cache.last_verified(item.key)
        if disk.since and item.key not in proved:
            doubted.append(
                DueEntry(
                    item,
                    VerifyOptions(
                        "after an error of the disk", is_doubted=True, event_hook="sweep"
                    ),
                )
            )
        elif not node.cache.is_proven(item.key):
            unproven.append(DueEntry(item, VerifyOptions("after a restart", event_hook="sweep")))
        elif abs(now - read) > PROOF_INTERVAL:  # also one that was read by a clock far ahead
            old.append(
                (
                    read,
                    DueEntry(
                        item,
                        VerifyOptions(
                            "as a precaution", rate=PROOF_BYTES_PER_SECOND, event_hook="sweep"
                        ),
                    ),
                )
            )
    old.sort(key=lambda one: one[0])
    return (*doubted, *unproven, *(due for _, due in old))


def end_doubt_if_proven(node: Node) -> None:
    """Ends the doubt in the disk once no entry is left that was not read since it began."""
    disk = disk_errors.read_state(node.places)
    items = inventory.read_inventory(node).items if disk.since else ()
    if disk.since and {item.key for item in items} <= {*disk.proved}:
        disk_errors.end_doubt(node.places, disk.since)


def prove_entry(node: Node, due: DueEntry, progress: VerifyProgress) -> EntryVerdict | None:
    """Compares an entry with its checksums, past the page cache; a bad one is evicted.

    A healthy one is noted, so that no other sweep reads it; None: it was evicted. Raises OSError.
    """
    item = due.item
    with contextlib.ExitStack() as undo:
        note = None
        if item.entry is not None:  # else it is bad, whatever else is there
            # Opened first: the note must lie beside the bytes that are read, whatever has that
            # name by then. And what cannot be noted would be read again by every sweep.
            try:
                here = os.open(node.cache.entry_dir(item.key), os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # evicted since the sweep began
                return None
            undo.callback(os.close, here)
            try:
                note = _open_proof_file(here)
            except OSError as error:
                what = f"entry {item.key} cannot be noted as verified: {error.strerror}"
                raise Failed("io", what, "evict it if its file `boot` is damaged") from None
            undo.callback(os.close, note)
        # An error of the disk while it is read makes another doubt than this.
        began, doubt = node.clock.wall(), disk_errors.read_state(node.places).since
        (verdict,) = verify.verify_entries(node, [item], False, progress, due.manner).verdicts
        if verdict.error:
            raise Failed("io", f"entry {item.key} could not be verified: {verdict.error}")
        if note is not None and verdict.result == "ok":
            os.pwrite(note, PROVEN, 0)
            os.ftruncate(note, len(PROVEN))
        if note is not None and verdict.result != "bad":
            os.utime(note, (began, began))
            if doubt:
                disk_errors.record_proven_entry(node.places, doubt, item.key)
    return verdict


def _open_proof_file(here: int) -> int:
    """Opens an entry's `boot` for writing, as it is. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open("boot", flags, 0o600, dir_fd=here)


def make_document(done: SweepReport) -> dict[str, object]:
    """Return the document of `sweep --json`, which has each field of features. Pure."""
    own = msgspec.structs.asdict(done)
    del own["added"]
    fields = [item for fields in load_doors(doors.SWEEP_FIELDS) for item in fields().items()]
    return insert_after(own, [(after, {name: done.added.get(name, ())}) for name, after in fields])


def format_output(done: SweepReport) -> list[OutputBlock]:
    """Pure: what `sweep` prints: what was done, or would be, and what could not be."""
    would = "would be " if done.dry_run else ""
    lines = []
    for lease in done.released:
        redirects = (
            f", {format_count(lease.redirects, 'redirect')} unmounted" if lease.redirects else ""
        )
        who = f"job {lease.job}" + (f" of {lease.user}" if lease.user else "")
        lines.append(f"{who}: lease {would}released ({lease.why}){redirects}")
    lines += [f"{path}: redirect {would}unmounted, no lease needs it" for path in done.redirects]
    lines += [f"part {short_key(key)}: {would}deleted" for key in done.parts]
    lines += [f"keeper of {short_key(key)}: {would}ended, it hung" for key in done.keepers]
    lines += [f"{short_key(key)}: {would}evicted, to make room" for key in done.evicted]
    lines += [f"{short_key(key)}: would be read and verified" for key in done.unproven]
    for one in done.verified:
        if one.result == "bad":
            end = f"stays: {one.stays}" if one.stays else "evicted"
            why = one.detail or "its chunks have changed"
            lines.append(f"{short_key(one.key)}: bad ({why}), {end}")
    healthy = sum(1 for one in done.verified if one.result == "ok")
    if healthy:
        lines.append(f"{format_count(healthy, 'entry', 'entries')} read and verified: healthy")
    for added in load_doors(doors.SWEEP_LINES):
        lines += added(done)
    if done.doubt:
        lines.append(f"No lease was released, Slurm gave no clear answer: {done.doubt}")
    if done.unmounted:
        lines.append(f"The cache was left alone: {done.unmounted}")
    lines += [f"Problem: {problem}" for problem in done.problems]
    lines.append(f"{format_count(len(done.released), 'lease')} {would}released, {done.kept} kept.")
    return [TextLine(text) for text in lines]


def choose_exit_status(done: SweepReport) -> int:
    """Pure: bad bytes before all else, then what the node could not do, then what may come yet."""
    if done.bad:
        return 7
    if done.problems:
        return 6
    if done.doubt:
        return 8
    return 12 if done.unmounted else 0


@click.command("sweep")
@as_json
@click.option("-n", "--dry-run", is_flag=True, help="Dry run: change nothing, verify nothing.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing if nothing was done.")
@click.option(
    "--only",
    type=click.Choice(("leftovers", "entries", "nodes")),
    help="Only what crashes left, the entries that are due to be read, or the list of nodes.",
)
@click.pass_context
def sweep_command(
    ctx: click.Context, dry_run: bool, quiet: bool, only: SweepPart | None, as_json: bool
) -> None:
    """Clean up what crashes left: leases of jobs that are over, redirects, parts.

    Asks Slurm about the jobs that hold a lease here; if it does not answer, no lease is released
    and the exit status is 8. Then reads the entries that are due, as after a restart. Run by
    `tend`.
    """
    with screen.show_busy_status() as progress:
        slurm = SlurmClient.from_environ(os.environ).with_pyslurm()
        done = run_sweep(ctx.obj.make_node(), slurm, dry_run, progress, only)
    print_result(
        make_document(done), () if quiet and done.is_empty else format_output(done), as_json
    )
    ctx.exit(choose_exit_status(done))


COMMANDS = (sweep_command,)
