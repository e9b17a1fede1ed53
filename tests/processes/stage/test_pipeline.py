"""The steps of a copy: an entry gets the right bytes with their rights, or there is none."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec
import pytest

from forestage import log, trace
from forestage.cache import allocation, digest, evict, source_image
from forestage.cache.arrival_map import ArrivalMap
from forestage.cache.layout import Entry
from forestage.cache.node import Node
from forestage.cache.part import ENTRY_BYTES, Part, PartRecord, boot_id
from forestage.clock import Clock
from forestage.errors import CopyStopped, Declined, Failed
from forestage.features.peers.engine import PeerHelpers
from forestage.slurm.job import Job
from forestage.sources import source as stage_source
from forestage.sources.file import FileSource
from forestage.sources.source import OpenImage, ReadableSource
from forestage.stage import chunks, engines, pipeline
from forestage.stage.pipeline import CopyStats
from forestage.stage.task import CopyTask
from forestage.system import lock, writers

AfterCopy = Callable[[Callable[[], None]], "During"]
Looking = Callable[[Path], OpenImage]
Patch = pytest.MonkeyPatch
CHUNK = 1 << 16
CONTENT = b"container " * (CHUNK // 4)
NEEDED = len(CONTENT) + 3 * ENTRY_BYTES  # with its map
SECOND = 1_000_000_000


@pytest.fixture
def source(shared: Path) -> Path:
    (shared / "folder").mkdir()
    file = shared / "folder/image.sqsh"
    file.write_bytes(CONTENT)
    os.utime(file, (1000, 1000))  # what changes it shows, however coarse the kernel's clock is
    return file


@pytest.fixture
def task(source: Path, look: Looking, staging_node: Node, asking: Job) -> Iterator[CopyTask]:
    found = look(source)
    yield CopyTask(staging_node, asking, found)
    found.close()


def run(task: CopyTask) -> CopyStats:
    figures = CopyStats()
    pipeline.run_copy(task, threading.Event(), figures)
    return figures


def refused(task: CopyTask, reason: str) -> bool:
    """Runs a copy that is to fail for this reason; whether the node is at fault."""
    with pytest.raises(Declined) as caught:
        run(task)
    assert caught.value.reason == reason
    assert not list(task.node.cache.entries.iterdir())
    return isinstance(caught.value, Failed)


def configured(task: CopyTask, **changes: object) -> CopyTask:
    return msgspec.structs.replace(task, node=task.node.with_config(**changes))


class During:
    """The chunks engine, and then something else."""

    def __init__(self, task: CopyTask, then: Callable[[], None]) -> None:
        self.real = engines.choose_engine(task.node.config, task.image.size)
        self.then = then

    def needed_bytes(self, source: ReadableSource) -> int:
        return self.real.needed_bytes(source)

    def reserve(self, source: ReadableSource, part: Part) -> None:
        self.real.reserve(source, part)

    def copy(
        self,
        source: ReadableSource,
        part: Part,
        stop: threading.Event,
        helpers: PeerHelpers | None = None,
        readers: ArrivalMap | None = None,
    ) -> int:
        count = self.real.copy(source, part, stop, helpers, readers)
        self.then()
        return count


@pytest.fixture
def after_copy(task: CopyTask, monkeypatch: Patch) -> AfterCopy:
    def adding(then: Callable[[], None]) -> During:
        engine = During(task, then)
        monkeypatch.setattr(engines, "choose_engine", lambda *_: engine)
        return engine

    return adding


def test_published_copy_with_an_inherited_hot_map_is_added_to_the_hot_index(
    task: CopyTask, after_copy: AfterCopy
) -> None:
    cache = task.node.cache
    run(task)
    assert not cache.hot_names.exists()
    cache.evict_entry(task.key)

    def take_over() -> None:
        task.part.hot.write_bytes(b"[0]")

    after_copy(take_over)
    run(task)
    (index,) = cache.hot_names.iterdir()
    assert msgspec.json.decode(index.read_bytes()) == [task.key]


def test_published_entry_has_the_sources_bytes_their_map_and_their_digest(task: CopyTask) -> None:
    cache = task.node.cache
    run(task)
    entry = cache.find_entry(task.image)
    assert entry is not None
    assert cache.image_path(task.key).read_bytes() == CONTENT
    folder = cache.entry_dir(task.key)
    assert sorted(os.listdir(folder)) == ["boot", "entry.json", "image", "map", "used"]
    sums = (folder / "map").read_bytes()
    assert digest.split_map(sums) == [
        digest.digest_chunk(CONTENT[at : at + CHUNK]) for at in range(0, len(CONTENT), CHUNK)
    ]
    assert (entry.engine, entry.chunk, entry.digest) == ("chunks", CHUNK, digest.digest_image(sums))
    assert not list(cache.parts.iterdir())


@pytest.mark.parametrize(("job", "makes_way"), [(0, False), (7, True)])
def test_copy_for_a_job_is_read_gently_at_first_but_not_a_copy_without_a_job(
    task: CopyTask, monkeypatch: Patch, job: int, makes_way: bool
) -> None:
    """With `forestage stage`, none is about to start. What is read gently shows no rate."""
    monkeypatch.setattr(chunks, "EARLY", 3600.0)
    task = configured(task, redirect="spank", cold="through")
    task = msgspec.structs.replace(task, job=msgspec.structs.replace(task.job, id=job))
    assert (run(task).rate == 0.0) is makes_way


def test_copy_that_a_step_waits_for_is_read_at_full_speed(
    task: CopyTask, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(chunks, "EARLY", 3600.0)
    monkeypatch.setattr(Part, "is_waited_for", lambda part, now: True)
    assert run(configured(task, redirect="spank", cold="through")).rate > 0.0


@pytest.mark.parametrize("changes", [{}, {"engine": "rsync"}])
def test_every_engine_publishes_the_same_bytes(task: CopyTask, changes: dict[str, object]) -> None:
    task = configured(task, **changes)
    config = task.node.config
    run(task)
    assert task.node.cache.image_path(task.key).read_bytes() == CONTENT
    entry = task.node.cache.find_entry(task.image)
    assert entry is not None
    assert entry.digest == digest.digest_image(task.node.cache.read_digests(entry))
    assert entry.engine == config.engine


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o755, 0o444, 0o4755])
def test_copy_has_the_mode_and_time_of_its_source(
    source: Path, look: Looking, staging_node: Node, asking: Job, mode: int
) -> None:
    source.chmod(mode)
    os.utime(source, ns=(5 * SECOND, 7 * SECOND + 1))
    opened = look(source)
    run(CopyTask(staging_node, asking, opened))
    copied = staging_node.cache.image_path(opened.image.key).stat()
    opened.close()
    assert copied.st_mode & 0o7777 == mode
    assert copied.st_mtime_ns == 7 * SECOND + 1


def test_copy_belongs_to_the_owner_of_its_source(
    as_root: None, source: Path, look: Looking, staging_node: Node, asking: Job
) -> None:
    os.chown(source, 65534, 65533)
    opened = look(source)
    run(CopyTask(staging_node, asking, opened))
    copied = staging_node.cache.image_path(opened.image.key).stat()
    opened.close()
    assert (copied.st_uid, copied.st_gid) == (65534, 65533)


def test_copy_is_not_published_if_its_acl_cannot_be_set(task: CopyTask, monkeypatch: Patch) -> None:
    """Without its ACL the mode's group bits would let others in."""
    access = msgspec.structs.replace(task.image.access, acl=b"acl")
    opened = msgspec.structs.replace(
        task.opened, image=msgspec.structs.replace(task.image, access=access)
    )
    task = msgspec.structs.replace(task, opened=opened)

    def unable(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(FileSource, "check_unchanged", lambda _: None)
    monkeypatch.setattr(os, "setxattr", unable)
    assert not refused(task, "acl")


def _write(source: Path) -> None:
    source.write_bytes(b"others    " * (CHUNK // 4))


def _append(source: Path) -> None:
    with source.open("ab") as file:
        file.write(b"more")


def _replace(source: Path) -> None:
    new = source.with_name("new")
    new.write_bytes(CONTENT)
    new.replace(source)


def _chmod(source: Path) -> None:
    source.chmod(0o600)


def _touch(source: Path) -> None:
    os.utime(source, (1, 1))


def _to_symlink(source: Path) -> None:
    source.rename(source.with_name("old"))
    source.symlink_to("old")


def _swap_folder(source: Path) -> None:
    """The open file stays as it is: only a second look at the path can tell."""
    source.parent.rename(source.parent.with_name("old"))
    source.parent.mkdir()
    source.write_bytes(CONTENT)


def _folder_to_file(source: Path) -> None:
    source.parent.rename(source.parent.with_name("old"))
    source.parent.touch()


def _folder_to_loop(source: Path) -> None:
    source.parent.rename(source.parent.with_name("old"))
    source.parent.symlink_to(source.parent.name)


CHANGES = [
    _swap_folder,
    _folder_to_file,
    _folder_to_loop,
    _write,
    _append,
    _replace,
    _chmod,
    _touch,
    Path.unlink,
    _to_symlink,
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fails", [False, True], ids=["copied", "engine failed"])
def test_source_that_changes_during_the_copy_is_never_published(
    task: CopyTask, source: Path, after_copy: AfterCopy, change: Callable[[Path], None], fails: bool
) -> None:
    """Nor is it the node's failure: rsync ends with 23 then."""

    def meanwhile() -> None:
        change(source)
        if fails:
            raise Failed("copy", "rsync: exit 23")

    after_copy(meanwhile)
    assert not refused(task, "changed")


@pytest.mark.parametrize("change", [_write, _append, _chmod, _touch])
def test_change_of_the_open_source_is_detected_though_its_path_leads_to_an_unchanged_twin(
    task: CopyTask, source: Path, monkeypatch: Patch, change: Callable[[Path], None]
) -> None:
    """The path may lead to the staged file's twin on another file system; our bytes are these."""
    seen = source_image.PathFacts(task.image.path, task.node.config.sources, 0, task.image)
    monkeypatch.setattr(
        "forestage.sources.opening.open_as_user", lambda *_, **__: (seen, socket.socket())
    )
    task.source.check_unchanged()
    change(source)
    with pytest.raises(Declined) as caught:
        task.source.check_unchanged()
    assert caught.value.reason == "changed"


class Opening(Clock):
    """Somebody opens the file for writing while it is waited until a change would show."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.opened: list[IO[bytes]] = []

    def sleep(self, seconds: float) -> None:
        self.opened.append(self.file.open("r+b"))


def test_source_is_checked_for_writers_only_after_a_change_would_show_in_its_times(
    task: CopyTask, source: Path, after_copy: AfterCopy
) -> None:
    """What they then write may have the very times that are known already."""
    clock = Opening(source)
    after_copy(lambda: clock.opened[0].close())  # nobody writes any more when that is asked again
    task = msgspec.structs.replace(task, node=msgspec.structs.replace(task.node, clock=clock))
    assert not refused(task, "written")
    clock.opened[0].close()


def test_writer_that_opens_the_source_during_the_copy_prevents_publishing(
    task: CopyTask, source: Path, after_copy: AfterCopy
) -> None:
    """Their stores through a mapping may show in no time that is still to come."""
    opened: list[IO[bytes]] = []
    after_copy(lambda: opened.append(source.open("r+b")))
    assert not refused(task, "written")
    opened[0].close()


def test_writer_is_searched_in_all_processes_if_file_leases_are_inconclusive(
    task: CopyTask, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(writers, "has_writer_by_lease", lambda _: False)
    monkeypatch.setattr(writers, "is_lease_conclusive", lambda _: False)
    monkeypatch.setattr(writers, "find_open_for_writing", lambda path, _: path)
    assert not refused(task, "written")


@pytest.mark.parametrize("size", [len(CONTENT) + 1, len(CONTENT) - 1, 5, 0])
def test_copy_of_another_size_is_never_published(
    task: CopyTask, after_copy: AfterCopy, size: int
) -> None:
    after_copy(lambda: os.truncate(task.part.image, size))
    assert refused(task, "copy")


def leave_part(task: CopyTask, **changes: object) -> None:
    """Leaves a part with all bytes but the first chunk, as a killed stager does."""
    owner = pipeline.claim_part(task)
    task.part.write_record(msgspec.structs.replace(owner, phase="copying", began=1.0, **changes))
    allocation.reserve_part(task.part, len(CONTENT), CHUNK, set(range(3)))
    task.part.image.write_bytes(b"y" * len(CONTENT))
    whole, last = (
        digest.digest_chunk(b"y" * CHUNK),
        digest.digest_chunk(b"y" * (len(CONTENT) - 2 * CHUNK)),
    )
    task.part.map.write_bytes(digest.MISSING + whole + last)


@pytest.fixture
def owners(task: CopyTask, monkeypatch: Patch) -> dict[str, PartRecord]:
    """The part's owner at each step of the copy."""
    seen: dict[str, PartRecord] = {}

    def listen(name: str) -> None:
        owner = task.part.find_record()
        if owner is not None:
            seen.setdefault(name, owner)

    monkeypatch.setattr(trace, "listener", listen)
    return seen


def test_killed_copy_is_resumed_from_its_map(task: CopyTask, owners: dict[str, PartRecord]) -> None:
    leave_part(task)
    assert run(task).resumed == len(CONTENT) - CHUNK
    copied = task.node.cache.image_path(task.key).read_bytes()
    assert copied == CONTENT[:CHUNK] + b"y" * (len(CONTENT) - CHUNK)
    assert (owners["claimed"].phase, owners["claimed"].began) == ("queued", 0.0)
    reserved = owners["reserved"]
    assert (reserved.phase, reserved.resumed) == ("copying", len(CONTENT) - CHUNK)


@pytest.mark.parametrize("since", [0.0, 1_700_000_000.0])
def test_part_of_a_copy_for_pending_jobs_counts_as_copied_ahead_in_the_resumed_copy(
    task: CopyTask, since: float
) -> None:
    leave_part(task, expected=since)
    done = run(task)
    assert (done.expected, done.ahead) == (since, done.resumed if since else 0)


def test_copy_for_pending_jobs_reports_since_when_the_jobs_wait(task: CopyTask) -> None:
    leave_part(task, expected=1.0)
    pending = msgspec.structs.replace(task.job, expected=2.0)
    done = run(msgspec.structs.replace(task, job=pending))
    assert (done.expected, done.ahead) == (2.0, 0)


@pytest.mark.parametrize(
    "changes",
    [{"boot": "another"}, {"chunk": 2 * CHUNK}, {"engine": "rsync"}, {"image": None}, None],
)
def test_part_of_another_boot_chunk_size_engine_or_image_is_not_resumed(
    task: CopyTask,
    make_image: Callable[..., source_image.SourceImage],
    changes: dict[str, object] | None,
) -> None:
    """Its bytes have the digests of its map, so that only its owner tells."""
    if changes is None:  # nobody's
        leave_part(task)
        task.part.record.unlink()
    else:
        leave_part(task, **({"image": make_image()} if "image" in changes else changes))
    assert run(task).resumed == 0
    assert task.node.cache.image_path(task.key).read_bytes() == CONTENT


def test_stager_records_itself_in_the_part_before_it_copies(
    task: CopyTask, owners: dict[str, PartRecord]
) -> None:
    run(task)
    owner = owners["claimed"]
    assert (owner.pid, owner.boot, owner.job) == (os.getpid(), boot_id(), 7)
    assert (owner.image, owner.chunk, owner.engine) == (task.image, CHUNK, "chunks")
    assert 0 < owner.since <= task.node.clock.monotonic()


def test_copy_stopped_in_the_queue_creates_no_image_file(task: CopyTask) -> None:
    other = task.node.cache.part("other")
    other.write_record(msgspec.structs.replace(pipeline.claim_part(task), since=1.0))
    stop = threading.Event()
    stop.set()
    with lock.held(task.node.cache.key_lock("other"), 0), pytest.raises(CopyStopped):
        pipeline.run_copy(configured(task, max_copies=1), stop, CopyStats())
    assert not task.part.image.exists()


def test_copy_waits_for_its_source_to_settle_before_opening_the_file(
    task: CopyTask, monkeypatch: Patch
) -> None:
    done: list[object] = []
    open_source = stage_source.open_source

    def noting(*arguments: object) -> ReadableSource:
        done.append("open")
        return open_source(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stage_source, "seconds_to_settle", lambda wanted, now: 1.5)
    monkeypatch.setattr(task.node.clock, "sleep", done.append)
    monkeypatch.setattr(stage_source, "open_source", noting)
    run(task)
    assert done == [1.5, "open"]


@pytest.fixture
def rooms(monkeypatch: Patch) -> list[int]:
    """What room was asked for; each time something is evicted."""
    asked: list[int] = []

    def noting(*arguments: object, **_: object) -> tuple[str, ...]:
        asked.append(arguments[-2])  # type: ignore[arg-type]
        return ("victim",)

    monkeypatch.setattr(evict, "make_room", noting)
    return asked


def test_copy_evicts_once_more_if_the_disk_is_full_when_space_is_reserved(
    task: CopyTask, rooms: list[int], monkeypatch: Patch
) -> None:
    real = allocation.allocate_space
    failures = iter([True])

    def full_once(fd: int, start: int, length: int) -> None:
        if next(failures, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, start, length)

    monkeypatch.setattr(allocation, "allocate_space", full_once)
    assert run(task).evicted == ("victim",) * 2
    assert rooms == [NEEDED] * 2


def test_resumed_copy_makes_room_only_for_the_missing_bytes(
    task: CopyTask, rooms: list[int], monkeypatch: Patch
) -> None:
    """Of an image that takes half of the disk, another half would not be free."""
    engine = During(task, lambda: None)
    monkeypatch.setattr(engine, "copy", lambda *_: (_ for _ in ()).throw(CopyStopped))
    monkeypatch.setattr(engines, "choose_engine", lambda *_: engine)
    for _ in range(2):
        with pytest.raises(CopyStopped):
            run(task)
    assert rooms == [NEEDED, 0]


def test_copy_makes_room_before_any_work_that_grows_with_the_image_size(
    task: CopyTask, monkeypatch: Patch
) -> None:
    phases: list[str | None] = []

    def full(*_: object, **__: object) -> None:
        owner = task.part.find_record()
        phases.append(owner and owner.phase)
        raise Declined("no-room", "full")

    monkeypatch.setattr(evict, "make_room", full)
    monkeypatch.setattr(pipeline, "clear_wrong_chunks", lambda *_: phases.append("struck"))
    assert not refused(task, "no-room")
    assert phases == ["queued"]


def test_damaged_entry_is_replaced_by_a_new_copy_of_its_key(
    task: CopyTask, publish: Callable[[source_image.SourceImage], Entry]
) -> None:
    publish(task.image)
    (task.node.cache.entry_dir(task.key) / "entry.json").unlink()
    run(task)
    assert task.node.cache.image_path(task.key).read_bytes() == CONTENT


def test_progress_line_computes_the_rate_without_resumed_bytes(
    task: CopyTask, monkeypatch: Patch
) -> None:
    owner = msgspec.structs.replace(
        pipeline.claim_part(task), phase="copying", began=10.0, resumed=CHUNK
    )
    task.part.map.write_bytes(b"\1" * 32 + bytes(16))
    monkeypatch.setattr(task.node.clock, "monotonic", lambda: 14.0)
    assert pipeline.format_progress(task, owner) == (
        f"image={task.image.path} key={task.key} copied={2 * CHUNK} of={len(CONTENT)} rate=16KiB/s"
    )


def test_long_copy_logs_its_progress_until_it_ends(
    task: CopyTask, after_copy: AfterCopy, monkeypatch: Patch
) -> None:
    said: list[str] = []
    spoken = threading.Event()

    def say(line: str, by_slurm: bool) -> None:
        said.append(line)
        spoken.set()

    monkeypatch.setattr(pipeline, "PROGRESS_EVERY", 0.001)
    monkeypatch.setattr(log, "write_log_line", say)
    after_copy(lambda: spoken.wait(600) or None)  # type: ignore[func-returns-value]
    run(task)
    assert said[0].startswith(f"stager job=7 image={task.image.path} ")
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_progress_of_a_stalled_copy_is_logged_at_doubling_intervals() -> None:
    due = pipeline.ProgressThrottle()
    assert [due.is_line_due(copied) for copied in (0, 1, 2)] == [True] * 3
    looks = [due.is_line_due(3) for _ in range(100)]
    assert [number for number, one in enumerate(looks) if one] == [0, 1, 3, 7, 15, 31, 63]
    assert due.is_line_due(4), "it goes on"
    assert [due.is_line_due(4) for _ in range(3)] == [True, False, True]


def test_progress_of_a_copy_with_a_hanging_source_is_not_logged_each_time(
    task: CopyTask, after_copy: AfterCopy, monkeypatch: Patch
) -> None:
    said: list[str] = []
    looks: list[int] = []
    enough = threading.Event()
    real = type(task.part).copied_bytes

    def copied(part: Part, owner: PartRecord) -> int:
        if threading.current_thread().name == "progress":
            looks.append(1)
            enough.set() if len(looks) == 40 else None
        return real(part, owner)

    monkeypatch.setattr(pipeline, "PROGRESS_EVERY", 0.001)
    monkeypatch.setattr(log, "write_log_line", lambda line, by_slurm: said.append(line))
    monkeypatch.setattr(type(task.part), "copied_bytes", copied)
    after_copy(lambda: enough.wait(600) or None)  # type: ignore[func-returns-value]
    run(task)
    assert 2 <= len(said) < 20
