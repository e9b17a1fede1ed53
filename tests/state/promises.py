"""What jobs and the timer do to a node, and what must hold after each of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis.stateful import RuleBasedStateMachine, invariant
from lab import Lab
from model import Job, Source, Stay, Version, allowed, owner_of, refusal
from played import Ended, Name, play, swept

from forestage.cache.allocation import SPARE
from forestage.cache.layout import StoredEntry, tree_bytes
from forestage.events import Outcome
from forestage.hooks.boundary import IMAGE_OPTION
from forestage.system.as_user import User
from node import ALICE, BOB, Later

HOUR = 3600.0
SMALL = 64 * 1024 + SPARE  # bytes that a copy takes beside its image, generously
SERVED = ("hit", "joined", "copied")
MEANWHILE = ("started", "through")  # the copy goes on

Work = Callable[[], Ended]
After = Callable[[Ended], None]


class Promises(RuleBasedStateMachine):
    """`lab` is the node; how a hook is run, and what may befall it, is the subclasses' part."""

    lab: Lab

    def __init__(self) -> None:
        super().__init__()
        self.lab.reset()
        self.node = self.lab.node
        self.clock = Later(HOUR)
        self.jobs: dict[int, Job] = {}
        self.starting: set[int] = set()  # their Prolog, or a step's helper, has not ended
        self.known: dict[str, Version] = {}  # the bytes that a key stands for
        # Paths that were changed in place, in several steps, while a stager ran. One that copies
        # between two of them would wait for the file to be left alone; here it has no time.
        self.halfway: set[str] = set()
        self.leased: set[str] = set()  # entries that were here, and leased, a moment ago
        self.untidy = False  # something was killed, and what it left may lie about
        self.lab.tally["lives"] += 1

    def run(self, work: Work, after: After) -> Ended:
        """Does it, with whatever befalls it; of one that is paused, `after` gets the end."""
        raise NotImplementedError

    def play(self, name: Name, environ: dict[str, str]) -> Work:
        return lambda: play(name, environ, self.node.places, self.clock)

    def calm(self) -> bool:
        """Whether nothing is in the way of a hook that runs now."""
        return not self.lab.filled()

    # What jobs do

    def prolog(self, number: int, wanted: list[str]) -> None:
        sources = [self.lab.sources[name] for name in wanted]
        first, rest = sources[0], sources[1:]
        comment = "stage=" + ",".join(str(one.path) for one in rest) if rest else None
        environ = self.node.environ(number, first.path, owner_of(number), comment)
        self.serve("prolog", number, sources, environ)

    def step(self, number: int, name: str) -> None:
        source, user = self.lab.sources[name], owner_of(number)
        environ = {
            "SLURM_SCRIPT_CONTEXT": "spank_step",
            "SLURM_JOB_ID": str(number),
            "SLURM_JOB_UID": str(user.uid),
            "SLURM_JOB_GID": str(user.gid),
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_WORK_DIR": str(self.node.shared),
            "SLURM_JOB_PARTITION": "batch",
            "SLURMD_NODENAME": "n1",
            IMAGE_OPTION: str(source.path),
            "FORESTAGE_TIMEOUT": self.step_timeout(),
        }
        # What its Prolog noted of the comment is shown to each step.
        by_path = {str(one.path): one for one in self.lab.sources.values()}
        hinted = [by_path[path] for path in self.node.leases.list_hinted_images(number)]
        self.serve("step", number, [source, *hinted], environ)

    def epilog(self, number: int) -> None:
        calm = self.calm()

        def after(ended: Ended) -> None:
            self.after_epilog(ended, calm)

        ended = self.run(
            self.play("epilog", self.node.environ(number, user=owner_of(number))), after
        )
        self.jobs.pop(number, None)
        after(ended)

    def after_epilog(self, ended: Ended, calm: bool) -> None:
        if ended.paused:
            return
        self.check_end(ended, calm)
        if ended.killed or ended.error or any(o.result == "failed" for o in ended.outcomes):
            self.untidy = True
        elif ended.outcomes and self.calm() and not self.lab.broken:
            self.untidy = False
            self.check_room()

    def sweep(self, dry_run: bool) -> None:
        """What the timer does. Slurm knows the jobs, and those whose hooks have not ended yet."""
        known = frozenset((*self.jobs, *self.starting))
        before, here = self.state(), self.lab.here(self.clock)
        calm, bad = self.calm(), self.lab.disk.bad()

        def after(ended: Ended) -> None:
            if not ended.paused:
                self.check_end(ended, calm)
                assert set(ended.bad) <= bad, "a sweep found fault with what is right"

        ended = self.run(lambda: swept(here, known, dry_run), after)
        after(ended)
        self.leased -= bad  # nobody is to read those
        if calm and self.calm() and not dry_run:
            self.lab.disk.is_proven()
            self.lab.tally["bad"] += len(ended.bad)
        if ended.killed or ended.paused or ended.error or not self.calm():
            self.untidy = self.untidy or not dry_run
        elif dry_run:
            assert self.state() == before, "a dry run has done something"
        else:
            self.untidy = False
            assert {lease.job for lease in self.node.leases.list_leases()} <= known
            self.check_room()

    def state(self) -> tuple[object, ...]:
        """All that a dry run must leave as it is."""
        parts = [part.directory.name for part in self.node.parts()]
        return self.node.binds(), self.node.entries(), parts, self.node.leases.list_leases()

    def step_timeout(self) -> str:
        return "540"

    def serve(
        self, name: Name, number: int, sources: list[Source], environ: dict[str, str]
    ) -> None:
        began = [Stay(source, source.latest) for source in sources]
        calm, off = self.calm(), self.lab.is_off()

        def after(ended: Ended) -> None:
            self.after_serving(name, number, began, ended, calm, off)

        if name == "prolog":  # until it has ended, there is no job to see anything
            self.jobs.pop(number, None)
        self.starting.add(number)
        after(self.run(self.play(name, environ), after))

    def after_serving(
        self, name: Name, number: int, began: list[Stay], ended: Ended, calm: bool, off: bool
    ) -> None:
        if ended.paused:
            return
        self.starting.discard(number)
        self.check_end(ended, calm)
        if ended.killed or ended.error:
            self.lab.tally[f"{name} {'killed' if ended.killed else ended.error[:30]}"] += 1
        if ended.killed:  # such a job is requeued, such a step is gone
            self.untidy = True
            return
        job = self.jobs.setdefault(number, Job(number))
        # A look that was never answered has seen nothing of what lies there.
        unseen = [o.reason in ("source-hangs", "busy", "helper") for o in ended.outcomes]
        if ended.error:
            self.untidy = True
            unseen = [True for _ in began]
        for stay, blind in zip(began, unseen, strict=True):
            job.stays[stay.source.path] = Stay(stay.source, 0) if blind else stay
        if ended.answer[:1] in (("use",), ("through",)):
            self.check_answer(ended.answer, began[0], number)
        for stay, outcome in zip(began, ended.outcomes, strict=False):
            self.lab.tally[f"{name} {outcome.reason or outcome.result}"] += 1
            self.untidy = self.untidy or outcome.result == "failed"
            self.check_outcome(name, stay, job.user, outcome, calm and self.calm(), off)

    # What must hold then

    def check_end(self, ended: Ended, calm: bool) -> None:
        """A hook meets nothing unexpected while all is calm."""
        assert not (ended.error and calm), ended

    def check_outcome(
        self, name: Name, stay: Stay, user: User, outcome: Outcome, calm: bool, off: bool
    ) -> None:
        """`off`: whether staging was switched off when the hook began."""
        if self.lab.broken:
            reasons = (self.lab.broken, "disabled", self.refusal(stay.source, user))
            assert outcome.reason in reasons, outcome
        elif off != self.lab.is_off():
            assert outcome.redirect != "mounted", "redirected though staging was off by then"
        elif off:
            assert outcome.reason == "disabled" or not calm, outcome
        elif calm and stay.since == stay.source.latest:
            self.check_served(name, stay.source, user, outcome)

    def refusal(self, source: Source, user: User) -> str:
        return refusal(source, user, self.lab.redirect)

    def check_served(self, name: Name, source: Source, user: User, outcome: Outcome) -> None:
        """Nobody is served in vain, and nobody is left out without need."""
        why_not = self.refusal(source, user)
        if why_not:
            assert (outcome.result, outcome.reason) == ("declined", why_not), outcome
            return
        if outcome.reason == "no-room":
            assert self.is_tight(source), outcome
            return
        held = self.node.leases.leased_keys()
        assert outcome.key in held, "served without a lease"
        assert self.lab.shown(source) == source.now
        redirect = self.lab.config.redirect
        if outcome.result in MEANWHILE:
            self.check_meanwhile(name, outcome)
            return
        assert outcome.result in SERVED, outcome
        if redirect == "bind":
            assert outcome.redirect in ("mounted", "kept"), outcome
            assert self.node.binds()[str(source.path)] == outcome.key == self.lab.key(source)
        else:
            assert outcome.redirect == redirect, outcome

    def check_meanwhile(self, name: Name, outcome: Outcome) -> None:
        """Only where the admin wants it, or where the step is yet to come."""
        config = self.lab.config
        prolog = name == "prolog" and config.redirect == "spank"
        assert prolog or config.cold != "wait", outcome
        reads = outcome.result == "through"
        assert reads == (
            config.redirect == "spank" and config.cold_start_mode == "through" and not prolog
        )
        later = {"bind": "later", "none": "none", "spank": "spank" if prolog or reads else "none"}
        assert outcome.redirect == later[config.redirect], outcome

    def check_answer(self, answer: tuple[str, ...], stay: Stay, number: int) -> None:
        """What the companion is to show is a copy of what the job may see, or that file itself."""
        path = Path(answer[1])
        key = path.parent.name
        if answer[0] == "use":
            facts = path.stat()
            owner = ALICE if facts.st_uid == ALICE.uid else BOB
            copy = Version(path.read_bytes(), owner, facts.st_mode & 0o7777)
        else:
            copy = self.known[key]
        assert copy in stay.source.versions[stay.since :], answer
        assert answer[2] == str(stay.source.path)
        held = self.node.leases.leased_keys()
        assert key in held, "the step holds no lease"

    def is_tight(self, source: Source) -> bool:
        """Whether what must stay leaves no room for this image."""
        assert source.now is not None
        stay = sum(one.bytes for one in self.stored_entries() if self.must_stay(one))
        # Another copy under way, in whose middle this hook ran.
        parts = [part.directory for part in self.node.parts()]
        stay += sum(tree_bytes(one) for one in parts if not self.node.is_idle(one.name))
        return stay + len(source.now.data) + SMALL > self.lab.config.max_size.resolve_bytes(0)

    def check_room(self) -> None:
        """After an Epilog the cache is down to its watermark, as far as it may be."""
        if not self.node.cache.locks.exists():
            return
        config = self.lab.config
        low = config.low_watermark.resolve_bytes(config.max_size.resolve_bytes(0))
        if self.lab.used() > low:
            assert all(map(self.must_stay, self.stored_entries())), (
                "an Epilog left the cache too full"
            )

    def must_stay(self, one: StoredEntry) -> bool:
        held = self.node.leases.leased_keys()
        return one.pinned or one.key in held

    def stored_entries(self) -> list[StoredEntry]:
        return self.node.cache.list_entries() if self.node.cache.entries.exists() else []

    @invariant()
    def nobody_sees_what_he_must_not(self) -> None:
        for source in self.lab.sources.values():
            shown = self.lab.shown(source)
            assert shown in source.versions, f"{source.path} shows what never was there"
            for job in self.jobs.values():
                stay = job.stays.get(source.path)
                assert stay is None or allowed(stay, job.user, shown), (
                    f"job {job.number} sees an older file than there was when it began"
                )

    @invariant()
    def a_leased_entry_stays(self) -> None:
        here = self.node.entries()
        now = set(self.node.leases.leased_keys())
        assert self.leased & now <= here, "a leased entry is gone"
        self.leased = now & here

    @invariant()
    def a_redirect_has_a_lease(self) -> None:
        if not self.untidy:
            assert set(self.node.binds()) <= self.node.leases.list_redirected_paths()
            assert not list(self.node.places.redirects.glob("*"))

    @invariant()
    def the_accounts_are_right(self) -> None:
        self.lab.tally["steps"] += 1
        if self.node.cache.locks.exists():
            assert self.lab.used() == self.lab.walked()
