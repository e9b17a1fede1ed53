"""What forestage takes for a squashfs image: bytes with the beginning of its superblock."""

from __future__ import annotations

MAGIC, VERSION = b"hsqs", b"\4\0\0\0"  # at 0, and major and minor at 28; at 40 its length


def beginning(data: bytes) -> bytes:
    """The bytes with magic and version in their place; too few of them stay as they are."""
    if len(data) < 32:
        return data
    size = len(data).to_bytes(8, "little")
    return (MAGIC + data[4:28] + VERSION + data[32:40] + size + data[48:])[: len(data)]
