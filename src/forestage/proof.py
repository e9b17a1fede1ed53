"""Has the disk kept what it was given? Entries of an earlier boot are read once, by the sweep.

They were synced before they got their names. But disks have been seen to forget what they had
confirmed, when the power went. The digests of the copying tell; the source is not read, since a
whole cluster may have restarted at once.
"""

import contextlib
import errno
import os
import shutil
from pathlib import Path

from forestage import entries, verify
from forestage.cache.node import Node
from forestage.cache.part import boot_id
from forestage.entries import Item
from forestage.system import records
from forestage.verify import Tell, Verdict

PROVEN = b"proven"  # in an entry's `boot`, in the place of the boot that wrote it


def due(node: Node) -> tuple[Item, ...]:
    """The entries that an earlier boot has written and nobody has read since."""
    good = (boot_id().encode(), PROVEN)
    items = entries.gather(node).items
    return tuple(item for item in items if _written_in(node.cache.entry_dir(item.key)) not in good)


def prove(node: Node, item: Item, tell: Tell) -> Verdict | None:
    """Compares an entry with its digests, past the page cache; a bad one is evicted.

    What is right is not read again by another sweep; None: it is gone. Raises OSError.
    """
    with contextlib.ExitStack() as undo:
        note = None
        if item.entry is not None:  # else it is bad, whatever else is there
            # Opened first: the note is to lie beside what was read, whatever has that name by
            # then. And what cannot be noted would be read again by every sweep.
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            try:
                here = os.open(node.cache.entry_dir(item.key), flags)
            except FileNotFoundError:  # evicted since the sweep began
                return None
            undo.callback(os.close, here)
            note = _open_note(here)
            undo.callback(os.close, note)
        (verdict,) = verify.verify(node, [item], False, tell, "after a restart").verdicts
        if note is not None and verdict.result == "ok":
            os.pwrite(note, PROVEN, 0)
            os.ftruncate(note, len(PROVEN))
    return verdict


def _open_note(here: int) -> int:
    """Opens an entry's `boot`, as it is. What else has that name goes. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open("boot", flags, 0o600, dir_fd=here)
    except OSError as error:
        if error.errno == errno.EISDIR:
            shutil.rmtree(f"/proc/self/fd/{here}/boot")
        elif error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a FIFO, a socket
            os.unlink("boot", dir_fd=here)
        else:
            raise
    return os.open("boot", flags, 0o600, dir_fd=here)


def _written_in(directory: Path) -> bytes:
    """The boot that wrote an entry; what cannot be read is no boot's."""
    try:
        return records.read(directory / "boot")
    except (FileNotFoundError, NotADirectoryError, records.Damaged):
        return b""
