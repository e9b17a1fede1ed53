"""The registry worker: a program that runs as the user, and does all that a registry is asked for.

    python3 -I -m forestage.features.registry.worker_main ORDER

    order -> environment -> reference -> digest (the job's record, or resolved)  DigestResolved
          -> in the store, or imported by one worker for all (image_import.py)   ImageReady

Words are lines of JSON on stdout (worker_messages.py); what goes wrong is the last of them,
ImportRefused. It ends, and has all end that it started, when its stdin ends: then nobody waits any
more.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from forestage.clock import Clock, Deadline
from forestage.errors import Declined
from forestage.features.registry import environment, reference, resolve, worker_messages
from forestage.features.registry.environment import EnrootSettings
from forestage.features.registry.image_import import ImageImport, ImportTask
from forestage.features.registry.parent_pipe import ParentGone, ParentPipe
from forestage.features.registry.registry_replies import RegistryDeclined
from forestage.features.registry.store import ImageStore
from forestage.features.registry.worker_messages import (
    DigestResolved,
    ImageReady,
    ImportOrder,
    ImportRefused,
    WorkerProtocolError,
)

SETTINGS = 60.0  # seconds for the evaluation of enroot's configuration
RESOLVE = 120.0  # seconds for a registry
POLL = 0.2  # seconds between looks for the leader's word

BY_TAG_REASONS = ("registry-busy", "registry-odd")
"""Where a registry does not say a digest, and one import by the tag serves all of a job."""


def main(argv: list[str]) -> int:
    """The whole program; `argv` is its one argument."""
    # The mode of the image's root is that of a directory which enroot makes.
    os.umask(0o022)
    asker, clock, directory = ParentPipe(), Clock(), ""
    with contextlib.suppress(ParentGone):
        try:
            order = worker_messages.decode_order(argv[0])
            directory = order.directory
            path = obtain_image(order, asker, clock)
            asker.send_message(ImageReady(os.fspath(path)))
        except Declined as error:
            free = _free_bytes(directory) if error.reason == "store-full" else 0
            asker.send_message(ImportRefused(error.reason, str(error), free))
        except WorkerProtocolError as error:
            asker.send_message(ImportRefused("registry-odd", str(error)))
        except OSError as error:
            asker.send_message(ImportRefused("store-gone", str(error)))
        return 0
    return 1


def _free_bytes(directory: str) -> int:
    with contextlib.suppress(OSError):
        disk = os.statvfs(directory)
        return disk.f_bavail * disk.f_frsize
    return 0


def obtain_image(order: ImportOrder, parent: ParentPipe, clock: Clock) -> Path:
    """Returns where the image lies. Raises Declined, ParentGone, WorkerProtocolError, OSError."""
    task = read_order(order, clock)
    store = ImageStore(Path(order.directory), clock, order.cache)
    digest = choose_digest(task, store, parent, clock)
    parent.send_message(DigestResolved(digest, task.image_name(digest)))
    return ImageImport(task, digest, store, parent, clock).obtain()


def read_order(order: ImportOrder, clock: Clock) -> ImportTask:
    """The order with the user's settings. Raises Declined."""
    meant = reference.parse_reference(order.reference)
    environ = environment.parse_environment(_read_environment(order.environ_fd))
    settings = environment.read_enroot_settings(environ, Deadline.after(SETTINGS, clock))
    check_container_missing(order, settings)
    return ImportTask(order, meant, settings, _make_job_names(order.job, environ))


def _make_job_names(job: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Pure: the job of a step and the step, or the job alone, by names that no other job has.

    Two clusters may share a store and have jobs of one number; a job that starts anew asks anew; a
    cluster that was set up anew counts from 1 again. Slurm says since 23.02 when a job started;
    before that, old records count for nothing (store.RECORD_LASTS).
    """
    given = ("SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT", "SLURM_JOB_START_TIME")
    cluster, *rest = (environ.get(name, "") for name in given)
    names = (job.partition(".")[0], job) if "." in job else (job,)
    return tuple(".".join((cluster, name, *rest)) for name in names if name)


def check_container_missing(order: ImportOrder, settings: EnrootSettings) -> None:
    """Raises Declined where the step's container is there: pyxis does not look at its image then.

    Its name is what stands before a colon (pyxis' args.c); with container_scope=job, the job's
    number is part of the container's own (pyxis_slurmstepd.c).
    """
    name, job = order.container.partition(":")[0], order.job.partition(".")[0]
    place = Path(environment.enroot_folder(settings.variables, "DATA"))
    if not name or "/" in name:
        return
    if any((place / one).is_dir() for one in (f"pyxis_{name}", f"pyxis_{job}_{name}")):
        raise Declined("container", f"the container {name} is there already")


def _read_environment(fd: int) -> bytes:
    if fd < 0:
        return Path("/proc/self/environ").read_bytes()
    with contextlib.suppress(OSError):  # a pipe has no place
        os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(fd, "rb") as file:
        return file.read(environment.MAX_BYTES + 1)


def choose_digest(task: ImportTask, store: ImageStore, parent: ParentPipe, clock: Clock) -> str:
    """The digest that counts for all of the job; "" where one import by the tag has to do."""
    if task.reference.digest:
        return task.reference.digest
    said = _wait_for_digest(task, store, parent, clock)
    if said is not None or (task.order.by_tag and task.jobs):
        return said or ""
    try:
        found = resolve.resolve_digest(
            task.reference, task.settings, Deadline.after(RESOLVE, clock)
        )
        store.record_last_digest(task.canonical_text, found)
    except RegistryDeclined as refused:
        found = _substitute_digest(task, store, refused)
    parent.check_parent()
    return (
        store.agree_on_job_digest(task.jobs[-1], task.canonical_text, found) if task.jobs else found
    )


def _wait_for_digest(
    task: ImportTask, store: ImageStore, parent: ParentPipe, clock: Clock
) -> str | None:
    """What the node that leads has said; who does not lead waits for that."""
    patience = 0.0 if task.order.leads else task.order.patience
    end = Deadline.after(patience, clock)
    while True:
        for job in task.jobs:
            said = store.find_job_digest(job, task.canonical_text)
            if said is not None:
                return said
        if not task.jobs or not end.seconds_left():
            return None
        parent.check_parent()
        clock.sleep(min(POLL, end.seconds_left()))


def _substitute_digest(task: ImportTask, store: ImageStore, refused: RegistryDeclined) -> str:
    """What stands in for the digest that a registry did not say. Raises Declined."""
    if task.order.offline == "use-last" and refused.is_transient:
        last = store.find_last_digest(task.canonical_text)
        if last:
            return last
    if task.jobs and refused.reason in BY_TAG_REASONS:
        return ""
    raise refused


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
