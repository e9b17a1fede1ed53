"""The step hook: the SPANK companion runs it once per step and node, before the tasks start.

The answer is one line of fields between tabs: `use` this entry for that file, read `through` the
keeper at this socket, or `leave` the path as it is. A line with `say` before it is for the user,
who sits at the terminal and waits; one with `also` is such an answer for one more image, and one
with `data` says what else is mounted (data/wanted.py).
"""

import contextlib
import math
import os
import pwd
from collections.abc import Callable, Mapping, Sequence

import msgspec

from forestage import events
from forestage.cache import shown
from forestage.cache.image import Image
from forestage.cache.lease import Leases
from forestage.cache.node import Node
from forestage.cache.shown import Shown
from forestage.clock import Clock, Deadline
from forestage.config import UserMessages
from forestage.errors import Declined, Failed, ForestageError
from forestage.events import Handled, saved
from forestage.hooks import leases, serve
from forestage.hooks.answers import UNSERVED, Answer, has_control, measured
from forestage.hooks.limit import Limit, wished
from forestage.slurm import nodelist, timeouts
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.stage import source
from forestage.system import lock
from forestage.units import to_tenths

MEASURED = frozenset(("time", "total", "step"))  # of an event, by the companion
HELD_UP = 5.0  # seconds that a step waits before its user reads why
SPARE = 7.0  # seconds of the companion's for what a copier says when its time is over
MAX_ENVIRONMENT = 8 << 20  # bytes; the kernel takes 6 MiB at most
AGAIN = 30.0  # seconds until they read it once more

PYXIS_TELLS = frozenset(
    ("bad-path", "missing", "no-permission", "not-a-file", "empty", "not-squashfs")
)
AS_DECIDED = frozenset(
    (
        *("registry", "outside-sources", "too-large", "below-bind"),
        *("off", "disabled", "config", "set-id", "unlisted", "container"),
    )
)

WHOLE = ("hit", "joined", "copied")  # results with which all of it is read from this node's disk
BY_WORTH = (*WHOLE, "through", "started", "declined", "failed")
MAX_LOCAL = 8192  # bytes; a line to the companion has twice as many at most

_TELL = "tell your admin (`forestage explain` says more)"
FOR_USERS = {
    "no-room": f"this node's cache has no room for it; if that stays so, {_TELL}",
    "io": f"this node's disk gave an error; {_TELL}",
    "copy": f"the copy failed on this node; {_TELL}",
    "cache-not-mounted": f"this node's cache disk is not mounted; {_TELL}",
    "cache-not-ours": f"this node's cache cannot be used; {_TELL}",
    "cache-format": f"this node's cache cannot be used; {_TELL}",
    "cache-hangs": f"this node's cache disk does not answer; {_TELL}",
    "disk-errors": f"this node's cache disk has errors; {_TELL}",
    "config": f"forestage is not set up right on this node; {_TELL}",
    **dict.fromkeys(
        ("busy", "helper", "lease-damaged", "loop", "program", "redirect", "slurm-conf"),
        f"forestage failed on this node; {_TELL}",
    ),
}
"""What users are told where only an admin can do something; the event and `explain` have it all."""

Say = Callable[[str], None]


class Done(msgspec.Struct, frozen=True):
    """What the requests came to, for log and events, and the fields of the answer's line.

    `also` are those of the images that the job's comment named, for lines before it.
    """

    answers: list[Answer]
    answer: tuple[str, ...]
    also: tuple[tuple[str, ...], ...] = ()

    @property
    def outcomes(self) -> list[Handled]:
        return [one.outcome for one in self.answers]


def waiting(
    node: Node,
    job: Job,
    timeout: str,
    say: Say,
    refusal: Declined | None,
    progress: Say | None = None,
) -> Limit:
    """Returns how long a step may go on, and wait for a copy.

    `timeout` is the companion's own limit in seconds, as text. Where all is refused there is only
    the search for stale redirects. `progress` writes lines while the step waits for data.
    """
    config, hint = node.config, job.hints.wait
    wish = None if refusal else wished(config, hint, timeouts.STEP_WAIT)
    copy = None if wish is None else timeouts.step_patience(wish, timeout)
    end = timeouts.step_patience(source.HOOK_TIMEOUT, timeout)
    limit = Limit.of(node.clock, end, copy, small=hint != 0)
    wish = timeouts.STEP_WAIT if hint is None else min(hint, config.max_stage_wait)
    longest = max(0.0, timeouts.step_patience(math.inf, timeout) - SPARE)
    fill = Deadline.after(min(wish, longest), node.clock)
    limit = msgspec.structs.replace(limit, fill=fill, through=config.start == "through")
    if config.user_messages == "none":
        return limit
    if progress is not None:
        limit = msgspec.structs.replace(limit, progress=Patience(node.clock, progress, AGAIN))
    if copy is not None:
        limit = msgspec.structs.replace(limit, watch=Patience(node.clock, say, math.inf))
    return limit


def step(node: Node, job: Job, limit: Limit, refusal: Declined | None) -> Done:
    """Stages the step's image; `refusal` is why nothing may be staged on this node now."""
    answers = serve.serve(node, job, job.requests, limit, refusal)
    own: tuple[str, ...] = ("leave", "no-image")
    also = []
    for request, answer in zip(job.requests, answers, strict=True):
        words = fields(node, answer)
        if request.via == "option":
            own = words
        elif words[0] != "leave":
            also.append(words)
    return Done(answers, own, tuple(also))


def tell(
    node: Node, job: Job, outcomes: Sequence[Handled], say: Say, always: Say | None = None
) -> None:
    """Says what the requests came to, what went wrong first: most users read one line only.

    That a mount is missing they read `always`: each step finds an empty directory there.
    """
    for one in sorted(outcomes, key=lambda one: one.result not in UNSERVED):
        line = message(one, node.config.user_messages, job.waited)
        if line:
            (always if always and is_unmounted(one) else say)(line)


def is_unmounted(outcome: Handled) -> bool:
    """Pure: whether a squashfs file was to be mounted, and is not."""
    is_mount = outcome.data and "@/" in outcome.request
    return is_mount and outcome.result in UNSERVED and not outcome.redirect


def environment(job: Job, environ: Mapping[str, str]) -> Job:
    """Returns the job with the variables of its step, in the open file that the companion names.

    What is too long for a program to be started with is left out: nobody knows it then.
    """
    number = environ.get("FORESTAGE_ENVIRONMENT", "")
    if not (number.isascii() and number.isdigit()):
        return job
    data = b""
    with contextlib.suppress(OSError):
        while len(data) <= MAX_ENVIRONMENT and (more := os.pread(int(number), 1 << 20, len(data))):
            data += more
    if not data or len(data) > MAX_ENVIRONMENT:
        return job
    # Of a name that comes twice the last counts, as with putenv(3).
    entries = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0"))
    variables = {name: value for name, equals, value in entries if equals}
    return msgspec.structs.replace(job, variables=variables)


def named(job: Job) -> Job:
    """Returns the job with its user's name, for their groups; an unknown uid has its gid."""
    try:
        name = pwd.getpwuid(job.user.uid).pw_name
    except KeyError:
        return job
    return msgspec.structs.replace(job, user=msgspec.structs.replace(job.user, name=name))


def also_hinted(noted: Leases, job: Job) -> Job:
    """Returns the job with the images that its comment named, as its Prolog noted them."""
    hinted = tuple(Request(path, "hint") for path in noted.hinted(job.id))
    return msgspec.structs.replace(job, requests=job.requests + hinted)


def as_noted(node: Node, job: Job, refusal: Declined | None) -> tuple[Job, Declined | None]:
    """Returns the job with what its Prolog noted: what the comment says, and the job's nodes.

    A lease that cannot be read is a refusal, unless there is one already.
    """
    job = also_hinted(node.leases, job)
    job = msgspec.structs.replace(job, nodelist=node.leases.nodelist(job.id))
    try:
        lease = node.leases.read(job.id)
    except Failed as damaged:
        return job, refusal or damaged
    except OSError as error:
        return job, refusal or Failed("io", str(error))
    if lease is None:
        return job, refusal
    said = {"off": lease.off, "wait": lease.wait, "tell": lease.tell, "problems": lease.say}
    hints = msgspec.structs.replace(job.hints, **said)
    return msgspec.structs.replace(job, hints=hints, waited=lease.waited), refusal


def telling(node: Node, job: Job) -> Node:
    """Returns the node as it is for a job whose user wants to read what happens."""
    if not job.hints.tell:
        return node
    config = msgspec.structs.replace(node.config, user_messages="all")
    return msgspec.structs.replace(node, config=config)


def say_bad_hints(node: Node, job: Job, say: "Once") -> None:
    """Says what the Prolog noted of the comment's hints, once: it is noted no longer."""
    if not job.hints.problems:
        return
    with (
        contextlib.suppress(ForestageError, OSError),  # rather twice than never
        lock.held_if_writable(node.cache.space_lock, leases.GIVE_UP),
    ):
        lease = node.leases.read(job.id)
        if lease is None or not lease.say:  # another step of the job was faster
            return
        node.leases.end_hinted(job.id)
        node.leases.put(msgspec.structs.replace(lease, say=()))
    for line in job.hints.problems:
        say.progress(line)


def result_word(outcome: Handled) -> str:
    """Pure: a request's outcome for the step's environment; `none` where no copy is shown."""
    if outcome.result in UNSERVED:
        return outcome.reason
    is_shown = outcome.redirect != "none" or outcome.result == "started"
    return outcome.result if is_shown else "none"


def variables(job: Job, answers: Sequence[Answer]) -> list[tuple[str, str]]:
    """Pure: what the step's environment says of its image, or of the first that the comment names.

    One word, a result or why not (events/reasons.py), and the path at which the image shows.
    """
    pairs = [*zip(job.requests, answers, strict=True)]
    own = [pair for pair in pairs if pair[0].via == "option"] or pairs
    if not own:
        return []
    request, answer = own[0]
    outcome, word = answer.outcome, result_word(answer.outcome)
    path = outcome.image or os.path.join(job.work_dir, request.path)
    found = [("FORESTAGE_RESULT", word), ("FORESTAGE_IMAGE_PATH", path)]
    return [pair for pair in found if not any(map(has_control, pair))]


def local_images(job: Job, answers: Sequence[Answer]) -> tuple[str, ...]:
    """Pure: the images of the comment that the step reads from this node's disk."""
    return tuple(
        answer.outcome.image
        for request, answer in zip(job.requests, answers, strict=True)
        if request.via == "hint" and result_word(answer.outcome) in WHOLE
    )


def data_variables(outcomes: Sequence[Handled], local: Sequence[str]) -> list[tuple[str, str]]:
    """Pure: what the step's environment says of all its data, and where it is local.

    The word is the worst one: of a failure, of what was declined, then the last of BY_WORTH. Paths
    beyond MAX_LOCAL bytes are left out.
    """
    found = []
    if outcomes:
        worst = max(outcomes, key=lambda one: BY_WORTH.index(one.result))
        found.append(("FORESTAGE_DATA_RESULT", result_word(worst)))
    listed = ""
    for path in dict.fromkeys(local):
        word = f":{path.replace('%', '%25').replace(':', '%3A')}"
        if not has_control(path) and len(os.fsencode(listed + word)) <= MAX_LOCAL:
            listed += word
    return found + ([("FORESTAGE_LOCAL", listed[1:])] if listed else [])


def is_first_node(job: Job) -> bool:
    """Pure: whether this node is the one of the step's that speaks to its user."""
    listed = job.step_nodelist or job.nodelist
    nodes = nodelist.expand(listed) if listed else ()
    return not nodes or nodes[0] == job.node


class Patience:
    """While a step waits: a line, so that nobody thinks it hangs, then one each `again` seconds."""

    def __init__(self, clock: Clock, say: Say, again: float) -> None:
        self.clock = clock
        self.say = say
        self.again = again
        self.due = clock.monotonic() + HELD_UP

    def __call__(self, line: Callable[[], str]) -> None:
        if self.clock.monotonic() >= self.due:
            self.due = self.clock.monotonic() + self.again
            self.say(line())


class Once:
    """Says a line to a job's user: one for each job, from the first node of the step.

    With `user_messages: all`, or stage-tell=yes, a line for each request of the job's first step.
    `progress` says any number; why something failed is still said after it. `always` does so from
    each node.
    """

    def __init__(self, node: Node, job: Job, say: Say) -> None:
        self.node = node
        self.job = job
        self.say = say
        self.may: bool | None = None

    def __call__(self, text: str) -> None:
        if self.may is None or self.node.config.user_messages != "all":
            self.may = is_first_node(self.job) and self._is_first()
        if self.may:
            self.say(f"{self.job.node}: {text}")

    def progress(self, text: str) -> None:
        if is_first_node(self.job):
            self.say(f"{self.job.node}: {text}")

    def always(self, text: str) -> None:
        self.say(f"{self.job.node}: {text}")

    def _is_first(self) -> bool:
        """Whether the user has read nothing yet; notes in the lease that now they do."""
        node = self.node
        try:
            with lock.held_if_writable(node.cache.space_lock, leases.GIVE_UP):
                lease = leases.of_job(node, self.job)
                node.leases.put(msgspec.structs.replace(lease, told=True))
                return not lease.told
        except (ForestageError, OSError):  # rather twice than never
            return True


def message(outcome: Handled, wanted: UserMessages, waited: float = 0.0) -> str:
    """Pure: the line that the user reads in the end; "" for none.

    `waited` are seconds that the job's Prolog took before this step.
    """
    name = outcome.image or outcome.request
    if wanted == "none":
        return ""
    if outcome.result in UNSERVED:
        why = FOR_USERS.get(outcome.reason, outcome.detail)
        if outcome.request == "stage-dir":
            return f"this job has no directory of its own on this node: {why}"
        if outcome.request.endswith("@job") or "@seed:" in outcome.request:
            return f"{name} is not in the job's directory: {why}"
        decided = outcome.reason in AS_DECIDED and (wanted != "all" or outcome.reason == "off")
        # Of a directory pyxis tells nothing.
        is_directory = outcome.data and outcome.request.endswith("/")
        quiet = decided or (outcome.reason in PYXIS_TELLS and not is_directory)
        if outcome.reason == "truncated":  # or the job's failure would look like ours
            return outcome.detail
        if outcome.reason == "no-mount" or is_unmounted(outcome):
            return f"{name} is not mounted: {why}"
        if outcome.reason == "registry" and not quiet:
            return f"{name} is imported by enroot, as without forestage"
        return "" if quiet else f"{name} is read from its original path: {why}"
    if wanted != "all":
        return ""
    copy = {
        "started": "its original path, while the copy for the next job is made",
        "through": "this node's copy while it is made",
    }
    where = copy.get(outcome.result, "this node's copy")
    took, before = to_tenths(outcome.wait), to_tenths(waited)
    said = outcome.result + (f", the step waited {took}" if took else "")
    said += f", the job's start {before}" if before else ""
    whole = msgspec.structs.replace(outcome, wait=outcome.wait + waited)
    worth = f", {saved.phrase(whole)}" * (outcome.result not in copy)
    return f"{name} is read from {where} ({said}){worth}"


def fields(node: Node, answer: Answer) -> tuple[str, ...]:
    """Pure: the fields of the line that ends the companion's wait."""
    outcome, wanted = answer.outcome, answer.image
    if outcome.result == "started":
        return "leave", "started"
    if outcome.reason or wanted is None:
        return "leave", outcome.reason
    # With `bind` too: job_container/tmpfs has given the job its own, older, view of the mounts, and
    # where a task already sees the entry there is nothing to do.
    if outcome.redirect == "none":
        return "leave", "none" if node.config.redirect == "none" else "saves"
    found = wanted.identity
    facts = (found.inode, found.size, found.mtime_ns, found.ctime_ns)
    tell = "0" if node.config.user_messages == "none" else "1"
    word = "through" if answer.socket else "use"
    place = answer.socket or node.cache.image(wanted.key)
    words = (str(place), found.path, *map(str, facts), tell)
    if any(map(has_control, words)):
        return "leave", "bad-path"
    return word, *words


def note_shown(node: Node, job: Job, decided: Sequence[str], answers: Sequence[Answer]) -> None:
    """Notes what further steps of the job are shown, so that they need no helper.

    The Prolog's answers or a step's, the first of them in the order of the job's requests.
    `decided` is what cache/shown.py found before the configuration was read.
    """
    if job.step is None and node.config.user_messages == "all":
        return  # the first step has a line to write, which takes a helper
    # The off switch and a lease that says stage=off leave no answer that counts.
    found = [_shown(node, job, *pair) for pair in zip(job.requests, answers, strict=False)]
    images = [image for image in found if image is not None]
    by_binds = next((one.decided for one in answers if one.decided), ())
    if images and by_binds:
        # Only a further step's time depends on it.
        with (
            contextlib.suppress(ForestageError, OSError),
            lock.held(node.cache.space_lock, leases.GIVE_UP),
        ):
            if decided:
                decided = [*decided, shown.of_room(node.cache, node.config), *by_binds]
            shown.note(node.leases, job.id, decided, images)


def _shown(node: Node, job: Job, request: Request, first: Answer) -> Shown | None:
    outcome = first.outcome
    answer = _further(node, first)
    if answer is None or outcome.redirect != "spank" or outcome.reason:
        return None
    if job.mounts_home is False:  # a further step need not say so
        return None
    changes = {"result": answer.outcome.result, "baseline": answer.outcome.baseline}
    same = {"via": "option", "wait": 0.0, "evicted": ()}
    further = msgspec.structs.replace(outcome, **changes, **same)
    event = msgspec.to_builtins(events.of_job(job, "step", further))
    # The companion writes these before the rest.
    event = {name: value for name, value in event.items() if name not in MEASURED}
    event["outcome"].pop("wait", None)
    return Shown(
        asked=os.path.join(job.work_dir, request.path),
        uid=job.user.uid,
        event=msgspec.json.encode(event).decode().removeprefix("{"),
        answer=fields(node, answer),
    )


def _further(node: Node, first: Answer) -> Answer | None:
    """What a further step gets: the entry, or the keeper of the copy that is under way.

    It need not listen yet. Where nobody does in the end, the companion asks a helper.
    """
    # Not one of an earlier boot, which nobody has proven yet.
    entry = node.cache.find(first.image) if first.image else None
    if entry is not None and entry.binds:  # which a helper has to look at
        return None
    if entry is not None:
        return measured(node, Answer(Handled("hit"), Image(entry.identity, entry.access)))
    return Answer(Handled("through"), first.image, first.socket) if first.socket else None
