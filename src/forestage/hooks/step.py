"""The step hook: the SPANK companion runs it once per step and node, before the tasks start.

The answer is one line of fields between tabs: `use` this entry for that file, or `leave` the path
as it is. Lines with `say` before it are for the user, who sits at the terminal and waits.
"""

import pwd
from collections.abc import Callable

import msgspec

from forestage.cache.node import Node
from forestage.clock import Clock, Deadline
from forestage.config import UserMessages
from forestage.errors import Declined, Failed
from forestage.events import Handled
from forestage.hooks import image
from forestage.hooks.image import Answer, Wait
from forestage.slurm import timeouts
from forestage.slurm.job import Job
from forestage.stage import source
from forestage.stage.wait import Eta
from forestage.units import format_duration

EVERY = 30.0  # seconds between two lines for a user who waits

PYXIS_TELLS = frozenset(
    ("bad-path", "missing", "no-permission", "not-a-file", "empty", "not-squashfs")
)
AS_DECIDED = frozenset(("registry", "outside-sources", "too-large", "off", "disabled", "config"))

Say = Callable[[str], None]


class Done(msgspec.Struct, frozen=True):
    """The outcomes for log and events, and the fields of the answer's line."""

    outcomes: list[Handled]
    answer: tuple[str, ...]


def waiting(node: Node, timeout: str, say: Say, refusal: Declined | None) -> Wait:
    """Returns how long a step may go on, and wait for a copy.

    `timeout` is the companion's own limit in seconds, as text. Where all is refused there is only
    the search for stale redirects.
    """
    config, clock = node.config, node.clock
    copy = 0.0 if refusal else config.step_wait
    seconds = timeouts.step_patience(max(copy, source.HOOK_TIMEOUT), timeout)
    watch = Watch(clock, say) if config.user_messages != "none" else None
    waits = Deadline.after(timeouts.step_patience(copy, timeout), clock)
    return Wait(Deadline.after(seconds, clock), waits, "keep", watch)


def step(node: Node, job: Job, limit: Wait, say: Say, refusal: Declined | None) -> Done:
    """Stages the step's image; `say` writes a line for the user.

    `refusal` is why nothing may be staged on this node now.
    """
    if not job.requests:
        return Done([], ("leave", "no-image"))
    request = job.requests[0]  # pyxis' option has one; a step sees no comment
    try:
        job = _as_noted(node, job)
    except Failed as damaged:
        refusal = refusal or damaged
    except OSError as error:
        refusal = refusal or Failed("io", str(error))
    answer = image.handle(node, job, request, limit, refusal)
    line = message(answer.outcome, node.config.user_messages)
    if line:
        say(line)
    return Done([answer.outcome], fields(node, answer))


def named(job: Job) -> Job:
    """Returns the job with its user's name, for their groups; an unknown uid has its gid."""
    try:
        name = pwd.getpwuid(job.user.uid).pw_name
    except KeyError:
        return job
    return msgspec.structs.replace(job, user=msgspec.structs.replace(job.user, name=name))


def _as_noted(node: Node, job: Job) -> Job:
    """With stage=off, if the Prolog noted that: a step sees no comment."""
    lease = node.leases.read(job.id)
    off = lease is not None and lease.off
    return msgspec.structs.replace(job, hints=msgspec.structs.replace(job.hints, off=off))


class Watch:
    """While a step waits: a line now and then, so that nobody thinks it hangs."""

    def __init__(self, clock: Clock, say: Say) -> None:
        self.clock = clock
        self.say = say
        self.next = clock.monotonic() + EVERY

    def __call__(self, eta: Eta) -> None:
        if self.clock.monotonic() >= self.next:
            self.next += EVERY
            self.say(eta.progress())


def message(outcome: Handled, wanted: UserMessages) -> str:
    """Pure: the line that the user reads in the end; "" for none."""
    name = outcome.image or outcome.request
    if wanted == "none":
        return ""
    if outcome.result in ("declined", "failed"):
        quiet = outcome.reason in PYXIS_TELLS | AS_DECIDED
        return "" if quiet else f"{name} is read from its original path: {outcome.detail}"
    if wanted != "all":
        return ""
    took = format_duration(outcome.wait)
    return f"{name} is read from this node's copy ({outcome.result} in {took})"


def fields(node: Node, answer: Answer) -> tuple[str, ...]:
    """Pure: the fields of the line that ends the companion's wait."""
    outcome, wanted = answer.outcome, answer.image
    if outcome.reason or wanted is None:
        return "leave", outcome.reason
    # With `bind` too: job_container/tmpfs has given the job its own, older, view of the mounts, and
    # where a task already sees the entry there is nothing to do.
    if outcome.redirect == "none":
        return "leave", "none" if node.config.redirect == "none" else "saves"
    found = wanted.identity
    facts = (found.inode, found.size, found.mtime_ns, found.ctime_ns)
    tell = "0" if node.config.user_messages == "none" else "1"
    words = (str(node.cache.image(wanted.key)), found.path, *map(str, facts), tell)
    if any(map(image.has_control, words)):
        return "leave", "bad-path"
    return "use", *words
