"""Records with any bytes: a value of their type, or damage, and nothing else."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from forestage.cache import digest
from forestage.cache.job_notes import JobData, JobNotes
from forestage.cache.known_disks import CacheLocation, KnownDisks
from forestage.cache.layout import Cache, Entry
from forestage.cache.lease import EntryUse, Lease
from forestage.cache.part import Part, PartRecord, chunk_count, count_done_bytes
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage
from forestage.config import Config
from forestage.events import EventRecord
from forestage.stage import pipeline
from forestage.system import records
from forestage.system.as_user import User
from properties import MORE

IMAGE = SourceImage(FileIdentity("/lustre/a.sqsh", 1, 5, 10, 20), AccessRights(0, 0, 0o644, b"acl"))
RECORDS: list[msgspec.Struct] = [
    Entry(IMAGE.key, IMAGE.identity, IMAGE.access, 1.0, "chunks", 16, "d"),
    PartRecord(7, "boot", IMAGE, 1 << 20, "chunks", 3, 5.0),
    Lease(1, User("alice", 1, 1), 5.0, "/cache", (EntryUse("k", "/a"),)),
    JobNotes(
        True, 3.0, hinted=(b"/a",), data=JobData(room=5), say=("a line",), words=(("a", "b"),)
    ),
    KnownDisks(caches=(CacheLocation("/mnt/nvme/forestage", "/mnt/nvme", "xfs 0a"),)),
]
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
WAYS = ["bytes", "cut", "byte", "value", "key"]


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[type[msgspec.Struct], bytes]:
    """A record with something wrong: bytes changed, the end cut off, or a value of any kind."""
    record = draw(st.sampled_from(RECORDS))
    data = msgspec.json.encode(record)
    way = draw(st.sampled_from(WAYS))
    at = draw(st.integers(0, len(data) - 1))
    if way == "bytes":
        data = draw(st.binary())
    elif way == "cut":
        data = data[:at]
    elif way == "byte":
        data = data[:at] + draw(st.binary(max_size=3)) + data[at + 1 :]
    else:
        fields = json.loads(data)
        name = draw(st.sampled_from(sorted(fields)))
        value = fields.pop(name) if way == "key" else draw(ANY)
        fields[name + "2" if way == "key" else name] = value
        data = json.dumps(fields).encode()
    return type(record), data


@given(spoilt())
@example((Entry, b"[" * 100_000))
@example((Lease, b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"))
@example((PartRecord, b'{"pid":' + b"9" * 5000 + b"}"))
@hypothesis_settings(
    max_examples=120 * MORE,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_any_bytes_load_as_a_record_or_raise_damaged_record(
    tmp_path: Path, found: tuple[type[msgspec.Struct], bytes]
) -> None:
    of, data = found
    file = tmp_path / "record"
    file.write_bytes(data)
    try:
        value = records.load(file, of)
    except records.DamagedRecord as damaged:
        said = str(damaged)
    else:
        said = ""
    if said:
        assert str(file) in said
        assert len(said) < 1000
        return
    assert type(value) is of
    assert records.load(file, of) == value
    if isinstance(value, PartRecord):
        # What `status` and waiting hooks compute with it.
        assert count_done_bytes(b"\1" * 32, value.chunk, 5) == 5


@pytest.mark.parametrize("chunk", [0, -1])
def test_part_record_with_chunk_length_zero_counts_as_damaged(tmp_path: Path, chunk: int) -> None:
    part = Part(tmp_path)
    part.write_record(msgspec.structs.replace(RECORDS[1], chunk=chunk))  # type: ignore[arg-type]
    assert part.find_record() is None


@given(st.lists(st.one_of(st.binary(), spoilt().map(lambda found: found[1])), max_size=4))
@hypothesis_settings(
    max_examples=30 * MORE,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_garbage_in_the_event_log_hides_no_later_event(
    tmp_path: Path, garbage: list[bytes]
) -> None:
    from forestage import events

    file = tmp_path / "events.jsonl"
    file.write_bytes(b"\n".join(garbage))
    event = EventRecord(1.0, "prolog", 424242, events.RequestOutcome("hit"))
    events.append_events(file, [event])
    assert [found for found in events.read_events(file) if found.job == 424242] == [event]


@pytest.mark.parametrize(
    ("number", "error"),
    [
        *(
            (one, records.DamagedRecord)
            for one in (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ELOOP)
        ),
        *((one, OSError) for one in (errno.EMFILE, errno.ENOMEM, errno.EACCES)),
    ],
)
def test_unreadable_block_of_a_record_is_damage_but_a_lack_of_resources_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    """Damage is evicted first: a hook that ran out of descriptors must not evict anything."""

    def failing(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(error, match=os.strerror(number)):
        records.read_raw(tmp_path / "record")


def _link(path: Path) -> None:
    path.with_name("target").write_bytes(b"{}")
    path.symlink_to("target")


def _fifo_with_writer(path: Path) -> None:
    os.mkfifo(path)
    os.open(path, os.O_RDWR)


@pytest.mark.parametrize("make", [_link, Path.mkdir, os.mkfifo, _fifo_with_writer])
def test_record_that_is_no_regular_file_is_damage_and_does_not_block(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "record")
    with pytest.raises(records.DamagedRecord):
        records.load(tmp_path / "record", Lease)


def test_entry_with_a_symlink_as_its_image_is_not_read(
    cache: Cache, publish: Callable[[SourceImage], Entry]
) -> None:
    """A link has a size as well, and may lead anywhere."""
    entry = publish(IMAGE)
    image = cache.image_path(IMAGE.key)
    image.rename(image.with_name("other"))
    image.symlink_to("other")
    assert image.lstat().st_size == IMAGE.size
    assert cache.find_entry_by_key(entry.key) is None


CHUNK = 1 << 20
SIZE = 2 * CHUNK + 5


@given(
    st.lists(st.sampled_from(["missing", "right", "wrong", "none"]), min_size=3, max_size=3),
    st.binary(max_size=20),
)
@hypothesis_settings(
    max_examples=15 * MORE,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_resumed_copy_keeps_only_chunks_with_a_matching_digest(
    tmp_path: Path, told: list[str], tail: bytes
) -> None:
    part = Part(tmp_path)
    data = bytes(CHUNK) + b"y" * CHUNK + b"short"
    part.image.write_bytes(data)
    right = [digest.digest_chunk(data[n * CHUNK : (n + 1) * CHUNK]) for n in range(3)]
    words = {"missing": digest.MISSING, "wrong": b"w" * 16, "none": b""}
    known = b"".join(words.get(word, one) for word, one in zip(told, right, strict=True))
    part.map.write_bytes(known + tail)

    struck = pipeline.clear_wrong_chunks(part, SIZE, Config(chunk_size=CHUNK, threads=2))

    count = chunk_count(SIZE, CHUNK)
    before = digest.split_map((known + tail)[: count * 16].ljust(count * 16, b"\0"))
    after = digest.split_map(part.read_digests()[: count * 16].ljust(count * 16, b"\0"))
    for number, (was, now) in enumerate(zip(before, after, strict=True)):
        assert now == (was if was == right[number] else digest.MISSING)
    assert struck == sum(was != now for was, now in zip(before, after, strict=True))


def test_resumed_copy_of_a_too_short_part_keeps_no_chunk(tmp_path: Path) -> None:
    part = Part(tmp_path)
    part.image.write_bytes(b"y" * CHUNK)
    part.map.write_bytes(digest.digest_chunk(b"y" * CHUNK) * 3)
    assert pipeline.clear_wrong_chunks(part, SIZE, Config(chunk_size=CHUNK, threads=2)) == 3
    assert set(part.read_digests()) == {0}
