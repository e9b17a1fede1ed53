"""Copies images into this node's cache without a job: `forestage stage`.

For nodes that Slurm does not give: at boot, from Ansible, while they are drained. It is what a hook
does, with the same rules and the same stager (stage/), but nothing holds a lease: what nobody uses
afterwards is evicted like any entry. A copy that jobs need goes before it.
"""

import contextlib
import pwd
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from forestage.cache import disk_errors, disk_probe
from forestage.cache.node import Node
from forestage.check.slurm_site import read_node_companion_state
from forestage.clock import Deadline
from forestage.config import resolve_auto_redirect, switch
from forestage.errors import Declined, Failed, ForestageError, classify_node_error
from forestage.features.prepare.job_images import ImageResult
from forestage.slurm.hints import JobHints
from forestage.slurm.job import Job
from forestage.sources import opening, source
from forestage.stage import copy_wait
from forestage.system.as_user import User
from forestage.system.terminal import OutputBlock, TextLine, TextTable, format_count
from forestage.units import format_duration, make_printable

if TYPE_CHECKING:
    from forestage.system.daemon import StartChannel

OPEN_TIMEOUT = 30.0  # seconds for the shared file system to open one image
MAX_AT_ONCE = 16  # images, as of a job: each has a process, also while its copy waits for its turn

TextProgress = Callable[[str], None]


class StageReport(msgspec.Struct, frozen=True):
    """What one command did, in the order of the images."""

    images: tuple[ImageResult, ...]

    @property
    def failed(self) -> int:
        """How many are not here."""
        return sum(1 for one in self.images if not one.is_here)


def read_user(name: str) -> User:
    """Return a user of this node. Raises KeyError."""
    known = pwd.getpwnam(name)
    return User(known.pw_name, known.pw_uid, known.pw_gid)


def decide_redirect(node: Node, conf: str) -> Node:
    """Return the node with what `redirect: auto` means on it; `conf` is $SLURM_CONF or ""."""
    config = resolve_auto_redirect(node.config, read_node_companion_state(node.places, conf).state)
    return msgspec.structs.replace(node, config=config)


def make_placeholder_job(user: User, node: str) -> Job:
    """Pure: what stands for a job where there is none: number 0, as in the events of a sweep."""
    return Job(0, user, node, "", "/", (), None, JobHints())


def copy_images(
    node: Node, job: Job, images: Sequence[str], within: float, progress: TextProgress
) -> StageReport:
    """Has all of them copied, opened as the job's user, and waits for `within` seconds at most.

    What is not here by then is `copying`: the copies go on, also when this process ends. What was
    not even begun is `declined`.
    """
    end = Deadline.after(within, node.clock)
    done: list[ImageResult] = []
    while some := images[len(done) : len(done) + MAX_AT_ONCE]:
        if end.seconds_left() == 0.0 and any(one.result == "copying" for one in done):
            late = "the time was over before its turn"
            done += [ImageResult(one, "declined", "deadline", late) for one in images[len(done) :]]
            break
        with contextlib.ExitStack() as begun:
            works = [_start_image(node, job, image, begun) for image in some]
            done += [_wait_for_result(node, job, one, end, progress) for one in works]
    return StageReport(tuple(done))


class _StartedImage(msgspec.Struct, frozen=True):
    """An image that is here or copied; or why it is not."""

    image: str
    since: float
    opened: source.OpenImage | None = None
    copying: "StartChannel | None" = None
    error: Exception | None = None


def _start_image(node: Node, job: Job, image: str, begun: contextlib.ExitStack) -> _StartedImage:
    since = node.clock.monotonic()
    try:
        check_usable(node)
        within = Deadline.after(OPEN_TIMEOUT, node.clock)
        opened = begun.enter_context(opening.open_image_for_hook(job.user, image, node, within))
        copying = begun.enter_context(copy_wait.ensure_copy_started(node, job, opened))
        return _StartedImage(image, since, opened, copying)
    except (ForestageError, OSError) as error:
        return _StartedImage(image, since, error=error)


def check_usable(node: Node) -> None:
    """Raises Declined, OSError where staging is switched off, or the cache is of use to nobody."""
    if off := switch.find_off_reason(node.places, node.config, node.clock.wall()):
        raise Declined("disabled", off)
    disk_probe.check_readable(node.places, node.cache)
    node.cache.prepare(node.config.require_mount)
    disk_errors.check_no_doubt(node.places)


def _wait_for_result(
    node: Node, job: Job, one: _StartedImage, end: Deadline, progress: TextProgress
) -> ImageResult:
    try:
        if one.error or one.opened is None:
            raise one.error or Declined("missing", one.image)
        came = copy_wait.wait_for_copy(
            node, job, one.opened, one.copying, end, lambda line: progress(line())
        )
        with contextlib.suppress(FileNotFoundError):
            if not job.expected:  # nobody has used it yet
                node.cache.record_use(one.opened.image.key, node.clock.wall())
        took = round(node.clock.monotonic() - one.since, 3)
        return ImageResult(one.image, came, wait=took, key=one.opened.image.key)
    except Declined as error:
        if error.reason == "deadline":
            key = one.opened.image.key if one.opened else ""
            return ImageResult(
                one.image, "copying", "deadline", make_printable(str(error)), key=key
            )
        failed = isinstance(error, Failed)
        detail = make_printable(str(error))
        return ImageResult(one.image, "failed" if failed else "declined", error.reason, detail)
    except (ForestageError, OSError) as error:
        return ImageResult(
            one.image, "failed", classify_node_error(error).reason, make_printable(str(error))
        )


def format_output(done: StageReport) -> list[OutputBlock]:
    """Pure: what `stage` prints."""
    rows = [
        (
            one.result,
            "-" if one.wait is None else format_duration(one.wait),
            f"{one.image} ({one.detail})" if one.detail else one.image,
        )
        for one in done.images
    ]
    here = sum(one.is_here for one in done.images)
    head = f"{here} of {format_count(len(rows), 'image')} here"
    return [TextLine(head, heading=True), TextTable(("result", "took", "image or reason"), rows)]
