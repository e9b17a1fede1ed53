"""A step's image of a registry: a worker imports it as the user, and the step's tasks wait.

    /run/forestage/images/JOB.STEP.sqsh   what pyxis' importer names; a task binds the copy over it
                          JOB.STEP.sock   where the tasks wait for the answer; root's alone

srun ends a launch after 600 s, and an import may take longer. So the helper answers at once that
somebody else knows, and a process of its own goes on: it has the worker resolve and import, stages
the file that comes of it as any other, and says to the tasks what it would have said to the
companion (src/spank/import_wait.c). It ends when nobody waits any more, and the worker with it.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from forestage.cache import disk_probe
from forestage.cache.node import Node
from forestage.config import UserMessages
from forestage.errors import Declined, Failed, ForestageError
from forestage.events import UNSERVED_RESULTS, ImageArrival, RequestOutcome
from forestage.features.registry import step_files, user_notes, worker
from forestage.features.registry.step_files import PROCESS_NAME, StepImport
from forestage.features.registry.user_notes import RefusalNote
from forestage.features.registry.waiting_tasks import ALL_TASKS_ENDED, WaitingTasks
from forestage.features.registry.worker import RegistryWorker
from forestage.features.registry.worker_messages import (
    DigestResolved,
    ImageReady,
    ImportOrder,
    ImportProgress,
    ImportRefused,
    ImportUnderWay,
    WorkerMessage,
)
from forestage.hooks import bare_name, leases, request_results, serve, step, user_messages
from forestage.hooks.request_results import RequestResult
from forestage.slurm.hints import IMPORTED, Request
from forestage.slurm.job import Job
from forestage.slurm.step_protocol import (
    RESULT_VARIABLE,
    STEP_ENVIRONMENT_VARIABLE,
    STEP_TIMEOUT_VARIABLE,
    LineFields,
)
from forestage.system import daemon, folders, forked_child, processes, run
from forestage.system.daemon import DaemonSpec, StartChannel, StartReport
from forestage.system.processes import ProcessIdentity
from forestage.units import is_number, make_printable

FIRST_TASK_TIMEOUT = 60.0  # seconds beyond the helper's own limit in which the first task must come
WORKER_SILENCE_TIMEOUT = (
    180.0  # seconds without a word from the worker: a file server or a registry hangs
)
LEADER_TIMEOUT = 30.0  # seconds for the word of the node that resolves for all

CONTAINER_OPTION = "SPANK__SLURM_SPANK_OPTION_pyxis_container_name"

Report = Callable[[Sequence[RequestOutcome]], None]


class RegistryRequest(msgspec.Struct, frozen=True):
    """What a step asks for, and with what: `environment` is an open file.

    `batch` is whether one digest counts for all of the job; `container` the name of its container.
    """

    request: Request
    environment: int
    batch: bool
    container: str
    timeout: str

    @classmethod
    def from_environ(cls, request: Request, environ: Mapping[str, str]) -> "RegistryRequest | None":
        """By what the companion says; None where it has given no environment."""
        number = environ.get(STEP_ENVIRONMENT_VARIABLE, "")
        if not is_number(number):
            return None
        return cls(
            request=request,
            environment=int(number),
            batch=environ.get("ENVIRONMENT") == "BATCH",
            container=environ.get(CONTAINER_OPTION, ""),
            timeout=environ.get(STEP_TIMEOUT_VARIABLE, ""),
        )


def start_import_process(
    node: Node, job: Job, asked: RegistryRequest, report: Report
) -> LineFields:
    """Returns the fields that tell the companion where the answer will be. Raises Declined."""
    disk_probe.check_writable(
        node.places, node.cache
    )  # the tasks would wait for a process that hangs
    folders.ensure_directory_with_mode(node.places.images, folders.PASSABLE)
    # The job's Epilog has work by this, though the job may have no lease yet (hooks/boundary.py).
    (node.places.images / f"{job.id}.asked").touch()
    path = node.places.images / f"{job.id}.{job.step}.sock"
    # The manager waits for this hook: its number is no other's yet.
    manager = processes.find_identity(job.manager) if job.manager else None
    about = f"step job={job.id} step={job.step}"
    work = partial(_serve_step, node, job, asked, report, path, manager)
    # In the step's cgroups: what it starts is to end with the step.
    with daemon.start_daemon(DaemonSpec(PROCESS_NAME, None), about, work) as channel:
        channel.wait_until_ready(daemon.START, "helper")
    return "later", str(path)


def _serve_step(
    node: Node,
    job: Job,
    asked: RegistryRequest,
    report: Report,
    path: Path,
    manager: ProcessIdentity | None,
    hook: StartChannel,
) -> None:
    """All that is done for a step."""
    # After us the helper may stage what else the job names, within its own limit.
    first = FIRST_TASK_TIMEOUT + float(asked.timeout if is_number(asked.timeout) else 0)
    hook.release_hook(asked.environment)
    with WaitingTasks(path, first, manager) as tasks:
        hook.send(StartReport("ready"))
        hook.close()
        answer = _import_and_stage(node, job, asked, tasks)
        line = format_final_line(answer.outcome, node.config.user_messages)
        if line and tasks.is_any_waiting:  # else the job may be over, and what is noted would stay
            user_messages.JobMessageWriter(node, job, tasks.send_user_line)(line)
        _record_refusal(node, job, answer.outcome)
        tasks.broadcast_line(
            "env", RESULT_VARIABLE, request_results.choose_result_variable(answer.outcome)
        )
        tasks.broadcast_line(*_format_reply_fields(node, job, answer))
        report([answer.outcome])
        if tasks.is_job_over:
            _release_after_job(node, job, answer)
        while not tasks.have_tasks_gone:
            tasks.wait(-1)
            forked_child.reap_ended_children()  # a copy that was started here may have ended


def _record_refusal(node: Node, job: Job, outcome: RequestOutcome) -> None:
    """Has the step's importer know what the registry has said, before a task goes on."""
    if outcome.reason in user_notes.REFUSALS and job.step is not None:
        said = RefusalNote(outcome.request, outcome.reason, outcome.detail)
        user_notes.record_refusal(node.places, job.id, job.step, job.user, said)


def _release_after_job(node: Node, job: Job, answer: RequestResult) -> None:
    """Gives back what a job that is over got: its Epilog came first, and none comes again."""
    if answer.image:
        leases.release_entry(node, job, answer.image.key)
    with contextlib.suppress(OSError):  # the sweep does it
        step_files.delete_job_files(node.places, job.id)


def _import_and_stage(
    node: Node, job: Job, asked: RegistryRequest, tasks: WaitingTasks
) -> RequestResult:
    """What the request comes to; never raises for what a registry, a user or the disk does."""
    start = node.clock.monotonic()
    try:
        found = _import_image(node, job, asked, tasks)
        answer = _stage_image(node, job, found.path, asked, tasks)
        origin = {"digest": found.digest, "came": found.came}
    except (ForestageError, OSError) as error:
        why = (
            bare_name.find_bare_name_refusal(job, asked.request, bare_name.LOOKUP_TIMEOUT) or error
        )
        answer = RequestResult(request_results.make_error_outcome(asked.request, why))
        origin = {"came": "enroot"}
    return answer.with_facts(
        request=make_printable(asked.request.path),
        wait=round(node.clock.monotonic() - start, 4),
        via=asked.request.via,
        **origin,
    )


def format_final_line(outcome: RequestOutcome, wanted: UserMessages) -> str:
    """Pure: the line that the user reads in the end; "" for none."""
    if outcome.result not in UNSERVED_RESULTS:
        return user_messages.format_message(outcome, wanted) and (
            f"{outcome.request} is {outcome.digest[:19]}: {outcome.result},"
            f" read from this node's copy of {outcome.image}"
        )
    if wanted == "none" or outcome.reason in user_messages.INTENDED_REASONS:
        return ""
    if outcome.image:
        return f"{outcome.request} is read from {outcome.image}: {outcome.detail}"
    return f"{outcome.request} is left to enroot, for this step alone: {outcome.detail}"


class ImportResult(msgspec.Struct, frozen=True):
    """What came of a worker: the digest that the reference means, and where the image lies."""

    digest: str
    came: ImageArrival
    path: str


def _import_image(
    node: Node, job: Job, asked: RegistryRequest, tasks: WaitingTasks
) -> ImportResult:
    """Has a worker obtain the image. Raises Declined, Failed."""
    tells = node.config.user_messages != "none" and user_messages.is_first_step_node(job)
    digest = name = ""
    came: ImageArrival = "stored"
    now, who, reference = node.clock.wall(), job.user.name, make_printable(asked.request.path)
    order = make_order(node, job, asked)
    shown = StepImport(job.id, job.step or 0, who, reference, now, os.getpid())
    with contextlib.ExitStack() as undo:
        enter = _wait_for_task_cgroups(job, tasks)
        undo.enter_context(_clean_up_cgroups(job, tasks))
        at_work = undo.enter_context(_start_worker(job, order, asked, enter, tasks))
        undo.callback(step_files.delete_import_record, node.places, shown)
        for word in _read_messages(at_work, tasks):
            if isinstance(word, DigestResolved):
                digest, name = word.digest, word.name
            elif isinstance(word, ImageReady):
                return ImportResult(digest, came, word.path)
            elif isinstance(word, ImportRefused):
                if word.reason == "store-full" and name:
                    # It holds back the importer, and the user's next steps, from doing this again.
                    # A user can say nothing here of another's images.
                    user_notes.record_full_store(
                        node.places, job.user, name, make_printable(word.detail), word.free, now
                    )
                raise Declined(make_printable(word.reason), make_printable(word.detail))
            else:
                if isinstance(word, ImportUnderWay):
                    came = "imported" if word.here else "waited"
                    shown = msgspec.structs.replace(shown, where=make_printable(word.where))
                else:
                    shown = msgspec.structs.replace(shown, said=make_printable(word.text))
                step_files.record_import(node.places, shown)
                if tells:
                    tasks.send_user_line(_format_progress(asked.request, word))
    raise Failed("helper", "the process that imports died")


def _start_worker(
    job: Job,
    order: ImportOrder,
    asked: RegistryRequest,
    enter_cgroups: Callable[[], None],
    tasks: WaitingTasks,
) -> worker.RegistryWorker:
    """Starts the worker in the cgroups of `enter_cgroups`.

    Raises Declined where its step has no task any more.

    Raises Failed, OSError.
    """
    try:
        return worker.start_worker(job.user, order, asked.environment, enter_cgroups)
    except Failed:
        # A task that was killed meanwhile has taken its cgroups along: no fault of the node's.
        if tasks.has_any_come and not tasks.is_any_waiting:
            raise Declined("stopped", ALL_TASKS_ENDED) from None
        raise


def _wait_for_task_cgroups(job: Job, tasks: WaitingTasks) -> Callable[[], None]:
    """Has the worker go to the cgroups of a task: bounded by what the step may take.

    Without v1's freezer: by that one Slurm kills what a step leaves, before enroot has deleted what
    it has unpacked. Raises Declined where the step has ended before it had tasks.
    """
    if not job.manager:
        return run.stay_in_cgroups
    while forked_child.find_task_cgroups(job.manager) is None:
        if tasks.have_tasks_gone:
            raise Declined("stopped", ALL_TASKS_ENDED)
        tasks.wait(-1)
    return partial(forked_child.enter_task_cgroups, job.manager, without="freezer")


@contextlib.contextmanager
def _clean_up_cgroups(job: Job, tasks: WaitingTasks) -> Iterator[None]:
    """Removes the step's cgroups that Slurm could not, as the worker was in them until now."""
    found = forked_child.find_task_cgroups(job.manager) if job.manager else None
    try:
        yield
    finally:
        if found and not Path(f"/proc/{job.manager}").exists():
            # With the job's only where no step comes any more: Slurm makes both, one by one.
            kinds = ("task_", "step_", "job_") if tasks.is_job_over else ("task_", "step_")
            forked_child.remove_empty_cgroups((one.parent for one in found), kinds)


def _format_progress(request: Request, word: ImportProgress | ImportUnderWay) -> str:
    """Pure."""
    if isinstance(word, ImportProgress):
        return f"{request.path}: {word.text}"
    by = f" by {word.where}" if word.where else ", once for all nodes"
    return f"{request.path} is being imported{by}"


def make_order(node: Node, job: Job, asked: RegistryRequest) -> ImportOrder:
    """Pure: what the worker is to do."""
    config = node.config
    return ImportOrder(
        reference=asked.request.path,
        directory=config.registry.store or "",
        cache=config.cache,
        job=str(job.id) if asked.batch else f"{job.id}.{job.step}",
        # Of the step: in a batch job, too, the job's first node may have no part in it.
        leads=user_messages.is_first_step_node(job),
        patience=LEADER_TIMEOUT,
        offline=config.registry.offline,
        environ_fd=asked.environment,
        max_size=config.max_image_size,
        host=job.node,
        container=asked.container,
        marks=os.fspath(node.places.images),
    )


def _read_messages(at_work: RegistryWorker, tasks: WaitingTasks) -> Iterator[WorkerMessage]:
    """What the worker says, until it ends.

    Raises Declined once nobody waits for it any more, or where it says nothing for too long.
    """
    heard = time.monotonic()
    while True:
        for word in at_work.read_messages():
            heard = time.monotonic()
            yield word
        if at_work.ended:
            return
        tasks.wait(at_work.fd)
        if tasks.have_tasks_gone:
            raise Declined("stopped", ALL_TASKS_ENDED)
        if time.monotonic() - heard > WORKER_SILENCE_TIMEOUT:
            raise Declined(
                "source-hangs",
                f"the store or the registry was silent for {WORKER_SILENCE_TIMEOUT:.0f} s",
            )


def _stage_image(
    node: Node, job: Job, path: str, asked: RegistryRequest, tasks: WaitingTasks
) -> RequestResult:
    """The file, as any other that a user names: only where they may read it."""
    request = Request(path, asked.request.via, IMPORTED)
    say = user_messages.JobMessageWriter(node, job, tasks.send_user_line)
    limit = step.make_step_deadlines(node, job, asked.timeout, say, None)
    tasks.check_any_waiting()  # the step may have been cancelled; a lease would outlive the job
    (answer,) = serve.serve_requests(node, job, (request,), limit)
    return answer


def _format_reply_fields(node: Node, job: Job, answer: RequestResult) -> LineFields:
    """The line that ends the tasks' wait: the copy shows at a place of the step's own."""
    words = step.format_answer_fields(node, answer)
    if words[0] == "leave":
        return words
    try:
        found = step_files.make_placeholder(node.places, job.id, job.step, int(words[4]))
    except OSError as error:
        return "leave", make_printable(str(error))
    return (*words[:2], found.path, *map(str, found.file_stamp), words[-1])
