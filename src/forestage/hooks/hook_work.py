"""What Prolog, step and Epilog do, from top to bottom; each calls the modules that have its name.

Only a hook that has work loads this (hooks/boundary.py). What just one of the three needs is
imported where it is needed, and doors of features where the job asks for more than images.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forestage.cache.layout import Cache
from forestage.cache.lease import LeaseDirectory
from forestage.cache.node import Node, configured_root
from forestage.clock import Clock
from forestage.config import (
    ANYWHERE,
    REMOVED_KEYS,
    Config,
    load_config,
    resolve_auto_redirect,
    switch,
)
from forestage.errors import ConfigError, Declined, Failed
from forestage.features import list_requested_features
from forestage.hooks import background_prolog
from forestage.hooks.boundary import HookRun, update_nodelist, write_companion_line
from forestage.paths import NodePaths
from forestage.slurm import companion, timeouts
from forestage.slurm.companion import CompanionState
from forestage.slurm.job import Job
from forestage.slurm.slurm_conf import SlurmConf
from forestage.slurm.step_protocol import STEP_TIMEOUT_VARIABLE, LineFields, has_control_characters
from forestage.units import make_printable

if TYPE_CHECKING:
    from forestage.events import Outcome, ReleaseOutcome, RequestOutcome
    from forestage.features import Feature
    from forestage.features.contexts import AfterLeaseFacts, BeforeLeaseFacts
    from forestage.hooks.hook_deadlines import HookDeadlines


def run_hook(hook: HookRun, places: NodePaths, clock: Clock) -> None:
    """The work, its log line and its events. Expected errors become outcomes; others rise."""
    if hook.is_in_background:
        _leave_job_cgroups()
    hook.slurm_conf = SlurmConf(hook.environ.get("SLURM_CONF", ""))
    # slurmd's word, also in a step, whose user has no say in it (src/spank/helper.c).
    places = places.with_slurm_conf(hook.slurm_conf.named)
    job = Job.from_environ(hook.environ)
    if hook.name == "epilog":
        return _run_epilog(hook, job, places, clock)
    if hook.name == "step":
        from forestage.hooks import step

        job = step.with_step_variables(job, hook.environ)
    work = {"prolog": _run_prolog, "step": _run_step}[hook.name]
    job, outcomes = work(hook, job, places, clock)
    if hook.is_in_background:
        background_prolog.clear_needless_hints_flag(places, job)
    return hook.record_outcomes(job, outcomes, places, clock)


def _leave_job_cgroups() -> None:
    from forestage.system import forked_child

    forked_child.leave_job_cgroups()


def _run_prolog(
    hook: HookRun, job: Job, places: NodePaths, clock: Clock
) -> tuple[Job, Sequence[Outcome]]:
    from forestage.cache import step_record
    from forestage.hooks import prolog

    limits = timeouts.read_limits(hook.slurm_conf)
    if LeaseDirectory(places.leases).lease_file(job.id).exists():
        from forestage.hooks import earlier_job

        limits = earlier_job.release_earlier_job(places, clock, job, limits, hook.hook_pipe)
        update_nodelist(
            hook.name, hook.environ, os.fspath(places.run)
        )  # may have gone with the earlier
    has_data = job.hints.has_data
    if not (job.requests or job.saves or job.hints.for_steps or has_data):
        bad = job.hints.problems and places.loaded.exists()
        if not bad:  # or nobody reads it
            return job, prolog.make_bad_hint_outcomes(job)
    features = _list_features_for_job(job, has_data)
    decided_by = step_record.format_config_lines(places)
    nodes, refusal = _make_nodes(hook, job, places, clock)
    _detach_if_allowed(hook, places, decided_by)
    # Once: several caches must not take several times what slurm.conf allows.
    limit = prolog.make_prolog_deadlines(nodes[0], job, limits, refusal, hook.is_in_background)
    hook.hook_pipe.report_time_limit(limit.end.seconds_left())
    if refusal is None and (job.requests or job.saves or has_data or job.hints.words):
        job, refusal = prolog.with_identified_user(job, limit)
    if features and refusal is None:
        job = _call_before_lease(hook, nodes[0], job, features)
    # The last one's count: all but one only lose what is outdated.
    answers = [prolog.serve_prolog(node, job, limit, refusal) for node in nodes][-1]
    if nodes[0].config.redirect == "spank":
        from forestage.hooks import step, user_messages

        step.record_images_for_steps(
            user_messages.with_requested_messages(nodes[0], job), job, decided_by, answers
        )
    outcomes: list[Outcome] = [answer.outcome for answer in answers]
    if features:
        from forestage.features.doors import PROLOG_AFTER_LEASE, load_doors

        for serve in load_doors(PROLOG_AFTER_LEASE, features):
            outcomes += serve(_make_after_lease_facts(nodes[0], job, limit, refusal))
    if (refusal is None or job.hints.tell) and places.loaded.exists():
        from forestage.hooks import user_messages

        prolog.record_hint_problems(
            user_messages.with_requested_messages(nodes[0], job), job, outcomes
        )
    return job, outcomes


def _call_before_lease(hook: HookRun, node: Node, job: Job, features: Sequence[Feature]) -> Job:
    """Return the job without what these features serve before the core does."""
    from forestage.features.doors import PROLOG_BEFORE_LEASE, load_doors

    for begin in load_doors(PROLOG_BEFORE_LEASE, features):
        job = begin(_make_before_lease_facts(hook, node, job))
    return job


def _detach_if_allowed(hook: HookRun, places: NodePaths, decided_by: Sequence[str]) -> None:
    """Lets this and the next Prologs end before their work does, where the companion is loaded."""
    if hook.is_in_background or hook.settings is None or not places.loaded.exists():
        return
    try:
        by_slurm = background_prolog.format_plugstack_lines(hook.slurm_conf)
        loads = _read_companion_state(hook, places).state
        background_prolog.record_detachable_partitions(
            places, hook.settings, loads, decided_by, by_slurm
        )
    except OSError:  # they do their work first
        return
    hook.detach(os.fspath(places.run))
    if hook.is_in_background:
        _leave_job_cgroups()


def _run_step(
    hook: HookRun, job: Job, places: NodePaths, clock: Clock
) -> tuple[Job, Sequence[Outcome]]:
    from forestage.cache import step_record
    from forestage.hooks import request_results, step, user_messages
    from forestage.system import forked_child

    decided_by = step_record.format_config_lines(places)
    # A look that hangs cannot be killed: in the step's cgroup it would drain the node.
    forked_child.leave_job_cgroups()
    background_prolog.wait_for_prolog(
        background_prolog.prolog_mark_path(hook.environ, os.fspath(places.run))
    )
    timeout = hook.environ.get(STEP_TIMEOUT_VARIABLE, "")
    hook.hook_pipe.report_time_limit(float("inf"))  # the companion has a limit of its own
    nodes, refusal = _make_nodes(hook, job, places, clock)
    job, unknown = step.with_identified_user(nodes[0], job, timeout)
    job, refusal = step.with_prolog_notes(nodes[0], job, refusal or unknown)
    nodes = [user_messages.with_requested_messages(node, job) for node in nodes]
    later: LineFields = ()
    features = _list_features_for_job(job, has_data=False)
    if features and refusal is None:
        from forestage.features.doors import STEP_BEFORE_LEASE, load_doors

        for begin in load_doors(STEP_BEFORE_LEASE, features):
            job, answer = begin(_make_before_lease_facts(hook, nodes[0], job))
            later = later or answer
    # Whatever bytes the name of the user's file has.
    say = user_messages.JobMessageWriter(
        nodes[0],
        job,
        lambda text: write_companion_line("say", f"forestage: {make_printable(text)}"),
    )
    user_messages.write_hint_problems(nodes[0], job, say)
    # Once, as in the Prolog.
    limit = step.make_step_deadlines(nodes[0], job, timeout, say, refusal, say.write_progress)
    done = [step.serve_step(node, job, limit, refusal) for node in nodes][-1]
    outcomes = done.outcomes
    if not later:
        for name, value in request_results.list_image_variables(job, done.results):
            write_companion_line("env", name, value)
    for words in done.hint_fields:
        write_companion_line("also", *words)
    data: list[RequestOutcome] = []
    local = request_results.list_local_images(job, done.results)
    # Of a lease that cannot be read a refusal says so already.
    has_data = nodes[0].leases.has_data(job.id, job.user.uid)
    if features := _list_features_for_job(job, has_data):
        from forestage.features.doors import STEP_AFTER_LEASE, load_doors

        for show in load_doors(STEP_AFTER_LEASE, features):
            part = show(_make_after_lease_facts(nodes[0], job, limit, refusal))
            _write_feature_lines(hook, part.lines)
            data, local = [*data, *part.outcomes], (*local, *part.local_paths)
    for name, value in request_results.list_data_variables(data, local):
        write_companion_line("env", name, value)
    outcomes += data
    user_messages.write_messages(nodes[0], job, outcomes, say, say.write_from_each_node)
    # At once: the log can wait, the step does not.
    hook.write_answer(*(later or done.answer_fields))
    step.record_images_for_steps(nodes[0], job, decided_by, done.results)
    return job, outcomes


def _list_features_for_job(job: Job, has_data: bool) -> list[Feature]:
    """Pure: the features that serve what the job asks for besides images by their paths."""
    kinds = {"reference": job.reference is not None, "data": has_data}
    asked = [kind for kind, is_asked in kinds.items() if is_asked]
    return list_requested_features([*asked, *(word for word, _ in job.hints.words)])


def _make_before_lease_facts(hook: HookRun, node: Node, job: Job) -> BeforeLeaseFacts:
    from forestage.features.contexts import BeforeLeaseFacts

    def report(outcomes: Sequence[Outcome]) -> None:
        hook.record_outcomes(job, outcomes, node.places, node.clock)

    return BeforeLeaseFacts(node, job, hook.slurm_conf, hook.environ, report, hook.write_log_line)


def _make_after_lease_facts(
    node: Node, job: Job, limit: HookDeadlines, refusal: Declined | None
) -> AfterLeaseFacts:
    from forestage.features.contexts import AfterLeaseFacts

    return AfterLeaseFacts(node, job, limit, refusal)


def _write_feature_lines(hook: HookRun, lines: Sequence[LineFields]) -> None:
    """Tells the companion what a feature shows the step."""
    for words in lines:
        if any(map(has_control_characters, words)):
            hook.write_log_line(f"result=unshown detail={words!r}")
        else:
            write_companion_line(*words)


def _run_epilog(hook: HookRun, job: Job, places: NodePaths, clock: Clock) -> None:
    """Reports what has come of the job itself: a feature's part may raise something after that."""
    from forestage.hooks import epilog

    try:
        config = read_partition_config(hook, job, places)
    except ConfigError as error:
        hook.write_log_line(f"result=failed reason=config detail={error.one_line!r}")
        config = None
    limits = timeouts.read_limits(hook.slurm_conf)

    def report(done: ReleaseOutcome) -> None:
        hook.record_outcomes(job, [done], places, clock)

    epilog.run_epilog(config, places, clock, job, limits, report, hook.hook_pipe)


def read_partition_config(hook: HookRun, job: Job, places: NodePaths) -> Config:
    """Reads what the admin decided for the job's partition. Raises ConfigError."""
    hook.settings = load_config(places.etc, places.config_memo)
    for key in hook.settings.unlogged:
        where = ", ".join(hook.settings.removed[key])
        detail = f"{where}: {key} was removed: {REMOVED_KEYS[key]} (remove the line)"
        hook.write_log_line(f"result=warning reason=removed-key detail={detail!r}")
    found = hook.settings.for_partition(job.partition)
    if found.redirect == "auto":
        loads = _read_companion_state(hook, places)
        if loads.why and hook.name == "prolog":  # once for a job
            hook.write_log_line(f"result=unread reason=slurm-conf detail={loads.why!r}")
        found = resolve_auto_redirect(found, loads.state)
    return found


def _read_companion_state(hook: HookRun, places: NodePaths) -> CompanionState:
    """Return whether the job's steps get the companion; it is what runs a step's hook."""
    if hook.name == "step":
        return CompanionState("loaded")
    return companion.read_companion_state(places.loaded, hook.slurm_conf)


def _make_nodes(
    hook: HookRun, job: Job, places: NodePaths, clock: Clock
) -> tuple[list[Node], Declined | None]:
    """The node to work on, and why nothing may be staged on it now.

    Where the configuration cannot be used nobody can say which cache is meant: there is a node
    for each cache that a lease names, so that no redirect shows the job an outdated file.
    """
    # First, as the configuration may be why somebody has switched it off.
    off = switch.find_off_file_reason(places, clock.wall())
    try:
        config = read_partition_config(hook, job, places)
    except ConfigError as error:
        leases = LeaseDirectory(places.leases)
        bare = Config(sources=ANYWHERE)
        nodes = [
            Node(bare, places, Cache(Path(root), places.claims), leases, clock)
            for root in leases.list_cache_roots()
        ]
        refusal = Declined("disabled", off) if off else Failed("config", error.one_line)
        if not nodes:
            hook.hook_pipe.report_cache(configured_root(bare, places))
        return nodes or [Node.from_config(bare, places, clock)], refusal
    off = off or ("" if config.enabled else "`enabled: false`")
    hook.hook_pipe.report_cache(configured_root(config, places))
    node = Node.from_config(config, places, clock)
    hook.hook_pipe.report_cache(os.fspath(node.cache.root))
    return [node], Declined("disabled", off) if off else None
