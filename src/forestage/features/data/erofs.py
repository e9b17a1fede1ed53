"""A tree as the image of an EROFS file system: where each file lies, and all else. Pure.

    block 0                superblock at 1024
    blocks 1 …             inodes, 64 bytes each and an ACL; short links behind theirs
    …                      directories, long links
    … to the end           files, each from a block's beginning on

Plain files in one piece each, nothing compressed: a file's bytes are copied to their place as they
are. Hard links are entries of one inode, which counts those of the tree. The kernel (5.4 and later)
mounts it read-only with owners, modes, ACLs and times. Root writes it from a manifest: nothing that
a user wrote is parsed by the kernel as a file system.

The format: Documentation/filesystems/erofs.rst, fs/erofs/erofs_fs.h of Linux.
"""

import stat
import struct
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence

import msgspec

from forestage.errors import Declined
from forestage.features.data.manifest import DirectoryManifest, ManifestEntry

BLOCK = 4096
MAGIC = 0xE0F5E1E2
MOST_BLOCKS = 1 << 32
ROOT = 2  # number of the root's inode; readers skip what has the number 0
SLOT = 32  # bytes that one step of an inode's number is long
_SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23s")
_INODE = struct.Struct("<HHHHQIIIIQII16s")
_DIRENT = struct.Struct("<QHBB")
_PLAIN, _INLINE = 0, 2  # where an inode's data are
_ACL_INDEX = 2  # the name of an access ACL
_KINDS = {stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFLNK: 7}


class ErofsLayout(msgspec.Struct, frozen=True):
    """`head` is all before the files' bytes; file number `numbers[i]` begins at `starts[i]`."""

    head: bytes
    size: int  # of the whole, in bytes
    starts: tuple[int, ...]
    numbers: tuple[int, ...]

    def find_file_index(self, at: int) -> int:
        """The place in `starts` of the last file that begins at or before `at`; -1: none does."""
        return bisect_right(self.starts, at) - 1


class _InodeDraft:
    """An inode while it gets its place."""

    def __init__(self, file: ManifestEntry, acl: bytes) -> None:
        self.file = file
        self.children: list[tuple[bytes, int]] = []
        self.acl = _format_acl(acl)
        self.at = 0  # bytes from the first inode's block on
        self.block = 0
        self.names = 1  # of a directory it says that nobody counted
        self.blocks: list[bytes] = []  # of a directory, or a long link

    @property
    def inline(self) -> bytes:
        link = self.file.link
        fits = _INODE.size + len(self.acl) + len(link) <= BLOCK
        return link if fits else b""

    @property
    def number(self) -> int:
        return self.at // SLOT


def compute_layout(manifest: DirectoryManifest, acls: Mapping[bytes, bytes]) -> ErofsLayout:
    """Where everything goes; `acls` by path. The same for the same manifest, on every node.

    Raises Declined for what is too large. What this takes of memory, names decide, not sizes.
    """
    nodes = [_InodeDraft(file, acls.get(file.path, b"")) for file in manifest.files]
    for number, first in manifest.links:
        nodes[number] = nodes[first]
        nodes[first].names += 1
    further = dict(manifest.links)
    inodes = {number: node for number, node in enumerate(nodes) if number not in further}
    where = {file.path: number for number, file in enumerate(manifest.files)}
    for number, file in enumerate(manifest.files[1:], 1):
        above, _, name = file.path.rpartition(b"/")
        nodes[where[above]].children.append((name, number))
    end = _place_inodes(inodes.values())
    block = 1 + -(-end // BLOCK)
    for node in inodes.values():
        if node.file.is_dir:
            parent = nodes[where[node.file.path.rpartition(b"/")[0]]]
            node.blocks = _format_directory(node, parent, nodes)
        elif node.file.link and not node.inline:
            node.blocks = [node.file.link]
        node.block = block
        block += len(node.blocks)
    head = block * BLOCK
    starts, numbers = [], []
    for number, node in inodes.items():
        if node.file.is_file and node.file.size:
            node.block = block
            starts.append(block * BLOCK)
            numbers.append(number)
            block += -(-node.file.size // BLOCK)
    if block > MOST_BLOCKS:
        raise Declined("too-large", f"{manifest.path} has more than EROFS can hold, 16 TiB")
    digest = bytes.fromhex(manifest.digest)
    made = _format_head(inodes.values(), head, block, digest)
    return ErofsLayout(made, block * BLOCK, tuple(starts), tuple(numbers))


def _place_inodes(nodes: Collection[_InodeDraft]) -> int:
    """Gives each inode its place; returns where the last one ends."""
    end = ROOT * SLOT
    for node in nodes:
        node.at = -(-end // _INODE.size) * _INODE.size
        size = _INODE.size + len(node.acl) + len(node.inline)
        # What is inline must not go over a block's end.
        if node.inline and node.at % BLOCK + size > BLOCK:
            node.at = -(-node.at // BLOCK) * BLOCK
        end = node.at + size
    return end


def _format_directory(
    node: _InodeDraft, above: _InodeDraft, nodes: Sequence[_InodeDraft]
) -> list[bytes]:
    """The blocks of a directory: entries, sorted by name, then their names."""
    named = [(name, nodes[number]) for name, number in node.children]
    blocks: list[bytes] = []
    batch: list[tuple[bytes, _InodeDraft]] = []
    room = BLOCK
    for name, child in sorted([*named, (b".", node), (b"..", above)], key=lambda one: one[0]):
        if len(name) + _DIRENT.size > room:
            blocks.append(_format_entries(batch).ljust(BLOCK, b"\0"))
            batch, room = [], BLOCK
        batch.append((name, child))
        room -= len(name) + _DIRENT.size
    return [*blocks, _format_entries(batch)]


def _format_entries(batch: Sequence[tuple[bytes, _InodeDraft]]) -> bytes:
    at = _DIRENT.size * len(batch)
    entries = b""
    for name, child in batch:
        kind = _KINDS[stat.S_IFMT(child.file.mode)]
        entries += _DIRENT.pack(child.number, at, kind, 0)
        at += len(name)
    return entries + b"".join(name for name, _ in batch)


def _format_head(nodes: Collection[_InodeDraft], size: int, blocks: int, digest: bytes) -> bytes:
    head = bytearray(size)
    _SUPER.pack_into(
        *(head, 1024),
        *(MAGIC, 0, 0, BLOCK.bit_length() - 1, 0, ROOT, len(nodes)),
        *(0, 0, blocks, 1, 0),  # its times are 0, the inodes begin in block 1
        *(digest[:16], b"forestage"),  # UUID and name
        *((0,) * 9),  # no feature that an old kernel would refuse
        b"",
    )
    for node in nodes:
        data = _format_inode(node) + node.acl + node.inline
        at = BLOCK + node.at
        head[at : at + len(data)] = data
        for number, block in enumerate(node.blocks):
            at = (node.block + number) * BLOCK
            head[at : at + len(block)] = block
    return bytes(head)


def _format_inode(node: _InodeDraft) -> bytes:
    file = node.file
    seconds, ns = divmod(file.mtime_ns, 1_000_000_000)
    inline = bool(node.inline)
    size = file.size or len(file.link)
    if file.is_dir:
        size = BLOCK * (len(node.blocks) - 1) + len(node.blocks[-1])
    # The bits that give another's rights mean nothing where set-id is not honoured.
    mode = file.mode & ~(stat.S_ISUID | stat.S_ISGID) if file.is_file else file.mode
    return _INODE.pack(
        1 | (_INLINE if inline else _PLAIN) << 1,
        len(node.acl) // 4 - 2 if node.acl else 0,
        mode,
        0,
        size,
        0 if inline else node.block,
        node.number & 0xFFFFFFFF,
        file.uid,
        file.gid,
        seconds & 0xFFFFFFFFFFFFFFFF,
        ns,
        node.names,
        b"",
    )


def _format_acl(acl: bytes) -> bytes:
    """An inode's attributes, if it has an ACL: 12 bytes of header, and the one entry."""
    if not acl:
        return b""
    entry = struct.pack("<BBH", 0, _ACL_INDEX, len(acl)) + acl
    return (b"\0" * 12 + entry).ljust(-(-(12 + len(entry)) // 4) * 4, b"\0")
