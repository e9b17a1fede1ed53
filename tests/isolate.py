#!/usr/bin/python3
"""Runs a command in namespaces of its own: `tests/isolate.py COMMAND…`, for ./test, ./demo, bench/.

What the command has mounted or started is gone when it ends, however it ends: with the first
process of a PID namespace the kernel ends all others, and a mount namespace ends with its last
process. In it every user can traverse to the checkout, wherever that lies: tests and jobs become
other users, who need its .venv, src and bench. No mode changes on the disk.

An ordinary user can have no such namespaces, and becomes nobody else: the command runs as it is.
Standard library only: it also runs without .venv.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
TRAVERSABLE, READABLE = 0o111, 0o055  # bits of a directory's mode: for all users; for all but root

CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x2, 0x4, 0x8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
AWAITED = (signal.SIGCHLD, *PASSED_ON)

_libc = ctypes.CDLL(None, use_errno=True)


def main(command: Sequence[str]) -> int:
    if os.geteuid() != 0:
        os.execvp(command[0], command)
    if TREE.stat().st_mode & READABLE != READABLE:
        return complain(f"{TREE} is closed to users, whom tests become (chmod -R go+rX {TREE})")
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    try:
        _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWPID), "unshare")
        mount("none", "/", flags=MS_REC | MS_PRIVATE)
        open_way(TREE)
    except OSError as error:
        return complain(f"no namespaces for {command[0]}: {error}")
    init = os.fork()
    return follow(init) if init else follow(start_inside(command))


def complain(problem: str) -> int:
    print(f"{Path(sys.argv[0]).stem}: {problem}", file=sys.stderr)
    return 1


# In both namespaces


def start_inside(command: Sequence[str]) -> int:
    """As the first process of the PID namespace; the PID of the command there.

    The command has a session of its own: what a terminal sends to a whole process group reaches
    it once, by `follow`.
    """
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "prctl")
    # By their names forestage knows its processes, and tests of that are called python3.
    _check(_libc.prctl(PR_SET_NAME, b"isolate"), "prctl")
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os._exit(126 + complain(f"{command[0]}: {error}"))
    return child


def follow(child: int) -> int:
    """Passes signals on to a child until it ends, and reaps orphans; its exit code, as a shell's.

    Without this a command that is the first process itself would not get SIGTERM, for which it
    has no handler, and its orphans would stay zombies.
    """
    while True:
        number = signal.sigwait(AWAITED)
        if number != signal.SIGCHLD:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
            continue
        pid = -1
        while pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code


# The way to the checkout


def find_closed(tree: Path) -> Path | None:
    """The topmost directory above `tree` that not every user can traverse; None if all can."""
    closed = (folder for folder in reversed(tree.parents) if not _is_traversable(folder))
    return next(closed, None)


def open_way(tree: Path) -> None:
    """Covers the topmost closed directory, in this mount namespace, by an overlay of itself.

    In the overlay directories are opened. The tree is bound over its own path there, so that what
    is written in it goes to the disk; what is written beside it does not.
    """
    closed = find_closed(tree)
    if closed is None:
        return
    here, old = Path.cwd(), closed.stat()
    # By descriptor: both will be covered, and overlay's options know no comma in a path.
    lower, source = (os.open(path, os.O_PATH | os.O_CLOEXEC) for path in (closed, tree))
    mount("tmpfs", closed, "tmpfs", data="mode=0700")
    os.chdir(closed)
    for layer in ("upper", "work"):
        Path(layer).mkdir()
    os.chown("upper", old.st_uid, old.st_gid)  # the overlay's root is as this is
    Path("upper").chmod(stat.S_IMODE(old.st_mode))
    layers = f"lowerdir=/proc/self/fd/{lower},upperdir=upper,workdir=work"
    mount("overlay", closed, "overlay", data=layers)
    tree.mkdir(parents=True, exist_ok=True)  # missing where another mount lies between the two
    open_parents(tree)
    mount(f"/proc/self/fd/{source}", tree, flags=MS_BIND | MS_REC)
    for descriptor in (lower, source):
        os.close(descriptor)
    os.chdir(here)


def open_parents(tree: Path, root: Path = Path("/")) -> None:
    """Lets every user traverse to `tree` below `root`, where overlays keep modes to themselves."""
    for folder in tree.parents[:-1]:
        inside = root / folder.relative_to("/")
        if not _is_traversable(inside):
            inside.chmod(stat.S_IMODE(inside.stat().st_mode) | TRAVERSABLE)


def _is_traversable(folder: Path) -> bool:
    return folder.stat().st_mode & TRAVERSABLE == TRAVERSABLE


def mount(
    source: str, target: str | Path, kind: str | None = None, flags: int = 0, data: str = ""
) -> None:
    words = (source, os.fspath(target), kind)
    from_, to, type_ = (word and os.fsencode(word) for word in words)
    result = _libc.mount(from_, to, type_, ctypes.c_ulong(flags), os.fsencode(data))
    _check(result, f"mount {kind or source} at {target}")


def _check(result: int, what: str) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
