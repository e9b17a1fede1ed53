"""The images that a site's sources hold, for users who look for one: `forestage images`.

As the calling user, who finds what they may list. By name, as opening each file would be a storm of
its own: what ends like an image is one. A label is the first line of the file IMAGE.label beside
it, which whoever publishes an image may write. Shallow and bounded, and no link is followed.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from forestage.system import as_user
from forestage.system.files import open_descriptor
from forestage.system.terminal import (
    OutputBlock,
    TextLine,
    TextTable,
    escape_control_characters,
    format_count,
)
from forestage.units import format_size

SUFFIXES = (".sqsh", ".squashfs", ".sqfs")
LABEL = ".label"
MAX_DEPTH = 4  # directories below one that is named
MAX_NAMES = 50_000  # names; a shared file system has far more
MAX_LABEL = 200  # bytes


class ListedImage(msgspec.Struct, frozen=True):
    """An image: `size` in bytes; `owner` is a number where this host has no name for it."""

    path: str
    size: int
    owner: str
    label: str = ""


class ImageListing(msgspec.Struct, frozen=True):
    """What was found; `cut_off`: there was more to look at than MAX_NAMES names."""

    images: tuple[ListedImage, ...]
    below: tuple[str, ...]
    cut_off: bool = False


def list_images_below(folders: Sequence[str], most: int = MAX_NAMES) -> ImageListing:
    """Lists the images below these directories, those of the upper ones first."""
    found: list[ListedImage] = []
    looked = 0
    for entry in _walk_directories(folders):
        looked += 1
        if looked > most:
            break
        if entry.name.endswith(SUFFIXES):
            # One that has gone since is none.
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    found.append(_read_image(entry))
    return ImageListing(tuple(found), tuple(map(escape_control_characters, folders)), looked > most)


def _walk_directories(folders: Sequence[str]) -> Iterator["os.DirEntry[str]"]:
    """The names below, level by level, in order; what cannot be listed has none."""
    level = list(dict.fromkeys(folders))
    for _ in range(MAX_DEPTH + 1):
        below: list[str] = []
        for folder in level:
            with contextlib.suppress(OSError), os.scandir(folder) as names:
                for entry in sorted(names, key=lambda one: one.name):
                    yield entry
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                        below.append(entry.path)
        level = below


def _read_image(entry: "os.DirEntry[str]") -> ListedImage:
    """Raises OSError."""
    facts = entry.stat(follow_symlinks=False)
    owner = as_user.find_user_name(facts.st_uid) or str(facts.st_uid)
    return ListedImage(
        escape_control_characters(entry.path), facts.st_size, owner, _read_label(entry.path + LABEL)
    )


def _read_label(path: str) -> str:
    """The first line of the file; "" where there is none to read."""
    with (
        contextlib.suppress(OSError),
        open_descriptor(Path(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd,
    ):
        return escape_control_characters(
            os.read(fd, MAX_LABEL).decode(errors="replace").split("\n")[0].strip()
        )
    return ""


def format_output(found: ImageListing) -> list[OutputBlock]:
    """Pure: what `images` prints."""
    below = ", ".join(found.below)
    lines: list[OutputBlock] = []
    if found.cut_off:
        lines = [TextLine(""), TextLine("There is more below: name a directory to look into.")]
    if not found.images:
        ends = ", ".join(SUFFIXES)
        return [TextLine(f"No file below {below} that this user can see ends in {ends}."), *lines]
    rows = [(one.path, format_size(one.size), one.owner, one.label) for one in found.images]
    head = f"{format_count(len(rows), 'image')} below {below}"
    return [
        TextLine(head, heading=True),
        TextTable(("path", "size", "owner", "label"), rows),
        *lines,
    ]
