"""What turns a part into an entry: the right bytes with their rights, or nothing at all."""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from forestage import events
from forestage.cache import digest, evict, image
from forestage.cache import space as reserve
from forestage.cache.image import OpenImage
from forestage.cache.layout import Cache, Entry
from forestage.cache.node import Node
from forestage.cache.part import MAX_SHARED, Part, boot_id
from forestage.config import Peering
from forestage.errors import Declined, Failed
from forestage.peers.protocol import ChunkRequest, Receiver
from forestage.slurm.job import Job
from forestage.stage import engines, opened, pipeline, stager
from forestage.stage.chunks import Source
from forestage.stage.pipeline import Task
from forestage.stage.stager import Message
from forestage.stage.with_peers import Lender

Looking = Callable[[Path], OpenImage]
CHUNK = 1 << 16
CONTENT = b"container " * (CHUNK // 4)
SECOND = 1_000_000_000


@pytest.fixture
def source(shared: Path) -> Path:
    (shared / "folder").mkdir()
    file = shared / "folder/image.sqsh"
    file.write_bytes(CONTENT)
    os.utime(file, (1000, 1000))  # what changes it shows, however coarse the kernel's clock is
    return file


@pytest.fixture
def task(source: Path, look: Looking, staging_node: Node, asking: Job) -> Iterator[Task]:
    found = look(source)
    yield Task(staging_node, asking, found)
    found.close()


def serve(task: Task) -> Message:
    """All that a stager does between its two words, in this process."""
    return stager._serve(task, threading.Event())


class During:
    """The chunks engine, and then something else; or that in its place."""

    def __init__(self, task: Task, then: Callable[[], None], copies: bool = True) -> None:
        self.real = engines.of(task.node.config)
        self.then = then
        self.copies = copies
        self.calls = 0

    def reserve(self, source: Source, part: Part) -> None:
        self.real.reserve(source, part)

    def copy(
        self, source: Source, part: Part, stop: threading.Event, lender: Lender | None = None
    ) -> int:
        self.calls += 1
        if self.copies:
            self.real.copy(source, part, stop, lender)
        self.then()
        return 0


def nothing_is_published(cache: Cache) -> bool:
    return not list(cache.entries.iterdir())


def nothing_is_left(cache: Cache) -> bool:
    return nothing_is_published(cache) and not list(cache.parts.iterdir())


def test_an_entry_has_the_bytes_their_map_and_their_digest(task: Task) -> None:
    cache = task.node.cache
    assert serve(task) == Message("published")
    entry = cache.find(task.image)
    assert entry is not None
    assert cache.image(task.key).read_bytes() == CONTENT
    folder = cache.entry_dir(task.key)
    assert sorted(os.listdir(folder)) == ["boot", "entry.json", "image", "map", "used"]
    sums = (folder / "map").read_bytes()
    assert digest.split(sums) == [
        digest.of_chunk(CONTENT[at : at + CHUNK]) for at in range(0, len(CONTENT), CHUNK)
    ]
    assert (entry.engine, entry.chunk, entry.digest) == ("chunks", CHUNK, digest.of_image(sums))
    assert not list(cache.parts.iterdir())


@pytest.mark.parametrize("changes", [{"digest": False}, {"engine": "rsync"}])
def test_every_engine_and_setting_publishes_the_same_bytes(
    task: Task, changes: dict[str, object]
) -> None:
    config = msgspec.structs.replace(task.node.config, **changes)
    task = msgspec.structs.replace(task, node=msgspec.structs.replace(task.node, config=config))
    assert serve(task) == Message("published")
    assert task.node.cache.image(task.key).read_bytes() == CONTENT
    entry = task.node.cache.find(task.image)
    assert entry is not None
    assert (entry.digest != "") is config.digest
    assert entry.engine == config.engine


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o755, 0o444, 0o4755])
def test_the_copy_has_the_rights_and_time_of_its_source(
    source: Path, look: Looking, staging_node: Node, asking: Job, mode: int
) -> None:
    source.chmod(mode)
    os.utime(source, ns=(5 * SECOND, 7 * SECOND + 1))
    looked = look(source)
    assert serve(Task(staging_node, asking, looked)) == Message("published")
    copied = staging_node.cache.image(looked.image.key).stat()
    looked.close()
    assert copied.st_mode & 0o7777 == mode
    assert copied.st_mtime_ns == 7 * SECOND + 1


def test_the_copy_belongs_to_the_owner_of_its_source(
    as_root: None, source: Path, look: Looking, staging_node: Node, asking: Job
) -> None:
    os.chown(source, 65534, 65533)
    looked = look(source)
    assert serve(Task(staging_node, asking, looked)) == Message("published")
    copied = staging_node.cache.image(looked.image.key).stat()
    looked.close()
    assert (copied.st_uid, copied.st_gid) == (65534, 65533)


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


@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes_during_the_copy_is_never_published(
    task: Task, source: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    engine = During(task, lambda: change(source))
    monkeypatch.setattr(engines, "engine", lambda _: engine)
    word = serve(task)
    assert (word.state, word.reason, word.ours) == ("failed", "changed", False)
    assert nothing_is_left(task.node.cache)


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_that_fails_because_the_user_changed_the_source_is_not_our_failure(
    task: Task, source: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """rsync ends with 23 then; with `on_error: drain` each user could drain each node."""

    def fail() -> None:
        change(source)
        raise Failed("copy", "rsync: exit 23")

    engine = During(task, fail)
    monkeypatch.setattr(engines, "engine", lambda _: engine)
    word = serve(task)
    assert (word.state, word.reason, word.ours) == ("failed", "changed", False)
    assert nothing_is_left(task.node.cache)


@pytest.mark.parametrize("size", [len(CONTENT) + 1, len(CONTENT) - 1, 5, 0])
def test_a_copy_of_another_size_is_never_published(
    task: Task, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    engine = During(task, lambda: os.truncate(task.part.image, size))
    monkeypatch.setattr(engines, "engine", lambda _: engine)
    word = serve(task)
    assert (word.state, word.reason, word.ours) == ("failed", "copy", True)
    assert nothing_is_published(task.node.cache)


@pytest.mark.parametrize("change", [_write, _append, _chmod, _touch])
def test_the_open_file_is_looked_at_as_well_as_the_path(
    task: Task, source: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    """The path may lead to the staged file's twin on another file system; our bytes are these."""
    seen = image.Seen(task.image.path, task.node.config.sources, 0, task.image)
    monkeypatch.setattr(image, "glance", lambda *_: (seen, socket.socket()))
    pipeline._check_unchanged(task)
    change(source)
    with pytest.raises(Declined) as caught:
        pipeline._check_unchanged(task)
    assert caught.value.reason == "changed"


def test_rights_that_the_cache_cannot_hold_are_not_left_out(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its ACL the mode's group bits would let others in."""
    access = msgspec.structs.replace(task.image.access, acl=b"acl")
    looked = msgspec.structs.replace(
        task.looked, image=msgspec.structs.replace(task.image, access=access)
    )
    task = msgspec.structs.replace(task, looked=looked)

    def unable(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(pipeline, "_check_unchanged", lambda _: None)
    monkeypatch.setattr(os, "setxattr", unable)
    word = serve(task)
    assert (word.reason, word.ours) == ("acl", False)
    assert nothing_is_published(task.node.cache)


def claimed(task: Task, **changes: object) -> Part:
    """A part with all bytes but the first chunk, as a stager that was killed leaves it."""
    owner = pipeline.claim(task)
    task.part.write_owner(msgspec.structs.replace(owner, phase="copying", began=1.0, **changes))
    reserve.reserve(task.part, len(CONTENT), CHUNK, set(range(3)))
    task.part.image.write_bytes(b"y" * len(CONTENT))
    whole, last = digest.of_chunk(b"y" * CHUNK), digest.of_chunk(b"y" * (len(CONTENT) - 2 * CHUNK))
    task.part.map.write_bytes(digest.MISSING + whole + last)
    return task.part


def test_a_killed_copy_is_resumed_from_its_map(task: Task) -> None:
    claimed(task)
    owner = pipeline.claim(task)
    assert (owner.phase, owner.began, owner.pid) == ("queued", 0.0, os.getpid())
    owner, source = pipeline.ready(task, owner, [])
    assert owner.phase == "copying"
    assert owner.resumed == len(CONTENT) - CHUNK
    assert task.part.owner() == owner
    pipeline.fetch(task, source, threading.Event())
    assert task.part.image.read_bytes() == CONTENT[:CHUNK] + b"y" * (len(CONTENT) - CHUNK)


@pytest.mark.parametrize(
    "changes",
    [
        {"boot": "another"},
        {"chunk": 2 * CHUNK},
        {"engine": "rsync"},
        {"image": None},
    ],
)
def test_a_part_of_another_copy_is_begun_anew(
    task: Task, make_image: Callable[..., image.Image], changes: dict[str, object]
) -> None:
    claimed(task, **({"image": make_image()} if "image" in changes else changes))
    assert serve(task) == Message("published")
    assert task.node.cache.image(task.key).read_bytes() == CONTENT


def test_a_part_without_an_owner_is_begun_anew(task: Task) -> None:
    """Also no leftover shows through a hole of the source."""
    claimed(task).record.unlink()
    assert serve(task) == Message("published")
    assert task.node.cache.image(task.key).read_bytes() == CONTENT


def test_who_copies_says_so_before_anything_else(task: Task) -> None:
    owner = pipeline.claim(task)
    assert task.part.owner() == owner
    assert (owner.pid, owner.boot, owner.job) == (os.getpid(), boot_id(), 7)
    assert (owner.image, owner.chunk, owner.engine) == (task.image, CHUNK, "chunks")
    assert 0 < owner.since <= task.node.clock.monotonic()


def test_space_taken_by_others_in_between_is_looked_for_once_more(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = reserve.allocate
    failures = iter([True])
    rooms: list[int] = []
    make_room = evict.make_room

    def full_once(fd: int, start: int, length: int) -> None:
        if next(failures, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, start, length)

    def noting(*arguments: object) -> tuple[str, ...]:
        rooms.append(arguments[-1])  # type: ignore[arg-type]
        return (*make_room(*arguments), "victim")  # type: ignore[arg-type]

    monkeypatch.setattr(reserve, "allocate", full_once)
    monkeypatch.setattr(evict, "make_room", noting)
    evicted: list[str] = []
    _, source = pipeline.ready(task, pipeline.claim(task), evicted)
    assert rooms == [len(CONTENT)] * 2
    assert evicted == ["victim"] * 2
    assert source.size == len(CONTENT)


@pytest.mark.parametrize(
    ("number", "reason", "ours"),
    [
        (errno.ENOSPC, "no-room", False),
        (errno.EDQUOT, "no-room", False),
        (errno.EIO, "io", True),
        (errno.EROFS, "io", True),
    ],
)
def test_a_disk_without_space_is_told_before_a_byte_is_copied(
    task: Task, monkeypatch: pytest.MonkeyPatch, number: int, reason: str, ours: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    engine = During(task, lambda: None)
    monkeypatch.setattr(engines, "engine", lambda _: engine)
    monkeypatch.setattr(reserve, "allocate", full)
    word = serve(task)
    assert (word.state, word.reason, word.ours) == ("failed", reason, ours)
    assert engine.calls == 0
    assert nothing_is_left(task.node.cache)


def test_what_is_reserved_already_is_not_asked_for_again(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed copy of an image that takes half of the disk would find no room for itself."""
    asked: list[int] = []

    def noting(*arguments: object) -> tuple[str, ...]:
        asked.append(arguments[-1])  # type: ignore[arg-type]
        return ()

    monkeypatch.setattr(evict, "make_room", noting)
    for _ in range(2):
        pipeline.ready(task, pipeline.claim(task), [])
    assert asked == [len(CONTENT), 0]


def test_an_older_entry_of_the_key_is_replaced(
    task: Task, publish: Callable[[image.Image], Entry]
) -> None:
    publish(task.image)
    (task.node.cache.entry_dir(task.key) / "entry.json").unlink()
    assert serve(task) == Message("published")
    assert task.node.cache.image(task.key).read_bytes() == CONTENT


def test_the_source_settles_before_it_is_opened_for_the_copy(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(opened, "settling", lambda wanted, now: 1.5)
    monkeypatch.setattr(task.node.clock, "sleep", done.append)
    monkeypatch.setattr(opened, "open_source", lambda *_: done.append("open"))
    monkeypatch.setattr(pipeline, "_reserve", lambda *_: done.append("reserve"))
    pipeline.ready(task, pipeline.claim(task), [])
    assert done == [1.5, "open", "reserve"]


class Lending:
    """Another node that has the whole image."""

    nodes = ("n1", "n2")
    me = "n1"
    closed = False

    def fetch(self, peer: str, chunk: ChunkRequest, receiver: Receiver) -> bytes:
        receiver.peer_has((1 << 64) - 1, False)
        data = CONTENT[chunk.start : chunk.start + chunk.size]
        receiver.buffer[: chunk.size] = data
        receiver.write(chunk.start, receiver.buffer[: chunk.size])
        return digest.of_chunk(data)

    def close(self) -> None:
        self.closed = True


def test_what_came_from_other_nodes_is_on_record_and_nothing_of_it_stays(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    lending = Lending()
    monkeypatch.setattr(pipeline, "_peers", lambda task: lending)
    assert serve(task) == Message("published")
    (event,) = events.read(task.node.places.events)
    assert event.outcome.from_peers == event.outcome.bytes == len(CONTENT)
    assert task.node.cache.image(task.key).read_bytes() == CONTENT
    assert not (task.node.cache.entry_dir(task.key) / "peers").exists()
    assert lending.closed


def test_without_peers_nothing_of_theirs_is_loaded(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "forestage.peers", None)  # an import would fail
    assert serve(task) == Message("published")


@pytest.mark.parametrize(("count", "helped"), [(MAX_SHARED, True), (MAX_SHARED + 1, False)])
def test_peers_are_not_asked_for_more_chunks_than_they_can_tell_of(
    task: Task, monkeypatch: pytest.MonkeyPatch, count: int, helped: bool
) -> None:
    lending = Lending()
    said: list[str] = []
    monkeypatch.setattr("forestage.peers.of_job", lambda *_: lending)
    monkeypatch.setattr(pipeline.log, "say", lambda line, by_slurm: said.append(line))
    config = msgspec.structs.replace(task.node.config, chunk_size=1, peers=Peering(enabled=True))
    identity = msgspec.structs.replace(task.image.identity, size=count)
    image = msgspec.structs.replace(task.image, identity=identity)
    looked = msgspec.structs.replace(task.looked, image=image)
    node = msgspec.structs.replace(task.node, config=config)
    found = pipeline._peers(Task(node, task.job, looked))
    assert (found is lending, len(said)) == (helped, 0 if helped else 1)
