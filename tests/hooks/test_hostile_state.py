"""Whatever lies under the name of a file of ours: at most a miss, and nobody else's loss."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from forestage import events
from forestage.cache import allocation, digest, source_image
from forestage.cache.layout import Cache, Entry
from forestage.cache.node import Node as Here
from forestage.cache.part import PartRecord, boot_id
from forestage.cache.source_image import SourceImage
from forestage.clock import Clock
from forestage.commands import sweep
from forestage.commands.command_context import ExitStatus
from forestage.commands.main import CommandContext, main
from forestage.config import load_config
from forestage.hooks.boundary import HookRun
from forestage.slurm.slurm_client import SlurmClient
from forestage.sources import opening
from node import ALICE, BOB, Node, content, read_as

CHUNK = 1 << 20

Damage = Callable[[Path], None]


@pytest.fixture
def damage(kind: str, victim: Path) -> Damage:
    """Puts something else in the place of a file or a directory of ours."""

    def damaged(path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if kind == "cut":
            path.write_bytes(b'{"job": 1, "user": {"na')
        elif kind == "garbage":
            path.write_bytes(b"\xff\xfe\0" * 100)
        elif kind == "full directory":
            (path / "image").mkdir(parents=True)
            (path / "owner.json").write_text("{")
        elif kind == "link":
            path.symlink_to(victim)
        elif kind == "fifo":
            os.mkfifo(path)

    return damaged


def each(*kinds: str) -> pytest.MarkDecorator:
    """One damage for each path through the code: other kinds are refused where records are read.

    (tests/unit/test_fuzz_records.py has those.)
    """
    return pytest.mark.parametrize("kind", kinds)


IN_ENTRY = ("entry.json", "image", "map", "used", "")  # the last is the entry itself
IN_PART = ("owner.json", "image", "map", "spare", "peers", "source-failed", "")


def put(node: Node, name: str) -> SourceImage:
    """An image on the shared file system, as a look sees it."""
    path = node.put(f"alice/{name}", content(sum(name.encode())))
    found, fd = opening.open_descriptor_as_user(str(path), ALICE, [str(node.shared)], None, 10.0)
    assert fd is not None
    os.close(fd)
    return source_image.check_image(found, None)


def publish(node: Node, name: str, digests: bool = False) -> SourceImage:
    """The same with a copy in the cache."""
    wanted = put(node, name)
    part = begin(node, wanted)
    shutil.copyfile(wanted.path, part / "image")
    os.chown(part / "image", ALICE.uid, ALICE.gid)
    (part / "image").chmod(wanted.access.mode)
    taken = digest.digest_chunk((part / "image").read_bytes()) if digests else b""
    (part / "map").write_bytes(taken or (part / "map").read_bytes())
    whole = digest.digest_image(taken) if digests else ""
    node.cache.publish(
        Entry(wanted.key, wanted.identity, wanted.access, 1.0, "chunks", CHUNK, whole)
    )
    return wanted


def begin(node: Node, wanted: SourceImage) -> Path:
    """A part of it that could be resumed: its owner has died just now."""
    part = node.cache.part(wanted.key)
    part.write_record(PartRecord(1, boot_id(), wanted, CHUNK, "chunks", job=99, since=0.0))
    allocation.reserve_part(part, wanted.size, CHUNK, {0})
    part.peers.write_bytes(b"5")
    return part.directory


@pytest.fixture
def victim(node: Node) -> Iterator[Path]:
    """Bob's own file, to which links lead; nothing we do may change or show it."""
    victim = node.server / node.put("bob/secret", content(77), BOB, 0o600).relative_to(node.shared)
    before = victim.stat()
    yield victim
    after = victim.stat()
    assert victim.read_bytes() == content(77)
    for fact in ("st_uid", "st_gid", "st_mode", "st_mtime_ns", "st_ctime_ns", "st_nlink"):
        assert getattr(after, fact) == getattr(before, fact), fact


def shows(node: Node, wanted: SourceImage) -> bool:
    return Path(wanted.path).read_bytes() == content(sum(Path(wanted.path).name.encode()))


@pytest.mark.cases(2)
@each("gone", "cut", "garbage", "full directory", "link", "fifo")
def test_damaged_cache_files_cost_a_miss_and_no_intact_entry(
    node: Node, damage: Damage, capfd: pytest.CaptureFixture[str]
) -> None:
    """One entry, or one part, for each of its files; all of them damaged in the same way."""
    node.configure()
    node.cache.prepare(require_mount=True)
    well = publish(node, "well")
    entries = [publish(node, f"entry-{file}") for file in IN_ENTRY]
    parts = [put(node, f"part-{file}") for file in IN_PART]
    for wanted in parts:
        begin(node, wanted)
    for wanted, file in zip(entries, IN_ENTRY, strict=True):
        damage(node.cache.entry_dir(wanted.key) / file)
    for wanted, file in zip(parts, IN_PART, strict=True):
        damage(node.cache.part_dir(wanted.key) / file)
    for directory in (node.cache.entries, node.cache.parts, node.cache.evicted):
        damage(directory / "stray")
        damage(directory / f"{well.key}.0")

    asked = [well, *entries, *parts]
    ran = node.prolog(1, comment="stage=" + ",".join(wanted.path for wanted in asked))

    # Neither job nor node pay for it.
    assert ran.code == 0
    assert ran.outcomes[0].result == "hit"
    assert {outcome.result for outcome in ran.outcomes} <= {"hit", "copied"}, ran.outcomes
    assert all(shows(node, wanted) for wanted in asked)
    assert all(read_as(ALICE, Path(wanted.path)) is not None for wanted in asked[-2:])
    epilog = node.epilog(1)
    assert (epilog.code, *epilog.said) == (0, "released", "")
    assert node.binds() == {}
    # The next job finds all of it healed.
    again = node.prolog(2, comment="stage=" + ",".join(wanted.path for wanted in asked))
    assert {outcome.result for outcome in again.outcomes} == {"hit"}
    node.epilog(2)
    assert list(node.cache.evicted.iterdir()) == []
    assert all(line.isprintable() for line in capfd.readouterr().err.splitlines())


@each("cut", "full directory")
def test_stray_and_damaged_files_in_the_cache_are_evicted_first(node: Node, damage: Damage) -> None:
    node.cache.prepare(require_mount=True)
    well = publish(node, "well")
    damage(node.cache.entries / "stray")
    damage(node.cache.entry_dir(publish(node, "spoilt").key) / "entry.json")
    # As much as `well` takes, and what the journal of a directory may: the rest has to go.
    node.configure(max_size=well.size * 3 // 2, low_watermark="100%")
    held = node.prolog(1, well.path)
    assert held.said == ("hit", "")
    node.epilog(1)
    assert node.entries() == {well.key}


SPOILT = ("entry.json", "image", "map", "used", "")


def spoil_each(node: Node, damage: Damage) -> dict[str, SourceImage]:
    """An entry of an earlier boot for each of its files, which is damaged in it; a whole one."""
    node.configure(cache="/mnt/nvme/forestage")
    node.cache.prepare(require_mount=True)
    made = {file: publish(node, f"entry-{file}", digests=True) for file in (*SPOILT, "none")}
    for file, wanted in made.items():
        (node.cache.entry_dir(wanted.key) / "boot").write_text("an earlier one")
        if file != "none":
            damage(node.cache.entry_dir(wanted.key) / file)
    damage(node.cache.entries / "stray")
    return made


@each("gone", "cut", "full directory", "fifo")
def test_sweep_after_a_restart_evicts_only_damaged_entries(node: Node, damage: Damage) -> None:
    made = spoil_each(node, damage)
    here = Here.from_config(load_config(node.places.etc).config, node.places, Clock())
    done = sweep.run_sweep(here, SlurmClient(""), False, lambda text: None)
    assert done.problems == ()
    assert node.entries() == {made[file].key for file in ("none", "used")}
    assert sum(one.result == "ok" for one in done.verified) == 2
    again = sweep.run_sweep(here, SlurmClient(""), False, lambda text: None)
    assert (again.verified, again.problems) == ((), ())


@each("gone", "garbage", "fifo")
def test_verify_all_evicts_only_damaged_entries(node: Node, damage: Damage) -> None:
    made = spoil_each(node, damage)
    (node.server / "alice/entry-map").unlink()  # so that its digests are looked at
    world = CommandContext(node.places, Clock())
    done = CliRunner().invoke(main, ["verify", "--all"], obj=world, catch_exceptions=False)
    assert done.exit_code == ExitStatus.BAD
    assert node.entries() == {made[file].key for file in ("none", "used")}


@each("cut", "garbage", "full directory")
def test_damaged_lease_lets_other_jobs_be_served_and_evicts_nothing(
    node: Node, damage: Damage
) -> None:
    held, other = put(node, "held"), put(node, "other")
    assert node.prolog(1, held.path).code == 0
    damage(node.leases.lease_file(1))

    assert node.prolog(2, other.path).ended == (0, "copied", "")
    assert shows(node, other)
    # It may protect anything; the reason and what to do are told.
    epilog = node.epilog(2)
    assert epilog.code == 0
    assert node.lease(2) is None
    assert other.path not in node.binds()
    assert held.key in node.entries()
    node.configure(max_size=1)
    told = node.epilog(2).outcome
    assert (told.result, told.reason) == ("failed", "lease-damaged")
    assert str(node.leases.lease_file(1)) in told.detail
    assert "remove it if the job is gone" in told.detail
    assert held.key in node.entries()
    assert node.prolog(3, put(node, "new").path).said == ("failed", "lease-damaged")
    assert node.prolog(4, held.path).outcome.result == "hit"
    node.epilog(4)
    # Its own job takes it away, unread.
    node.configure()
    own = node.epilog(1)
    assert (own.code, *own.said) == (0, "released", "")
    assert not os.path.lexists(node.leases.lease_file(1))
    assert node.binds() == {}


@each("cut", "fifo")
def test_requeued_job_with_its_own_damaged_lease_reads_the_source(
    node: Node, damage: Damage
) -> None:
    wanted = put(node, "image")
    node.prolog(1, wanted.path)
    damage(node.leases.lease_file(1))
    assert node.prolog(1, wanted.path).ended == (1, "failed", "lease-damaged")
    assert shows(node, wanted)
    assert node.epilog(1).code == 0
    assert node.prolog(1, wanted.path).said == ("hit", "")


@each("cut", "garbage", "fifo")
def test_cache_with_a_damaged_format_file_is_refused_and_unchanged(
    node: Node, damage: Damage, capfd: pytest.CaptureFixture[str]
) -> None:
    node.cache.prepare(require_mount=True)
    well = publish(node, "well")
    damage(node.cache.root / "format")
    ran = node.prolog(1, well.path)
    assert ran.ended == (1, "failed", "cache-format")
    assert str(node.cache.root) in ran.outcome.detail
    assert len(capfd.readouterr().err) < 1000
    assert node.entries() == {well.key}
    assert shows(node, well)
    assert (node.epilog(1).code, node.binds()) == (0, {})


@pytest.mark.parametrize("name", ["entries", "parts", "evicted", "locks"])
def test_missing_directory_of_the_cache_is_created_again(node: Node, name: str) -> None:
    node.cache.prepare(require_mount=True)
    wanted = publish(node, "image")
    shutil.rmtree(node.cache.root / name)
    ran = node.prolog(1, wanted.path)
    assert ran.said == (("copied" if name == "entries" else "hit"), "")
    assert node.epilog(1).said == ("released", "")


@pytest.mark.cases(2)
@each("cut", "link", "fifo")
def test_damaged_event_log_or_cachedir_tag_does_not_stop_a_job(node: Node, damage: Damage) -> None:
    """Events, CACHEDIR.TAG, and what a killed hook left where redirects are made."""
    node.cache.prepare(require_mount=True)
    node.places.redirects.mkdir(parents=True)
    node.places.events.parent.mkdir(parents=True)
    for spoilt in (
        node.cache.root / "CACHEDIR.TAG",
        node.places.redirects / "leftover",
    ):
        damage(spoilt)
    wanted = put(node, "image")
    assert node.prolog(1, wanted.path).said == ("copied", "")
    assert node.epilog(1).said == ("released", "")
    assert node.binds() == {}
    damage(node.places.events)
    # Without `Node`, which would read the events.
    prolog = HookRun("prolog", node.environ(2, wanted.path), time.monotonic())
    prolog.run(node.places, Clock())
    assert node.shows_entry(Path(wanted.path), wanted.key)
    HookRun("epilog", node.environ(2), time.monotonic()).run(node.places, Clock())
    assert node.binds() == {}


def test_garbage_in_the_event_log_hides_no_event_of_the_epilog(node: Node) -> None:
    wanted = put(node, "image")
    node.prolog(1, wanted.path)
    with node.places.events.open("ab") as file:
        file.write(b'{"user":"\xff"}\n')
        file.write(b'{"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n" + b"[" * 9000)
    node.epilog(1)
    assert [event.hook for event in events.read_events(node.places.events)][-1] == "epilog"


@pytest.mark.cases(2)
@pytest.mark.parametrize("who", ["theirs", "everybody's", "a group's", "everybody's by a link"])
def test_cache_below_a_directory_writable_by_other_users_is_refused(node: Node, who: str) -> None:
    """Whoever renames the cache away can have root write into a directory of his own."""
    scratch = node.nvme / "scratch"
    scratch.mkdir()
    if who == "theirs":
        os.chown(scratch, BOB.uid, BOB.gid)
    elif who == "a group's":
        os.chown(scratch, 0, BOB.gid)
        scratch.chmod(0o775)
    else:
        scratch.chmod(0o777)
    cache = scratch / "forestage"
    if "link" in who:
        (scratch / "deep").mkdir()
        (node.nvme / "link").symlink_to(scratch / "deep")
        cache = node.nvme / "link/forestage"
    node.configure(cache=f"/mnt/nvme/{cache.relative_to(node.nvme)}")
    node.cache = Cache(cache, node.places.claims)
    wanted = put(node, "image")
    ran = node.prolog(1, wanted.path)
    assert ran.ended == (1, "failed", "cache-not-ours")
    assert str(scratch) in ran.outcome.detail
    scratch.chmod(0o1777)
    os.chown(scratch, 0, 0)
    assert node.prolog(1, wanted.path).said == ("copied", "")
