"""What the machine knows by itself: every version a source has had, and what each job may see."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import squashfs
from forestage.system.as_user import User
from node import ALICE, BOB


@lru_cache(maxsize=256)
def content(seed: int, size: int) -> bytes:
    """Bytes that no other seed gives: an image's, or for every eighth seed those of no image."""
    data = random.Random(seed).randbytes(size)
    return data if seed % 8 == 7 else squashfs.beginning(data)


@dataclass(frozen=True)
class Version:
    """A source at one time: its bytes and who may read them."""

    data: bytes
    owner: User
    mode: int

    def readable(self, user: User) -> bool:
        if user.uid == self.owner.uid:
            return bool(self.mode & 0o400)
        return bool(self.mode & (0o040 if user.gid == self.owner.gid else 0o004))


MISSING = None
Seen = Version | None
"""What lies at a path; None: nothing."""


@dataclass
class Source:
    """One path on the shared file system, and all that has ever lain there, oldest first."""

    path: Path
    versions: list[Seen] = field(default_factory=lambda: [MISSING])

    @property
    def now(self) -> Seen:
        return self.versions[-1]

    @property
    def latest(self) -> int:
        return len(self.versions) - 1


@dataclass(frozen=True)
class Stay:
    """A job's view of one path: no version older than `since` may be shown to it."""

    source: Source
    since: int


@dataclass
class Job:
    """A job that Slurm knows on this node."""

    number: int
    stays: dict[Path, Stay] = field(default_factory=dict)

    @property
    def user(self) -> User:
        return owner_of(self.number)


def owner_of(job: int) -> User:
    """A job's number says whose it is: a requeued one is the same user's."""
    return ALICE if job % 2 else BOB


def allowed(stay: Stay, user: User, shown: Seen) -> bool:
    """Whether a job that began with `stay` may meet this at its path."""
    after = stay.source.versions[stay.since :]
    if shown in after:
        return True
    # Bytes that a user may not read make no difference to them.
    denied = shown is not None and not shown.readable(user)
    return denied and any(v is not None and not v.readable(user) for v in after)


def refusal(source: Source, user: User, redirect: object) -> str:
    """Why the source as it is now is not staged for this user; "" if it is to be."""
    now = source.now
    if now is None:
        return "missing"
    if not now.readable(user):
        return "no-permission"
    if not now.data:
        return "empty"
    return "" if redirect != "bind" or now.data.startswith(squashfs.MAGIC) else "not-squashfs"
