"""A block of the node's disk that cannot be read: no job after the first one fails for it."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fault import image, source_bytes

from forestage.cache import disk_errors
from forestage.commands import sweep
from forestage.commands.sweep import SweepReport
from forestage.slurm.slurm_client import SlurmClient
from forestage.system.as_user import User
from forestage.system.files import open_descriptor
from node import BOB, Node, until
from through import MIB, Copy, Shown, Through, forget_pages, here, read_fresh, shows


class Disk:
    """The node's NVMe: ext4 on a loop device over a file, of which a piece can be lost."""

    def __init__(self, node: Node, file: Path) -> None:
        self.file = file
        subprocess.run(["truncate", "-s", "96M", file], check=True)
        # A journal would be written behind what is lost, and that would be zeros then, no error.
        subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", file], check=True)
        subprocess.run(["mount", "-o", "loop", file, node.nvme], check=True)

    def lose_end_of(self, copy: Path) -> None:
        """From now on the copy's last blocks, and all that lies behind them, are I/O errors."""
        subprocess.run(["sync", "-f", copy], check=True)
        shown = subprocess.run(
            ["filefrag", "-v", "-b4096", copy], check=True, capture_output=True, text=True
        ).stdout
        rows = [re.findall(r"\d+", line) for line in shown.splitlines() if ".." in line]
        last = max(int(physical_end) for _, _, _, _, physical_end, *_ in rows)
        os.truncate(self.file, (last - 15) * 4096)
        with copy.open("rb") as file:
            forget_pages(file.fileno())


COMPLAINED_OF = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.unshare(0x10000000 | 0x00020000)  # CLONE_NEWUSER | CLONE_NEWNS
name = sys.argv[1].replace(",", "\\\\,")
for data in (f"lowerdir=/{name}", f"lowerdir=/etc,upperdir=/{name},workdir=/tmp"):
    libc.mount(b"overlay", b"/mnt", b"overlay", 0, data.encode())
"""
"""Any user has the kernel log a name: overlayfs complains of it (fs/overlayfs/params.c)."""


def is_logged(user: User, text: str) -> bool:
    """As the user, has the kernel log a line with this text; False where it does not.

    Its first word tells this line from any other.
    """
    argv = ["setpriv", f"--reuid={user.uid}", f"--regid={user.gid}", "--clear-groups"]
    subprocess.run([*argv, sys.executable, "-c", COMPLAINED_OF, text], check=True)
    with open_descriptor(disk_errors.KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK) as log:
        while True:
            try:
                if text.split()[0].encode() in os.read(log, disk_errors.LONGEST):
                    return True
            except BrokenPipeError:
                continue
            except BlockingIOError:
                return False


def swept(node: Node) -> SweepReport:
    return sweep.run_sweep(here(node), SlurmClient("", ""), False, lambda text: None)


@pytest.fixture
def nvme(node: Node, tmp_path: Path) -> Disk:
    return Disk(node, tmp_path / "nvme")


def read(path: Path) -> bytes | int:
    """What is read past the page cache, or the number of the error."""
    with path.open("rb") as file:
        forget_pages(file.fileno())
        try:
            return file.read()
        except OSError as error:
            return error.errno or 0


def test_bad_block_met_by_a_job_stops_hits_until_every_entry_was_verified(
    node: Node, nvme: Disk
) -> None:
    good, bad = node.put("a.sqsh", image(1)), node.put("b.sqsh", image(2))
    for job, path in ((1, good), (2, bad)):
        assert node.prolog(job, path).said == ("copied", "")
        node.epilog(job)
    nvme.lose_end_of(node.cache.image_path(node.identity(bad).key))

    assert node.prolog(3, bad).outcome.result == "hit"
    assert read(bad) == errno.EIO  # a plain bind tells nobody
    node.epilog(3)

    for path, data in ((bad, image(2)), (good, image(1))):
        ran = node.prolog(4, path, user=BOB)
        assert ran.ended == (0, "declined", "disk-errors")
        assert read(path) == data
        node.epilog(4)
    why = disk_errors.read_state(node.places).why
    assert why.startswith("I/O error, dev loop")

    assert [one.result for one in swept(node).verified].count("bad") == 1
    assert node.entries() == {node.identity(good).key}
    swept(node)  # reading the bad block was an error once more
    assert disk_errors.read_state(node.places).since == 0
    assert node.prolog(5, good).outcome.result == "hit"
    assert node.prolog(6, bad).outcome.result == "copied"
    assert (read(good), read(bad)) == (image(1), image(2))


def test_kernel_log_line_forged_by_a_user_declines_no_job(node: Node, nvme: Disk) -> None:
    path = node.put("a.sqsh", image(1))
    assert node.prolog(1, path).outcome.result == "copied"
    (loop,) = disk_errors.list_devices(node.cache.root)
    for between in (" ", "\n"):
        if not is_logged(BOB, f"{os.urandom(4).hex()}{between}I/O error, dev {loop}, sector 1"):
            pytest.skip("here users have no overlayfs")
    node.epilog(1)
    assert disk_errors.read_state(node.places).since == 0
    assert node.prolog(2, path).outcome.result == "hit"


def test_bad_block_met_by_the_nodes_first_job_is_detected(node: Node, nvme: Disk) -> None:
    path = node.put("a.sqsh", image(1))
    assert node.prolog(1, path).outcome.result == "copied"
    nvme.lose_end_of(node.cache.image_path(node.identity(path).key))
    assert read(path) == errno.EIO
    node.epilog(1)
    assert node.prolog(2, path).said == ("declined", "disk-errors")


def published(shown: Shown, node: Node) -> Through:
    """An image whose entry is complete, seen through the file that showed the copy."""
    through = shown(node.put("alice/image.sqsh", source_bytes()), lay=False)
    through.at = node.shared / "place"  # so that the source stays within reach
    through.at.touch()
    through.lay()
    copy = Copy(through, source_bytes())
    copy.bring(0, len(source_bytes()))
    copy.publish()
    through.kill_server()  # the part that it had open has the entry's name now
    until(lambda: has_entry(through), "the next server to open the entry")
    return through


def has_entry(through: Through) -> bool:
    entry = str(through.node.cache.image_path(through.image.key))
    links = Path(f"/proc/{through.server()}/fd").glob("*")
    return entry in {os.readlink(link) for link in links if os.path.lexists(link)}


def test_reader_of_a_bad_block_gets_the_sources_bytes_and_the_entry_is_evicted(
    node: Node, nvme: Disk, shown: Shown
) -> None:
    through = published(shown, node)
    copy = node.cache.image_path(through.image.key)
    with copy.open("rb") as held:
        nvme.lose_end_of(copy)
        assert shows(through.at, source_bytes())
        until(lambda: not node.entries(), "the entry to be evicted")
        until(lambda: os.fstat(held.fileno()).st_nlink == 0, "it to be deleted")
    assert shows(through.at, source_bytes())


def test_bad_block_of_an_entry_with_a_changed_source_is_a_read_error(
    node: Node, nvme: Disk, shown: Shown
) -> None:
    through = published(shown, node)
    copy = node.cache.image_path(through.image.key)
    with through.path.open("r+b") as source:
        source.write(image(9, len(source_bytes())))
    with copy.open("rb"):
        nvme.lose_end_of(copy)
        with pytest.raises(OSError, match="Input/output error"):
            read_fresh(through.at, len(source_bytes()) - 4096, 4096)
        assert shows(through.at, source_bytes()[:MIB])
