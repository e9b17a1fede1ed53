"""The source as the stager has it: opened by the job's user, settled, and still the same file?

What asks the file server is asked as that user, in a child: root may be squashed there. Only the
bytes are read by root himself, from what the user has opened.
"""

import os

import msgspec

from forestage.cache import image
from forestage.cache.image import Identity, Image, Look
from forestage.config import Config
from forestage.errors import Declined
from forestage.stage.chunks import Source, Unreadable
from forestage.system import as_user

LOOK_TIMEOUT = 60.0  # seconds; nobody waits for the stager's own looks

# A file server's clock may tick in seconds: a change within the same tick leaves the identity as it
# is. So a copy starts only when the source's last change is a full tick old.
COARSE_TICK_NS = 2_000_000_000
FINE_TICK_NS = 20_000_000
# Its clock and ours may differ. By no more than this: what munge makes is good for five minutes,
# so a node whose clock is further off runs no jobs (munged(8), --max-ttl).
SKEW_NS = 300_000_000_000


class Facts(msgspec.Struct, frozen=True):
    """What the file server says of the open source now. `local`: it is a disk of this node."""

    identity: Identity
    local: bool


def settling(wanted: Image, now: float) -> float:
    """Pure: seconds to wait until a further change of the source must show in its times.

    A full tick from now on, unless the last change is long past: waiting for the rest of a tick
    would trust that the server's clock is ours.
    """
    # A user can set mtime, to full seconds as well. What he cannot set tells how fine the clock is.
    ctime = wanted.identity.ctime_ns
    tick = FINE_TICK_NS if ctime % 1_000_000_000 else COARSE_TICK_NS
    age = int(now * 1_000_000_000) - max(ctime, wanted.identity.mtime_ns)
    return tick / 1_000_000_000 if age < tick + SKEW_NS else 0.0


def open_source(looked: Look, config: Config) -> Source:
    """The source as the engines want it: past the page cache as well, where that is a gain.

    Raises Declined where it is no longer what was looked at, Unreadable, as_user.TooSlow.
    """
    found = must_be_same(looked)
    direct = None
    if config.direct == "on" or (config.direct == "auto" and found.local):
        direct = open_direct(looked, LOOK_TIMEOUT)
    return Source(looked.source, direct, looked.image.size)


def must_be_same(looked: Look) -> Facts:
    """Looks at the open file once more. Raises Declined if it is another, Unreadable, TooSlow."""

    def work() -> as_user.Found[Facts]:
        as_user.become(looked.user)
        facts = os.fstat(looked.source)
        # Major 0 is no block device: what a network file system does past its cache is its affair.
        return Facts(image.identity(facts, looked.image.path), os.major(facts.st_dev) != 0), []

    try:
        found, _ = as_user.call(work, Facts, LOOK_TIMEOUT, keep=(looked.source,))
    except OSError as error:
        raise Unreadable(error) from None
    if found.identity != looked.image.identity:
        raise changed(looked.image.path, difference(looked.image.identity, found.identity))
    return found


def open_direct(looked: Look, timeout: float) -> int | None:
    """The source once more, past the page cache; None where its file system cannot do that.

    As the user again: root may be squashed on the shared file system. Raises as_user.TooSlow.
    """

    def work() -> as_user.Found[None]:
        as_user.become(looked.user)
        flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
        return None, [os.open(f"/proc/self/fd/{looked.source}", flags)]

    try:
        return as_user.call(work, type(None), timeout, keep=(looked.source,))[1][0]
    except OSError:
        return None


def changed(path: str, how: str = "") -> Declined:
    """Pure: the source is no longer the file that was asked for; `how` where that helps."""
    return Declined("changed", f"{path} was changed while it was copied" + (how and f": {how}"))


def difference(was: Identity, now: Identity) -> str:
    """Pure: what an admin must know of a file that seems changed each time; else nothing."""
    if msgspec.structs.replace(now, inode=was.inode) == was:
        return "only its inode number is another, as if its file system gave a new one at each look"
    return ""
