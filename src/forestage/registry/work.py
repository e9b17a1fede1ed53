"""The registry worker: a program that runs as the user, and does all that a registry is asked for.

    python3 -I -m forestage.registry.work ORDER

    order -> environment -> reference -> digest (the job's record, or resolved)    says Resolved
          -> waits for "go", where it was told to ask
          -> in the store?                                                         says Present
          -> or imports, or waits for who does      says Importing, Progress; then says Present

Words are lines of JSON on stdout (words.py); what goes wrong is the last of them, Refused. It ends,
and has all end that it started, when its stdin ends: then nobody waits for the image any more.
"""

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from forestage.clock import Clock, Deadline
from forestage.errors import Declined
from forestage.events.reasons import REASONS
from forestage.registry import environment, importing, reference, resolve, words
from forestage.registry.environment import Settings
from forestage.registry.flight import Flight, of_this_process
from forestage.registry.importing import Import
from forestage.registry.reference import Reference
from forestage.registry.store import Record, Store
from forestage.registry.words import (
    Importing,
    Odd,
    Order,
    Present,
    Progress,
    Refused,
    Resolved,
    Word,
)
from forestage.system import run
from forestage.units import format_duration

SETTINGS = 60.0  # seconds for the evaluation of enroot's configuration
RESOLVE = 120.0  # seconds for a registry
POLL = 0.2  # seconds between looks for the leader's word, and at a running import
WATCH = 1.0  # seconds between looks at another's import
TELL = 30.0  # seconds between two lines for the user
GRACE = 3.0  # seconds to clean up once nobody waits any more

BY_TAG = ("registry-busy", "registry-odd")
"""Where a registry does not say a digest, and one import by the tag serves all of a job."""


FOR_ALL = ("import-failed", "too-large", "registry-moved", "store-full")
"""Why an import failed that would fail for whoever waited for it as well."""


class Gone(Exception):
    """Nobody waits for the image any more."""


class Superseded(Exception):
    """Another worker took the import over; this one's is given up."""


class Asker:
    """The other side: who started this process, and reads what it says."""

    def __init__(self) -> None:
        self.gone, self.went = threading.Event(), threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while said := os.read(0, words.LONGEST):
            if words.GO in said:
                self.went.set()
        self.gone.set()
        self.went.set()
        time.sleep(GRACE)
        # It hangs in a file system or a program, which must not go on for nobody.
        if os.getsid(0) == os.getpid():
            run.end_session(os.getpid(), spare=os.getpid())
        os._exit(1)

    def say(self, word: Word) -> None:
        """Raises Gone, Odd."""
        line = words.encode(word)
        try:
            while line:
                line = line[os.write(1, line) :]
        except BrokenPipeError:
            raise Gone from None

    def must_wait(self) -> None:
        """Raises Gone."""
        if self.gone.is_set():
            raise Gone

    def ask(self) -> None:
        """Waits until it says go. Raises Gone."""
        self.went.wait()
        self.must_wait()


class Task(msgspec.Struct, frozen=True):
    """What is known of the order once it was read; `jobs` is empty where it is none of a job's.

    The last of them is the order's own; the one before is the whole job of a step, whose digest
    counts for the step, if there is one.
    """

    order: Order
    reference: Reference
    settings: Settings
    jobs: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.reference.text

    def name(self, digest: str) -> str:
        """The name of the image; one without a digest is of this job alone."""
        settings = self.settings
        if digest:
            return reference.name(self.reference, digest, settings.arch, settings.squash_options)
        parts = (*self.jobs[-1:], self.reference.text, settings.arch, settings.squash_options)
        return f"job-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:32]}"


def main(argv: list[str]) -> int:
    """The whole program; `argv` is its one argument."""
    os.umask(0o077)
    asker, clock = Asker(), Clock()
    with contextlib.suppress(Gone):
        try:
            path = work(words.decode_order(argv[0]), asker, clock)
            asker.say(Present(os.fspath(path)))
        except Declined as error:
            asker.say(Refused(_known(error.reason), str(error)))
        except Odd as error:
            asker.say(Refused("registry-odd", str(error)))
        except OSError as error:
            asker.say(Refused("store-gone", str(error)))
        return 0
    return 1


def _known(reason: str) -> str:
    return reason if reason in REASONS else "registry-odd"


def work(order: Order, asker: Asker, clock: Clock) -> Path:
    """Returns where the image lies. Raises Declined, Gone, Odd, OSError."""
    task = understood(order, clock)
    store = Store(Path(order.directory), clock)
    digest = digest_of(task, store, asker, clock)
    name = task.name(digest)
    asker.say(Resolved(digest, name))
    if order.ask:
        asker.ask()
    return obtain(task, store, digest, name, asker, clock)


def understood(order: Order, clock: Clock) -> Task:
    """The order with the user's settings. Raises Declined."""
    meant = reference.parse(order.reference)
    environ = environment.read(_environment(order.environ_fd))
    settings = environment.settings(environ, Deadline.after(SETTINGS, clock))
    must_be_wanted(order.container, settings)
    return Task(order, meant, settings, _jobs(order.job, environ))


def _jobs(job: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Pure: the job of a step and the step, or the job alone, by names that no other job has.

    Two clusters may share a store and have jobs of one number; a job that starts anew asks anew.
    """
    around = (environ.get("SLURM_CLUSTER_NAME", ""), environ.get("SLURM_RESTART_COUNT", ""))
    names = (job.partition(".")[0], job) if "." in job else (job,)
    return tuple(".".join((around[0], name, around[1])) for name in names if name)


def must_be_wanted(container: str, settings: Settings) -> None:
    """Raises Declined where the step's container is there: pyxis does not look at its image then.

    Its name is what stands before a colon (pyxis' args.c), and the job's number may be part of it.
    """
    name = container.partition(":")[0]
    data = settings.variables.get("ENROOT_DATA_PATH", "")
    if not (name and data) or "/" in name:
        return
    if Path(data, f"pyxis_{name}").is_dir():
        raise Declined("container", f"the container {name} is there already")


def _environment(fd: int) -> bytes:
    if fd < 0:
        return Path("/proc/self/environ").read_bytes()
    with contextlib.suppress(OSError):  # a pipe has no place
        os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(fd, "rb") as file:
        return file.read(environment.MAX_BYTES + 1)


def digest_of(task: Task, store: Store, asker: Asker, clock: Clock) -> str:
    """The digest that counts for all of the job; "" where one import by the tag has to do."""
    if task.reference.digest:
        return task.reference.digest
    if not task.order.imports:
        return _meant_last(task, store)
    known = _said(task, store, asker, clock)
    if known is not None:
        return known
    try:
        found = resolve.digest(task.reference, task.settings, Deadline.after(RESOLVE, clock))
        store.set_last(task.text, found)
    except resolve.Refused as refused:
        found = _instead(task, store, refused)
    asker.must_wait()
    return store.set_job_digest(task.jobs[-1], task.text, found) if task.jobs else found


def _meant_last(task: Task, store: Store) -> str:
    """What the tag meant last: a guess, for which no registry is asked. Raises Declined."""
    last = store.last(task.text)
    if not last:
        raise Declined("not-imported", f"{task.text} is not in the store yet")
    return last


def _said(task: Task, store: Store, asker: Asker, clock: Clock) -> str | None:
    """What the node that leads has said; who does not lead waits for that."""
    patience = 0.0 if task.order.leads else task.order.patience
    end = Deadline.after(patience, clock)
    while True:
        for job in task.jobs:
            known = store.job_digest(job, task.text)
            if known is not None:
                return known
        if not task.jobs or not end.left():
            return None
        asker.must_wait()
        clock.sleep(min(POLL, end.left()))


def _instead(task: Task, store: Store, refused: resolve.Refused) -> str:
    """What stands in for the digest that a registry did not say. Raises Declined."""
    if task.order.offline == "use-last" and refused.transient:
        last = store.last(task.text)
        if last:
            return last
    if task.jobs and refused.reason in BY_TAG:
        return ""
    raise refused


def obtain(task: Task, store: Store, digest: str, name: str, asker: Asker, clock: Clock) -> Path:
    """The image: found, imported by another worker, or by this one."""
    flight = Flight(store, name, of_this_process(task.order.host), clock)
    since = told = clock.monotonic()
    holder = ""
    while True:
        found = store.find(name)
        if found is not None:
            return found
        if not task.order.imports:
            raise Declined("not-imported", f"{task.text} is not in the store yet")
        failed = flight.failure()
        if failed is not None:
            raise Declined(_known(failed.reason), failed.detail)
        if flight.take():
            with contextlib.suppress(Superseded):
                return _imported(task, store, digest, name, flight, asker, clock)
            continue
        where = flight.holder.host if flight.holder else ""
        if where != holder:
            holder = where
            asker.say(Importing(where))
        if clock.monotonic() - told >= TELL:
            told = clock.monotonic()
            waits = format_duration(clock.monotonic() - since)
            asker.say(Progress(f"{where or 'another node'} imports it; waited for {waits}"))
        asker.must_wait()
        clock.sleep(WATCH)


def _imported(
    task: Task, store: Store, digest: str, name: str, flight: Flight, asker: Asker, clock: Clock
) -> Path:
    """Imports the image, which this worker alone does now."""
    part = store.part(name)
    try:
        found = store.find(name)  # the one before may have ended between two looks
        if found is None:
            asker.say(Importing(task.order.host))
            _run(task, digest, part, flight, asker, clock)
            found = _published(task, store, digest, name, part, flight, clock)
    except Declined as error:
        if error.reason in FOR_ALL:
            flight.end(error.reason, str(error))
        raise
    finally:
        store.discard(part)
        flight.end()
    return found


def _run(task: Task, digest: str, part: Path, flight: Flight, asker: Asker, clock: Clock) -> None:
    """Runs enroot to its end. Raises Declined, Gone."""
    importing.bound(task.order.max_size)
    at_work = Import(_uri(task, digest), part, task.settings, clock)
    told = clock.monotonic()
    try:
        while at_work.runs(POLL):
            asker.must_wait()
            if not flight.beat():
                raise Superseded
            if clock.monotonic() - told >= TELL:
                told = clock.monotonic()
                asker.say(Progress(at_work.progress()))
        at_work.must_have_succeeded()
    finally:
        at_work.kill()


def _uri(task: Task, digest: str) -> str:
    settings = task.settings
    if digest:
        return task.reference.uri(digest, settings.enroot_version)
    return task.reference.uri("", (0, 0, 0))  # by its tag


def _published(
    task: Task, store: Store, digest: str, name: str, part: Path, flight: Flight, clock: Clock
) -> Path:
    """The image under its name, if it still is what was asked for."""
    if digest and not task.reference.digest and not task.settings.imports_digests:
        now = resolve.digest(task.reference, task.settings, Deadline.after(RESOLVE, clock))
        if now != digest:
            what = f"{task.text} was pushed anew while it was imported"
            raise Declined("registry-moved", what, "enroot 4 and later can import what was meant")
    if not flight.is_ours():
        raise Superseded
    record = Record(task.text, digest, clock.wall(), 0, task.order.host)
    return store.publish(name, part, record, task.order.max_size)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
