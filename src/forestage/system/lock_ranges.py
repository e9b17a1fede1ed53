"""The bytes of one file (`NodePaths.mounting`) that processes lock before they may hang for a user.

Each kind of process has a range of the file, and in it each user some bytes. All of them are locks
of the same file, so two ranges that overlap would let one user hold up another. What the companion
locks is in `src/spank/constants.h`, which `packaging/constants` makes of this table.
"""

import msgspec

UIDS = 1 << 32  # as many user ids as Linux has


class LockRange(msgspec.Struct, frozen=True):
    """A range of the file, of which each user has `width` bytes; `start` is the byte of uid 0."""

    start: int
    width: int

    def first_byte(self, uid: int) -> int:
        """Return the first of the bytes that this user has. Pure."""
        return self.start + uid * self.width


TASK_MOUNTS = LockRange(0, 1 << 29)
"""Of processes that mount for a task: TASK_TURNS bytes, then one for each path, by its hash."""

TASK_TURNS = 8
"""So many of a user's hang on a node (src/spank/task_namespace.c)."""

USER_FILES = LockRange(1 << 61, 8)
"""Of processes that read a user's own files: so many hang on a node (hooks/container_binds)."""

NODE_MOUNTS = LockRange(1 << 62, 1)
"""Of processes that mount for the whole node (bind/redirect)."""

LOCK_RANGES = (TASK_MOUNTS, USER_FILES, NODE_MOUNTS)
