"""Processes we fork: what a child must let go of before it may outlive, or outhang, its parent."""

import os


def let_go(keep: set[int]) -> None:
    """Drops what the child would hold for as long as it lives, all descriptors but `keep`.

    That is the hook's stdout and stderr (slurmd waits until all who hold them are gone) and every
    lock (flock(2) belongs to the open file, so a copy of the descriptor keeps it).
    """
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))
