"""A node's part of `forestage prefetch`: asks for the list, and copies what it expects most.

It is what `forestage stage` does, for other users: each image is opened as the user whose jobs name
it, with all rules that hold for jobs. Nothing holds a lease. Nobody reads a refusal but who asks
with a dry run. Where another job needs the queue's place, the disk or the image itself, the copy
ends or gives way (stage/copy_queue.py), and nothing that a job has used lately goes for it
(policy.py).
"""

import contextlib
import pwd
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from forestage import events
from forestage.cache import evict
from forestage.cache.layout import StoredEntry
from forestage.cache.node import Node
from forestage.clock import Deadline
from forestage.errors import Declined, ForestageError
from forestage.events import CopyOutcome
from forestage.features.prefetch import expected_list, policy, prefetch_record
from forestage.features.prefetch.expected_list import ExpectedImageList
from forestage.features.prefetch.policy import HeldCopy, WantedImage
from forestage.features.prefetch.prefetch_record import ImageInspection, PrefetchRecord
from forestage.features.prepare import stage_images
from forestage.slurm import nodelist
from forestage.slurm.slurm_client import SlurmClient
from forestage.sources import opening
from forestage.stage import copy_queue
from forestage.system import as_user, lock
from forestage.system.as_user import User
from forestage.system.terminal import OutputBlock, TextLine, TextTable, format_count
from forestage.units import make_printable

MAX_INSPECTIONS = 32  # images that one pass opens
OPEN_TIMEOUT = 10.0  # seconds for the shared file system to open one of them
SETTLED = 60.0  # seconds since the last write: somebody may be writing it
COPYING = "a copy that was asked for is under way"
BUSY = "a job runs on this node, and `prefetch.bandwidth` is not set"

ListFetcher = Callable[[], ExpectedImageList]
"""What the prefetch host says; raises PeerError, OSError."""


class PrefetchDecision(msgspec.Struct, frozen=True):
    """An image of the list, and what this node does with it."""

    image: str
    user: int
    starts: float
    state: str
    why: str = ""


class PrefetchNodePass(msgspec.Struct, frozen=True):
    """One pass. `silent` says why the host gave no list, `idle` why nothing is copied."""

    dry_run: bool
    silent: str = ""
    idle: str = ""
    expires: float = 0.0
    decisions: tuple[PrefetchDecision, ...] = ()


def run_node_pass(
    node: Node, slurm: SlurmClient, fetch_list: ListFetcher, dry_run: bool
) -> PrefetchNodePass:
    """One pass. Raises OSError, Failed where the node is at fault."""
    now = node.clock.wall()
    listed, silent = fetch_or_keep_list(node, fetch_list, dry_run)
    idle = _explain_idle(node, slurm) if listed else "there is no list"
    if not dry_run:
        prefetch_record.record_pass(node.places, silent, idle)
    if listed is None:
        return PrefetchNodePass(dry_run, silent, idle)
    done = PrefetchNodePass(dry_run, silent, idle, expires=listed.expires)
    own = _NodePassRun(node, slurm, listed, dry_run, now)
    if not idle:
        own.record_ended_copies()
        own.inspect_due_images()
        own.update_use_times()
        own.start_best_copy()
    return msgspec.structs.replace(done, decisions=tuple(own.list_decisions()))


def fetch_or_keep_list(
    node: Node, fetch_list: ListFetcher, dry_run: bool
) -> tuple[ExpectedImageList | None, str]:
    """The list that counts now, and why the host gave no newer one. Raises OSError."""
    now, silent = node.clock.wall(), ""
    known = expected_list.find_list(node.places)
    try:
        told = fetch_list()
        silent = expected_list.explain_list_refusal(told, known, now)
        if not silent:
            if not dry_run:
                expected_list.write_list(node.places, told)
            return told, ""
    except (ForestageError, OSError) as error:
        silent = make_printable(str(error))
    return (known if known is not None and expected_list.is_valid(known, now) else None), silent


def _explain_idle(node: Node, slurm: SlurmClient) -> str:
    """Why nothing may be copied now; "" where something may."""
    try:
        stage_images.check_usable(node)
    except Declined as declined:
        return make_printable(str(declined))
    if node.config.prefetch.bandwidth is None and has_jobs(node, slurm):
        return BUSY
    return COPYING if any(copy_queue.list_requested_copies(node)) else ""


def has_jobs(node: Node, slurm: SlurmClient) -> bool:
    """Whether jobs run here, as far as that can be seen without asking Slurm."""
    return (
        copy_queue.has_job_begun_recently(node)
        or bool(node.leases.list_jobs())
        or bool(slurm.list_jobs_with_steps())
    )


def select_wanted_images(
    listed: ExpectedImageList, name: str
) -> dict[str, list[tuple[int, float]]]:
    """Pure: the images of the node's partitions, each with its users, most expected first."""
    own = {
        part for part, nodes in listed.partitions.items() if name in nodelist.expand_nodelist(nodes)
    }
    found: dict[str, dict[int, float]] = {}
    for row in listed.rows:
        if row.partition in own:
            users = found.setdefault(row.image, {})
            users[row.user] = users.get(row.user, 0.0) + row.starts
    return {
        image: sorted(users.items(), key=lambda one: (-one[1], one[0]))
        for image, users in found.items()
    }


class _NodePassRun:
    """One pass at work: `record` grows, and is written as it does."""

    def __init__(
        self, node: Node, slurm: SlurmClient, listed: ExpectedImageList, dry_run: bool, now: float
    ) -> None:
        self.node = node
        self.slurm = slurm
        self.dry_run = dry_run
        self.now = now
        self.images = select_wanted_images(listed, slurm.node)
        self.made = listed.made
        named = [(image, user) for image, users in self.images.items() for user, _ in users]
        self.record = prefetch_record.read_record(node.places).without_unnamed(named, now)
        self.states: dict[str, str] = {}

    def inspect_due_images(self) -> None:
        """Opens what is due, as its users, most expected first."""
        left = MAX_INSPECTIONS
        by_starts = sorted(self.images.items(), key=lambda one: -_sum_starts(one[1]))
        for image, users in by_starts:
            for user, _ in users:
                known = self.record.find_inspection(image, user)
                if prefetch_record.is_inspection_due(known, self.now) and left:
                    left -= 1
                    before = known or ImageInspection(image, user, self.now, self.made)
                    known = inspect_image(self.node, before, self.now)
                    self._save_record(self.record.with_inspection(known))
                if known is not None and not known.why:
                    break  # whoever else wants it

    def list_wanted(self) -> dict[str, WantedImage]:
        """What could be copied, by its key."""
        found: dict[str, WantedImage] = {}
        for image, users in self.images.items():
            if (one := self._find_opened(image)) is not None:
                before = found[one.key].starts if one.key in found else 0.0
                found[one.key] = WantedImage(one.size, one.user, before + _sum_starts(users))
        return found

    def _find_opened(self, image: str) -> ImageInspection | None:
        """The look of the first of its users who could open it."""
        looks = (self.record.find_inspection(image, user) for user, _ in self.images[image])
        return next((one for one in looks if one is not None and not one.why), None)

    def update_use_times(self) -> None:
        """Says of the copies that no job has used whether they are expected still.

        If so, they count as used when they were made, else as never used: the first to go.
        """
        wanted, leased = self.list_wanted(), self.node.leases.leased_keys()
        for one in self.node.cache.list_entries():
            if one.entry is None:
                continue
            if not one.is_unused or one.key in leased:
                self._forget_tries(one.key)
                continue
            used = one.entry.created if one.key in wanted else 0.0
            if bool(used) != bool(one.used) and not self.dry_run:
                with contextlib.suppress(FileNotFoundError):  # evicted this moment
                    self.node.cache.record_use(one.key, used)

    def record_ended_copies(self) -> None:
        """Notes how copies ended that earlier passes began: nobody has waited for them."""
        begun = {
            one.key: one
            for one in self.record.looks
            if one.begun and lock.is_free(self.node.cache.key_lock(one.key))
        }
        ends = _read_copy_ends(self.node, begun) if begun else {}
        for key, found in begun.items():
            over = msgspec.structs.replace(found, begun=0.0)
            end = ends.get(key)
            if end is not None and end.result == "copied":
                over = msgspec.structs.replace(over, tries=found.tries + 1)
            elif end is not None and end.reason not in ("stopped", "no-room", "disabled"):
                over = with_refusal(over, self.now, end.detail or end.reason)
            self._save_record(self.record.with_inspection(over))

    def start_best_copy(self) -> None:
        """Begins to copy the image that the policy names; its copy goes on by itself."""
        if any(
            one.expected for one in copy_queue.list_live_copies(self.node)
        ):  # none that stalls is there
            return
        for _ in self.images:  # what was replaced a moment ago is chosen anew
            held, room = self.measure_room()
            tried = {
                one.key
                for one in self.record.looks
                if one.tries >= prefetch_record.MAX_TRIES or one.begun
            }
            wanted = {
                key: one
                for key, one in self.list_wanted().items()
                if key in held or key not in tried
            }
            chosen = policy.choose_copy(wanted, held, room, self.node.clock.wall())
            if chosen is None or _explain_idle(self.node, self.slurm):
                return
            image = next(one for one in self.images if self._find_key(one) == chosen.image)
            if not self._is_still_same(image, chosen.image):
                continue
            if self.dry_run:
                self.states[image] = "would be copied next"
                return
            self.start_copy(image, chosen.stay)
            return

    def _find_key(self, image: str) -> str:
        found = self._find_opened(image)
        return found.key if found else ""

    def _is_still_same(self, image: str, key: str) -> bool:
        """Looks again, just before the copy: since it was chosen it may have been replaced."""
        found = self._find_opened(image)
        assert found is not None
        self._save_record(
            self.record.with_inspection(inspect_image(self.node, found, self.node.clock.wall()))
        )
        return self._find_key(image) == key

    def measure_room(self) -> tuple[dict[str, HeldCopy], int]:
        """What is here, copies under way included, and the room for all of it in bytes."""
        cache = self.node.cache
        stored = cache.list_entries()
        leased = self.node.leases.leased_keys()
        found: dict[str, HeldCopy] = {}
        for one in stored:
            in_use = one.key in leased
            new, stays = one.is_unused and not in_use, one.pinned or in_use
            found[one.key] = HeldCopy(one.bytes, one.used, one.user or 0, new, stays)
        for copy in copy_queue.list_live_copies(self.node):
            size = cache.part(copy.key).allocated_bytes()
            found[copy.key] = HeldCopy(size, self.now, copy.uid, copy.expected, stays=True)
        # Above the low watermark, the Epilog would evict it again.
        return found, evict.measure_space(cache, stored, self.node.config).low

    def start_copy(self, image: str, stay: frozenset[str]) -> None:
        """Begins to copy one image."""
        found = self._find_opened(image)
        assert found is not None
        node = self.node.with_config(bandwidth=_limit_bandwidth(self.node))
        job = stage_images.make_placeholder_job(read_user(found.user), self.slurm.node)
        job = msgspec.structs.replace(job, expected=found.since, keys_to_keep=stay)
        # To the millisecond, as the event has it that tells the end.
        begun = msgspec.structs.replace(found, begun=round(self.node.clock.wall(), 3))
        self._save_record(self.record.with_inspection(begun))
        (done,) = stage_images.copy_images(node, job, [image], 0.0, lambda _: None).images
        self.states[image] = done.result
        if not done.is_here and done.result != "copying":
            # There is no copy of which `record_ended_copies` would find the end.
            ended = with_refusal(found, self.now, done.detail or done.reason)
            is_for_now = done.reason in ("stopped", "no-room", "disabled")
            self._save_record(self.record.with_inspection(found if is_for_now else ended))

    def _forget_tries(self, key: str) -> None:
        """Forgets how often an image was copied in vain, as a job has used it since."""
        for one in self.record.looks:
            if one.key == key and one.tries:
                self._save_record(
                    self.record.with_inspection(msgspec.structs.replace(one, tries=0))
                )

    def _save_record(self, found: PrefetchRecord) -> None:
        if found != self.record and not self.dry_run:
            prefetch_record.write_record(self.node.places, found)
        self.record = found

    def list_decisions(self) -> Iterator[PrefetchDecision]:
        """What becomes of each image of the list here."""
        here = {one.key for one in _list_entries(self.node)}
        for image, users in sorted(self.images.items(), key=lambda one: -_sum_starts(one[1])):
            found = self._find_opened(image)
            last = next(
                filter(None, (self.record.find_inspection(image, user) for user, _ in users)), None
            )
            state, why = "not looked at", ""
            if found is not None:
                state = "copying" if found.begun else "not expected enough, or no room"
                state = "here" if found.key in here else state
                if found.key not in here and found.tries >= prefetch_record.MAX_TRIES:
                    state, why = "refused", f"copied {found.tries} times, and no job used it"
            elif last is not None:
                state, why = "refused", last.why
            yield PrefetchDecision(
                image, users[0][0], _sum_starts(users), self.states.get(image, state), why
            )


def _read_copy_ends(node: Node, begun: Mapping[str, ImageInspection]) -> dict[str, CopyOutcome]:
    """How the last copy of each key ended since it was begun, as its event says. Raises OSError."""
    found: dict[str, CopyOutcome] = {}
    for event in events.read_events(node.places.events):
        one = event.outcome
        if isinstance(one, CopyOutcome) and one.key in begun and event.time >= begun[one.key].begun:
            found[one.key] = one
    return found


def _list_entries(node: Node) -> list[StoredEntry]:
    with contextlib.suppress(OSError):  # no cache is mounted
        return node.cache.list_entries()
    return []


def _sum_starts(users: Iterable[tuple[int, float]]) -> float:
    return sum(starts for _, starts in users)


def _limit_bandwidth(node: Node) -> int | None:
    """The rate of such a copy."""
    limits = (node.config.bandwidth, node.config.prefetch.bandwidth)
    return min((one for one in limits if one is not None), default=None)


def inspect_image(node: Node, before: ImageInspection, now: float) -> ImageInspection:
    """What an image is for a user: opened as them, with the rules that hold for their jobs."""
    try:
        end = Deadline.after(OPEN_TIMEOUT, node.clock)
        with opening.open_image_for_hook(read_user(before.user), before.image, node, end) as opened:
            found = opened.image
        if 0 <= now - found.identity.mtime_ns / 1e9 < SETTLED:
            why = f"{before.image} was written less than {SETTLED:.0f} s ago"
            raise Declined("written", why)
    except (ForestageError, OSError) as error:
        return with_refusal(before, now, str(error))
    return msgspec.structs.replace(before, at=now, key=found.key, size=found.size, why="")


def with_refusal(before: ImageInspection, now: float, why: str) -> ImageInspection:
    """Pure: a look that came to nothing, once more."""
    why, tries = make_printable(why) or "refused", before.tries + 1
    return msgspec.structs.replace(before, at=now, key="", size=0, why=why, tries=tries)


def read_user(uid: int) -> User:
    """The user as this node knows them. Raises Declined."""
    try:
        known = pwd.getpwuid(uid)
    except KeyError:
        raise Declined("no-permission", f"uid {uid} is no user of this node") from None
    # For all children that act as this user: a name service may take long for each answer.
    user = User(known.pw_name, uid, known.pw_gid, home=known.pw_dir)
    return msgspec.structs.replace(user, groups=tuple(as_user.list_group_ids(user)))


def format_output(done: PrefetchNodePass) -> Iterator[OutputBlock]:
    """Pure: what `prefetch` prints on a node."""
    if done.silent:
        yield TextLine(f"The host gave no new list: {done.silent}")
    if done.idle:
        yield TextLine(f"Nothing is copied: {done.idle}")
    if done.decisions:
        yield TextLine(f"{format_count(len(done.decisions), 'image')} expected here", heading=True)
        rows = []
        for one in done.decisions:
            what = f"{one.image} ({one.why})" if one.why else one.image
            rows.append((f"{one.starts:.2f}", str(one.user), one.state, what))
        yield TextTable(("starts", "user", "state", "image or reason"), rows)
