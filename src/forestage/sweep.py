"""What did a crash leave behind? Leases, redirects and parts whose job or stager is gone.

Run by a timer, or by hand; never by a hook. It does what the Epilog would have done, by the
Epilog's own code and under the hooks' locks, each held for as long as a hook holds it: so it may
run at any moment beside hooks and other sweeps. It goes on after a failure, and tells of it in the
end.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from forestage import entries, evictions, proof
from forestage.cache import evict, redirect
from forestage.cache.layout import Cache
from forestage.cache.lease import Lease, Leases
from forestage.cache.node import Node
from forestage.cache.part import Part, boot_id
from forestage.errors import Failed, SlurmError
from forestage.events import Event, Outcome, append
from forestage.hooks import epilog
from forestage.slurm.queue import Gone, Slurm, gone
from forestage.stage import source
from forestage.system import lock
from forestage.system.as_user import User
from forestage.verify import Tell, Verdict

ABANDONED = 24 * 3600.0  # seconds; what nobody has resumed in so long only takes room
PROVING = 300.0  # seconds of reading in one sweep; leases are not to wait for a whole cache
PAUSE = 2 * lock.POLL  # seconds; who polls for the lock gets it in between
ROOT = User("root", 0, 0)
TROUBLE = (OSError, Failed, lock.Busy)

T = TypeVar("T")
R = TypeVar("R")


class Released(msgspec.Struct, frozen=True):
    """A lease that was released, or would be, and how many redirects went with it.

    `user` and `node` are "" where the lease is damaged.
    """

    job: int
    user: str
    node: str
    why: str
    redirects: int = 0


class Swept(msgspec.Struct, frozen=True):
    """What one sweep did, or would do. `redirects` no lease asked for; `parts`, `evicted`: keys.

    `kept` leases stay. `doubt` says why none was released. `unproven` are the entries that a dry
    run would read.
    """

    dry_run: bool
    released: tuple[Released, ...] = ()
    kept: int = 0
    redirects: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    verified: tuple[Verdict, ...] = ()
    unproven: tuple[str, ...] = ()
    doubt: str = ""
    problems: tuple[str, ...] = ()

    @property
    def bad(self) -> int:
        return sum(1 for one in self.verified if one.result == "bad")


def sweep(node: Node, slurm: Slurm, dry_run: bool, tell: Tell) -> Swept:
    """Cleans up after crashes; as root. `tell` is called with what is being done.

    Raises PermissionError for users who may not look.
    """
    start = node.clock.monotonic()
    run = _Run(node, dry_run)
    made = run.tried(entries.is_made, node)
    found, doubt = _asked(node.leases, slurm)
    released = tuple(run.each(found))
    run.tried(run.strays, found)
    parts = (run.tried(run.dead_parts, found) or ()) if made else ()
    evicted = (run.tried(run.evicted, found) or ()) if made else ()
    unproven = (run.tried(proof.due, node) or ()) if made else ()
    verified = () if dry_run else tuple(run.proofs(unproven, tell))
    done = Swept(
        dry_run=dry_run,
        released=released,
        kept=len(node.leases.jobs()) - (len(released) if dry_run else 0),
        redirects=tuple(run.off),
        parts=parts,
        evicted=evicted,
        verified=verified,
        unproven=tuple(item.key for item in unproven) if dry_run else (),
        doubt=doubt,
        problems=tuple(run.problems),
    )
    if not dry_run:
        run.tried(lambda swept: _record(node, swept, start), done)
    return msgspec.structs.replace(done, problems=tuple(run.problems))


def _asked(leases: Leases, slurm: Slurm) -> tuple[tuple[Gone, ...], str]:
    """The leases to release; or none, and why nobody knows."""
    try:
        return gone(leases, slurm), ""
    except (SlurmError, *TROUBLE) as error:
        if isinstance(error, PermissionError) and os.geteuid() != 0:
            raise
        return (), str(error)


class _Run:
    """One sweep at work; on the way grow `problems`, and `off`: paths no longer redirected.

    `hung` are the ids of mounts on which a path could not be reached in time.
    """

    def __init__(self, node: Node, dry_run: bool) -> None:
        self.node = node
        self.dry_run = dry_run
        self.problems: list[str] = []
        self.off: list[str] = []
        self.hung: set[int] = set()

    def tried(self, work: Callable[[T], R], subject: T) -> R | None:
        """What `work` gives; None, and a problem noted, where it fails in an expected way."""
        try:
            return work(subject)
        except TROUBLE as error:
            if isinstance(error, PermissionError) and os.geteuid() != 0:
                raise
            self.problems.append(str(error))
            return None

    def each(self, found: tuple[Gone, ...]) -> Iterator[Released]:
        """Releases them one by one; a hook that waits gets the lock after one of them."""
        for one in found:
            released = self.tried(self.release, one)
            if released is not None:
                yield released
            if not self.dry_run:
                self.pause()

    def pause(self) -> None:
        """Without the lock: who waits for it looks only now and then, and must see it free."""
        self.node.clock.sleep(PAUSE)

    def release(self, one: Gone) -> Released | None:
        """What the Epilog would have done. None where a hook has had to do with it since."""
        node, leases = self.node, self.node.leases
        released = Released(one.job, "", "", one.why)
        cache, user = node.cache, ROOT
        if one.lease:
            cache, user = Cache(Path(one.lease.cache)), one.lease.user
            released = Released(one.job, user.name, one.lease.node, one.why)
        if self.dry_run:
            return released
        with lock.held_if_writable(cache.space_lock, lock.SPACE_TIMEOUT):
            if leases.mark(one.job) != one.mark:
                return None
            if one.lease and node.config.on_deadline == "abort":
                # Before the lock is free: a job of this number may begin again, with its copy.
                self.tried(lambda lease: epilog.abort(cache, leases, lease), one.lease)
            try:
                count = epilog.let_go(cache, leases, one.lease, node.places, one.job, user)
            except (OSError, Failed) as error:  # the lease is gone, its redirect is a stray now
                count = self._stuck(error)
        return msgspec.structs.replace(released, redirects=count)

    def strays(self, found: tuple[Gone, ...]) -> None:
        """Takes redirects off that no lease asks for; those of one owner for each hold of the lock.

        Where a path hangs, that costs a hook one timeout, not one for each owner.
        """
        if self.dry_run:
            needed = {use.path for lease in self._staying(found) for use in lease.uses}
            bound = redirect.binds(self.node.cache)
            self.off += [bind.path for bind in redirect.unneeded(bound, frozenset(needed))]
            return
        tried: set[User] = set()
        while self._strays_of_one(tried):
            self.pause()

    def _strays_of_one(self, tried: set[User]) -> bool:
        """Those of an owner who is not in `tried` yet; whether there was one."""
        node = self.node
        with lock.held_if_writable(node.cache.space_lock, lock.SPACE_TIMEOUT):
            node.leases.drop_unfinished()
            stray = redirect.unneeded(redirect.binds(node.cache), node.leases.redirected())
            if not stray:  # what is left is where redirects are made
                redirect.unmount_unneeded(node.cache, node.leases, node.places, ROOT, None)
                return False
            owned: dict[User, list[redirect.Bind]] = {}
            for bind in stray:
                owned.setdefault(_owner(node.cache, bind), []).append(bind)
            for owner in [one for one in owned if one not in tried]:
                binds = [bind for bind in owned[owner] if bind.mount.parent not in self.hung]
                tried.add(owner)
                if len(binds) < len(owned[owner]):
                    beside = (bind.path for bind in owned[owner] if bind not in binds)
                    self.problems.append(f"not tried, beside what hangs: {', '.join(beside)}")
                if binds:
                    self._take_off(binds, owner)
                    return True
            return False

    def _take_off(self, binds: list[redirect.Bind], owner: User) -> None:
        try:
            redirect.unmount(binds, owner)
        except (OSError, Failed) as error:
            self._stuck(error)
        there = {bind.mount.id for bind in redirect.binds(self.node.cache)}
        self.off += [bind.path for bind in binds if bind.mount.id not in there]

    def _stuck(self, error: OSError | Failed) -> int:
        """Notes that redirects stay; how many others went."""
        self.problems.append(str(error))
        if not isinstance(error, redirect.StillMounted):
            return 0
        self.hung |= error.hung
        return error.off

    def dead_parts(self, found: tuple[Gone, ...]) -> tuple[str, ...]:
        """The keys of parts that nobody will go on with. They are deleted."""
        node = self.node
        staying = self._staying(found)
        wanted = {use.key for lease in staying for use in lease.uses}
        boot, now = boot_id(), node.clock.wall()

        def unwanted(part: Part) -> bool:
            abandoned = part.stood_still(now) > ABANDONED and part.directory.name not in wanted
            return abandoned or not part.resumable_in(boot)

        if not self.dry_run:
            return evict.drop_dead_parts(node.cache, unwanted)
        return tuple(
            directory.name
            for directory in node.cache.parts.iterdir()
            if unwanted(Part(directory)) and lock.is_free(node.cache.key_lock(directory.name))
        )

    def evicted(self, found: tuple[Gone, ...]) -> tuple[str, ...]:
        """The keys that go, down to the low watermark, as the Epilog does it."""
        node = self.node
        if not self.dry_run:
            return evict.tidy(node.cache, node.leases, node.config)
        leased = frozenset(use.key for lease in self._staying(found) for use in lease.uses)
        room = evictions.measured(node)
        stored = node.cache.stored()
        return evict.plan(stored, leased, room, evict.room_at_rest(room)).victims

    def proofs(self, items: tuple[entries.Item, ...], tell: Tell) -> Iterator[Verdict]:
        """Reads what an earlier boot has written; what is bad is evicted, what is right noted.

        For some minutes only: the rest stays due, and the next sweep goes on with it.
        """
        until = self.node.clock.monotonic() + PROVING
        for item in items:
            if self.node.clock.monotonic() > until:
                return
            verdict = self.tried(lambda one: proof.prove(self.node, one, tell), item)
            if verdict is not None:
                yield verdict

    def _staying(self, found: tuple[Gone, ...]) -> list[Lease]:
        """The leases that nobody releases. Raises Failed for a damaged one that stays."""
        over = {one.job for one in found}
        leases = self.node.leases
        staying = (leases.read(job) for job in leases.jobs() if job not in over)
        return [lease for lease in staying if lease is not None]


def _owner(cache: Cache, bind: redirect.Bind) -> User:
    """Who can reach a redirect's path, where root is squashed."""
    entry = cache.read(bind.key) if bind.key else None
    return source.owner(entry.access) if entry else ROOT


def _record(node: Node, done: Swept, start: float) -> None:
    """An event for each lease, and one for what belonged to no job, whose number is 0."""
    now, total = round(node.clock.wall(), 3), round(node.clock.monotonic() - start, 4)

    def event(one: Released, outcome: Outcome) -> Event:
        return Event(now, "sweep", one.job, outcome, one.user, node=one.node, total=total)

    found = [
        event(one, Outcome("released", released=one.redirects, detail=one.why))
        for one in done.released
    ]
    bad = tuple(one.key for one in done.verified if one.evicted)
    if done.redirects or done.evicted or bad:
        rest = Outcome("released", released=len(done.redirects), evicted=(*done.evicted, *bad))
        found.append(event(Released(0, "", "", ""), rest))
    append(node.places.events, found)
