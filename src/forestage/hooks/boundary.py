"""The hooks as Slurm runs them: stay out of the way, fail open, one line in the log.

slurmd drains a node whose Prolog or Epilog does not exit 0 (slurm.conf(5), `Prolog`). So nothing
that goes wrong here gets out, unless the admin asked for it with `on_error: drain`. A hook must run
no Slurm command, gets no PATH, and imports next to nothing before it knows that there is work: a
job without an image pays for one bare interpreter start. The SPANK companion's helper, the step, is
a hook like the others; it has an answer besides, and no failure of a step drains its node.
"""

from __future__ import annotations

import gc
import os
import time

from forestage import log

TYPE_CHECKING = False  # the real one costs the import of typing, 9 ms; checkers know it by name
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal, NoReturn

    from forestage.cache.node import Node
    from forestage.clock import Clock
    from forestage.config import Config, Settings
    from forestage.errors import Declined
    from forestage.events import Handled, Outcome
    from forestage.hooks.answers import Answer
    from forestage.hooks.data import Shown
    from forestage.hooks.limit import Limit
    from forestage.hooks.watch import Watched
    from forestage.paths import Places
    from forestage.slurm.job import Job

    Name = Literal["prolog", "step", "epilog"]

DRAIN = 75
"""The one exit status that the shell guard of the hooks does not turn into 0."""

USAGE = 2
"""As click's: the command was called in a wrong way."""

IMAGE_OPTION = "SPANK__SLURM_SPANK_OPTION_pyxis_container_image"
SAVE_OPTION = "SPANK__SLURM_SPANK_OPTION_pyxis_container_save"

BY_HAND = b"""\
forestage: `step` is what forestage's SPANK plugin runs when a step starts, with an environment of
 its own (to see what it did for a job: forestage explain JOBID)
"""


def main(name: Name) -> NoReturn:
    """What prolog/forestage, epilog/forestage and the companion call, as root. Ends the process."""
    # A hook lives for a tenth of a second and leaves nothing to clean up: collecting garbage and
    # taking the interpreter apart cost a warm hit 14 ms of 100.
    gc.disable()
    os._exit(_main(name))


def _main(name: Name, root: str = "") -> int:
    """`root` is above the paths of the node; a test has one of its own."""
    run = f"{root}/run/forestage"
    hook = Hook(name, os.environ, time.monotonic())
    if name == "step" and os.environ.get("SLURM_SCRIPT_CONTEXT") != "spank_step":
        os.write(2, BY_HAND)
        return USAGE
    note_call(name, os.environ, run)
    note_nodes(name, os.environ, run)
    if nothing_to_do(name, os.environ, f"{run}/leases"):
        hook.say("result=none")
        hook.answer("leave", "no-image")
        return 0
    from forestage.hooks import background, watch

    mark, code = "", 0
    try:
        if name == "epilog":
            background.stop(background.mark_of(os.environ, run))
        if name == "prolog":
            mark = background.leave(os.environ, run)
            hook.in_background = bool(mark)
        forked = None if mark else watch.fork(keeps_stdout=name == "step")
        if forked and forked[0]:
            code = hook.wait(*forked, root)
            return code
        if forked:
            hook.child = watch.Watched(forked[1])
        import_msgspec()
        from pathlib import Path

        from forestage.clock import Clock
        from forestage.paths import Places

        code = hook.run(Places(Path(root)) if root else Places(), Clock())
    except Exception as error:  # noqa: BLE001 - the fail-open boundary, the only one in the program
        what = f"reason={type(error).__name__} at={_place(error)} detail={str(error)[:1000]!r}"
        hook.say(f"result=failed {what}")
        hook.answer("leave", "error")
        code = DRAIN if hook.drains else 0
    finally:
        background.end(mark)
        hook.watched.end(code)
    return code


def import_msgspec() -> None:
    """Imports msgspec and pathlib without what they import and no hook uses: a third of its time.

    For these imports something small stands in for it. Who imports it later gets the real module.
    """
    import importlib
    import sys

    stands_in: dict[str, object] = {
        "typing_extensions": None,  # msgspec takes from typing what that has too
        "platform": _Unused,  # asked by uuid
        # datetime.py defines once more what it then takes from there.
        "datetime": importlib.import_module("_datetime"),
        "decimal": _Unused,
        "uuid": _Unused,
        "urllib.parse": _Unused,  # pathlib's, for as_uri()
        "msgspec.inspect": _Unused,
        "msgspec._json_schema": _Unused,
        "msgspec.toml": _Unused,
        "msgspec.yaml": _Unused,
    }
    if not stands_in.keys().isdisjoint(sys.modules):
        return
    sys.modules.update(stands_in)  # type: ignore[arg-type]
    try:
        import pathlib  # noqa: F401

        import msgspec

        for part in ("inspect", "toml", "yaml"):
            delattr(msgspec, part)
    except (ImportError, AttributeError):  # who needs it next imports it with all that it wants
        pass
    finally:
        for name in stands_in:
            del sys.modules[name]


class _Unused:
    """What is asked of a module that stands in for another, once, by who imports it."""

    class Decimal: ...

    class UUID: ...

    class SafeUUID:
        unknown = None

    quote_from_bytes = schema = schema_components = None


def nothing_to_do(
    name: Name,
    environ: Mapping[str, str],
    leases: str,
    window: str = "/dev/shm/forestage-window-job-",  # noqa: S108 - to look what is there
    images: str = "/run/forestage/images",
) -> bool:
    """Whether this job is none of ours; costs no import, and never errs."""
    if name == "prolog":
        asked = IMAGE_OPTION in environ or SAVE_OPTION in environ
        comment = environ.get("SLURM_JOB_COMMENT", "")
        return not asked and not (comment and _may_be_hinted(comment))
    if name == "step":
        hinted = f"{leases}/{environ.get('SLURM_JOB_ID', '')}.hinted"
        asked = bool(environ.get(IMAGE_OPTION) or environ.get(SAVE_OPTION))
        return not (asked or os.path.exists(hinted))
    number = environ.get("SLURM_JOB_ID", "")
    if any(os.path.exists(f"{leases}/{number}.{kind}") for kind in ("json", "prolog")):
        return False
    if os.path.lexists(window + number):
        return False
    # Of a job that began with a release in which nodes agreed on digests without a store.
    return not os.path.exists(f"{images}/{number}.agreed")


def _may_be_hinted(comment: str) -> bool:
    """Whether a job's comment has to be read: it says stage, or a path follows a `=`."""
    if "stage" in comment.lower():
        return True
    if "=/" not in comment:
        return False
    from forestage.slurm import near

    return near.is_missed(comment)


def note_call(name: Name, environ: Mapping[str, str], run: str) -> None:
    """Leaves that Slurm calls this hook, and the latest job for which it did; never errs.

    `forestage status` and the alerts go by it: most jobs leave no event. Two Prologs at the same
    moment may leave the lower number, until the next.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if name == "step" or not (job.isascii() and job.isdigit() and len(job) <= 10):
        return
    _keep_from_lists(run)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO there blocks nobody
        fd = os.open(f"{run}/called.{name}", flags, 0o644)
        last = os.read(fd, 10)
        if int(job) > (int(last) if last.strip().isdigit() else 0):
            os.pwrite(fd, b"%10d" % int(job), 0)
        os.utime(fd)
        os.close(fd)
    except OSError:  # of a node whose /run is full
        return


def _keep_from_lists(run: str) -> None:
    """Has users pass through a directory of ours and not list it, as system/folders.py has it.

    That is an import. Never errs.
    """
    try:
        if os.stat(run).st_mode & 0o7777 != 0o711:  # noqa: PTH116
            os.chmod(run, 0o711)  # noqa: PTH101, S103
    except OSError:
        return


def note_nodes(name: Name, environ: Mapping[str, str], run: str) -> None:
    """Keeps the nodes that Slurm named to a Prolog, for steps; costs no import, never errs.

    They are whom a copy may ask: a step's own list is its user's word. Beside the lease, as most
    jobs with images in their steps only have none before the first of these.
    """
    file = f"{run}/leases/{environ.get('SLURM_JOB_ID', '')}.nodes"
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    try:
        if name == "prolog" and ("[" in listed or "," in listed):
            if os.path.exists(f"{run}/companion"):  # else no step asks
                os.makedirs(f"{run}/leases", 0o700, exist_ok=True)  # noqa: PTH103 - pathlib is an import
                fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
                os.write(fd, os.fsencode(listed))
                os.close(fd)
        elif name != "step" and os.path.exists(file):
            os.unlink(file)  # noqa: PTH108
    except OSError:  # a copy asks nobody, and is only slower
        return


class Hook:
    """One run of a hook. `drains` is whether the admin wants a failure to drain the node.

    `in_background`: of a Prolog whose script has ended (hooks/background.py). `child`: of the
    child that does its work (hooks/watch.py), what tells the hook.
    """

    def __init__(self, name: Name, environ: Mapping[str, str], start: float) -> None:
        self.name = name
        self.environ = environ
        self.start = start
        self.drains = False
        self.answered = name != "step"
        self.settings: Settings | None = None
        self.in_background = False
        self.child: Watched | None = None
        self.manager = os.getppid()  # of a child it would be the hook

    @property
    def watched(self) -> Watched:
        """Tells the process that waits for this one, if one does."""
        from forestage.hooks.watch import ALONE

        return self.child or ALONE

    def wait(self, pid: int, line: int, root: str) -> int:
        """Waits for the child that does the work; goes on without it where it hangs."""
        from forestage.hooks import watch

        def hangs(cache: str) -> float:
            return _hangs(cache, root)

        try:
            return watch.wait(pid, line, hangs)
        except watch.Late as late:
            self._go_on_without(late.cache, root)
            return 0

    def _go_on_without(self, cache: str, root: str) -> None:
        """The job reads its sources; what it holds of the cache the sweep releases."""
        from pathlib import Path

        from forestage.clock import Clock
        from forestage.errors import Declined
        from forestage.paths import Places
        from forestage.slurm.job import Job

        places = Places(Path(root)) if root else Places()
        why = Declined("deadline", "the hook's work did not end in time")
        if cache:
            why = Declined("cache-hangs", f"the disk of {cache} has stopped answering")
        job = Job.from_environ(self.environ)
        outcomes: list[Outcome] = []
        if self.name == "epilog":
            from forestage.hooks import epilog

            outcomes.append(epilog.given_up(places, job, why))
        else:
            from forestage.hooks import answers

            outcomes += [answers.of_error(request, why) for request in job.requests]
        self._report(job, outcomes, places, Clock())
        self.answer("leave", why.reason)

    def run(self, places: Places, clock: Clock) -> int:
        """The work, its log line and its events. Expected errors become outcomes; others rise."""
        from forestage.slurm.job import Job

        if self.in_background:
            from forestage.hooks import background
            from forestage.system import child

            child.leave_job()

        job = Job.from_environ(self.environ).of_manager(self.manager)
        if self.name == "step":
            from forestage.hooks import step

            job = step.environment(step.named(job), self.environ)
        work = {"prolog": self._prolog, "step": self._step, "epilog": self._epilog}[self.name]
        outcomes = work(job, places, clock)
        if self.in_background:
            background.forget_hints(places, job)
        self._report(job, outcomes, places, clock)
        failed = any(outcome.result == "failed" for outcome in outcomes)
        return DRAIN if failed and self.drains else 0

    def _prolog(self, job: Job, places: Places, clock: Clock) -> Sequence[Outcome]:
        from forestage.cache import shown
        from forestage.hooks import prolog
        from forestage.slurm import timeouts

        has_data = job.hints.has_data
        if not (job.requests or job.saves or job.hints.for_steps or has_data):
            bad = job.hints.problems and places.loaded.exists()
            if not bad:  # or nobody reads it
                return prolog.bad_hint(job)
        limits = timeouts.read(self.environ.get("SLURM_CONF", ""))
        decided = shown.decided_by(places)
        answers: Sequence[Answer] = ()
        nodes, refusal = self._nodes(job, places, clock)
        self._note_background(places, decided)
        if refusal is None:
            job, _ = self._begin_import(nodes[0], job, places, clock)
        # Once: several caches must not take several times what slurm.conf allows.
        limit = prolog.waiting(nodes[0], job, limits, refusal, self.in_background)
        self.watched.ends_within(limit.end.left())
        for node in nodes:
            answers = prolog.prolog(node, job, limit, refusal)
        if nodes[0].config.redirect == "spank":
            from forestage.hooks import step

            step.note_shown(step.telling(nodes[0], job), job, decided, answers)
        outcomes: list[Outcome] = [answer.outcome for answer in answers]
        if has_data:
            from forestage.hooks import data

            outcomes += data.begin(nodes[0], job, limit, refusal)
        if (refusal is None or job.hints.tell) and places.loaded.exists():
            from forestage.hooks import step

            prolog.note_bad_hints(step.telling(nodes[0], job), job, outcomes)
        return outcomes

    def _note_background(self, places: Places, decided: Sequence[str]) -> None:
        """Lets the next Prologs end before their work does, where the companion is loaded."""
        if self.settings is None or not places.loaded.exists():
            return
        from forestage.hooks import background

        try:
            conf = self.environ.get("SLURM_CONF", "")
            background.note(places, self.settings, self._has_companion(places), decided, conf)
        except OSError:  # they do their work first
            return

    def _step(self, job: Job, places: Places, clock: Clock) -> Sequence[Outcome]:
        from forestage.cache import shown
        from forestage.hooks import background, step
        from forestage.system import child

        decided = shown.decided_by(places)
        # A look that hangs cannot be killed: in the step's cgroup it would drain the node.
        child.leave_job()
        background.wait(background.mark_of(self.environ, os.fspath(places.run)))
        timeout = self.environ.get("FORESTAGE_TIMEOUT", "")
        self.watched.ends_within(float("inf"))  # the companion has a limit of its own
        done = step.Done([], ("leave", "no-image"))
        nodes, refusal = self._nodes(job, places, clock)
        job, refusal = step.as_noted(nodes[0], job, refusal)
        nodes = [step.telling(node, job) for node in nodes]
        later: tuple[str, ...] = ()
        if refusal is None:
            job, later = self._begin_import(nodes[0], job, places, clock)
        say = step.Once(nodes[0], job, _speak)
        step.say_bad_hints(nodes[0], job, say)
        # Once, as in the Prolog.
        limit = step.waiting(nodes[0], job, timeout, say, refusal, say.progress)
        for node in nodes:
            done = step.step(node, job, limit, refusal)
        outcomes = done.outcomes
        if not later:
            for name, value in step.variables(job, done.answers):
                _write("data", "env", name, value)
        for words in done.also:
            _write("also", *words)
        data: Sequence[Handled] = ()
        local = step.local_images(job, done.answers)
        if os.path.exists(nodes[0].leases.data(job.id)):
            shown_data = self._show_data(nodes[0], job, limit, refusal)
            data, local = shown_data.outcomes, (*local, *shown_data.local)
        for name, value in step.data_variables(data, local):
            _write("data", "env", name, value)
        outcomes += data
        step.tell(nodes[0], job, outcomes, say, say.always)
        # At once: the log can wait, the step does not.
        self.answer(*(later or done.answer))
        step.note_shown(nodes[0], job, decided, done.answers)
        return outcomes

    def _begin_import(
        self, node: Node, job: Job, places: Places, clock: Clock
    ) -> tuple[Job, tuple[str, ...]]:
        """Has a process obtain the registry's image that the job names: that may take long.

        Returns the job without it, and a step's answer. The job as it is, where it names none,
        there is no store, or pyxis would not ask our importer for it.
        """
        request, config = job.reference, node.config
        asked = config.registry.enabled and config.registry.store and not job.hints.off
        if request is None or not asked or config.redirect != "spank":
            return job, ()
        from forestage.errors import ForestageError
        from forestage.slurm import companion

        if not companion.is_importer(companion.importer(self.environ.get("SLURM_CONF", ""))):
            return job, ()
        from forestage.hooks import registry

        def report(outcomes: Sequence[Outcome]) -> None:
            self._report(job, outcomes, places, clock)

        later: tuple[str, ...] = ()
        try:
            if self.name == "prolog":
                registry.guess(node, job, request, report)
            elif found := registry.Asked.of(request, self.environ):
                later = registry.begin(node, job, found, report)
        except (ForestageError, OSError) as error:
            self.say(f"result=failed reason=registry detail={str(error)!r}")
        return job.without_reference(), later

    def _show_data(self, node: Node, job: Job, limit: Limit, refusal: Declined | None) -> Shown:
        """Tells the companion what data the step is shown."""
        from forestage.hooks import answers, data

        shown = data.show(node, job, limit, refusal)
        for words in shown.lines:
            if any(map(answers.has_control, words)):
                self.say(f"result=unshown detail={words!r}")
            else:
                _write("data", *words)
        return shown

    def _epilog(self, job: Job, places: Places, clock: Clock) -> Sequence[Outcome]:
        from forestage.errors import ConfigError
        from forestage.hooks import epilog
        from forestage.slurm import timeouts

        try:
            config = self._config(job, places, clock)
        except ConfigError as error:
            self.say(f"result=failed reason=config detail={error.one_line!r}")
            config = None
        limits = timeouts.read(self.environ.get("SLURM_CONF", ""))
        return epilog.epilog(config, places, clock, job, limits, self.watched)

    def _config(self, job: Job, places: Places, clock: Clock) -> Config:
        """Reads what the admin decided for the job's partition. Raises ConfigError."""
        from forestage.config import decided, load_settings, switch

        self.settings = load_settings(places.etc, places.config)
        found = self.settings.for_partition(job.partition)
        if found.redirect == "auto":
            found = decided(found, self._has_companion(places))
        # Not while it is off: during an upgrade old and new code may meet.
        off = switch.by_file(places, clock.wall())
        self.drains = found.on_error == "drain" and self.name != "step" and not off
        return found

    def _has_companion(self, places: Places) -> bool:
        """Whether the job's steps get the companion; it is what runs a step's hook."""
        from forestage.slurm import companion

        conf = self.environ.get("SLURM_CONF", "")
        return self.name == "step" or companion.is_loaded(places.loaded, conf)

    def _nodes(self, job: Job, places: Places, clock: Clock) -> tuple[list[Node], Declined | None]:
        """The node to work on, and why nothing may be staged on it now.

        Where the configuration cannot be used nobody can say which cache is meant: there is a node
        for each cache that a lease names, so that no redirect shows the job an outdated file.
        """
        from pathlib import Path

        from forestage.cache.layout import Cache
        from forestage.cache.lease import Leases
        from forestage.cache.node import Node
        from forestage.config import Config, switch
        from forestage.errors import ConfigError, Declined, Failed

        # First, as the configuration may be why somebody has switched it off.
        off = switch.by_file(places, clock.wall())
        try:
            config = self._config(job, places, clock)
        except ConfigError as error:
            leases = Leases(places.leases)
            bare = Config(sources=("/",))
            nodes = [
                Node(bare, places, Cache(Path(root), places.claims), leases, clock)
                for root in leases.caches()
            ]
            refusal = Declined("disabled", off) if off else Failed("config", error.one_line)
            return nodes or [Node.of(bare, places, clock)], refusal
        off = off or ("" if config.enabled else "`enabled: false`")
        node = Node.of(config, places, clock)
        self.watched.works_on(os.fspath(node.cache.root))
        return [node], Declined("disabled", off) if off else None

    def _report(self, job: Job, outcomes: Sequence[Outcome], places: Places, clock: Clock) -> None:
        from forestage import events

        total = time.monotonic() - self.start
        self.say(events.summary(job, outcomes, total))
        try:
            events.record(places.events, clock.wall(), self.name, job, outcomes, total)
        except OSError as error:
            # The job is served; a full log disk is no reason to drain its node.
            self.say(f"result=unrecorded detail={str(error)!r}")

    def say(self, text: str) -> None:
        """The hook's line in the log."""
        of_step = f"step={self.environ.get('SLURM_STEP_ID', '?')[:20]} " * (self.name == "step")
        line = f"{self.name} job={self.environ.get('SLURM_JOB_ID', '?')[:20]} {of_step}{text}"
        log.say(line, by_slurm="SLURM_SCRIPT_CONTEXT" in self.environ)

    def answer(self, *fields: str) -> None:
        """The companion's answer, if it waits for one and has none yet."""
        if not self.answered:
            self.answered = True
            _write(*fields)


def _hangs(cache: str, root: str) -> float:
    """For how many seconds a cache's disk has not answered."""
    from pathlib import Path

    from forestage.cache import disk
    from forestage.cache.layout import Cache
    from forestage.paths import Places

    hang = disk.hangs(Places(Path(root)) if root else Places(), Cache(Path(cache)))
    return hang.seconds if hang else 0.0


def _write(*fields: str) -> None:
    """One line for the companion, which may have gone."""
    try:
        os.write(1, "\t".join(fields).encode(errors="backslashreplace") + b"\n")
    except OSError:
        return


def _speak(text: str) -> None:
    """Writes one line for the user, whatever bytes the name of their file has."""
    from forestage.units import printable

    _write("say", f"forestage: {printable(text)}")


def _place(error: Exception) -> str:
    """File and line of the code that raised, for a log that has one line."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at else "?"
