"""Has the disk kept what it was given? Entries of an earlier boot are read once, by the sweep.

They were synced before they got their names. But disks have been seen to forget what they had
confirmed, when the power went. The digests of the copying tell; the source is not read, since a
whole cluster may have restarted at once.
"""

import contextlib
import os
from pathlib import Path

from forestage import entries, records, verify
from forestage.entries import Item
from forestage.node import Node
from forestage.part import boot_id
from forestage.verify import Tell, Verdict

PROVEN = b"proven"  # in an entry's `boot`, in the place of the boot that wrote it


def due(node: Node) -> tuple[Item, ...]:
    """The entries that an earlier boot has written and nobody has read since."""
    good = (boot_id().encode(), PROVEN)
    items = entries.gather(node).items
    return tuple(item for item in items if _written_in(node.cache.entry_dir(item.key)) not in good)


def prove(node: Node, item: Item, tell: Tell) -> Verdict:
    """Compares an entry with its digests, past the page cache; a bad one is evicted.

    What is right is not read again by another sweep. Raises OSError.
    """
    with contextlib.ExitStack() as undo:
        # Opened first: the note is to lie beside what was read, whatever has that name by then.
        here = os.open(node.cache.entry_dir(item.key), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        undo.callback(os.close, here)
        (verdict,) = verify.verify(node, [item], False, tell, "after a restart").verdicts
        if verdict.result == "ok":
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            note = os.open("boot", flags, 0o600, dir_fd=here)
            undo.callback(os.close, note)
            os.write(note, PROVEN)
    return verdict


def _written_in(directory: Path) -> bytes:
    """The boot that wrote an entry; what cannot be read is no boot's."""
    try:
        return records.read(directory / "boot")
    except (FileNotFoundError, NotADirectoryError, records.Damaged):
        return b""
