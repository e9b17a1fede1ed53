"""No bad entry passes for good, no good one is evicted, and a bad one is never served again."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from commands import CHUNK, NOW, Site
from forestage import events, log
from forestage.bind import unmount
from forestage.cache import digest
from forestage.cache.layout import Entry
from forestage.cache.lease import EntryUse
from forestage.cache.part import ENTRY_BYTES
from forestage.clock import Clock
from forestage.commands import copy_comparison, verify
from forestage.commands.command_context import ExitStatus
from forestage.commands.main import CommandContext, main
from forestage.errors import Failed
from forestage.events import BadEntryOutcome
from forestage.sources.source import SourceUnreadable
from forestage.stage import source_reader
from forestage.system import lock
from node import ALICE, BOB, Node, content, leased

DATA = os.urandom(3 * CHUNK + 4711)
SPOT = CHUNK + 12345


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, "threads: 3\n")


@pytest.fixture
def source(site: Site) -> Path:
    made = site.image("a.sqsh", DATA)
    os.utime(made, (1000, 1000))  # what changes it shows, however coarse the kernel's clock is
    return made


def spoil(site: Site, key: str, at: int = SPOT, name: str = "image") -> None:
    """Turns one bit round, as a failing disk does; times and sizes stay."""
    file = site.node.cache.entry_dir(key) / name
    facts = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        was = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([was ^ 4]))
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def one(site: Site, *args: str, code: int = ExitStatus.OK) -> dict[str, Any]:
    (verdict,) = site.json("verify", *(args or ("--all",)), code=code)["verdicts"]
    return dict(verdict)


def kept(site: Site, key: str) -> bool:
    return {key} <= site.keys()


# --- against the source


@pytest.mark.parametrize("size", [1, 4095, 4096, CHUNK, CHUNK + 1, 2 * CHUNK, len(DATA)])
def test_verify_finds_an_entry_ok_only_if_its_bytes_equal_its_source(site: Site, size: int) -> None:
    key = site.publish(site.image("a.sqsh", DATA[:size]))
    found = one(site)
    assert (found["result"], found["against"]) == ("ok", "source")
    assert kept(site, key)
    spoil(site, key, at=size - 1)
    found = one(site, code=ExitStatus.BAD)
    assert (found["result"], found["chunks"]) == ("bad", [(size - 1) // CHUNK])


def test_verify_compares_the_entry_of_a_directory_with_its_checksums(site: Site) -> None:
    key = site.publish(site.image("a.sqsh", DATA))
    record = site.node.cache.entry_dir(key) / "entry.json"
    entry = json.loads(record.read_bytes())
    entry["identity"]["tree"] = key * 2
    record.write_text(json.dumps(entry))
    found = one(site)
    assert (found["result"], found["against"]) == ("ok", "digests")
    assert found["detail"].startswith("its source was not asked: each step that is shown a dir")
    spoil(site, key)
    assert one(site, code=ExitStatus.BAD)["against"] == "digests"


def test_verify_locates_a_wrong_bit_and_evicts_the_entry(site: Site, source: Path) -> None:
    key = site.publish(source)
    good = site.publish(site.image("b.sqsh", DATA))
    spoil(site, key)
    spoil(site, key, at=len(DATA) - 1)
    printed = site.run("verify", "--all", "--dry-run")
    assert printed.exit_code == ExitStatus.BAD
    assert "2 chunks wrong (1, 3)" in printed.stdout
    assert "would be evicted" in printed.stdout
    assert kept(site, key)
    done = site.run("verify", "--all")
    assert done.exit_code == ExitStatus.BAD
    assert "2 entries: 1 ok, 1 bad." in done.stdout
    assert site.keys() == {good}
    assert list(site.node.cache.evicted.iterdir()) == []


def test_bad_entry_is_evicted_even_if_leased_and_pinned(site: Site, source: Path) -> None:
    key = site.publish(source)
    site.run("pin", key)
    site.lease(7, EntryUse(key))
    site.node.leases.lease_file(8).write_text("{")
    spoil(site, key)
    with site.node.cache.image_path(key).open("rb") as still:
        printed = site.run("verify", key).stdout
        assert "in use by job 7: what they have open, they keep" in printed
        assert "evicted; its pin is gone with it" in printed
        assert len(still.read()) == len(DATA)
    assert not kept(site, key)
    assert site.node.leases.find_lease(7) is not None


def test_bad_entry_is_reported_in_log_event_status_and_metrics(
    site: Site, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "write_log_line", lambda line, by_slurm: said.append(line))
    key = site.publish(source)
    os.utime(site.node.cache.entry_dir(key) / "boot", (NOW - 50, NOW - 50))
    spoil(site, key)
    site.run("verify", "--all", "--dry-run")
    assert (said, list(events.read_events(site.places.events))) == ([], [])
    site.run("verify", "--all")
    (event,) = events.read_events(site.places.events)
    assert (event.hook, event.job, event.outcome) == (
        "verify",
        0,
        BadEntryOutcome(
            "bad",
            "wrong-bytes",
            image=str(source),
            key=key,
            size=len(DATA),
            chunks=1,
            since=NOW - 50,
            evicted=(key,),
        ),
    )
    (line,) = said
    assert f"verify image={source} key={key} result=bad reason=wrong-bytes chunks=1" in line
    assert "wrong-bytes" in site.run("status").output
    assert 'forestage_bad_entries_total{by="verify"} 1.0' in site.run("metrics", "--print").output


# --- against the digests


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: path.unlink(), "its source is gone"),
        (lambda path: path.write_bytes(b"new"), "its source was changed"),
        (lambda path: path.write_bytes(DATA), "its source was changed"),
        (lambda path: path.chmod(0o600), "its source was changed"),
        (lambda path: (path.unlink(), path.mkdir()), "its source was changed"),
    ],
)
def test_verify_uses_checksums_if_the_source_is_changed_or_gone(
    site: Site, source: Path, change: Callable[[Path], None], why: str
) -> None:
    key = site.publish(source)
    change(source)
    found = one(site)
    assert (found["result"], found["against"]) == ("ok", "digests")
    assert found["detail"].startswith(why)
    spoil(site, key)
    found = one(site, code=ExitStatus.BAD)
    assert found["chunks"] == [1]
    assert not kept(site, key)


def test_entry_without_checksums_and_source_is_unverifiable_and_kept(
    site: Site, source: Path
) -> None:
    key = site.publish(source)
    site.forget_checksums(key)
    assert one(site)["result"] == "ok"  # by its source
    source.unlink()
    found = one(site)
    assert (found["result"], found["against"]) == ("unverifiable", "nothing")
    assert "no checksum was taken" in found["detail"]
    assert kept(site, key)


@pytest.mark.parametrize("damage", ["spoiled", "short", "gone"])
def test_damaged_checksums_make_an_entry_bad_only_if_its_source_is_gone(
    site: Site, source: Path, damage: str
) -> None:
    key = site.publish(source)
    known = site.node.cache.entry_dir(key) / "map"
    if damage == "spoiled":
        spoil(site, key, at=3, name="map")
    elif damage == "short":
        os.truncate(known, ENTRY_BYTES)
    else:
        known.unlink()
    assert one(site)["result"] == "ok"  # the source is a better one
    source.unlink()
    found = one(site, code=ExitStatus.BAD)
    assert "its checksums are damaged" in found["detail"]
    assert not kept(site, key)


@pytest.mark.parametrize("how", ["written", "truncated"])
def test_source_changed_during_verify_does_not_make_an_entry_bad(
    site: Site, source: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    key = site.publish(source)
    right = source_reader.read_pieces

    def changing(*args: Any) -> Iterator[tuple[int, memoryview]]:
        if how == "written":
            source.write_bytes(b"y" * len(DATA))
        else:
            os.truncate(source, 5)
        return right(*args)

    monkeypatch.setattr(source_reader, "read_pieces", changing)
    found = one(site)
    assert (found["result"], found["against"]) == ("ok", "digests")
    assert kept(site, key)


# --- the entry itself


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda copy: copy.chmod(0o666), "mode is 0666, expected 0644"),
        (lambda copy: copy.chmod(0o4644), "mode is 4644"),
        (lambda copy: os.chown(copy, 65534, -1), "uid is 65534"),
        (lambda copy: os.chown(copy, -1, 65533), "gid is 65533"),
    ],
)
def test_entry_with_wrong_mode_or_owner_is_bad(
    as_root: None, site: Site, source: Path, change: Callable[[Path], None], what: str
) -> None:
    source.chmod(0o644)
    key = site.publish(source)
    change(site.node.cache.image_path(key))
    assert what in one(site, code=ExitStatus.BAD)["detail"]
    assert not kept(site, key)


def raw_acl(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def test_acl_that_equals_the_mode_is_no_attribute_error(site: Site, source: Path) -> None:
    source.chmod(0o644)
    entry = site.node.cache.find_entry_by_key(site.publish(source))
    assert entry is not None
    nobody = 0xFFFFFFFF
    plain = ((1, 6, nobody), (4, 4, nobody), (0x20, 4, nobody))
    named = ((1, 6, nobody), (2, 4, 65534), (4, 4, nobody), (0x10, 4, nobody), (0x20, 4, nobody))
    with site.node.cache.image_path(entry.key).open("rb") as copy:
        for acl, wrong in ((raw_acl(*plain), ""), (raw_acl(*named), "its ACL is none, expected")):
            access = msgspec.structs.replace(entry.access, acl=acl)
            printed = verify.format_attribute_errors(
                msgspec.structs.replace(entry, access=access), copy.fileno()
            )
            assert printed.startswith(wrong) if wrong else printed == ""


@pytest.mark.parametrize("damage", ["record", "no record", "size", "no image"])
def test_verify_evicts_an_entry_with_damaged_or_missing_files(
    site: Site, source: Path, damage: str
) -> None:
    key = site.publish(source)
    entry = site.node.cache.entry_dir(key)
    if damage == "record":
        (entry / "entry.json").write_text("{")
    elif damage == "no record":
        (entry / "entry.json").unlink()
    elif damage == "size":
        os.truncate(entry / "image", 5)
    else:
        (entry / "image").unlink()
    assert one(site, code=ExitStatus.BAD)["evicted"] is True
    assert not kept(site, key)


def test_entry_with_an_unreadable_chunk_is_bad(
    site: Site, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.publish(source)
    read = copy_comparison._DirectCopyReader.read_piece

    def failing(self: Any, start: int, buffer: memoryview, want: int) -> None:
        if start == CHUNK:
            raise OSError(errno.EIO, "Input/output error")
        read(self, start, buffer, want)

    monkeypatch.setattr(copy_comparison._DirectCopyReader, "read_piece", failing)
    found = one(site, code=ExitStatus.BAD)
    assert found["chunks"] == [1]
    assert "the copy cannot be read: Input/output error" in found["detail"]


def test_exception_in_a_verify_thread_exits_with_failed_status(
    site: Site, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.publish(source)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    monkeypatch.setattr(digest.RunningDigest, "add", lambda *_: 1 / 0)
    assert site.run("verify", "--all").exit_code == ExitStatus.FAILED


def test_verify_allocates_one_piece_buffer_per_thread(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.publish(site.image("a.sqsh", os.urandom(20 * CHUNK)))
    made = []
    real = source_reader.allocate_piece_buffer

    def counted(chunk: int) -> memoryview:
        made.append(chunk)
        return real(chunk)

    monkeypatch.setattr(source_reader, "allocate_piece_buffer", counted)
    assert one(site)["result"] == "ok"
    assert made == [CHUNK] * 3


def test_verify_uses_checksums_if_the_source_cannot_be_read(
    site: Site, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = site.publish(source)

    def failing(*_: Any) -> None:
        raise SourceUnreadable("/lustre/a", OSError(errno.ESTALE, "Stale file handle"))

    monkeypatch.setattr(source_reader, "read_piece", failing)
    found = one(site)
    assert (found["result"], found["against"], kept(site, key)) == ("ok", "digests", True)
    assert "cannot be read (Stale file handle)" in found["detail"]


# --- while others go on


def test_entry_copied_again_while_the_old_bytes_are_verified_is_not_evicted(
    site: Site, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = site.publish(source)
    spoil(site, key)
    judged = verify._verify_copy

    def meanwhile(*args: Any) -> verify.EntryVerdict:
        found = judged(*args)
        site.node.cache.evict_entry(key)
        site.node.cache.delete_evicted()
        assert site.publish(source) == key
        return found

    monkeypatch.setattr(verify, "_verify_copy", meanwhile)
    assert one(site, code=ExitStatus.BAD)["result"] == "bad"
    assert kept(site, key)


def test_entry_evicted_while_it_is_verified_is_not_bad(
    site: Site, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = site.publish(source)
    gather = verify._make_progress

    def meanwhile(*args: Any) -> copy_comparison.CompareProgress:
        site.node.cache.evict_entry(key)
        return gather(*args)

    monkeypatch.setattr(verify, "_make_progress", meanwhile)
    assert one(site)["detail"] == "it was evicted just now"


def test_bad_entry_stays_while_the_space_lock_is_busy_and_the_lock_is_reported(
    site: Site, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = site.publish(source)
    spoil(site, key)
    monkeypatch.setattr(lock, "SPACE_TIMEOUT", 0.1)
    with lock.held(site.node.cache.space_lock, 0):
        done = site.run("verify", "--all")
    assert done.exit_code == ExitStatus.BAD
    assert "could not be evicted: space.lock is held" in done.stdout
    assert kept(site, key)


@pytest.mark.parametrize("args", [[], ["--all", "abcd"]])
def test_verify_without_a_key_or_with_all_and_a_key_is_a_usage_error(
    site: Site, args: list[str]
) -> None:
    assert site.run("verify", *args).exit_code == ExitStatus.USAGE


def test_verify_of_an_empty_cache_exits_0_and_creates_no_cache(site: Site) -> None:
    done = site.run("verify", "--all")
    assert (done.exit_code, done.stdout) == (ExitStatus.OK, "The cache holds no entry.\n")
    assert not site.node.cache.root.exists()


# --- on a node, with redirects and other users


def verdicts(node: Node, code: int = ExitStatus.OK) -> list[dict[str, Any]]:
    world = CommandContext(node.places, Clock())
    done = CliRunner().invoke(main, ["verify", "--all", "--json"], obj=world)
    assert done.exit_code == code, done.output
    return list(json.loads(done.stdout)["verdicts"])


def verified(node: Node, code: int = ExitStatus.OK) -> dict[str, Any]:
    (verdict,) = verdicts(node, code)
    return verdict


def spoil_entry(node: Node, key: str) -> None:
    with node.cache.image_path(key).open("r+b") as file:
        file.seek(4711)
        file.write(b"?")


def test_bad_entry_is_unmounted_evicted_and_copied_again(node: Node) -> None:
    path = node.put("a.sqsh", mode=0o600)
    node.prolog(1, path)
    key = node.identity(path).key
    assert verified(node)["against"] == "source"
    assert node.shows_entry(path, key)
    spoil_entry(node, key)
    with path.open("rb") as held:
        found = verified(node, ExitStatus.BAD)
        assert (found["chunks"], found["jobs"], found["evicted"]) == ([0], [1], True)
        assert node.shows_source(path)
        assert len(held.read()) == len(content())
    assert node.binds() == {}
    assert node.prolog(2, path).outcome.result == "copied"
    assert node.shows_entry(path, key)
    assert verified(node)["result"] == "ok"
    assert (node.epilog(1).code, node.epilog(2).code) == (0, 0)
    assert node.shows_source(path)


def test_verify_reads_the_source_with_the_rights_of_its_owner(node: Node) -> None:
    # Bob may read it by the mode, its owner may not; root could.
    path = node.put("a.sqsh", user=ALICE, mode=0o004)
    assert node.prolog(1, path, user=BOB).outcome.result == "copied"
    found = verified(node)
    assert (found["result"], found["against"]) == ("ok", "digests")
    assert "is not readable as " in found["detail"]


def test_bad_entry_is_evicted_though_its_redirect_cannot_be_unmounted(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = node.put("a.sqsh")
    node.prolog(1, path)
    spoil_entry(node, node.identity(path).key)

    def hangs(*args: object) -> None:
        raise Failed("redirect", "it hangs")

    with monkeypatch.context() as patch:
        patch.setattr(unmount, "unmount_binds", hangs)
        assert "its redirect is still there" in verified(node, ExitStatus.BAD)["stays"]
    assert node.entries() == set()
    assert node.prolog(2, path).outcome.result == "copied"
    assert path.read_bytes() == content()


def test_error_in_one_entry_does_not_stop_verify_of_other_entries(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [node.put(f"{name}.sqsh", content(seed)) for seed, name in enumerate("abc", 1)]
    for job, path in enumerate(paths, 1):
        node.prolog(job, path)
    real = verify.format_attribute_errors

    def fails(entry: Entry, fd: int) -> str:
        if entry.identity.path == str(paths[1]):
            raise OSError(errno.EUCLEAN, "Structure needs cleaning")
        return real(entry, fd)

    monkeypatch.setattr(verify, "format_attribute_errors", fails)
    with leased(paths[0]) as held:
        found = verdicts(node, ExitStatus.FAILED)
        assert held()
    by_path = {one["path"]: one for one in found}
    results = [by_path[str(path)]["result"] for path in paths]
    assert results == ["unverifiable", "unverifiable", "ok"]
    assert "lease" in by_path[str(paths[0])]["detail"]
    assert "Structure needs cleaning" in by_path[str(paths[1])]["error"]
    assert len(node.entries()) == 3


def test_entry_with_an_image_that_cannot_be_opened_is_evicted_by_verify(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = node.put("a.sqsh")
    node.prolog(1, path)

    def fails(copy: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(verify, "open_copy", fails)
    assert verified(node, ExitStatus.BAD)["evicted"]
    assert node.entries() == set()
    assert node.shows_source(path)
