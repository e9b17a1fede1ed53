"""Layouts of files on Lustre: over how many servers a file is spread."""

from pathlib import Path

import msgspec


class StripeLayout(msgspec.Struct, frozen=True):
    """A Lustre layout: over how many OSTs (-1: all), in stripes of which size, as lfs takes it."""

    stripes: int = -1
    size: str = "1M"


def format_setstripe_command(layout: StripeLayout, path: Path) -> list[str]:
    """Return the command: one component up to the end of the file (lfs-setstripe(1): -E). Pure."""
    words = ["lfs", "setstripe", "-E", "-1", "-c", str(layout.stripes), "-S", layout.size]
    return [*words, str(path)]
