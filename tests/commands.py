"""A node's commands on a folder of their own: configuration, cache, leases, sources."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner, Result

from forestage.cache import allocation, digest, disk_errors
from forestage.cache.layout import Entry
from forestage.cache.lease import EntryUse, Lease
from forestage.cache.node import Node
from forestage.cache.part import Part, PartRecord, boot_id
from forestage.cache.source_image import AccessRights, FileIdentity, SourceImage, read_acl
from forestage.clock import Clock
from forestage.commands.command_context import ExitStatus
from forestage.commands.main import CommandContext, main
from forestage.config import load_config
from forestage.paths import NodePaths
from forestage.stage import chunks
from forestage.stage.chunks import CopyTuning, ReadableSource
from forestage.system import records
from forestage.system.as_user import User

NOW = 1_800_000_000.0
CHUNK = 1 << 20


class Frozen(Clock):
    def wall(self) -> float:
        return NOW


class Site:
    """A node of its own below a temporary root: configuration, cache, leases, sources."""

    def __init__(self, root: Path, config: str = "") -> None:
        self.places = NodePaths(root)
        self.world = CommandContext(self.places, Frozen())
        self.lustre = root / "lustre"
        self.lustre.mkdir(exist_ok=True)
        self.places.etc.mkdir(parents=True, exist_ok=True)
        self.file = self.places.etc / "forestage.yaml"
        self.configure(config)

    def configure(self, text: str) -> None:
        self.file.write_text(f"cache: /nvme/forestage\nrequire_mount: false\n{text}")
        self.file.chmod(0o644)

    @property
    def node(self) -> Node:
        return Node.from_config(load_config(self.places.etc).config, self.places, self.world.clock)

    def run(self, *args: str) -> Result:
        done = CliRunner().invoke(main, [*args], obj=self.world)
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    def json(self, *args: str, code: int = ExitStatus.OK) -> Any:
        done = self.run(*args, "--json")
        assert done.exit_code == code, done.output
        return json.loads(done.stdout)

    def start_disk_doubt(self) -> None:
        """Record that the cache's disk has lost data."""
        self.places.run.mkdir(parents=True, exist_ok=True)
        state = disk_errors.DiskErrorState(since=NOW, why="test")
        records.write(self.places.disk_errors, msgspec.json.encode(state))

    def image(self, name: str, data: bytes = b"squashfs") -> Path:
        path = self.lustre / name
        path.write_bytes(data)
        return path

    def look(self, path: Path) -> SourceImage:
        """What `path` is now."""
        fd = os.open(path, os.O_RDONLY)
        facts = os.fstat(fd)
        access = AccessRights(facts.st_uid, facts.st_gid, facts.st_mode & 0o7777, read_acl(fd))
        os.close(fd)
        identity = FileIdentity(
            str(path), facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
        )
        return SourceImage(identity, access)

    def part(self, path: Path, **facts: Any) -> tuple[Part, PartRecord]:
        """A part of what `path` is now, with its owner's record but not a byte yet."""
        cache, wanted = self.node.cache, self.look(path)
        cache.prepare(False)
        part = cache.part(wanted.key)
        known = {"chunk": CHUNK, "engine": "chunks", "job": 1, "since": 0.0, **facts}
        owner = PartRecord(os.getpid(), boot_id(), wanted, **known)
        part.write_record(owner)
        size = wanted.size
        allocation.reserve_part(part, size, CHUNK, set(range(-(-size // CHUNK))))
        return part, owner

    def publish(self, path: Path, age: float = 60.0, expected: float = 0.0) -> str:
        """Copies what `path` is now as a stager does; last used `age` seconds ago."""
        part, owner = self.part(path)
        wanted = owner.image
        with path.open("rb") as file:
            source = ReadableSource(file.fileno(), None, wanted.size)
            chunks.copy_chunks(source, part, CopyTuning(threads=2, chunk=CHUNK), threading.Event())
        access = wanted.access
        os.chown(part.image, access.uid, access.gid)
        part.image.chmod(access.mode)
        whole = digest.digest_image(part.read_digests())
        entry = Entry(
            wanted.key,
            wanted.identity,
            access,
            NOW - age,
            "chunks",
            CHUNK,
            whole,
            expected=expected,
        )
        self.node.cache.publish(entry)
        self.node.cache.record_use(wanted.key, NOW - age)
        return wanted.key

    def forget_checksums(self, key: str) -> None:
        """Leave a copy as a build did that had `digest: false`."""
        place, entry = self.node.cache.entry_dir(key), self.node.cache.find_entry_by_key(key)
        (place / "map").write_bytes(digest.UNKNOWN * ((place / "map").stat().st_size // 16))
        bare = msgspec.structs.replace(entry, digest="")
        (place / "entry.json").write_bytes(msgspec.json.encode(bare))

    def lease(self, job: int, *uses: EntryUse) -> None:
        user = User("alice", 1000, 1000)
        self.node.leases.write_lease(Lease(job, user, NOW - 90, str(self.node.cache.root), uses))

    def keys(self) -> set[str]:
        return {entry.name for entry in self.node.cache.entries.iterdir()}
