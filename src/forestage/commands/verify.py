"""Compares entries with their sources, or with the checksums of their copying; evicts bad ones.

The source counts as long as it is the very file that was copied. It is read as its owner, below
our own bind mounts. The copy is read past the page cache, where its file system can do that: so
the disk itself is read, and no running job loses what the page cache has of its image.

A bad entry goes although it is leased or pinned (docs/decisions/0012). Its redirects are unmounted
first, so that nobody opens it any more; a process that has it open keeps it.
"""

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import click
import msgspec

from forestage import events, log
from forestage.bind import unmount
from forestage.cache import digest, source_image
from forestage.cache.layout import Entry, open_copy
from forestage.cache.node import Node
from forestage.cache.source_image import AccessRights
from forestage.commands import copy_comparison, entry_sources, inventory
from forestage.commands.command_context import ExitStatus, as_json, print_result
from forestage.commands.copy_comparison import ComparisonResult, SourceReadError
from forestage.commands.entry_arguments import optional_entry_words, pick_entries
from forestage.commands.inventory import InventoryItem
from forestage.errors import ForestageError
from forestage.events import BadEntryOutcome, EventRecord, losses
from forestage.stage import engines
from forestage.system import lock
from forestage.system import terminal as screen
from forestage.system.terminal import (
    OutputBlock,
    TextLine,
    TextTable,
    format_count,
    format_jobs,
    short_key,
)
from forestage.units import format_size

PLAIN_ACL_BYTES = 4 + 3 * 8  # bytes of the raw xattr (linux/posix_acl_xattr.h)

VerdictResult = Literal["ok", "bad", "unverifiable"]
ComparedWith = Literal["source", "digests", "nothing"]
VerifyProgress = Callable[[str], None]


class EntryVerdict(msgspec.Struct, frozen=True):
    """One entry. `chunks`: numbers of the bad ones, the first is 0.

    `against` is what the bytes were compared with; `jobs` held a lease. A bad entry is `evicted`,
    or `stays` says why not; neither in a dry run. `error`: it could not be verified, for this.
    """

    key: str
    path: str
    size: int
    result: VerdictResult
    against: ComparedWith = "nothing"
    detail: str = ""
    chunks: tuple[int, ...] = ()
    jobs: tuple[int, ...] = ()
    pinned: bool = False
    evicted: bool = False
    stays: str = ""
    error: str = ""


class VerifyReport(msgspec.Struct, frozen=True):
    """What one command found."""

    dry_run: bool
    verdicts: tuple[EntryVerdict, ...] = ()

    @property
    def bad(self) -> int:
        """How many entries are bad."""
        return sum(1 for one in self.verdicts if one.result == "bad")

    @property
    def failed(self) -> int:
        """How many could not be verified because the node is at fault."""
        return sum(1 for one in self.verdicts if one.error)


class VerifyOptions(msgspec.Struct, frozen=True):
    """How entries are verified.

    `source_skip_reason` says why the sources are left alone: then only the checksums count.
    `is_doubted`: what cannot be verified is bad. The copies are read at `rate` bytes per second, on
    behalf of `event_hook`.
    """

    source_skip_reason: str = ""
    is_doubted: bool = False
    rate: int | None = None
    event_hook: Literal["verify", "sweep"] = "verify"


DEFAULT_OPTIONS = VerifyOptions()


def verify_entries(
    node: Node,
    items: Iterable[InventoryItem],
    dry_run: bool,
    progress: VerifyProgress,
    manner: VerifyOptions = DEFAULT_OPTIONS,
) -> VerifyReport:
    """Verifies these, one after the other, and evicts the bad ones.

    `progress` is called with what is being done. Raises PermissionError for users who may not read
    the cache.
    """
    wanted = tuple(items)
    found = []
    for number, item in enumerate(wanted, start=1):
        what = item.path or item.key
        done = _make_progress(progress, number, len(wanted), what)
        try:
            found.append(_verify_entry(node, item, dry_run, done, manner))
        except (ForestageError, OSError) as error:
            if isinstance(error, PermissionError) and os.geteuid() != 0:
                raise
            # Of this entry, whatever it is: the others are verified all the same.
            found.append(msgspec.structs.replace(_make_unverified(item), error=str(error)))
    return VerifyReport(dry_run, tuple(found))


def _make_progress(
    progress: VerifyProgress, number: int, of: int, what: str
) -> copy_comparison.CompareProgress:
    return lambda done, size: progress(
        f"verifying {number} of {of}: {format_size(done)} of {format_size(size)} of {what}"
    )


def _make_unverified(item: InventoryItem) -> EntryVerdict:
    return EntryVerdict(
        key=item.key,
        path=item.path,
        size=item.entry.identity.size if item.entry else 0,
        result="unverifiable",
        jobs=item.jobs,
        pinned=item.pinned,
    )


def _verify_entry(
    node: Node,
    item: InventoryItem,
    dry_run: bool,
    on_progress: copy_comparison.CompareProgress,
    manner: VerifyOptions,
) -> EntryVerdict:
    verdict = _make_unverified(item)

    def bad(detail: str) -> EntryVerdict:
        found = msgspec.structs.replace(verdict, result="bad", detail=detail)
        return found if dry_run else _evict_bad_entry(node, item, found, None, manner)

    if item.entry is None:
        return bad("its record cannot be read, or is not of this image")
    try:
        copy = open_copy(node.cache.image_path(item.key))
    except FileNotFoundError:
        return msgspec.structs.replace(verdict, detail="it was evicted just now")
    except BlockingIOError:
        detail = "its owner holds a lease on the copy, which has to be given back within a minute"
        return bad(detail) if manner.is_doubted else msgspec.structs.replace(verdict, detail=detail)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return bad("it cannot be opened")
    with copy:
        fd = copy.fileno()
        verdict = _verify_copy(node, item.entry, verdict, fd, on_progress, manner)
        # `fd` is still open, so no other file can have this one's inode number.
        is_kept = verdict.result != "bad" or dry_run
        return verdict if is_kept else _evict_bad_entry(node, item, verdict, fd, manner)


def _verify_copy(
    node: Node,
    entry: Entry,
    verdict: EntryVerdict,
    fd: int,
    on_progress: copy_comparison.CompareProgress,
    manner: VerifyOptions,
) -> EntryVerdict:
    """The verdict on the open copy, by its source or else by the checksums of its copying."""
    wrong = format_attribute_errors(entry, fd)
    if wrong:
        return msgspec.structs.replace(verdict, result="bad", detail=wrong)
    chunk = entry.chunk or node.config.chunk_bytes_for(entry.identity.size)
    threads = engines.derive_tuning(node.config, entry.identity.size).threads

    def against(expected: copy_comparison.ExpectedDigest) -> ComparisonResult:
        return copy_comparison.compare_copy(
            fd, entry.identity.size, chunk, threads, expected, on_progress, manner.rate
        )

    why = manner.source_skip_reason
    if not why:
        found = _compare_with_source(node, entry, against)
        if isinstance(found, ComparisonResult):
            return _with_comparison(verdict, found, "source", "")
        why = found
    if not entry.digest:  # copied with `digest: false`, which an earlier build had
        result: VerdictResult = "bad" if manner.is_doubted else "unverifiable"
        detail = f"{why}, and no checksum was taken"
        return msgspec.structs.replace(verdict, result=result, detail=detail)
    digests = node.cache.read_digests(entry)
    if digest.digest_image(digests) != entry.digest:
        detail = f"{why}, and its checksums are damaged"
        return msgspec.structs.replace(verdict, result="bad", detail=detail)
    return _with_comparison(
        verdict,
        against(copy_comparison.make_recorded_digests(digest.split_map(digests), chunk)),
        "digests",
        why,
    )


def _compare_with_source(
    node: Node, entry: Entry, against: Callable[[copy_comparison.ExpectedDigest], ComparisonResult]
) -> ComparisonResult | str:
    """What differs from the source; or why that cannot be said."""
    user = entry_sources.read_owner_account(entry.access)
    opened = entry_sources.open_if_unchanged(node.cache, entry, user)
    if isinstance(opened, entry_sources.SourceState):
        if entry.identity.tree:
            return f"its source was not asked: {opened.detail}"
        return _format_source_state(opened)
    try:
        expected = copy_comparison.make_source_digests(
            opened.fd, entry.identity.size, node.config.bandwidth
        )
        found = against(expected)
    except SourceReadError as failed:
        return f"its source cannot be read ({failed})"
    finally:
        opened.close()
    # What differs from a source that was changed meanwhile is not bad for that.
    now = entry_sources.read_source_state(node.cache, entry, user) if found.bad else None
    return _format_source_state(now) if now and now.state != "unchanged" else found


def _format_source_state(why: entry_sources.SourceState) -> str:
    word = {"gone": "is gone", "changed": "was changed"}.get(why.state, "could not be read")
    return f"its source {word}" + (f" ({why.detail})" if why.detail else "")


def _with_comparison(
    verdict: EntryVerdict, comparison: ComparisonResult, against: ComparedWith, why: str
) -> EntryVerdict:
    return msgspec.structs.replace(
        verdict,
        result="bad" if comparison.bad else "ok",
        against=against,
        detail="; ".join(filter(None, (comparison.detail, why))),
        chunks=comparison.bad,
    )


def format_attribute_errors(entry: Entry, fd: int) -> str:
    """What is wrong with the size and the rights of the open copy, or ""."""
    facts = os.fstat(fd)
    access = AccessRights(
        facts.st_uid, facts.st_gid, facts.st_mode & 0o7777, source_image.read_acl(fd)
    )
    right = entry.access
    pairs = [
        ("size", str(facts.st_size), str(entry.identity.size)),
        ("uid", str(access.uid), str(right.uid)),
        ("gid", str(access.gid), str(right.gid)),
        ("mode", f"{access.mode:04o}", f"{right.mode:04o}"),
        ("ACL", _format_acl(access.acl), _format_acl(right.acl)),
    ]
    return ", ".join(
        f"its {what} is {found}, expected {expected}"
        for what, found, expected in pairs
        if found != expected
    )


def _format_acl(raw: bytes) -> str:
    # Owner, group, others: no more than the mode says, and a local file system does not keep it.
    return raw.hex() if len(raw) > PLAIN_ACL_BYTES else "none"


def _evict_bad_entry(
    node: Node, item: InventoryItem, verdict: EntryVerdict, fd: int | None, manner: VerifyOptions
) -> EntryVerdict:
    """Evicts a bad entry, leased and pinned or not; the verdict says so, or why it stays.

    Everybody hears of it: jobs may have read it since its bytes were last right.
    """
    cache, since = node.cache, node.cache.last_verified(item.key)
    user = (
        entry_sources.read_owner_account(item.entry.access)
        if item.entry
        else entry_sources.invoking_user()
    )
    stays = ""
    going: list[unmount.ClaimedBind] = []
    try:
        with contextlib.ExitStack() as claims:
            with lock.held(cache.space_lock, lock.SPACE_TIMEOUT):
                if _is_same_entry(node, item, fd):
                    binds = [bind for bind in unmount.list_binds(cache) if bind.key == item.key]
                    going = unmount.claim_binds(cache, binds, claims)
                    cache.evict_entry(item.key)
            try:
                unmount.unmount_binds(going, lambda bind: user)
            except (ForestageError, OSError) as error:
                # It is evicted all the same: the next Prolog that names the path unmounts it.
                stays = f"its redirect is still there: {error}"
        cache.delete_evicted()
    except (ForestageError, OSError) as error:
        stays = str(error)
    done = msgspec.structs.replace(verdict, evicted=not stays, stays=stays)
    _record_bad_entry(node, done, since, manner)
    return done


def _record_bad_entry(
    node: Node, verdict: EntryVerdict, since: float, manner: VerifyOptions
) -> None:
    """One event and one line in the log."""
    found = BadEntryOutcome(
        "bad",
        reason="wrong-bytes",
        detail="; ".join(filter(None, (verdict.detail, verdict.stays))),
        image=verdict.path,
        key=verdict.key,
        size=verdict.size,
        chunks=len(verdict.chunks),
        since=since,
        evicted=(verdict.key,) if verdict.evicted else (),
    )
    log.write_log_line(f"{manner.event_hook} {events.format_outcome(found)}", by_slurm=True)
    now = node.clock.wall()
    event = EventRecord(round(now, 3), manner.event_hook, 0, found)
    with contextlib.suppress(OSError):  # root's event does not hang on what users are told
        events.record_bad_entry_for_users(node.places, event)
    try:
        events.append_events(node.places.events, [event])
    except OSError as error:  # of the log's disk; the verdict is shown all the same
        losses.record_loss(node.places.lost_events, now, error)


def _is_same_entry(node: Node, item: InventoryItem, fd: int | None) -> bool:
    """Whether the entry is the one that was verified, and not a newer copy of the same image."""
    if fd is None:  # its record is damaged, or its image cannot be opened
        there = os.path.lexists(node.cache.entry_dir(item.key))
        return there and node.cache.find_entry_by_key(item.key) == item.entry
    try:
        facts = node.cache.image_path(item.key).lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(facts, os.fstat(fd))


def format_output(done: VerifyReport) -> list[OutputBlock]:
    """Pure: what `verify` prints."""
    if not done.verdicts:
        return [TextLine("The cache holds no entry.")]
    columns = ("key", "size", "result", "path")
    rows: list[tuple[str, ...]] = []
    lines: list[OutputBlock] = []
    for one in done.verdicts:
        word = f"{one.result} ({one.against})" if one.against != "nothing" else one.result
        rows.append((short_key(one.key), format_size(one.size), word, one.path or "-"))
        lines += [
            TextLine(f"{short_key(one.key)}: {text}") for text in _format_verdict(one, done.dry_run)
        ]
    results = Counter(one.result for one in done.verdicts)
    numbers = ", ".join(
        f"{results[word]} {word}" for word in get_args(VerdictResult) if results[word]
    )
    total = TextLine(f"{format_count(len(rows), 'entry', 'entries')}: {numbers}.")
    return [TextTable(columns, rows), *lines, total]


def _format_verdict(one: EntryVerdict, dry_run: bool) -> list[str]:
    found = []
    if one.chunks:
        numbers = ", ".join(map(str, one.chunks[:8])) + (", …" if len(one.chunks) > 8 else "")
        found.append(f"{format_count(len(one.chunks), 'chunk')} wrong ({numbers})")
    found += [text for text in (one.detail, one.error) if text]
    if one.result != "bad":
        return found
    if one.jobs:
        found.append(f"in use by {format_jobs(one.jobs)}: what they have open, they keep")
    if dry_run:
        return [*found, "would be evicted"]
    if one.stays:
        return [*found, f"could not be evicted: {one.stays}"]
    return [*found, "evicted; its pin is gone with it" if one.pinned else "evicted"]


@click.command("verify")
@as_json
@optional_entry_words
@click.option("--all", "everything", is_flag=True, help="Every entry.")
@click.option("-n", "--dry-run", is_flag=True, help="Dry run: verify, but evict nothing.")
@click.pass_context
def verify_command(
    ctx: click.Context, words: tuple[str, ...], everything: bool, dry_run: bool, as_json: bool
) -> None:
    """Compare entries with their sources, or with the checksums of their copying.

    A bad entry is evicted, even if it is leased or pinned, and the exit status is 7.
    """
    if bool(words) == everything:
        raise click.UsageError("either KEY|PATH, or --all")
    node = ctx.obj.make_node()
    items = inventory.read_inventory(node).items
    with screen.show_busy_status() as progress:
        done = verify_entries(
            node, items if everything else pick_entries(items, words), dry_run, progress
        )
    print_result(done, format_output(done), as_json)
    if done.bad:
        ctx.exit(ExitStatus.BAD)
    if done.failed:
        ctx.exit(ExitStatus.FAILED)


COMMANDS = (verify_command,)
