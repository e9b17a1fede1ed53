"""Images of registries by hand: `forestage registry get`, `import`, `ls`, `gc`.

`get` is what pyxis' importer runs where a step sees no copy of its image; like `import` it runs as
the job's user, and has a worker do it. `ls` and `gc` act as each directory's owner; so does the
sweep, which each hour visits some users' directories (`collect_some_users`).
"""

import contextlib
import os
import random
import select
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from forestage.cache.part import boot_id
from forestage.clock import Clock
from forestage.config import Config
from forestage.errors import Declined, NotFoundError
from forestage.features.registry import store_age, store_collection, user_notes, worker
from forestage.features.registry.store_age import CollectionSighting, StoreCollection
from forestage.features.registry.store_collection import CollectionResult
from forestage.features.registry.worker_messages import (
    ImageReady,
    ImportOrder,
    ImportProgress,
    ImportRefused,
    ImportUnderWay,
    WorkerMessage,
)
from forestage.paths import NodePaths
from forestage.system import as_user, folders, records
from forestage.system.as_user import User
from forestage.system.terminal import OutputBlock, TextLine, TextTable, format_age, format_count
from forestage.units import format_size, is_number, make_printable

USER_TIMEOUT = 120.0  # seconds for one user's directory, which may be on a file server that hangs
TOTAL_TIMEOUT = 3600.0  # seconds for all of them
AT_ONCE = 8
VISIT_INTERVAL = 3600.0  # seconds between two visits of one node's sweep
MAX_VISITED_USERS = 100  # users whose directories it visits, in VISITS_TIMEOUT seconds at the most
LIST_TIMEOUT, VISIT_TIMEOUT, VISITS_TIMEOUT = 20.0, 60.0, 120.0
NOBODY = 65534  # the group of an account that is gone
MAX_LISTED_IMAGES = 300  # images of a user that are listed
REMEMBERED = 20_000  # users of whom a node remembers its last visit
STEP_IMPORT_REASONS = ("store-full", "store-gone", "store-foreign", "store-local")
"""Why a job has its image imported for itself alone instead."""

ENROOT_FAILED_REASONS = ("import-failed", "too-large", "enroot-full")
"""Why enroot itself would not fare better a second time."""

LineWriter = Callable[[str], None]


class StoredImageRow(msgspec.Struct, frozen=True):
    """An image in the store; `digest` is "" where it was imported by its tag."""

    user: str
    reference: str
    digest: str
    bytes: int
    used: float
    imported: float
    host: str
    path: str


def obtain_for_step(
    config: Config, uri: str, environ: Mapping[str, str], host: str, write_line: LineWriter
) -> str:
    """Returns the path of an image for a step of pyxis, as its user.

    It is looked for and imported in the store. Where that cannot be used, below pyxis' runtime
    path: the importer deletes that. Raises Declined; NotFoundError where enroot is to do it alone.
    """
    if not (config.registry.store and config.registry.enabled):
        raise NotFoundError("there is no store of images: enroot imports it, as without forestage")
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    places = NodePaths()
    is_step = is_number(job) and is_number(step)
    refusal = user_notes.find_refusal(places, job, step, uri) if is_step else None
    order = ImportOrder(reference=uri, directory="", job=f"{job}.{step}" if job else "", host=host)
    marks = os.fspath(places.images)
    order = msgspec.structs.replace(order, offline=config.registry.offline, marks=marks)
    shared = {"directory": config.registry.store, "cache": config.cache}
    try:
        return _obtain_by_digest_or_tag(
            msgspec.structs.replace(order, **shared), environ, write_line, refusal
        )
    except Declined as error:
        if error.reason not in STEP_IMPORT_REASONS:
            raise
        write_line(f"{error}; the image is imported for this step alone")
    own = _make_step_directory(environ, job, step)
    return _obtain_by_digest_or_tag(
        msgspec.structs.replace(order, directory=own), environ, write_line, refusal
    )


def _obtain_by_digest_or_tag(
    order: ImportOrder, environ: Mapping[str, str], write_line: LineWriter, refusal: Declined | None
) -> str:
    """An image by its digest; by its tag where the registry does not say one, as pyxis would.

    The user reads enroot's own words then. After a `refusal` the registry is not asked again.
    """
    try:
        if refusal:
            raise refusal
        return obtain_by_worker(order, environ, write_line)
    except Declined as error:
        if error.reason not in user_notes.REFUSALS or not order.job:
            raise
        write_line(f"{error}; enroot is asked")
        return obtain_by_worker(msgspec.structs.replace(order, by_tag=True), environ, write_line)


def _make_step_directory(environ: Mapping[str, str], job: str, step: str) -> str:
    """A directory for one step's import, as the importer knows it. Raises Declined."""
    above = environ.get("PYXIS_RUNTIME_PATH", "")
    if not (above.startswith("/") and is_number(job) and is_number(step)):
        raise Declined("store-gone", "this is no step of pyxis")
    path = Path(above, str(os.geteuid()), f"forestage-{job}.{step}")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Declined("store-gone", f"{path} cannot be made: {error.strerror}") from None
    return str(path)


def import_into_store(
    config: Config, text: str, environ: Mapping[str, str], host: str, write_line: LineWriter
) -> str:
    """Has the store hold an image before a job wants it. Raises Declined, NotFoundError."""
    if not config.registry.store:
        raise _make_no_store_error()
    store = config.registry.store
    order = ImportOrder(reference=text, directory=store, cache=config.cache, host=host)
    return obtain_by_worker(order, environ, write_line)


def _make_no_store_error() -> NotFoundError:
    return NotFoundError("there is no store of images", "the admin can set `registry: store:`")


def obtain_by_worker(order: ImportOrder, environ: Mapping[str, str], write_line: LineWriter) -> str:
    """Has a worker, as who we are, carry an order out; returns the path. Raises Declined."""
    fd = worker.write_environment_file(environ)
    try:
        at_work = worker.start_worker(None, order, fd)
    finally:
        os.close(fd)
    with at_work:
        for word in _read_messages(at_work):
            if isinstance(word, ImageReady):
                return word.path
            if isinstance(word, ImportRefused):
                raise Declined(word.reason, word.detail)
            if isinstance(word, ImportUnderWay):
                write_line(f"imported by {word.where or 'another node'}")
            elif isinstance(word, ImportProgress):
                write_line(word.text)
    raise Declined("helper", "the worker ended without an answer")


def _read_messages(at_work: worker.RegistryWorker) -> Iterator[WorkerMessage]:
    poll = select.poll()
    poll.register(at_work.fd, select.POLLIN)
    while not at_work.ended:
        poll.poll()
        yield from at_work.read_messages()


def list_owners(base: Path) -> list[User]:
    """Whose directories there are: all of them for root, else who we are. Raises NotFoundError."""
    if os.geteuid() != 0:
        return [User("", os.geteuid(), os.getegid())]
    try:
        return [as_user.user_from_uid(uid, NOBODY) for uid in _filter_owned(base, _list_uids(base))]
    except OSError as error:
        raise NotFoundError(f"{base}: {error.strerror}", "is the store mounted?") from None


def _list_uids(base: Path) -> list[int]:
    """Raises OSError."""
    names = os.listdir(base)  # noqa: PTH208 - names are wanted
    numbers = filter(is_number, names)
    return sorted(int(name) for name in numbers if name == str(int(name)))  # 007 is not 7's


def _filter_owned(base: Path, uids: Sequence[int], most: int | None = None) -> list[int]:
    """Of these the owners of their directories, `most` of them at the most.

    Anybody may make a directory of any name there: root acts as its owner, and as no root. An
    account that is gone has its images collected as well.
    """
    found: list[int] = []
    for uid in uids:
        if len(found) == most:
            break
        with contextlib.suppress(OSError):
            if uid != 0 and os.lstat(base / str(uid)).st_uid == uid:
                found.append(uid)
    return found


def list_stored_images(base: Path) -> list[StoredImageRow]:
    """The images in the store, used longest ago last. Raises NotFoundError."""
    users = list_owners(base)
    found = as_user.run_each_in_child(
        [partial(_list_user_rows, base, user) for user in users],
        list[StoredImageRow],
        USER_TIMEOUT,
        TOTAL_TIMEOUT,
        AT_ONCE,
    )
    rows = [row for rows in found for row in rows or []]
    return sorted(rows, key=lambda row: -row.used)


def _list_user_rows(base: Path, user: User) -> list[StoredImageRow]:
    as_user.set_effective_user(user)
    folder = base / str(user.uid)
    rows = []
    with contextlib.suppress(FileNotFoundError):
        for image in store_collection.list_images(store_collection.list_files(folder))[
            -MAX_LISTED_IMAGES:
        ]:
            noted = store_collection.find_record(folder, image.name)
            reference = make_printable(noted.reference if noted else image.name)[:256]
            digest = make_printable(noted.digest)[:71] if noted else ""
            date, host = (noted.date, make_printable(noted.host)[:64]) if noted else (0.0, "")
            path = str(folder / f"{image.name}.sqsh")
            rows.append(
                StoredImageRow(
                    _user_name(user), reference, digest, image.size, image.used, date, host, path
                )
            )
    return rows


def _user_name(user: User) -> str:
    return user.name or as_user.find_user_name(user.uid) or str(user.uid)


def collect_store(config: Config, dry_run: bool) -> list[CollectionResult]:
    """Deletes what nobody used for long, what is too much, and what dead imports left.

    Raises NotFoundError.
    """
    if not config.registry.store:
        raise _make_no_store_error()
    base = Path(config.registry.store)
    users = list_owners(base)
    works = [partial(_collect_as_user, config, user, dry_run) for user in users]
    return _with_user_names(
        users,
        as_user.run_each_in_child(works, CollectionResult, USER_TIMEOUT, TOTAL_TIMEOUT, AT_ONCE),
    )


class StoreVisits(msgspec.Struct, frozen=True):
    """What a node remembers of its visits, in seconds of this boot's monotonic clock.

    `sights` are by uid: which collection it met there, and when first.
    """

    boot: str
    at: float
    sights: dict[str, CollectionSighting]


class _VisitResult(msgspec.Struct, frozen=True):
    """What one visit did; `token` is of the collection that lies there now, "" if unknown."""

    done: CollectionResult
    token: str


def collect_some_users(config: Config, places: NodePaths, clock: Clock) -> list[CollectionResult]:
    """Does so for some users whose turn it is; for the sweep of every node, as root.

    A node visits some users at random each hour, and one of all that visit a user collects: so
    nobody has to say which node it is, and nothing is written but by a directory's owner. A store
    that hangs costs the sweep LIST_TIMEOUT seconds. Raises OSError, as_user.ChildTimeout.
    """
    if config.registry.store is None:
        return []
    base, boot, now = Path(config.registry.store), boot_id(), clock.monotonic()
    past = records.find(places.store_check_mark, StoreVisits)
    if past is None or past.boot != boot:
        past = StoreVisits(boot, now - VISIT_INTERVAL, {})
    if now - past.at < VISIT_INTERVAL:
        return []
    # Before it is looked at: a store that hangs is not visited every ten minutes.
    folders.ensure_directory_with_mode(places.store_check_mark.parent, folders.PASSABLE)
    past = StoreVisits(boot, now, past.sights)
    records.write(places.store_check_mark, msgspec.json.encode(past))

    def look() -> as_user.ChildResult[list[int]]:
        uids = _list_uids(base)
        random.shuffle(uids)  # then, as anybody may make names that are nobody's
        return _filter_owned(base, uids, MAX_VISITED_USERS), []

    uids, _ = as_user.run_in_child(look, list[int], LIST_TIMEOUT)
    users = [as_user.user_from_uid(uid, NOBODY) for uid in uids]
    works = [
        partial(_collect_if_turn, config, user, past.sights.get(str(user.uid)), now)
        for user in users
    ]
    visits = as_user.run_each_in_child(works, _VisitResult, VISIT_TIMEOUT, VISITS_TIMEOUT, AT_ONCE)
    sights = dict(past.sights)
    for user, visit in zip(users, visits, strict=True):
        known = sights.pop(str(user.uid), None)
        if visit is not None and visit.token:
            same = known is not None and known.token == visit.token
            # Not the time of before the visit: another node may have collected since.
            sights[str(user.uid)] = (
                known if known and same else CollectionSighting(visit.token, clock.monotonic())
            )
        elif visit is None and known is not None:
            sights[str(user.uid)] = known
    kept = dict(list(sights.items())[-REMEMBERED:])  # those met last are the last ones
    records.write(places.store_check_mark, msgspec.json.encode(StoreVisits(boot, now, kept)))
    return _with_user_names(users, [visit.done if visit else None for visit in visits])


def _with_user_names(
    users: Sequence[User], found: Sequence[CollectionResult | None]
) -> list[CollectionResult]:
    missing = CollectionResult(problem="the directory cannot be read, or did not answer in time")
    named = zip(users, found, strict=True)
    return [msgspec.structs.replace(one or missing, user=_user_name(user)) for user, one in named]


def _collect_as_user(
    config: Config, user: User, dry_run: bool, collection: StoreCollection | None = None
) -> CollectionResult:
    as_user.set_effective_user(user)
    limits = config.registry
    folder = Path(limits.store or "", str(user.uid))
    if not os.path.lexists(folder):
        return CollectionResult()
    last = collection or store_age.read_last_collection(folder)[1]
    done = store_collection.collect_garbage(
        folder, limits.keep, limits.max_user_size, last, dry_run
    )
    problem = make_printable(done.problem)
    return msgspec.structs.replace(done, images=done.images[:MAX_LISTED_IMAGES], problem=problem)


def _collect_if_turn(
    config: Config, user: User, sight: CollectionSighting | None, now: float
) -> _VisitResult:
    as_user.set_effective_user(user)
    folder = Path(config.registry.store or "", str(user.uid))
    token, collection = store_collection.claim_collection(folder, sight, now)
    if collection is None:
        return _VisitResult(CollectionResult(), token)
    return _VisitResult(_collect_as_user(config, user, False, collection), token)


def format_listing(rows: Sequence[StoredImageRow], now: float) -> list[OutputBlock]:
    """`ls` for people."""
    if not rows:
        return [TextLine("no images")]
    cells = [
        (
            row.user,
            row.reference,
            row.digest.removeprefix("sha256:")[:12] or "-",
            format_size(row.bytes),
            format_age(now - row.used),
            row.host or "-",
        )
        for row in rows
    ]
    total = format_size(sum(row.bytes for row in rows))
    columns = ("USER", "IMAGE", "DIGEST", "SIZE", "USED", "IMPORTED BY")
    return [TextTable(columns, cells), TextLine(f"{format_count(len(rows), 'image')}, {total}")]


def format_results(done: Sequence[CollectionResult], dry_run: bool) -> list[OutputBlock]:
    """`gc` for people."""
    return [TextLine(text) for text in format_result_lines(done, dry_run)] or [
        TextLine("nothing to delete")
    ]


def format_result_lines(done: Sequence[CollectionResult], dry_run: bool) -> list[str]:
    """Pure: a line for each user of whose directory something went, or should have."""
    verb = "would delete" if dry_run else "deleted"
    found = []
    for one in done:
        if one.images or one.files:
            went = f"{format_count(len(one.images), 'image')}, {format_size(one.bytes)}"
            found.append(f"{one.user}: {verb} {went}; {format_count(one.files, 'file')} left over")
        if one.problem:
            found.append(f"{one.user}: {one.problem}")
    return found
