"""The Prolog in the background: it lets slurmd start the job at once, and works beside it.

Since Slurm 23.02 srun asks 0.1 s after its allocation whether the Prologs are over, and then a
second later (`_wait_nodes_ready` in its allocate.c). Where the companion shows the copies, nothing
that a Prolog does must be over before the job starts: the first step waits for what it needs.

    /run/forestage/background          for which partitions that holds, and the files that say so
    /run/forestage/leases/JOB.prolog   the mark: there while the process works, which locks it
                                       (flock(2)) and has left its pid in it, and whose job it is

    Prolog   makes the mark, locks it, forks; the child leaves its session, and the script ends
             the first one after a change of those files reads the configuration before that
    step     waits for the lock, for so long; then it does all by itself, as where no Prolog ran
    Epilog   kills who holds the lock, then takes the mark away and releases the rest as always;
             not where the number is another user's job's by now, or a later run's
    sweep    takes away marks that nobody locks: of one that was killed

What is left by a process that the Epilog kills is what a Prolog leaves that slurmd kills. Until a
step has waited, `JOB.hinted` (cache/lease.py) says that the comment may be about steps, too.
Nothing is imported here: a job with an image pays for little more than one without.
"""

from __future__ import annotations

import os

from forestage.hooks.boundary import (
    STAGE_OPTION,
    format_job_owner,
    is_other_job,
    may_have_hints,
)

TYPE_CHECKING = False  # as in hooks/boundary.py
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from forestage.config import CompanionPresence, LoadedConfig
    from forestage.paths import NodePaths
    from forestage.slurm.job import Job
    from forestage.slurm.slurm_conf import SlurmConf

FORMAT_LINE = "forestage 1"
ANY_PARTITION = "*"  # a partition without settings of its own
MAX_STEP_WAIT = (
    20.0  # seconds that a step waits: longer than a Prolog's look at a source that hangs
)
KILL_TIMEOUT = 2.0  # seconds for the end of a process that was killed
POLL_INTERVAL = 0.002  # seconds between two looks whether the process has ended
PROCESS_NAME = "forestage-prolog"


def detach_prolog(environ: Mapping[str, str], run_directory: str) -> str:
    """Ends the script that slurmd waits for, and returns in a process that it does not know.

    Returns the mark, which that process has to `end_background_work`. "" where the caller is still
    the script: the job's start has to wait for it, or nothing could be forked.
    """
    if not may_detach(environ, run_directory):
        return ""
    mark = prolog_mark_path(environ, run_directory)
    lock = _lock_mark(mark)
    if lock is None:
        if is_other_job(_read_mark(mark).partition(" ")[2], environ):
            return ""  # the job does without its number's records, which are another job's
        os._exit(0)  # two Prologs of one job: the first one's process is at it
    if lock < 0:
        return ""
    # What is wrong with a hint is for the first step, too, which may be there before it is found.
    if STAGE_OPTION in environ or may_have_hints(environ.get("SLURM_JOB_COMMENT", "")):
        _create_file(mark.removesuffix("prolog") + "hinted")
    ours, theirs = os.pipe()
    try:
        child = os.fork()
    except OSError:
        child = -1
    if child == 0:
        _leave_slurmd(lock, format_job_owner(environ))
        os.write(theirs, b"1")
        os.close(theirs)
        return mark
    os.close(theirs)
    if child > 0 and os.read(ours, 1):
        os._exit(0)
    os.close(ours)
    return mark  # it could not be forked, or was killed at once: the work is still to be done


def _leave_slurmd(lock: int, owner: str) -> None:
    """Out of the reach of slurmd, which kills the script's process group when that has ended.

    And without its output: slurmd waits until nobody has that any more.
    """
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    name = os.open("/proc/self/comm", os.O_WRONLY)
    os.write(name, PROCESS_NAME.encode())
    os.close(name)
    os.pwrite(lock, f"{os.getpid()} {owner}".encode(), 0)


def end_background_work(mark: str) -> None:
    """Says that the work is done. To be called by the process that has the mark."""
    if mark:
        _delete_file(mark)


def may_detach(environ: Mapping[str, str], run_directory: str) -> bool:
    """Whether this job may start before its Prolog's work is done; never errs.

    By the record, which is good as long as all of the files in it are as they were. A user who asks
    for a wait gets one.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not (job.isascii() and job.isdigit()):
        return False
    if any("stage-wait" in environ.get(one, "") for one in (STAGE_OPTION, "SLURM_JOB_COMMENT")):
        return False
    try:
        fd = os.open(f"{run_directory}/background", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        text = os.read(fd, 1 << 20)  # a line for each file that slurm.conf includes
        os.close(fd)
        first, *lines = os.fsdecode(text).split("\n")
        found: dict[str, bool] = {}
        for line in lines:
            kind, *fields = line.split("\t")
            if kind == "file" and read_file_stamp(fields[0]) != tuple(fields[1:]):
                return False
            if kind == "partition":
                found[fields[0]] = fields[1] == "leave"
    except (OSError, IndexError, ValueError):
        return False
    other = found.get(ANY_PARTITION, False)
    loaded = first == FORMAT_LINE and os.path.exists(f"{run_directory}/companion")
    return loaded and found.get(environ.get("SLURM_JOB_PARTITION", ""), other)


def read_file_stamp(path: str) -> tuple[str, ...]:
    """What changes with a file: inode, size, mtime and ctime in ns; zeros where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - pathlib is an import
    except FileNotFoundError:
        return ("0",) * 4
    times = found.st_mtime_ns, found.st_ctime_ns
    return tuple(map(str, (found.st_ino, found.st_size, *times)))


def format_plugstack_lines(conf: SlurmConf) -> list[str]:
    """The lines for all that says whether Slurm loads the companion.

    To be called before that is asked: what is here of each file is from before it was read, and of
    each directory in which an include looks.
    """
    from forestage.slurm import plugstack

    try:
        for line in plugstack.read_lines(plugstack.find_plugstack_path(conf), conf.read_text):
            if isinstance(line, plugstack.IncludeLine):
                conf.files.list_names(os.path.dirname(line.pattern))  # noqa: PTH120 - pathlib is an import
    except (OSError, ValueError):  # so nobody can tell
        pass
    return [
        "\t".join(("file", path, *map(str, facts)))
        for path, facts in conf.files.file_stamps.items()
    ]


def record_detachable_partitions(
    places: NodePaths,
    settings: LoadedConfig,
    companion: CompanionPresence,
    decided_by: Sequence[str],
    by_slurm: Sequence[str],
) -> None:
    """Writes down which partitions' Prologs may leave, if that is not what is there already.

    `companion`: whether Slurm loads it; where that is unknown, all Prologs stay. `decided_by` are
    the lines of cache/step_record.format_config_lines from before the settings were read,
    `by_slurm` those of `format_plugstack_lines`. Raises OSError.
    """
    from forestage import config
    from forestage.system import records
    from forestage.system.files import read_file

    files = [line for line in decided_by if line.startswith("file\t")]
    lines = [FORMAT_LINE, *files, *by_slurm]
    partitions = [
        (name, config.resolve_auto_redirect(own, companion))
        for name, own in settings.list_configs()
    ]
    # A bind that is out of date has to go before any job of the node starts.
    bind = any(own.redirect == "bind" for _, own in partitions)
    for name, own in partitions:
        leaves = own.redirect == "spank" and own.cold_start_mode != "wait"
        lines.append(
            f"partition\t{name or ANY_PARTITION}\t{'leave' if leaves and not bind else 'stay'}"
        )
    text = os.fsencode("".join(f"{line}\n" for line in lines))
    file = places.background_marks
    if files and not (file.exists() and read_file(file) == text):
        records.write(file, text)


def clear_needless_hints_flag(places: NodePaths, job: Job) -> None:
    """Has the steps of a job ask no helper for its comment's sake, if that says nothing to them.

    Called when the work is done: nobody else writes there meanwhile.
    """
    from forestage.cache.lease import LeaseDirectory
    from forestage.errors import Failed

    leases = LeaseDirectory(places.leases)
    try:
        lease, uid = leases.find_lease(job.id), job.user.uid
        if lease is None or (lease.belongs_to(uid) and not leases.read_notes(job.id, uid).say):
            leases.clear_hints_flag(job.id, uid)
    except (Failed, OSError):  # a helper more
        return


def prolog_mark_path(environ: Mapping[str, str], run_directory: str) -> str:
    """The mark of a job's Prolog."""
    return f"{run_directory}/leases/{environ.get('SLURM_JOB_ID', '')}.prolog"


def wait_for_prolog(mark: str, timeout: float = MAX_STEP_WAIT, kill: bool = False) -> None:
    """Waits for the end of a Prolog's work, for so many seconds. At once where there is none.

    Who does not `kill` it waits for so many seconds of its work: of a job whose Prolog hangs, not
    each step is to wait anew.
    """
    import contextlib
    import time

    until = time.monotonic() + (timeout if kill else min(timeout, timeout - _mark_age(mark)))
    while (pid := _find_worker_pid(mark)) and time.monotonic() < until:
        if kill and _is_prolog_process(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        time.sleep(POLL_INTERVAL)


def _mark_age(mark: str) -> float:
    """For how many seconds a Prolog works, by the clock; 0 where it does not."""
    import time

    try:
        return time.time() - os.stat(mark).st_mtime  # noqa: PTH116 - pathlib is an import
    except OSError:
        return 0.0


def stop_prolog(mark: str, environ: Mapping[str, str]) -> None:
    """Ends a Prolog's work: its job is over. Called by the Epilog, before it releases anything.

    Killed, it does nothing any more; one that is stuck in the kernel does nothing when it wakes.
    Nothing is done where it works for another user's job, or for a later run.
    """
    if is_other_job(_read_mark(mark).partition(" ")[2], environ):
        return
    wait_for_prolog(mark, KILL_TIMEOUT, kill=True)
    _delete_file(mark)


def _find_worker_pid(mark: str) -> int:
    """The process that has the mark's lock; 0 for none, -1 for one that has not said its pid."""
    import fcntl

    try:
        fd = os.open(mark, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(fd, 40).partition(b" ")[0]
        return int(pid) if pid.isdigit() else -1
    finally:
        os.close(fd)
    return 0


def _read_mark(mark: str) -> str:
    try:
        fd = os.open(mark, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    text = os.read(fd, 60)
    os.close(fd)
    return os.fsdecode(text)


def _is_prolog_process(pid: int) -> bool:
    """Whether that is a Prolog's process, and not another that has got its number since."""
    try:
        fd = os.open(f"/proc/{pid}/comm", os.O_RDONLY)
    except OSError:
        return False
    name = os.read(fd, 16)
    os.close(fd)
    return name.strip() == PROCESS_NAME[:15].encode()


def _lock_mark(mark: str) -> int | None:
    """A descriptor that has the mark's lock, None where another has it, -1 where none can be made.

    A sweep may take a mark away that is not locked yet: that one counts for nobody.
    """
    import fcntl

    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        try:
            os.makedirs(os.path.dirname(mark), 0o700, exist_ok=True)  # noqa: PTH103, PTH120
            fd = os.open(mark, flags, 0o600)
        except OSError:
            return -1
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            if os.fstat(fd).st_nlink:
                return fd
        except BlockingIOError:
            if _find_worker_pid(mark):  # and not one who looks
                os.close(fd)
                return None
        os.close(fd)


def _create_file(path: str) -> None:
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        os.close(os.open(path, flags, 0o600))
    except OSError:  # the steps read the shared path
        return


def _delete_file(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108
    except OSError:
        return
