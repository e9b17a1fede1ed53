"""Loop devices: files of the cache as disks, so that a step can mount them. Root only.

By losetup(8). A device stays until `detach`; while it is mounted somewhere, until the last unmount.
Mounts of one device share one file system in the kernel, and so one page cache, wherever they are.
"""

import os
from pathlib import Path

import msgspec

from forestage.errors import Failed
from forestage.system import run

TIMEOUT = 30.0  # seconds; it asks the kernel only


class Loop(msgspec.Struct, frozen=True, rename={"file": "back-file", "inode": "back-ino"}):
    """A device in use. `file` ends in " (deleted)" where it has no name any more."""

    name: str
    file: str | None
    inode: int | None
    disk: str | None = msgspec.field(name="back-maj:min", default=None)

    def is_on(self, directory: os.stat_result) -> bool:
        """Whether its file lies on the file system of this directory, of which stat(2) says it."""
        return (self.disk or "").strip() == _disk(directory)

    def is_of(self, facts: os.stat_result) -> bool:
        """Whether it shows the file of which stat(2) says this."""
        return (self.inode, (self.disk or "").strip()) == (facts.st_ino, _disk(facts))


class _Listed(msgspec.Struct, frozen=True):
    loopdevices: list[Loop] = []


def attach(file: Path, read_only: bool) -> str:
    """Returns the device that shows this file; the one that does already, if there is one.

    Past the page cache, where the file's disk can: the mounted file system has one of its own.
    Raises Failed.
    """
    options = ["--read-only"] if read_only else []
    for direct in ("on", "off"):  # tmpfs cannot
        argv = ["losetup", "--find", "--show", "--nooverlap", *options, f"--direct-io={direct}"]
        ran = run.run([*argv, os.fspath(file)], timeout=TIMEOUT)
        if ran.code == 0:
            return ran.out.strip()
    raise Failed("loop", f"no loop device for {file}: {ran.explained()}")


def file_of(facts: os.stat_result) -> str:
    """Pure: how the companion knows the file of a device, of which stat(2) says this."""
    return f"{facts.st_dev}:{facts.st_ino}"


def detach(name: str) -> None:
    """Lets go of a device; what is mounted stays so until its last unmount. Raises Failed."""
    ran = run.run(["losetup", "--detach", name], timeout=TIMEOUT)
    if ran.code != 0 and any(one.name == name for one in attached()):
        raise Failed("loop", f"{name} stays: {ran.explained()}")


def attached() -> list[Loop]:
    """All loop devices of this machine that are in use. Raises Failed."""
    columns = "NAME,BACK-FILE,BACK-INO,BACK-MAJ:MIN"
    ran = run.run(["losetup", "--list", "--json", "--output", columns], timeout=TIMEOUT)
    if ran.code != 0:
        raise Failed("loop", f"loop devices cannot be listed: {ran.explained()}")
    return msgspec.json.decode(ran.out or "{}", type=_Listed).loopdevices


def _disk(facts: os.stat_result) -> str:
    return f"{os.major(facts.st_dev)}:{os.minor(facts.st_dev)}"
