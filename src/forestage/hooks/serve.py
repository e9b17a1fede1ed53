"""Serves what a job names: from the user's word to the path that shows the local copy.

Prolog and step share this path. `start_request` opens the source as the user, takes the lease and
has the copy begin; `finish_request` waits for it and shows it. All requests have begun before one
is finished, so that their copies come in at the same time. Whatever a request comes to is its
outcome: nothing that is expected to go wrong leaves `serve_requests` as an exception. The lease is
taken before the entry is used, and before the copy exists, so that nothing evicts it in between.

    cold: wait      the hook waits; at its deadline the job starts as with `shared`
    cold: shared    the job reads the source; with `redirect: bind` the stager lays the redirect
    cold: through   a step reads through the copy as it comes in, or as `shared` where it cannot
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from forestage.bind import redirect
from forestage.cache import disk_errors, disk_probe, unpack_space
from forestage.cache.lease import Lease
from forestage.cache.node import Node
from forestage.cache.source_image import SourceImage
from forestage.clock import Deadline
from forestage.errors import Declined, Failed, ForestageError, classify_disk_error
from forestage.events import UNSERVED_RESULTS, OutcomeResult
from forestage.hooks import bare_name, leases
from forestage.hooks.container_binds import ContainerBinds
from forestage.hooks.hook_deadlines import HookDeadlines
from forestage.hooks.leases import SHORT_LOCK_TIMEOUT
from forestage.hooks.request_results import (
    RequestResult,
    make_error_outcome,
    make_served_result,
    with_baseline,
)
from forestage.slurm.hints import IMPORTED, Request, RequestKind
from forestage.slurm.job import Job
from forestage.slurm.step_protocol import has_control_characters
from forestage.sources.file import FileSourceFinder
from forestage.sources.source import OpenImage, SourceFinder
from forestage.stage import copy_wait
from forestage.units import make_printable

if TYPE_CHECKING:
    from forestage.system.daemon import StartChannel

SOURCE_FINDERS: Mapping[RequestKind, SourceFinder] = {
    "image": FileSourceFinder("image"),
    IMPORTED: FileSourceFinder("image"),
    "mount": FileSourceFinder("data"),
}
"""How the source of a request is found, by its kind. A directory is not known until all of it has
been looked at, by a process that then copies it itself (features/data/directory.py)."""

SOURCE_TRIES = 2  # times that a source may change while it is copied before its path is left alone


class ServeContext(msgspec.Struct, frozen=True):
    """What the requests that are served together share.

    `refusal` is why nothing may be staged; `exit_stack` what is open until all of them are
    finished.
    """

    node: Node
    job: Job
    limit: HookDeadlines
    refusal: Declined | None
    container_binds: ContainerBinds
    exit_stack: contextlib.ExitStack


class StagedRequest(msgspec.Struct, frozen=True):
    """A request whose source is open and whose entry the job holds, until `exit_stack` is left.

    `stager_channel` is the stager that brings the entry; None where it is here. `since` is when the
    request was begun, on the monotonic clock; `tries` how often by now, as its source changed.
    """

    request: Request
    opened: OpenImage
    lease: Lease
    stager_channel: "StartChannel | None"
    exit_stack: contextlib.ExitStack
    since: float
    tries: int


def serve_requests(
    node: Node,
    job: Job,
    requests: Sequence[Request],
    limit: HookDeadlines,
    refusal: Declined | None = None,
) -> list[RequestResult]:
    """Stages what is named, and shows it. Never raises for a request: each gets its answer.

    `refusal` is why nothing may be staged now (switched off, misconfigured); the path is looked at
    all the same where the node has redirects, since none may show this job an outdated file.
    """
    job = leases.record_save_path(node, job, requests, limit)
    with contextlib.ExitStack() as held:
        bound = ContainerBinds(node.places, job, limit.end)
        # Data shows elsewhere than at its own path.
        is_all_data = bool(requests) and all(request.is_data for request in requests)
        if refusal is None and node.config.redirect != "none" and not is_all_data:
            held.enter_context(bound)
        call = ServeContext(node, job, limit, refusal, bound, held)
        begun = [start_request(call, request) for request in requests]
        answers = [finish_request(call, work) for work in begun]
    return _evict_for_unpacking(node, job, answers)


def start_request(
    call: ServeContext, request: Request, since: float | None = None, tries: int = 1
) -> StagedRequest | RequestResult:
    """Has the copy begin, or finds it here. The answer, where nothing will come of it.

    `since` and `tries` are those of a request that was begun before (`StagedRequest`).
    """
    node, job, limit = call.node, call.job, call.limit
    since = node.clock.monotonic() if since is None else since
    refusal = call.refusal or _find_refusal(node, job, request, limit)
    found: SourceImage | None = None
    try:
        if refusal and not redirect.list_binds(node.cache):
            raise refusal
        finder = SOURCE_FINDERS[request.kind]
        path = finder.path(job, request)
        with contextlib.ExitStack() as held:
            opened = held.enter_context(finder.open(node, job, path, limit.end))
            found = opened.image
            _check_may_stage(node, found, refusal)
            _check_clear_of_binds(call, request, found)
            lease = held.enter_context(leases.hold_entry(node, job, opened.image.key, limit))
            copying = held.enter_context(copy_wait.ensure_copy_started(node, job, opened))
            kept = call.exit_stack.enter_context(held.pop_all())
    except (ForestageError, OSError) as error:
        return _with_duration(call, _make_unserved_result(request, error, refusal, found), since)
    return StagedRequest(request, opened, lease, copying, kept, since, tries)


def finish_request(call: ServeContext, begun: StagedRequest | RequestResult) -> RequestResult:
    """Waits for the copy as long as the job does, and shows it, or what there is meanwhile."""
    if isinstance(begun, RequestResult):
        return begun
    request, found = begun.request, begun.opened.image
    try:
        with begun.exit_stack:
            answer = _wait_and_show(call, begun)
    except (ForestageError, OSError) as error:
        is_changed = isinstance(error, Declined) and error.reason == "changed"
        if is_changed and begun.tries < SOURCE_TRIES:  # what lies there now may stay
            return finish_request(call, start_request(call, request, begun.since, begun.tries + 1))
        if is_changed:  # without the image: nobody knows which one it is now
            answer = _make_unserved_result(
                request, Declined("changed", f"{SOURCE_TRIES} times, {error}")
            )
        else:
            answer = _make_unserved_result(request, error, image=found)
    return _with_duration(call, answer, begun.since)


def _with_duration(call: ServeContext, answer: RequestResult, since: float) -> RequestResult:
    """The answer with how long it took, and what decided."""
    answer = answer.with_facts(wait=round(call.node.clock.monotonic() - since, 4))
    answer = msgspec.structs.replace(answer, decision_lines=call.container_binds.decision_lines)
    return with_baseline(call.node, answer)


def _make_unserved_result(
    request: Request,
    error: Exception,
    refusal: Declined | None = None,
    image: SourceImage | None = None,
) -> RequestResult:
    """Pure: the answer where nothing is shown; `refusal` says more than what it led to."""
    if image and isinstance(error, Declined):
        return RequestResult(make_error_outcome(request, error, image), image)
    return RequestResult(
        make_error_outcome(request, error if isinstance(error, Failed) else refusal or error)
    )


def _wait_and_show(call: ServeContext, begun: StagedRequest) -> RequestResult:
    """The entry, if it comes in time; else what the job does meanwhile."""
    node, job, limit = call.node, call.job, call.limit
    opened, copying, found = begun.opened, begun.stager_channel, begun.opened.image
    first = limit.copy_deadline(found.size)
    begins = not first.seconds_left() and copying is not None and _may_lack_room(node, found)
    if begins:  # no job is to read through a copy that is refused, and say nothing of it
        first = limit.room
    try:
        came = copy_wait.wait_for_copy(
            node, job, opened, copying, first, limit.on_copy_wait, begins
        )
    except Declined as late:
        if late.reason != "deadline":
            raise
        meanwhile = _serve_while_copying(call, begun, late)
        if meanwhile is None:
            came = "joined"
        elif until := _extended_deadline(call, begun, meanwhile):
            came = copy_wait.wait_for_copy(node, job, opened, copying, until, limit.on_copy_wait)
        else:
            return meanwhile
    _check_clear_of_binds(call, begun.request, found)  # what its own fstab says is known now
    # The use is noted at its end (hooks/epilog.py): a hit writes nothing to a disk that may hang.
    way = _choose_redirect(call, begun.request, found)
    if way == "bind":
        way = redirect.mount_redirect(node, begun.lease, job.user, found, limit.end, limit.copy)
    return make_served_result(begun.request, found, came, way)


def _may_lack_room(node: Node, image: SourceImage) -> bool:
    """Whether the copy's stager may find no room; as long as nothing has to be evicted it does."""
    from forestage.cache import evict  # a hit needs none of it

    try:
        return not evict.is_space_free(node.cache, node.config, image.size)
    except OSError:  # the stager meets it, too
        return True


def _extended_deadline(
    call: ServeContext, begun: StagedRequest, result: RequestResult
) -> Deadline | None:
    """How long the job would rather wait for its copy than read the source meanwhile, if at all."""
    reads_source = call.limit.is_read_through and not result.socket
    shows = _choose_redirect(call, begun.request, begun.opened.image) == "spank"
    return call.limit.copy if reads_source and shows else None


def _serve_while_copying(
    call: ServeContext, begun: StagedRequest, deadline_error: Declined
) -> RequestResult | None:
    """What the job does while its image is copied; None where that has just ended."""
    node, limit, found = call.node, call.limit, begun.opened.image
    way = _choose_redirect(call, begun.request, found)
    if way == "bind":
        leases.request_redirect(node, call.job, found)
        # The stager publishes, then looks who asked: one of the two sees the other.
        if limit.copy is None and node.cache.find_entry(found):
            return None
        way = "later"
    if limit.copy is not None and not limit.is_read_through:
        return _make_unserved_result(begun.request, deadline_error, image=found)
    if way != "spank":
        return make_served_result(begun.request, found, "started", way)
    return _start_read_through(call, begun)


def _start_read_through(call: ServeContext, begun: StagedRequest) -> RequestResult | None:
    """Has the step read through the copy, or leaves it the shared path where that cannot be.

    Returns None if the copy has just been published. The Prolog has all ready for the first step.
    """
    node, job, found = call.node, call.job, begun.opened.image
    started = make_served_result(
        begun.request, found, "started", "none" if job.step is not None else "spank"
    )
    if node.config.cold_start_mode != "through" or not begun.opened.is_read_through:
        return started
    # A hit needs none of it.
    from forestage.stage.task import CopyTask
    from forestage.views.through import keeper

    try:
        socket = keeper.start_keeper(CopyTask(node, job, begun.opened), wait=call.limit.ready)
    except Declined as why:
        # A stager that publishes takes away what a keeper of its copy needs
        # (cache/arrival_map.remove_map_files).
        if node.cache.find_entry(found):
            return None
        return started.with_facts(reason=why.reason, detail=make_printable(str(why)))
    result: OutcomeResult = "started" if job.step is None else "through"
    answer = make_served_result(begun.request, found, result, "spank")
    return msgspec.structs.replace(answer, socket=socket)


def _evict_for_unpacking(node: Node, job: Job, answers: list[RequestResult]) -> list[RequestResult]:
    """Evicts for what the job's containers take if enroot unpacks them on the cache's disk.

    For the largest, whose outcome says what went: steps come one after the other, mostly. It is
    only a favour: a job that finds too little has no more without us.
    """
    needs = {
        number: unpack_space.estimate_unpacked_bytes(node.cache, node.config, answer.image)
        for number, answer in enumerate(answers)
        if answer.image
        and answer.image.kind == "image"
        and answer.outcome.result not in UNSERVED_RESULTS
    }
    number = max(needs, key=lambda number: needs[number], default=None)
    if number is None or not needs[number]:
        return answers
    with contextlib.suppress(ForestageError, OSError):
        disk_probe.check_writable(node.places, node.cache, SHORT_LOCK_TIMEOUT)
        if not unpack_space.has_free_bytes(
            node.cache, node.config, needs[number]
        ) and unpack_space.is_enroot_on_same_disk(node.cache, node.places.root, SHORT_LOCK_TIMEOUT):
            # Mostly there is enough.
            from forestage.cache import evict

            whose = (needs[number], job.user.uid, SHORT_LOCK_TIMEOUT)
            keys = evict.evict_for_job(node.cache, node.leases, node.config, *whose)
            answers[number] = answers[number].with_facts(evicted=keys)
    return answers


def _find_refusal(node: Node, job: Job, request: Request, limit: HookDeadlines) -> Declined | None:
    """Returns why nothing may be staged for this request on this node, if it may not."""
    try:
        # First: a registry's name must not count as a failure of the cache, which may drain the
        # node.
        if found := bare_name.find_bare_name_refusal(job, request, limit.end.seconds_left()):
            return found
        SOURCE_FINDERS[request.kind].path(job, request)
        if job.hints.off:
            return Declined("off", "the job says stage=off")
        disk_probe.check_readable(node.places, node.cache, limit.end.seconds_left())
        node.cache.prepare(node.config.require_mount)
        disk_errors.check_no_doubt(node.places)
    except Declined as declined:
        return declined
    except OSError as error:
        return classify_disk_error(error)
    return None


def _check_may_stage(node: Node, image: SourceImage, refusal: Declined | None) -> None:
    """Raises Declined where this image must not be staged for the job."""
    if refusal:
        raise refusal
    if node.config.redirect == "spank" and has_control_characters(image.path):
        # The step could not tell the companion, whose lines have fields between tabs.
        raise Declined("bad-path", "the path resolves to a name with control characters")


def _check_clear_of_binds(call: ServeContext, request: Request, image: SourceImage) -> None:
    """Raises Declined where the job's container binds a directory above.

    Then no redirect of this job's stays; where another job needs one, this container may not start.
    """
    if request.is_data or call.node.config.redirect == "none":
        return
    try:
        entry = call.node.cache.find_entry_by_key(image.key)
        call.container_binds.check_not_below_bind(image.path, entry.binds if entry else ())
    except Declined:
        # A Prolog does not see what a step asks for, and may have laid one.
        leases.drop_own_redirect(call.node, call.job, image.path, call.limit)
        raise


def _choose_redirect(call: ServeContext, request: Request, image: SourceImage) -> str:
    """How the path is to show the entry: bind, spank, or none for the site's sake or the job's."""
    job, way = call.job, call.node.config.redirect
    if way == "none" or not job.saves or not request.is_redirected:
        return way
    lease = call.node.leases.find_own_lease(job.id, job.user.uid)
    may = lease is not None and job.saves in lease.saves and job.saves != image.path
    return way if may else "none"
