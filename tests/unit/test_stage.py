"""How an image gets here: one copy with the bytes and rights of its source, or nothing at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from forestage import copy, lock, run, stage
from forestage.cache import Cache
from forestage.clock import Clock, Deadline
from forestage.config import Config
from forestage.errors import Declined, Failed
from forestage.image import Look
from forestage.job import User
from forestage.lease import Leases
from forestage.stage import COARSE_TICK_NS, FINE_TICK_NS, Staged
from forestage.units import Amount

Looking = Callable[[Path], Look]
CONTENT = b"container " * 1000
SECOND = 1_000_000_000


class During:
    """An engine that does something else right after its copy, or in its place."""

    name = "during"

    def __init__(self, then: Callable[[], None], copies: bool = True) -> None:
        self.then = then
        self.copies = copies
        self.calls = 0

    def copy(self, source: int, part: Path, timeout: float) -> None:
        self.calls += 1
        if self.copies:
            data = os.pread(source, 1 << 20, 0)
            with part.open("r+b") as file:
                file.write(data)
        self.then()


Staging = Callable[[Look], Staged]


@pytest.fixture
def config(shared: Path) -> Config:
    return Config(
        sources=(str(shared),), max_size=Amount(share=1.0), min_free=Amount(size=0), deadline=30.0
    )


@pytest.fixture
def staging(cache: Cache, leases: Leases, config: Config, me: User) -> Staging:
    def run_stage(looked: Look) -> Staged:
        deadline = Deadline.after(config.deadline, Clock())
        return stage.stage(cache, leases, config, looked, me, deadline)

    return run_stage


@pytest.fixture
def source(shared: Path) -> Path:
    (shared / "folder").mkdir()
    file = shared / "folder/image.sqsh"
    file.write_bytes(CONTENT)
    return file


@pytest.fixture
def looked(source: Path, look: Looking) -> Iterator[Look]:
    found = look(source)
    yield found
    found.close()


def with_engine(monkeypatch: pytest.MonkeyPatch, engine: copy.Engine) -> None:
    monkeypatch.setitem(copy.ENGINES, Config().engine, engine)


def nothing_is_left(cache: Cache) -> bool:
    return not list(cache.parts.iterdir()) and not list(cache.entries.iterdir())


def test_an_image_is_copied_once_and_found_ever_after(
    cache: Cache, looked: Look, staging: Staging
) -> None:
    first = staging(looked)
    assert (first.result, first.bytes) == ("copied", len(CONTENT))
    second = staging(looked)
    assert (second.result, second.bytes, second.entry) == ("hit", 0, first.entry)
    assert cache.image(first.entry.key).read_bytes() == CONTENT
    assert not list(cache.parts.iterdir())


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o755, 0o444, 0o4755])
def test_the_copy_has_the_rights_and_time_of_its_source(
    cache: Cache, source: Path, look: Looking, staging: Staging, mode: int
) -> None:
    source.chmod(mode)
    os.utime(source, ns=(5 * SECOND, 7 * SECOND + 1))
    looked = look(source)
    copied = cache.image(staging(looked).entry.key).stat()
    looked.close()
    assert copied.st_mode & 0o7777 == mode
    assert copied.st_mtime_ns == 7 * SECOND + 1


def test_the_copy_belongs_to_the_owner_of_its_source(
    as_root: None, cache: Cache, source: Path, look: Looking, staging: Staging
) -> None:
    os.chown(source, 65534, 65533)
    looked = look(source)
    copied = cache.image(staging(looked).entry.key).stat()
    looked.close()
    assert (copied.st_uid, copied.st_gid) == (65534, 65533)


def _write(source: Path) -> None:
    source.write_bytes(b"others    " * 1000)


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


@pytest.mark.parametrize(
    "change", [_swap_folder, _write, _append, _replace, _chmod, _touch, Path.unlink, _to_symlink]
)
def test_a_source_that_changes_during_the_copy_is_never_published(
    cache: Cache,
    source: Path,
    looked: Look,
    staging: Staging,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
) -> None:
    with_engine(monkeypatch, During(lambda: change(source)))
    with pytest.raises(stage.Changed):
        staging(looked)
    assert nothing_is_left(cache)


def _too_long(cache: Cache, looked: Look) -> None:
    os.truncate(cache.part(looked.image.key), len(CONTENT) + 1)


def _cut(cache: Cache, looked: Look) -> None:
    os.truncate(cache.part(looked.image.key), 5)


@pytest.mark.parametrize("spoil", [_too_long, _cut])
def test_a_copy_of_another_size_is_never_published(
    cache: Cache,
    looked: Look,
    staging: Staging,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Cache, Look], None],
) -> None:
    with_engine(monkeypatch, During(lambda: spoil(cache, looked)))
    with pytest.raises(Failed) as caught:
        staging(looked)
    assert caught.value.reason == "copy"
    assert nothing_is_left(cache)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (Failed("copy", "rsync: exit 23"), Failed),
        (run.TimedOut("rsync did not end"), Declined),
        (OSError(errno.EIO, "I/O"), OSError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_an_engine_that_fails_leaves_nothing(
    cache: Cache,
    looked: Look,
    staging: Staging,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: type[BaseException],
) -> None:
    def fail() -> None:
        raise error

    with_engine(monkeypatch, During(fail))
    with pytest.raises(raised):
        staging(looked)
    assert nothing_is_left(cache)


@pytest.mark.xfail(strict=True, reason="an engine's failure is ours even if the source changed")
def test_a_copy_that_fails_because_the_user_cut_the_source_is_not_our_failure(
    source: Path, looked: Look, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rsync ends with 23 then; with `on_error: drain` each user could drain each node."""

    def fail() -> None:
        os.truncate(source, 5)
        raise Failed("copy", "rsync: exit 23")

    with_engine(monkeypatch, During(fail))
    with pytest.raises(stage.Changed):
        staging(looked)


def test_who_waited_for_a_copy_joins_it(
    cache: Cache, looked: Look, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry appears between the first look and the lock, as after a copy by another hook."""
    engine = During(lambda: None)
    with_engine(monkeypatch, engine)
    entry = staging(looked).entry
    answers = iter([None, entry])
    monkeypatch.setattr(Cache, "find", lambda *_: next(answers))
    staged = staging(looked)
    assert (staged.result, staged.bytes, staged.entry) == ("joined", 0, entry)
    assert engine.calls == 1


def test_a_copy_under_way_that_does_not_end_is_not_waited_for_for_ever(
    cache: Cache, leases: Leases, config: Config, me: User, looked: Look
) -> None:
    deadline = Deadline.after(0.05, Clock())
    with lock.held(cache.key_lock(looked.image.key), 0), pytest.raises(Declined) as caught:
        stage.stage(cache, leases, config, looked, me, deadline)
    assert (caught.value.reason, isinstance(caught.value, Failed)) == ("deadline", False)


def test_a_part_that_a_dead_copier_left_is_not_taken_for_a_copy(
    cache: Cache, looked: Look, staging: Staging
) -> None:
    cache.part_dir(looked.image.key).mkdir()
    cache.part(looked.image.key).write_bytes(b"x" * len(CONTENT))
    staged = staging(looked)
    assert cache.image(staged.entry.key).read_bytes() == CONTENT


def test_space_taken_by_others_in_between_is_looked_for_once_more(
    cache: Cache, looked: Look, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallocate = os.posix_fallocate
    failures = iter([True])

    def full_once(fd: int, offset: int, length: int) -> None:
        if next(failures, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full_once)
    assert staging(looked).result == "copied"


def test_a_full_disk_is_reported_before_a_byte_is_copied(
    cache: Cache, looked: Look, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    engine = During(lambda: None)
    with_engine(monkeypatch, engine)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        staging(looked)
    assert engine.calls == 0
    assert nothing_is_left(cache)


def test_without_room_nothing_is_copied(
    cache: Cache, leases: Leases, config: Config, me: User, looked: Look
) -> None:
    small = msgspec.structs.replace(config, max_size=Amount(size=1))
    with pytest.raises(Declined) as caught:
        stage.stage(cache, leases, small, looked, me, Deadline.after(30, Clock()))
    assert caught.value.reason == "no-room"
    assert nothing_is_left(cache)


NOW = 1_700_000_000.0
NOW_NS = 1_700_000_000 * SECOND


@pytest.mark.parametrize(
    ("mtime_ns", "ctime_ns", "seconds"),
    [
        # Full seconds only: the server's clock may tick in seconds.
        (NOW_NS, NOW_NS, COARSE_TICK_NS / SECOND),
        (NOW_NS - SECOND, NOW_NS - SECOND, 1.0),
        (NOW_NS - 2 * SECOND, NOW_NS - 2 * SECOND, 0.0),
        (0, NOW_NS - SECOND, 1.0),
        # Fractions: a fine clock.
        (NOW_NS - 5_000_000, NOW_NS - 5_000_000, (FINE_TICK_NS - 5_000_000) / SECOND),
        (NOW_NS - FINE_TICK_NS - 1, 0, 0.0),
        # Another machine's clock is ahead.
        (NOW_NS + 3600 * SECOND, NOW_NS, 0.0),
        (NOW_NS, NOW_NS + 1, 0.0),
    ],
)
def test_a_copy_starts_only_when_a_later_change_would_show(
    looked: Look, mtime_ns: int, ctime_ns: int, seconds: float
) -> None:
    identity = msgspec.structs.replace(looked.image.identity, mtime_ns=mtime_ns, ctime_ns=ctime_ns)
    wanted = msgspec.structs.replace(looked.image, identity=identity)
    assert stage._settling(wanted, NOW) == pytest.approx(seconds)
