"""Are the images that jobs use most spread over Lustre's servers? For `check`."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from forestage.errors import Failed
from forestage.finding import Finding
from forestage.system import run
from forestage.system import tree as tree
from forestage.system.tree import Files, Filesystem
from forestage.units import format_size
from forestage.uses import Used

MOST = 5  # images
LARGE = 1 << 30  # bytes; a smaller one takes no time from any server
FEW = 4  # stripes; with so many a file's servers are no bottleneck for some nodes
TIMEOUT = 5.0  # seconds for one question to the metadata server
# lustre's lfs-setstripe(1): one component to the end of the file (-E), on all OSTs (-c).
STRIPE = ("lfs", "setstripe", "-E", "-1", "-c", "-1", "-S", "1M")


class Striped(msgspec.Struct, frozen=True):
    """An image on Lustre, and over how many OSTs it is spread; -1 is all."""

    image: Used
    stripes: int


def gather(
    files: Files, images: tuple[Used, ...], filesystems: tuple[Filesystem, ...]
) -> tuple[Striped, ...]:
    """Asks `lfs` about the large images that are used most; nothing where there is no lfs."""
    large = [used for used in images if used.size >= LARGE][:MOST]
    found = []
    for used in large:
        under = tree.under(filesystems, used.path)
        if under is not None and under.kind == "lustre":
            stripes = _stripes(str(files.at(used.path)))
            found += [] if stripes is None else [Striped(used, stripes)]
    return tuple(found)


def _stripes(path: str) -> int | None:
    try:
        ran = run.run(["lfs", "getstripe", "--stripe-count", path], timeout=TIMEOUT)
    except (Failed, OSError):  # not installed
        return None
    # A file of several components has a line for each; the last ones hold most of its bytes.
    words = ran.out.split() if ran.code == 0 else []
    numbers = [int(word) for word in words if word.lstrip("-").isdigit()]
    return numbers[-1] if numbers else None


def findings(striped: tuple[Striped, ...]) -> Iterator[Finding]:
    """Pure."""
    for one in striped:
        path = Path(one.image.path)
        if not 0 <= one.stripes < FEW:
            continue
        osts = "1 OST" if one.stripes == 1 else f"{one.stripes} OSTs"
        yield Finding(
            "striping",
            "warning",
            f"{path} ({format_size(one.image.size)}) lies on {osts}",
            "All nodes of a cold start read it from there: 23 GiB took 64 nodes 200 s with Lustre's"
            " default, 74 s from 32 OSTs",
            f"{' '.join(STRIPE)} {path.parent} (for new files; then write {path.name}"
            " anew: cp it to another name there, and mv that over it)",
        )
