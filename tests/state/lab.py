"""A node and its shared file system, and all that can happen to both from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from disk import Disk
from model import MISSING, Seen, Source, Version

from boot import Boot
from forestage.cache import evict
from forestage.cache.node import Node as Here
from forestage.cache.source_image import read_identity
from forestage.clock import Clock
from forestage.config import Config, load_config
from forestage.hooks import hook_deadlines
from forestage.stage.task import CopyTask
from forestage.system import mounts
from forestage.views.through import keeper
from node import Node

NAMES = ("one", "two", "three")

Off = Literal["", "file", "enabled"]
Why = Literal["file", "enabled", "config", "cache-format"]


class Lab:
    """`sources` are below the node's shared file system; everything is wiped by `reset`."""

    def __init__(self, node: Node, boot: Boot, **config: object) -> None:
        self.node = node
        self.base = config
        self.sources: dict[str, Source] = {}
        self.tally: Counter[str] = Counter()  # what was done, for whoever wants to know
        self.disk = Disk(node.cache)
        self.broken = ""  # the reason that hooks give
        self._boot = boot
        self.reset()

    @classmethod
    @contextlib.contextmanager
    def opened(cls, node: Node, tmp_path: Path, **config: object) -> Iterator[Lab]:
        """A lab for one test; the next one is in this machine's own boot again."""
        # The model knows nothing of users.
        config = {
            "low_watermark": "60%",
            "max_user_share": "100%",
            "user_messages": "none",
            **config,
        }
        with Boot.told_by(tmp_path / "boot_id") as boot, _cold_starts():
            yield cls(node, boot, **config)

    def reset(self) -> None:
        """As on the first day."""
        self._take_all_off()
        self.unfill()
        places = self.node.places
        for folder in (self.node.server, self.node.nvme, places.run, places.events.parent):
            for path in folder.glob("*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.sources = {name: Source(self.node.shared / name) for name in NAMES}
        self.config_keys: dict[str, object] = {}
        self.configure()
        self.disk = Disk(self.node.cache)
        self._boot.again()

    def configure(self, **keys: object) -> None:
        """These keys from now on, beside those of before."""
        self.config_keys |= keys
        self.node.configure(**(self.base | self.config_keys))

    @property
    def config(self) -> Config:
        return load_config(self.node.places.etc).config

    @property
    def redirect(self) -> object:
        """As it was configured last; the file itself may be broken just now."""
        return (self.base | self.config_keys).get("redirect", "bind")

    def here(self, clock: Clock) -> Here:
        """The node as commands see it."""
        return Here.from_config(self.config, self.node.places, clock)

    def switch(self, off: Off) -> None:
        """Staging off by either switch, or on."""
        disabled = self.node.places.disabled
        disabled.unlink(missing_ok=True)
        if off == "file":
            disabled.parent.mkdir(parents=True, exist_ok=True)
            disabled.touch()
        self.configure(enabled=off != "enabled")

    def is_off(self) -> bool:
        return self.node.places.disabled.exists() or not self.config_keys.get("enabled", True)

    @contextlib.contextmanager
    def serving_nobody(self, why: Why) -> Iterator[None]:
        """Until somebody mends it: switched off, or the configuration or the cache is broken."""
        form = self.node.cache.root / "format"
        before = form.read_bytes()
        if why == "file" or why == "enabled":
            self.switch(why)
        elif why == "config":
            self.broken = why
            self.node.write_config("sources: [\n")
        else:
            self.broken = why
            form.write_bytes(b"9\n")
        try:
            yield
        finally:
            self.broken = ""
            self.switch("")
            form.write_bytes(before)

    # Sources

    def on_server(self, source: Source) -> Path:
        return self.node.server / source.path.name

    def change(self, name: str, to: Seen, in_place: bool) -> None:
        """Another node changes the source; the model learns of it."""
        source = self.sources[name]
        self.write(source, to, in_place)
        source.versions.append(to)

    def write(self, source: Source, to: Seen, in_place: bool) -> None:
        """Only the files: for changes of which the model learns later."""
        file = self.on_server(source)
        before = file.stat() if file.exists() else None

        def work() -> None:
            if to is MISSING:
                file.unlink(missing_ok=True)
                return
            target = file if in_place and file.exists() else file.with_suffix(".new")
            with target.open("r+b" if target == file else "wb") as handle:
                handle.truncate(len(to.data))
                handle.write(to.data)
            os.chown(target, to.owner.uid, to.owner.gid)
            target.chmod(to.mode)
            times = target.stat()
            if before is not None and in_place and before.st_size == times.st_size:
                times = before  # as `touch -r` leaves it: only the ctime differs
            os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
            # A coarse clock may not have ticked since the last change, which nobody could notice:
            # against that a stager waits, and these machines have no time for waiting.
            while before is not None and _same(before, target.stat()):
                os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
            target.replace(file)

        self.node.elsewhere(work)

    def shown(self, source: Source) -> Seen:
        """What lies at the path on the node, redirects and all."""
        try:
            with source.path.open("rb") as handle:
                facts = os.fstat(handle.fileno())
                data = handle.read()
        except FileNotFoundError:
            return MISSING
        known = [v.owner for v in source.versions if v is not None and v.owner.uid == facts.st_uid]
        assert known, f"{source.path} belongs to uid {facts.st_uid}"
        assert facts.st_gid == known[0].gid
        return Version(data, known[0], facts.st_mode & 0o7777)

    def key(self, source: Source) -> str:
        """Of what lies there now; "" for nothing."""
        try:
            fd = os.open(self.on_server(source), os.O_RDONLY)
        except FileNotFoundError:
            return ""
        try:
            return read_identity(fd, str(source.path)).key
        finally:
            os.close(fd)

    # The machine

    def reboot(self) -> None:
        """Jobs, mounts and /run are gone; the disks stay."""
        self._take_all_off()
        shutil.rmtree(self.node.places.run, ignore_errors=True)
        self.disk.grows_old()
        self._boot.again()

    def lose_cache(self) -> None:
        """Somebody has deleted it all, or the disk is a new one after a reboot."""
        self.disk.is_deleted()
        for path in self.node.nvme.glob("*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def fill(self, folder: Path, leave: int) -> None:
        """Somebody else writes to the disk until only `leave` bytes are free."""
        disk = os.statvfs(folder)
        size = disk.f_bavail * disk.f_frsize - leave
        if size > 0:
            fd = os.open(folder / "ballast", os.O_WRONLY | os.O_CREAT)
            try:
                os.posix_fallocate(fd, os.fstat(fd).st_size, size)
            finally:
                os.close(fd)

    def unfill(self) -> None:
        for folder in (self.node.nvme, self.node.places.root):
            (folder / "ballast").unlink(missing_ok=True)

    def filled(self) -> bool:
        return any((f / "ballast").exists() for f in (self.node.nvme, self.node.places.root))

    def _take_all_off(self) -> None:
        ours = (f"{self.node.shared}/", f"{self.node.places.redirects}/")
        for mount in reversed(mounts.list_mounts()):
            if mount.point.startswith(ours):
                mounts.umount(mount.point)

    # Accounts

    def used(self) -> int:
        """Bytes that entries and parts take, as forestage counts them."""
        cache = self.node.cache
        return evict.measure_space(cache, cache.list_entries(), self.config).used

    def walked(self) -> int:
        """The same, walked here."""
        cache = self.node.cache
        return sum(_blocks(d) for top in (cache.entries, cache.parts) for d in top.iterdir())


@contextlib.contextmanager
def _cold_starts() -> Iterator[None]:
    """No small image is waited for. None gets a keeper, but the word that it has one: what those
    do is in tests/faults."""

    def start(task: CopyTask, wait: bool = True) -> Path:
        return task.node.places.through / task.key / "sock"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hook_deadlines, "SHORT_WAIT", 0.0)
        patch.setattr(keeper, "start_keeper", start)
        yield


def _blocks(top: Path) -> int:
    paths = [top, *top.rglob("*")]
    return sum(path.lstat().st_blocks for path in paths) * 512


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) == (
        other.st_ino,
        other.st_size,
        other.st_mtime_ns,
        other.st_ctime_ns,
    )
