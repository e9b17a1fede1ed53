"""Who imports an image: one worker of all nodes. A lease is a file, never a lock.

    NAME.lease.<n>   who imports: the newest generation n counts. Its mtime is their heartbeat
    NAME.wanted      touched by those who wait for it
    NAME.failed      how the last import ended that failed, for those who waited for that one

A lease is dead when its process is gone, which only the same boot of the same machine can tell (and
the same PID namespace), or when its mtime has not moved for DEAD_AFTER seconds of the looker's own
monotonic clock: no two clocks are compared, and hosts of one name are no matter. Then the next
generation is created, which succeeds for one of all lookers:

    A lease.1, hangs    B sees no beat, creates lease.2, imports    A beats: sees lease.2, stops
    A ended, took off lease.1    B creates a lease.1 of its own    A' beats: another token, stops

Whoever imports though nobody should makes the same image once more, and no wrong one.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from forestage.cache.part import boot_id
from forestage.clock import Clock
from forestage.features.registry.store import FILE, ImageStore, convert_store_errors
from forestage.features.registry.store_files import find_own_record, open_own_file, try_create_file
from forestage.system import processes, records
from forestage.system.files import open_descriptor

HEARTBEAT_INTERVAL = 10.0  # seconds between heartbeats
DEAD_AFTER = 60.0  # seconds without one


class ImportLeaseRecord(msgspec.Struct, frozen=True):
    """A process that imports; `host` is for people, `boot` and `pids` say where `pid` counts."""

    token: str
    host: str
    boot: str
    pids: str
    pid: int
    start: str


class ImportFailure(msgspec.Struct, frozen=True):
    """How the import of a lease failed."""

    token: str
    reason: str
    detail: str


class _NewestLease(msgspec.Struct, frozen=True):
    generation: int
    lease: ImportLeaseRecord | None  # None: half of one, or something else under its name
    beat: int  # ns


def make_lease_record(host: str) -> ImportLeaseRecord:
    """A lease for this process, by the numbers of /proc: a worker that is apart has others."""
    pid = int(os.readlink("/proc/self"))
    pids = f"proc:{os.stat('/proc').st_dev}"  # noqa: PTH116
    return ImportLeaseRecord(os.urandom(8).hex(), host, boot_id(), pids, pid, _find_start_time(pid))


def _find_start_time(pid: int) -> str:
    """When a process started, as /proc says it; "" for one that is gone."""
    try:
        found = processes.read_stat(Path(f"/proc/{pid}"))
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if found.is_over else str(found.began)


class ImportLease:
    """One worker's part in the import of one image."""

    def __init__(
        self, store: ImageStore, name: str, own_record: ImportLeaseRecord, clock: Clock
    ) -> None:
        self.store, self.name, self.own_record, self.clock = store, name, own_record, clock
        self.holder: ImportLeaseRecord | None = None  # whom `try_acquire` found at work
        self.tokens_waited_for: set[str] = set()  # tokens of those
        self._generation = 0
        self._seen: tuple[int, str, int] = (0, "", 0)
        self._moved = self._beaten = clock.monotonic()

    def try_acquire(self) -> bool:
        """Whether this worker imports from now on. Else `holder` does, and it asks again later."""
        with convert_store_errors(self.store.folder):
            newest = self._find_newest()
            if newest is not None and not self._is_dead(newest):
                self.holder = newest.lease
                if newest.lease is not None:
                    self.tokens_waited_for.add(newest.lease.token)
                self._touch_wanted()
                return False
            number = newest.generation + 1 if newest else 1
            if try_create_file(self._lease_path(number), msgspec.json.encode(self.own_record)):
                self._generation, self._beaten = number, self.clock.monotonic()
        return self._generation > 0

    def send_heartbeat(self) -> bool:
        """Says that the import goes on; False where somebody else does it now, or may do it."""
        if self.clock.monotonic() - self._beaten < HEARTBEAT_INTERVAL:
            return True
        self._beaten = self.clock.monotonic()
        return self.renew_if_newest()

    def renew_if_newest(self) -> bool:
        """Whether this worker's lease is there and the newest; if so, that is a heartbeat."""
        with convert_store_errors(self.store.folder):
            newest = self._find_newest()
            if (
                newest is None
                or newest.lease is None
                or newest.lease.token != self.own_record.token
            ):
                return False
            with open_own_file(self._lease_path(self._generation)) as fd:
                os.utime(fd)
        return True

    def release(self, reason: str = "", detail: str = "") -> None:
        """Lets go of the lease. Who waited learns the reason; "" has one of them go on instead."""
        with contextlib.suppress(OSError):
            if reason:
                failure = ImportFailure(self.own_record.token, reason, detail)
                path = self.store.folder / f"{self.name}.failed"
                records.write(path, msgspec.json.encode(failure))
            for number in sorted(self._list_generations()):
                if number < self._generation:
                    self._lease_path(number).unlink(missing_ok=True)
            lease = find_own_record(self._lease_path(self._generation), ImportLeaseRecord)
            if lease is not None and lease.token == self.own_record.token:
                self._lease_path(self._generation).unlink(missing_ok=True)
        self._generation = 0

    def find_failure(self) -> ImportFailure | None:
        """How an import ended that this worker had waited for."""
        found = find_own_record(self.store.folder / f"{self.name}.failed", ImportFailure)
        return found if found is not None and found.token in self.tokens_waited_for else None

    def _lease_path(self, generation: int) -> Path:
        return self.store.folder / f"{self.name}.lease.{generation}"

    def _list_generations(self) -> list[int]:
        with os.scandir(self.store.folder) as found:
            matches = [FILE.fullmatch(one.name) for one in found]
        leases = [match for match in matches if match and match["name"] == self.name]
        kinds = [match["kind"] for match in leases if match["kind"].startswith("lease.")]
        return [int(kind.removeprefix("lease.")) for kind in kinds]

    def _find_newest(self) -> _NewestLease | None:
        numbers = self._list_generations()
        if not numbers:
            return None
        path = self._lease_path(max(numbers))
        beat = 0
        # It went meanwhile, or is nothing of ours: then DEAD_AFTER counts.
        with contextlib.suppress(OSError), open_own_file(path) as fd:
            beat = os.fstat(fd).st_mtime_ns
        return _NewestLease(max(numbers), find_own_record(path, ImportLeaseRecord), beat)

    def _is_dead(self, newest: _NewestLease) -> bool:
        lease, now = newest.lease, self.clock.monotonic()
        seen = (newest.generation, lease.token if lease else "", newest.beat)
        if seen != self._seen:
            self._seen, self._moved = seen, now
        if now - self._moved >= DEAD_AFTER:
            return True
        if lease is None or (lease.boot, lease.pids) != (
            self.own_record.boot,
            self.own_record.pids,
        ):
            return False
        return _find_start_time(lease.pid) != lease.start

    def _touch_wanted(self) -> None:
        if self.clock.monotonic() - self._beaten < HEARTBEAT_INTERVAL:
            return
        self._beaten = self.clock.monotonic()
        path = self.store.folder / f"{self.name}.wanted"
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with contextlib.suppress(OSError), open_descriptor(path, flags, 0o600) as fd:
            os.utime(fd)
