"""What the user of a job reads on their terminal: what went wrong, or how far a wait is."""

import contextlib
from collections.abc import Callable, Sequence

import msgspec

from forestage.cache.node import Node
from forestage.clock import Clock
from forestage.config import UserMessages
from forestage.errors import ForestageError
from forestage.events import UNSERVED_RESULTS, RequestOutcome, saved_time
from forestage.hooks import leases
from forestage.slurm import nodelist
from forestage.slurm.job import Job
from forestage.system import lock
from forestage.units import format_rough_duration

FIRST_MESSAGE_AFTER = 5.0  # seconds that a step waits before its user reads why
REPEAT_MESSAGE_AFTER = 30.0  # seconds until they read it once more

REASONS_REPORTED_BY_PYXIS = frozenset(
    ("bad-path", "missing", "no-permission", "not-a-file", "empty", "not-squashfs")
)
INTENDED_REASONS = frozenset(
    (
        *("registry", "outside-sources", "too-large", "below-bind"),
        *("off", "disabled", "config", "set-id", "unlisted", "container"),
    )
)

_ASK_ADMIN = "tell your admin (`forestage explain` says more)"
USER_TEXTS = {
    "no-room": f"this node's cache has no room for it; if that stays so, {_ASK_ADMIN}",
    "io": f"this node's disk gave an error; {_ASK_ADMIN}",
    "disk-full": f"a file system of this node is full; {_ASK_ADMIN}",
    "copy": f"the copy failed on this node; {_ASK_ADMIN}",
    "cache-not-mounted": f"this node's cache disk is not mounted; {_ASK_ADMIN}",
    "cache-other-disk": f"this node's cache disk is not mounted; {_ASK_ADMIN}",
    "cache-on-network": f"this node's cache cannot be used; {_ASK_ADMIN}",
    "cache-not-ours": f"this node's cache cannot be used; {_ASK_ADMIN}",
    "cache-format": f"this node's cache cannot be used; {_ASK_ADMIN}",
    "cache-hangs": f"this node's cache disk does not answer; {_ASK_ADMIN}",
    "disk-errors": f"this node's cache disk has errors; {_ASK_ADMIN}",
    "config": f"forestage is not set up right on this node; {_ASK_ADMIN}",
    **dict.fromkeys(
        ("busy", "helper", "lease-damaged", "loop", "program", "redirect", "slurm-conf"),
        f"forestage failed on this node; {_ASK_ADMIN}",
    ),
}
"""What users are told where only an admin can do something; the event and `explain` have it all."""

WriteMessage = Callable[[str], None]


def write_messages(
    node: Node,
    job: Job,
    outcomes: Sequence[RequestOutcome],
    write_message: WriteMessage,
    write_always: WriteMessage | None = None,
) -> None:
    """Says what the requests came to, what went wrong first: most users read one line only.

    `write_always` tells each step that a mount is missing: it finds an empty directory there.
    """
    for outcome in sorted(outcomes, key=lambda outcome: outcome.result not in UNSERVED_RESULTS):
        line = format_message(outcome, node.config.user_messages, job.waited)
        if line:
            (write_always if write_always and is_mount_missing(outcome) else write_message)(line)


def is_mount_missing(outcome: RequestOutcome) -> bool:
    """Pure: whether a squashfs file was to be mounted, and is not."""
    is_mount = outcome.data and "@/" in outcome.request
    return is_mount and outcome.result in UNSERVED_RESULTS and not outcome.redirect


def with_requested_messages(node: Node, job: Job) -> Node:
    """Returns the node as it is for a job whose user wants to read what happens."""
    return node.with_config(user_messages="all") if job.hints.tell else node


def write_hint_problems(node: Node, job: Job, writer: "JobMessageWriter") -> None:
    """Says what the Prolog noted of the comment's hints, once: it is noted no longer."""
    if not job.hints.problems:
        return
    with (
        contextlib.suppress(ForestageError, OSError),  # rather twice than never
        lock.held_if_writable(node.cache.space_lock, leases.SHORT_LOCK_TIMEOUT),
    ):
        lease = node.leases.find_own_lease(job.id, job.user.uid)
        if (
            lease is None or not node.leases.read_notes(job.id, job.user.uid).say
        ):  # another step was faster
            return
        node.leases.clear_hints_flag(job.id, job.user.uid)
        node.leases.add_notes_and_keep_lease(lease, say=())
    for line in job.hints.problems:
        writer.write_progress(line)


def is_first_step_node(job: Job) -> bool:
    """Pure: whether this node is the one of the step's that speaks to its user."""
    listed = job.step_nodelist or job.nodelist
    nodes = nodelist.expand_nodelist(listed) if listed else ()
    return not nodes or nodes[0] == job.node


class WaitReporter:
    """While a step waits: a line, so that nobody thinks it hangs, then others.

    One comes each `repeat_seconds` seconds.
    """

    def __init__(self, clock: Clock, say: WriteMessage, again: float) -> None:
        self.clock = clock
        self.write_message = say
        self.repeat_seconds = again
        self.next_message_time = clock.monotonic() + FIRST_MESSAGE_AFTER

    def __call__(self, line: Callable[[], str]) -> None:
        if self.clock.monotonic() >= self.next_message_time:
            self.next_message_time = self.clock.monotonic() + self.repeat_seconds
            self.write_message(line())


class JobMessageWriter:
    """Says a line to a job's user: one for each job, from the first node of the step.

    With `user_messages: all`, or stage-tell=yes, a line for each request of the job's first step.
    `write_progress` says any number; why something failed is still said after it.
    `write_from_each_node` does so from each node.
    """

    def __init__(self, node: Node, job: Job, say: WriteMessage) -> None:
        self.node = node
        self.job = job
        self.write_message = say
        self.may_write: bool | None = None

    def __call__(self, text: str) -> None:
        if self.may_write is None or self.node.config.user_messages != "all":
            self.may_write = is_first_step_node(self.job) and self._is_first_message()
        if self.may_write:
            self.write_message(f"{self.job.node}: {text}")

    def write_progress(self, text: str) -> None:
        if is_first_step_node(self.job):
            self.write_message(f"{self.job.node}: {text}")

    def write_from_each_node(self, text: str) -> None:
        self.write_message(f"{self.job.node}: {text}")

    def _is_first_message(self) -> bool:
        """Whether the user has read nothing yet; notes in the lease that now they do."""
        node = self.node
        try:
            with lock.held_if_writable(node.cache.space_lock, leases.SHORT_LOCK_TIMEOUT):
                lease = leases.read_or_make_lease(node, self.job)
                told = node.leases.read_notes(self.job.id, self.job.user.uid).told
                node.leases.add_notes_and_keep_lease(lease, told=True)
                return not told
        except (ForestageError, OSError):  # rather twice than never
            return True


def format_message(outcome: RequestOutcome, mode: UserMessages, waited: float = 0.0) -> str:
    """Pure: the line that the user reads in the end; "" for none.

    `waited` are seconds that the job's Prolog took before this step.
    """
    if mode == "none":
        return ""
    if outcome.result in UNSERVED_RESULTS:
        return _format_refusal(outcome, mode)
    return _format_served(outcome, waited) if mode == "all" else ""


def _format_refusal(outcome: RequestOutcome, mode: UserMessages) -> str:
    """Pure: why what was asked for is read as without us; "" where nobody needs to hear it."""
    name = outcome.image or outcome.request
    why = USER_TEXTS.get(outcome.reason, outcome.detail)
    if outcome.request == "stage-dir":
        return f"this job has no directory of its own on this node: {why}"
    if outcome.request.endswith("@job") or "@seed:" in outcome.request:
        return f"{name} is not in the job's directory: {why}"
    if outcome.reason == "no-permission" and outcome.via == "hint" and not outcome.data:
        return f"{name} is not staged: {why}; give yourself the right to read it"
    decided = outcome.reason in INTENDED_REASONS and (mode != "all" or outcome.reason == "off")
    # Of a directory pyxis tells nothing.
    is_directory = outcome.data and outcome.request.endswith("/")
    quiet = decided or (outcome.reason in REASONS_REPORTED_BY_PYXIS and not is_directory)
    # The job fails for it, and that would look like our failure, or like a registry's.
    if outcome.reason in ("truncated", "bare-name"):
        return outcome.detail
    if outcome.reason == "no-mount" or is_mount_missing(outcome):
        return f"{name} is not mounted: {why}"
    if outcome.reason == "registry" and not quiet:
        return f"{name} is imported by enroot, as without forestage"
    return "" if quiet else f"{name} is read from its original path: {why}"


def _format_served(outcome: RequestOutcome, waited: float) -> str:
    """Pure: where it is read from, how long that took, and what it was worth."""
    name = outcome.image or outcome.request
    copy = {
        "started": "its original path, while the copy for the next job is made",
        "through": "this node's copy while it is made",
    }
    where = copy.get(outcome.result, "this node's copy")
    took, before = format_rough_duration(outcome.wait), format_rough_duration(waited)
    said = outcome.result + (f", the step waited {took}" if took else "")
    said += f", the job's start {before}" if before else ""
    whole = msgspec.structs.replace(outcome, wait=outcome.wait + waited)
    worth = f", {saved_time.format_saving(whole)}" * (outcome.result not in copy)
    return f"{name} is read from {where} ({said}){worth}"
