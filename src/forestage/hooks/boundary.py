"""The hooks as Slurm runs them: stay out of the way, fail open, one line in the log.

slurmd drains a node whose Prolog or Epilog does not exit 0 (slurm.conf(5), `Prolog`). So nothing
that goes wrong here gets out. A hook must run no Slurm command, gets no PATH, and imports next to
nothing before it knows that there is work: a job without an image pays for one bare interpreter
start. The SPANK companion's helper, the step, is a hook like the others; it has an answer besides.
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

    from forestage.clock import Clock
    from forestage.config import LoadedConfig
    from forestage.events import Outcome
    from forestage.hooks.hook_worker import HookPipe, HookWorker
    from forestage.paths import NodePaths
    from forestage.slurm.job import Job
    from forestage.slurm.slurm_conf import SlurmConf

    HookKind = Literal["prolog", "step", "epilog"]

USAGE_STATUS = 2
"""As click's: the command was called in a wrong way."""

MAX_NUMBER_DROP = 10_000
"""By so much a job's number may be below that of one which began before it."""

IMAGE_OPTION = "SPANK__SLURM_SPANK_OPTION_pyxis_container_image"
SAVE_OPTION = "SPANK__SLURM_SPANK_OPTION_pyxis_container_save"
STAGE_OPTION = "SPANK_FORESTAGE_STAGE"

STEP_USAGE = b"""\
forestage: `step` is what forestage's SPANK plugin runs when a step starts, with an environment of
 its own (to see what it did for a job: forestage explain JOBID)
"""


def main(name: HookKind) -> NoReturn:
    """What prolog/forestage, epilog/forestage and the companion call, as root. Ends the process."""
    # A hook lives for a tenth of a second and leaves nothing to clean up: collecting garbage and
    # taking the interpreter apart cost a warm hit 14 ms of 100.
    gc.disable()
    os._exit(_run_to_exit_status(name))


def _run_to_exit_status(name: HookKind, root: str = "") -> int:
    """`root` is above the paths of the node; a test has one of its own."""
    run = f"{root}/run/forestage"
    hook = HookRun(name, os.environ, time.monotonic())
    if name == "step" and os.environ.get("SLURM_SCRIPT_CONTEXT") != "spank_step":
        os.write(2, STEP_USAGE)
        return USAGE_STATUS
    record_call(name, os.environ, run)
    update_nodelist(name, os.environ, run)
    if name == "step":
        from forestage.slurm.step_protocol import PROTOCOL_GREETING

        write_companion_line(PROTOCOL_GREETING)
    if has_no_work(name, os.environ, root):
        hook.write_log_line("result=none")
        hook.write_answer("leave", "no-image")
        return 0
    from forestage.hooks import background_prolog, hook_worker

    try:
        if name == "epilog":
            background_prolog.stop_prolog(
                background_prolog.prolog_mark_path(os.environ, run), os.environ
            )
        # What is there of its number may be another job's: that goes before this one may start.
        if name == "prolog" and not has_lease(os.environ, run):
            hook.mark = background_prolog.detach_prolog(os.environ, run)
        forked = None if hook.mark else hook_worker.fork_worker(keeps_stdout=name == "step")
        if isinstance(forked, hook_worker.HookWorker):
            return hook.wait_for_worker(forked, root)
        hook.own_pipe = forked
        import_msgspec()
        from forestage.clock import Clock

        hook.run(_make_paths(root), Clock())
    except Exception as error:  # noqa: BLE001 - the fail-open boundary, the only one in the program
        at = _format_code_location(error)
        what = f"reason={type(error).__name__} at={at} detail={str(error)[:1000]!r}"
        hook.write_log_line(f"result=failed {what}")
        hook.write_answer("leave", "error")
    finally:
        background_prolog.end_background_work(hook.mark)
        hook.hook_pipe.exit_worker()
    return 0


def import_msgspec() -> None:
    """Imports msgspec and pathlib without what they import and no hook uses: a third of its time.

    For these imports something small stands in for it. Who imports it later gets the real module.
    """
    import importlib
    import sys

    stands_in: dict[str, object] = {
        "typing_extensions": None,  # msgspec takes from typing what that has too
        "platform": _ImportStub,  # asked by uuid
        # datetime.py defines once more what it then takes from there.
        "datetime": importlib.import_module("_datetime"),
        "decimal": _ImportStub,
        "uuid": _ImportStub,
        "urllib.parse": _ImportStub,  # pathlib's, for as_uri()
        "msgspec.inspect": _ImportStub,
        "msgspec._json_schema": _ImportStub,
        "msgspec.toml": _ImportStub,
        "msgspec.yaml": _ImportStub,
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


class _ImportStub:
    """What is asked of a module that stands in for another, once, by who imports it."""

    class Decimal: ...

    class UUID: ...

    class SafeUUID:
        unknown = None

    quote_from_bytes = schema = schema_components = None


def has_no_work(name: HookKind, environ: Mapping[str, str], root: str) -> bool:
    """Return whether this job is none of ours. Imports the table of features at most."""
    number = environ.get("SLURM_JOB_ID", "")
    run = f"{root}/run/forestage"
    if name == "prolog":
        asked = IMAGE_OPTION in environ or SAVE_OPTION in environ or STAGE_OPTION in environ
        asked = asked or may_have_hints(environ.get("SLURM_JOB_COMMENT", ""))
        return not asked and not has_lease(environ, run)
    if name == "step":
        asked = bool(environ.get(IMAGE_OPTION) or environ.get(SAVE_OPTION))
        return not (asked or os.path.exists(f"{run}/leases/{number}.hinted"))
    from forestage.features import FEATURES  # which imports nothing

    marks = [mark.format(job=number) for feature in FEATURES for mark in feature.marks]
    return not any(os.path.exists(f"{run}/{mark}") for mark in marks)


def has_lease(environ: Mapping[str, str], run_directory: str) -> bool:
    """Whether there is a lease of the job's number, whoever's it is; costs no import."""
    return os.path.exists(f"{run_directory}/leases/{environ.get('SLURM_JOB_ID', '')}.json")


def format_job_owner(environ: Mapping[str, str]) -> str:
    """The words by which a record says whose it is besides its number: uid and start; 0: unknown.

    A hook's that Slurm calls: the start in a step's environment is the user's word.
    """
    return f"{environ.get('SLURM_JOB_UID', '?')} {environ.get('SLURM_JOB_START_TIME') or 0}"


def is_other_job(owner: str, environ: Mapping[str, str]) -> bool:
    """Whether these words are of another user's job than this hook's, or of a later run of it."""
    uid, _, start = owner.partition(" ")
    own_uid, _, own_start = format_job_owner(environ).partition(" ")
    if not uid.isdigit():  # the hook that wrote them was not told
        return False
    starts = start.isdigit() and own_start.isdigit() and "0" not in (start, own_start)
    return uid != own_uid or (starts and int(start) > int(own_start))


def may_have_hints(comment: str) -> bool:
    """Return whether a job's comment has to be read."""
    return "stage" in comment


def record_call(name: HookKind, environ: Mapping[str, str], run_directory: str) -> None:
    """Records that Slurm called this hook, and the latest job for which it did; never errs.

    `forestage status` and the alerts go by it: most jobs leave no event. Two Prologs at the same
    moment may leave the lower number, until the next. A number that is lower by MAX_NUMBER_DROP
    says that slurmctld counts from the start again, or that a job waited for long: then it is the
    latest, and behind it stands since when (commands/recent_activity.py).
    """
    job = environ.get("SLURM_JOB_ID", "")
    if name == "step" or not (job.isascii() and job.isdigit() and len(job) <= 10):
        return
    _make_unlistable(run_directory)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO there blocks nobody
        fd = os.open(f"{run_directory}/called.{name}", flags, 0o644)
        last = os.read(fd, 10)
        latest = int(last) if last.strip().isdigit() else 0
        if int(job) > latest:
            os.pwrite(fd, b"%10d" % int(job), 0)
        elif int(job) < latest - MAX_NUMBER_DROP:
            os.pwrite(fd, b"%10d %10d" % (int(job), time.time()), 0)
        os.utime(fd)
        os.close(fd)
    except OSError:  # of a node whose /run is full
        return


def _make_unlistable(run_directory: str) -> None:
    """Has users pass through a directory of ours and not list it, as system/folders.py has it.

    That is an import. Never errs.
    """
    try:
        if os.stat(run_directory).st_mode & 0o7777 != 0o711:  # noqa: PTH116
            os.chmod(run_directory, 0o711)  # noqa: PTH101, S103
    except OSError:
        return


def update_nodelist(name: HookKind, environ: Mapping[str, str], run_directory: str) -> None:
    """Keeps the nodes that Slurm named to a Prolog, for steps; costs no import, never errs.

    They are whom a copy may ask: a step's own list is its user's word. Beside the lease, as most
    jobs with images in their steps only have none before the first of these.
    """
    file = f"{run_directory}/leases/{environ.get('SLURM_JOB_ID', '')}.nodes"
    listed = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    try:
        if name == "prolog" and ("[" in listed or "," in listed):
            if os.path.exists(f"{run_directory}/companion"):  # else no step asks
                os.makedirs(f"{run_directory}/leases", 0o700, exist_ok=True)  # noqa: PTH103 - pathlib is an import
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
                fd = os.open(file, flags, 0o600)
                os.write(fd, os.fsencode(f"{listed}\n{format_job_owner(environ)}"))
                os.close(fd)
        elif name != "step" and os.path.exists(file):
            if name == "epilog" and is_other_job(_read_second_line(file), environ):
                return
            os.unlink(file)  # noqa: PTH108
    except OSError:  # a copy asks nobody, and is only slower
        return


def _read_second_line(file: str) -> str:
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    text = os.fsdecode(os.read(fd, 1 << 20))
    os.close(fd)
    return text.partition("\n")[2]


class HookRun:
    """One run of a hook.

    `mark`: of a Prolog whose script has ended (hooks/background_prolog.py). `own_pipe`: of the
    child that does its work (hooks/hook_worker.py), what tells the hook. `slurm_conf` is there once
    `run` is called.
    """

    slurm_conf: SlurmConf

    def __init__(self, name: HookKind, environ: Mapping[str, str], start: float) -> None:
        self.name = name
        self.environ = environ
        self.start = start
        self.has_answered = name != "step"
        self.settings: LoadedConfig | None = None
        self.mark = ""
        self.own_pipe: HookPipe | None = None

    @property
    def is_in_background(self) -> bool:
        """Whether slurmd waits no more for this Prolog."""
        return bool(self.mark)

    def detach(self, run_directory: str) -> None:
        """Lets the script end, if the configuration, which is known only now, allows that.

        Who waits for this child sees it end with 0; what goes on is another process.
        """
        from forestage.hooks import background_prolog

        if self.own_pipe is not None:
            self.mark = background_prolog.detach_prolog(self.environ, run_directory)
        if self.own_pipe is not None and self.mark:
            os.close(self.own_pipe.pipe_fd)
            self.own_pipe = None

    @property
    def hook_pipe(self) -> HookPipe:
        """Tells the process that waits for this one, if one does."""
        from forestage.hooks.hook_worker import NO_HOOK_PIPE

        return self.own_pipe or NO_HOOK_PIPE

    def wait_for_worker(self, child: HookWorker, root: str) -> int:
        """Waits for the child that does the work; goes on without it where it hangs."""
        from forestage.hooks import hook_worker

        try:
            return child.wait_for_exit(lambda cache: _seconds_hung(cache, root))
        except hook_worker.HookWorkerTimeout as late:
            self._finish_without_worker(late.cache, _make_paths(root))
            return 0

    def _finish_without_worker(self, cache: str, places: NodePaths) -> None:
        """The job reads its sources; what it holds of the cache the sweep releases."""
        from forestage.clock import Clock
        from forestage.errors import Declined
        from forestage.slurm.job import Job

        why = Declined("deadline", "the hook's work did not end in time")
        if cache:
            why = Declined("cache-hangs", f"the disk of {cache} has stopped answering")
        job = Job.from_environ(self.environ)
        outcomes: list[Outcome] = []
        if self.name == "epilog":
            from forestage.hooks import epilog

            outcomes.append(epilog.drop_lease_of_hung_epilog(places, job, why))
        else:
            from forestage.hooks import request_results

            if self.name == "step":  # else `explain` says that none asked
                from forestage.cache.lease import LeaseDirectory
                from forestage.hooks import step

                job = step.with_hinted_images(LeaseDirectory(places.leases), job)
            outcomes += [
                request_results.make_error_outcome(request, why) for request in job.requests
            ]
        self.record_outcomes(job, outcomes, places, Clock())
        self.write_answer("leave", why.reason)

    def run(self, places: NodePaths, clock: Clock) -> None:
        """The work, its log line and its events. Expected errors become outcomes; others rise."""
        from forestage.hooks import hook_work

        hook_work.run_hook(self, places, clock)

    def record_outcomes(
        self, job: Job, outcomes: Sequence[Outcome], places: NodePaths, clock: Clock
    ) -> None:
        """Writes the log line and the events of what came of the job's requests."""
        from forestage import events

        total = time.monotonic() - self.start
        self.write_log_line(events.format_summary(job, outcomes, total))
        try:
            events.record_outcomes(places, clock.wall(), self.name, job, outcomes, total)
        except OSError as error:
            # The job is served; a full log disk is no reason to drain its node.
            from forestage.events import losses

            losses.record_loss(places.lost_events, clock.wall(), error)
            self.write_log_line(f"result=unrecorded detail={str(error)!r}")

    def write_log_line(self, text: str) -> None:
        """The hook's line in the log."""
        of_step = f"step={self.environ.get('SLURM_STEP_ID', '?')[:20]} " * (self.name == "step")
        line = f"{self.name} job={self.environ.get('SLURM_JOB_ID', '?')[:20]} {of_step}{text}"
        log.write_log_line(line, by_slurm="SLURM_SCRIPT_CONTEXT" in self.environ)

    def write_answer(self, *fields: str) -> None:
        """The companion's answer, if it waits for one and has none yet."""
        if not self.has_answered:
            self.has_answered = True
            write_companion_line(*fields)


def _seconds_hung(cache: str, root: str) -> float:
    """For how many seconds a cache's disk has not answered."""
    from pathlib import Path

    from forestage.cache import disk_probe
    from forestage.cache.layout import Cache

    hang = disk_probe.probe_disk(_make_paths(root), Cache(Path(cache)))
    return hang.seconds if hang else 0.0


def _make_paths(root: str) -> NodePaths:
    from pathlib import Path

    from forestage.paths import NodePaths

    return NodePaths(Path(root)) if root else NodePaths()


def write_companion_line(*fields: str) -> None:
    """One line for the companion, which may have gone."""
    from forestage.slurm.step_protocol import encode_line

    try:
        os.write(1, encode_line(*fields) + b"\n")
    except OSError:
        return


def _format_code_location(error: Exception) -> str:
    """File and line of the code that raised, for a log that has one line."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at else "?"
