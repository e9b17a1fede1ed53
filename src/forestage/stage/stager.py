"""The detached process that copies one key. It outlives the hook that started it.

It holds the key's lock (system/daemon.py): whoever else wants the key waits for the entry, or for
the lock to be free.
"""

import contextlib
import errno
import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from forestage import events, log
from forestage.bind import redirect
from forestage.cache.part import PROCESS_NAME
from forestage.errors import CopyStopped, Declined, Failed, classify_disk_error
from forestage.events import CopyOutcome, losses
from forestage.stage.task import CopyTask
from forestage.system import daemon, lock
from forestage.system.daemon import DaemonSpec, StartChannel, StartReport
from forestage.units import make_printable

if TYPE_CHECKING:
    from forestage.stage.pipeline import CopyStats

STAGER = DaemonSpec(PROCESS_NAME, "copy")
ENDS_WITHIN = 8.0  # seconds of a stager that is to stop, for what it is at
LOOK = 0.5  # seconds between two looks of its main thread
PROBE_GRACE = 0.5  # seconds for those who only probe whether the key's lock is free


def start_stager(task: CopyTask) -> StartChannel:
    """Starts a stager; its messages arrive in the channel, which the caller closes."""
    return daemon.start_daemon(STAGER, f"stager job={task.job.id}", partial(_run_stager, task))


def _run_stager(task: CopyTask, hook: StartChannel) -> None:
    """The stager's whole life."""
    has_key = threading.Event()

    def work(stop: threading.Event) -> None:
        own = task.with_descriptor()
        hook.release_hook(own.opened.fd)
        try:
            with contextlib.ExitStack() as held:
                _acquire_key(own, held)
                has_key.set()
                hook.send(copy_and_report(own, stop))
                has_key.clear()
        except lock.LockTimeout:
            hook.send(StartReport("busy"))
        except OSError as error:  # the disk takes no name: it is full of files, or read-only
            why = classify_disk_error(error)
            hook.send(StartReport("failed", why.reason, str(why), isinstance(why, Failed)))
            raise
        else:
            _mount_for_waiting_jobs(own)

    try:
        run_until_stopped(work)
    except CopyStopped as stopped:
        hook.send(StartReport("failed", stopped.reason, str(stopped)))
        if has_key.is_set() and not task.job.expected:
            _mark_stopped(task)
        raise


def run_until_stopped(work: Callable[[threading.Event], None]) -> None:
    """Does all the work of a stager's process in a thread; SIGTERM sets the event that it is given.

    Any call of the work may hang with the source, and a thread in such a call hears no signal. So
    the main thread does nothing but wait for it. Raises CopyStopped where the work goes on for
    ENDS_WITHIN seconds after the event was set, by SIGTERM or by the work itself; then the process
    has to end at once (forked_child.run_and_exit): a stager may be killed at any line.
    """
    stop = threading.Event()
    signals: list[int] = []
    ended: list[BaseException | None] = []

    def note_signal(number: int, _: object) -> None:
        # A second signal may interrupt this, and would wait for ever for the lock of the event.
        if not signals:
            signals.append(number)
            stop.set()

    def run() -> None:
        try:
            work(stop)
        finally:
            ended.append(sys.exc_info()[1])

    signal.signal(signal.SIGTERM, note_signal)
    until = math.inf
    working = threading.Thread(target=run, name=PROCESS_NAME, daemon=True)
    threading.excepthook = partial(_log_dead_thread, working)
    working.start()
    # Not for ever in one wait: CPython may sleep through a signal that comes just before.
    while working.is_alive():
        working.join(LOOK)
        now = time.monotonic()
        until = min(until, now + ENDS_WITHIN) if stop.is_set() else math.inf
        if now >= until and working.is_alive():
            raise CopyStopped
    if ended[0] is not None:
        raise ended[0]


def _log_dead_thread(working: threading.Thread, dead: threading.ExceptHookArgs) -> None:
    """Log what ended a thread of the work: else it is known to none why its copy failed.

    What ends the work itself is raised by run_until_stopped, and is logged there.
    """
    if dead.thread is not None and dead.thread is not working:
        last = dead.exc_traceback
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        where = f" at {last.tb_frame.f_code.co_filename}:{last.tb_lineno}" if last else ""
        log.write_log_line(
            f"stager thread {dead.thread.name} died: {dead.exc_value!r}{where}", by_slurm=True
        )


def _acquire_key(task: CopyTask, held: contextlib.ExitStack) -> None:
    """Take the key's lock. Raises lock.LockTimeout, OSError.

    A disk that takes no more files takes no new lock either, and without one no copy evicts.
    """
    from forestage.stage import copy_queue

    file, patience = task.node.cache.key_lock(task.key), _key_lock_timeout(task, copy_queue.LETS_GO)
    try:
        held.enter_context(lock.held_for_work(file, patience))
    except OSError as error:
        if error.errno != errno.ENOSPC or not copy_queue.evict_for_files(task.node):
            raise
        held.enter_context(lock.held_for_work(file, patience))


def _key_lock_timeout(task: CopyTask, lets_go: float) -> float:
    """Seconds to wait for the key's lock; who copies it for jobs that are only expected lets go."""
    owner = None if task.job.expected else task.part.find_record()
    return lets_go if owner is not None and owner.expected else PROBE_GRACE


def _mount_for_waiting_jobs(task: CopyTask) -> None:
    """Lays the redirects that jobs began without. Not under the key's lock: some hang."""
    if task.node.cache.find_entry(task.image) is not None:
        for job, came in redirect.mount_for_waiting_jobs(task.node, task.image):
            line = (
                f"image={events.quote_field(task.image.path)} redirect={events.quote_field(came)}"
            )
            log.write_log_line(f"stager job={job} {line}", by_slurm=True)


def copy_and_report(task: CopyTask, stop: threading.Event) -> StartReport:
    """Makes the copy, its event and its log line; every expected error becomes a message.

    The caller holds the key's lock.
    """
    # Here: its hook is not to wait for what only a copy needs.
    from forestage.stage import pipeline

    task.node.cache.mark_stager_start(task.key)
    if task.node.cache.find_entry(task.image) is not None:
        return StartReport(
            "found"
        )  # another stager published it between the hook's look and our lock
    start = task.node.clock.monotonic()
    figures = pipeline.CopyStats()
    error: Declined | None = None
    try:
        with _stop_when_requested(task, stop):
            pipeline.run_copy(task, stop, figures)
    except Declined as declined:
        error = declined
    except OSError as failure:
        error = classify_disk_error(failure)
    _record_copy(task, figures, error, task.node.clock.monotonic() - start)
    if error is None:
        return StartReport("published")
    if error.reason in ("changed", "written", "no-room") or not task.part.read_digests().strip(
        b"\0"
    ):
        task.node.cache.drop_part(task.key)  # no use to whoever comes next
    elif error.reason == "stopped" and not task.job.expected:
        _mark_stopped(task)
    return StartReport("failed", error.reason, str(error), isinstance(error, Failed))


def _mark_stopped(task: CopyTask) -> None:
    with contextlib.suppress(OSError):  # then its keeper has it go on
        task.part.mark_stopped()


def _stop_when_requested(task: CopyTask, stop: threading.Event) -> AbstractContextManager[None]:
    """Around a copy; one that no job has asked for ends once one wants it, or the node."""
    if not task.job.expected:
        return contextlib.nullcontext()
    from forestage.stage import copy_queue

    return copy_queue.stop_when_requested(task.node, task.key, stop)


def _record_copy(task: CopyTask, figures: "CopyStats", error: Declined | None, took: float) -> None:
    """Writes the copy's own event and line: the hook that asked may be long gone."""
    node, job = task.node, task.job
    facts = msgspec.structs.asdict(figures)
    del facts["rate"]  # the entry has it
    outcome = CopyOutcome(
        result="copied" if error is None else "failed" if isinstance(error, Failed) else "declined",
        image=task.image.path,
        key=task.key,
        reason=error.reason if error else "",
        detail=make_printable(str(error)) if error else "",
        size=task.image.size,
        wait=round(took, 4),
        data=task.image.kind == "data",
        **facts,
    )
    log.write_log_line(
        f"stager job={job.id} {events.format_summary(job, [outcome], took)}", by_slurm=True
    )
    event = events.make_job_event(job, "stager", outcome, node.clock.wall(), took)
    with contextlib.suppress(OSError):  # the job's event does not hang on what others are told
        events.record_copy_for_users(
            node.places, event, node.leases.list_users_of(task.key) - {job.user.uid}
        )
    try:
        events.record_events(node.places, [event])
    except OSError as failure:  # a full log disk is no reason to lose a copy
        losses.record_loss(node.places.lost_events, node.clock.wall(), failure)
        log.write_log_line(
            f"stager job={job.id} result=unrecorded detail={str(failure)!r}", by_slurm=True
        )
