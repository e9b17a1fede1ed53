"""Leases: one small file for each job that uses entries, gone after a reboot as jobs are.

    /run/forestage/leases/JOB.json     what the job holds: `Lease`; there as long as any of these is
                          JOB.said     what was said (cache/job_notes.py)
                          JOB.hinted   a flag for the companion: each step of the job has to ask
                          JOB.nodes    its nodes, by a Prolog that has imported nothing
                          JOB.shown    what further steps are shown (cache/step_record.py)
                          JOB.directory  by what its own directory shows
                                       (features/data/directory_record.py)
                          JOB.data     its Epilog has data to release (features/data/requests.py)
                          JOB.over     an Epilog without Python was here (epilog/forestage)
                          JOB.prolog   locked as long as its Prolog works
                                       (hooks/background_prolog.py)

A number comes again: where slurmctld has lost its state, or MaxJobId is passed. So JOB.json, .said,
.nodes, .prolog and each image in .shown say whose they are, and JOB.json, .nodes and .prolog when
that run began if Slurm says so; what is another user's counts as not there. JOB.hinted has a helper
asked, and tells it nothing.

Reading is free. Taking and dropping happen under the cache's space lock, the one that evict plans
under, so that no entry is evicted between being found and being leased.

    state         reached by                          left by
    absent        boot, Epilog, sweep                 Prolog, step: taken
    taken         before the entry is copied or used  the path is noted, or an error drops it
    with a path   before the bind mount is made       Epilog drops it, then unmounts the path
    saves         the job saves its container there   Epilog drops it
    empty         something was said                  Epilog drops it
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from forestage.cache.job_notes import JobNotes
from forestage.errors import Declined, Failed
from forestage.system import files, folders, lock, records
from forestage.system.as_user import User
from forestage.units import is_number

MAX_BYTES = 128 * 1024
"""Of one lease: 2,400 images, or 1,000 with redirects of their paths. A job must not fill /run, nor
hold up all hooks, which read all leases."""


class EntryUse(msgspec.Struct, frozen=True):
    """One entry a job may read.

    `path` is the resolved path if it is redirected, or is to be once the entry is here; else "".
    """

    key: str
    path: str = ""


class Lease(msgspec.Struct, frozen=True):
    """What one job holds on this node; `since` in seconds since the epoch, `cache` the root.

    `saves` are resolved paths to which its containers are saved: none of them is redirected for the
    node. `node` is this node as Slurm calls it, "" where the hook had no name for it. `start` and
    `restart` are those of slurm/job.Job, 0 where a step took the lease.
    """

    job: int
    user: User
    since: float
    cache: str
    uses: tuple[EntryUse, ...] = ()
    node: str = ""
    saves: tuple[str, ...] = ()
    start: int = 0
    restart: int = 0

    def belongs_to(self, uid: int, start: int = 0) -> bool:
        """Return whether this is the lease of that user's job, of the run that began then. Pure.

        A start that is not known, 0, is any.
        """
        return self.user.uid == uid and (0 in (start, self.start) or start == self.start)

    def with_use(self, use: EntryUse) -> "Lease":
        """Returns a lease with one more use; a redirect replaces its plain use."""
        others = tuple(u for u in self.uses if u not in (use, EntryUse(use.key)))
        return msgspec.structs.replace(self, uses=(*others, use))

    def without_redirect(self, path: str) -> "Lease":
        """Returns a lease that wants no redirect at this path; what it uses stays the same."""
        uses = dict.fromkeys(EntryUse(u.key) if u.path == path else u for u in self.uses)
        return msgspec.structs.replace(self, uses=tuple(uses))

    def with_save_path(self, path: str) -> "Lease":
        """Returns a lease of a job that saves to this path, and so wants no redirect there."""
        saves = tuple(dict.fromkeys((*self.saves, path)))
        return msgspec.structs.replace(self.without_redirect(path), saves=saves)

    def without_entry(self, key: str) -> "Lease":
        """Returns a lease in which this entry is not used."""
        return msgspec.structs.replace(self, uses=tuple(u for u in self.uses if u.key != key))


class LeaseVersion(msgspec.Struct, frozen=True):
    """One state of a lease's file: no two have the same, whatever the clock does."""

    inode: int
    ctime_ns: int


class LeaseDirectory:
    """The directory of leases. Reading needs no lock.

    Whoever writes holds the space lock; only an Epilog that cannot get it drops its own without.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def lease_file(self, job: int) -> Path:
        return self.directory / f"{job}.json"

    def step_record_file(self, job: int) -> Path:
        """Where the companion finds what the job's steps are shown (cache/step_record.py)."""
        return self.directory / f"{job}.shown"

    def directory_record_file(self, job: int) -> Path:
        """Where the companion finds the job's own directory (features/data/directory_record.py)."""
        return self.directory / f"{job}.directory"

    def over_mark(self, job: int) -> Path:
        """It is there once an Epilog that could not do its work has ended the job."""
        return self.directory / f"{job}.over"

    def read_nodelist(self, job: int, uid: int | None = None) -> str:
        """The nodes that Slurm named to the Prolog of this user's job (hooks/boundary.py).

        "" if they are unknown. `uid` None: whoever's job it is.
        """
        with contextlib.suppress(OSError):
            text = os.fsdecode(files.read_file(self.directory / f"{job}.nodes"))
            listed, _, owner = text.partition("\n")
            if uid is None or owner.split()[:1] == [str(uid)]:
                return listed
        return ""

    def hints_flag(self, job: int) -> Path:
        """By this the companion knows that each step of the job is to be shown more images."""
        return self.directory / f"{job}.hinted"

    def set_hints_flag(self, job: int) -> None:
        """Has each of the job's steps ask a helper for the comment's sake.

        Under the space lock, with a lease that is there.
        """
        self.hints_flag(job).touch(0o600)

    def clear_hints_flag(self, job: int, uid: int | None = None) -> None:
        """Has the job's steps ask no helper for the comment's sake, if it names nothing for them.

        Under the space lock.
        """
        said = self.read_notes(job, uid)
        if not said.hinted and said.data is None and not said.words:
            self.hints_flag(job).unlink(missing_ok=True)

    def list_hinted_images(self, job: int, uid: int | None = None) -> tuple[str, ...]:
        """The images that the job's comment named, and its Prolog found."""
        with contextlib.suppress(Failed, OSError):
            return tuple(map(os.fsdecode, self.read_notes(job, uid).hinted))
        return ()

    def read_notes(self, job: int, uid: int | None = None) -> JobNotes:
        """What was said of this user's job; nothing where nothing was.

        `uid` None: whoever's job it is. Raises Failed if that is damaged.
        """
        try:
            found = records.load(self.notes_file(job), JobNotes)
        except FileNotFoundError:
            return JobNotes()
        except records.DamagedRecord as damaged:
            raise Failed("lease-damaged", str(damaged), "remove it if the job is gone") from None
        if uid not in (None, found.uid):
            return JobNotes()
        return msgspec.structs.replace(found, uid=None)

    def has_data(self, job: int, uid: int) -> bool:
        """Whether the comment of this user's job named any data; not where nobody can tell."""
        with contextlib.suppress(Failed, OSError):
            return self.read_notes(job, uid).data is not None
        return False

    def notes_file(self, job: int) -> Path:
        return self.directory / f"{job}.said"

    def add_notes(self, job: int, uid: int, **said: object) -> None:
        """Notes more of what was said, with a lease that is there. Under the space lock."""
        folders.ensure_directory_with_mode(self.directory)
        # What a killed hook left without a lease was said to an earlier run of the job.
        earlier = self.read_notes(job, uid) if self.lease_file(job).exists() else JobNotes()
        found = msgspec.structs.replace(earlier, **said, uid=uid)
        records.write(self.notes_file(job), msgspec.json.encode(found))

    def add_notes_and_keep_lease(self, lease: Lease, **said: object) -> None:
        """Notes more of what was said, and keeps the lease by that. Under the space lock."""
        self.add_notes(lease.job, lease.user.uid, **said)
        self.write_or_drop(lease)

    def find_lease(self, job: int) -> Lease | None:
        """The lease with a job's number, whoever's it is. Raises Failed if it is damaged."""
        return _find_lease(self.lease_file(job))

    def find_own_lease(self, job: int, uid: int) -> Lease | None:
        """The lease of this user's job; None also where another user's has its number.

        Raises Failed if it is damaged.
        """
        lease = self.find_lease(job)
        return lease if lease and lease.belongs_to(uid) else None

    def list_leases(self) -> list[Lease]:
        """Every lease, by file name. Raises Failed for a damaged one: it may protect any entry."""
        # glob() of a directory that is not there is empty, and so are the leases of a fresh boot.
        found = map(_find_lease, sorted(self.directory.glob("*.json")))
        return [lease for lease in found if lease is not None]

    def leased_keys(self) -> frozenset[str]:
        """The keys in use by any job: what must not be evicted."""
        return frozenset(use.key for lease in self.list_leases() for use in lease.uses)

    def list_users_of(self, key: str) -> frozenset[int]:
        """Return the uids whose jobs use this entry; a damaged lease is nobody's."""
        return frozenset(
            lease.user.uid
            for lease in self._list_readable()
            if any(use.key == key for use in lease.uses)
        )

    def is_saved_to(self, path: str) -> bool:
        """Whether some job saves its container there; a damaged lease is of none."""
        return any(path in lease.saves for lease in self._list_readable())

    def list_redirected_paths(self) -> frozenset[str]:
        """The paths that some job needs redirected. A damaged lease needs none.

        It protects its entries, but taking a redirect off does nobody harm.
        """
        return frozenset(
            use.path for lease in self._list_readable() for use in lease.uses if use.path
        )

    def _list_readable(self) -> Iterator[Lease]:
        """The leases that can be read."""
        for file in self.directory.glob("*.json"):
            lease = None
            with contextlib.suppress(Failed):
                lease = _find_lease(file)
            if lease is not None:
                yield lease

    def write_lease(self, lease: Lease) -> None:
        """Takes or extends a job's lease. Under the space lock.

        Raises Declined where it would grow above MAX_BYTES.
        """
        folders.ensure_directory_with_mode(self.directory)
        data = msgspec.json.encode(lease)
        if len(data) > MAX_BYTES:
            raise Declined("too-many", "the job's lease on this node holds what one may hold")
        records.write(self.lease_file(lease.job), data)

    def write_or_drop(self, lease: Lease) -> None:
        """Writes a lease, or drops one that says nothing any more. Under the space lock."""
        if lease.uses or lease.saves or self.read_notes(lease.job, lease.user.uid) != JobNotes():
            self.write_lease(lease)
        else:
            self._delete_files(lease.job, ("shown", "hinted", "said", "directory"))

    def touch_lease(self, job: int) -> None:
        """Says that a hook goes on with the lease as it is. Under the space lock."""
        os.utime(self.lease_file(job))

    def find_version(self, job: int) -> LeaseVersion | None:
        """What changes whenever a hook has to do with the lease; None where there is none."""
        found = files.lstat_or_none(self.lease_file(job))
        return LeaseVersion(found.st_ino, found.st_ctime_ns) if found else None

    def list_jobs(self) -> tuple[int, ...]:
        """The jobs that have a lease, damaged ones too, in order."""
        # glob() of a directory that is not there is empty.
        names = (file.stem for file in self.directory.glob("*.json"))
        return tuple(sorted(int(name) for name in names if is_number(name)))

    def list_jobs_without_lease(self, before: float) -> tuple[int, ...]:
        """The jobs without a lease whose nodes were noted before that moment, of the wall clock."""
        found = self.directory.glob("*.nodes")
        alone = (file for file in found if not file.with_suffix(".json").exists())
        old = (
            file
            for file in alone
            if (facts := files.lstat_or_none(file)) and facts.st_mtime < before
        )
        return tuple(sorted(int(file.stem) for file in old if is_number(file.stem)))

    def drop_nodelist(self, job: int, before: float) -> None:
        """Deletes the nodes of a job without a lease, if still the same. Under the space lock."""
        if job in self.list_jobs_without_lease(before):
            (self.directory / f"{job}.nodes").unlink(missing_ok=True)

    def list_cache_roots(self) -> tuple[str, ...]:
        """The roots of the caches that leases name; damaged ones name none."""
        found: dict[str, None] = {}
        for job in self.list_jobs():
            with contextlib.suppress(Failed):
                lease = self.find_lease(job)
                if lease is not None:
                    found[lease.cache] = None
        return tuple(found)

    def drop_unfinished(self) -> None:
        """Deletes what hooks left that were killed while they wrote, and what outlived its lease.

        Under the space lock. A job whose Prolog is still at work (hooks/background_prolog.py) may
        have hints before its lease.
        """
        marks = [*self.directory.glob("*.prolog")]
        at_work = {mark.stem for mark in marks if not lock.is_free(mark)}
        for mark in marks:
            if mark.stem not in at_work:
                mark.unlink(missing_ok=True)
        alone = (
            file
            for file in self.directory.glob("*.*")
            # A job's nodes are noted before it has a lease, and by many that never have one.
            if file.suffix not in (".json", ".nodes") and file.name[0] != "."
            if not file.with_suffix(".json").exists() and file.stem not in at_work
        )
        for file in (*self.directory.glob(".*.*.*"), *alone):  # the first as records.py names them
            file.unlink(missing_ok=True)

    def drop_lease(self, job: int) -> None:
        """Ends a job's lease, with all that was noted beside it. Under the space lock."""
        kinds = {file.suffix[1:] for file in self.directory.glob(f"{job}.*")}
        self._delete_files(
            job, kinds - {"json", "prolog"}
        )  # of that one somebody may have the lock

    def _delete_files(self, job: int, kinds: Iterable[str]) -> None:
        # The lease last: a sweep that finds one does what is left here.
        for file in (*(self.directory / f"{job}.{kind}" for kind in kinds), self.lease_file(job)):
            try:
                file.unlink(missing_ok=True)
            except IsADirectoryError:
                import shutil  # no hook needs it

                shutil.rmtree(file)


def _find_lease(file: Path) -> Lease | None:
    try:
        return records.load(file, Lease)
    except FileNotFoundError:
        return None
    except records.DamagedRecord as damaged:
        # No licence to evict. The job's own Epilog removes what is there without reading it.
        raise Failed("lease-damaged", str(damaged), "remove it if the job is gone") from None
