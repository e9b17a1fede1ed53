"""Hooks and stagers without processes: each child that forestage forks is a thread here.

A thread has ids and a mount namespace of its own if it asks the kernel itself, so the kernel, the
mounts and the users' rights stay real, and a whole job takes some milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec.structs import replace

from forestage import log, trace
from forestage.stage import fstab, stager
from forestage.stage.task import CopyTask
from forestage.system import as_user, lock, mounts
from forestage.system.as_user import User
from forestage.system.daemon import StartChannel, StartReport

T = TypeVar("T")

# glibc's functions change the ids of all threads; these calls change those of the caller.
SETGROUPS, SETRESUID, SETRESGID = {
    "x86_64": (116, 117, 119),
    "aarch64": (159, 147, 149),
}[platform.machine()]

_libc = ctypes.CDLL(None, use_errno=True)


class Killed(BaseException):
    """SIGKILL, as near as a thread can come to it: what holds is let go, nothing else is done."""


@dataclass
class Mishap:
    """At the `nth` passing of a trace point, `deed` happens: it may raise Killed."""

    point: str
    nth: int
    deed: Callable[[], None]

    def __call__(self, name: str) -> None:
        if name == self.point:
            self.nth -= 1
            if self.nth == 0:
                trace.listener = None  # what it does itself passes points as well
                self.deed()


@contextlib.contextmanager
def expecting(mishap: Mishap | None) -> Iterator[None]:
    trace.listener = mishap
    try:
        yield
    finally:
        trace.listener = None


def without_processes(patch: pytest.MonkeyPatch) -> None:
    """From now on nothing is forked."""
    patch.setattr(as_user, "set_effective_user", _become)
    patch.setattr(as_user, "with_effective_user", _acting)
    patch.setattr(as_user, "run_in_child_with_socket", _ask)
    patch.setattr(stager, "start_stager", _start)
    patch.setattr(
        fstab, "read_fstab_binds", lambda copy, user: ()
    )  # whose limits would be this process'
    patch.setattr(mounts, "list_mounts", _current)
    patch.setattr(log, "write_log_line", lambda line, by_slurm: None)
    patch.setattr(os, "fsync", os.fstat)  # nobody pulls the plug here


def _become(user: User) -> None:
    groups = os.getgrouplist(user.name, user.gid) if user.name else [user.gid]
    _sys(SETGROUPS, len(groups), (ctypes.c_uint32 * len(groups))(*groups))
    _effective(user.uid, user.gid)


@contextlib.contextmanager
def _acting(user: User) -> Iterator[None]:
    _become(user)
    try:
        yield
    finally:
        _effective(0, 0)


def _effective(uid: int, gid: int) -> None:
    if uid == 0:
        _sys(SETRESUID, -1, uid, -1)
    _sys(SETRESGID, -1, gid, -1)
    if uid != 0:
        _sys(SETRESUID, -1, uid, -1)


def _sys(number: int, *arguments: object) -> None:
    if _libc.syscall(number, *arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ask(
    work: Callable[[], as_user.ChildResult[T]],
    answer: type[T],
    timeout: float,
    keep: tuple[int, ...] = (),
    idle: Callable[[], None] | None = None,
    tries: int = 1,
) -> tuple[T, socket.socket]:
    found: list[as_user.ChildResult[T]] = []
    failed: list[BaseException] = []

    def live() -> None:
        try:
            found.append(work())
        except BaseException as error:  # handed on
            failed.append(error)

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as undo, theirs, _all_closed():
        undo.callback(ours.close)
        thread = threading.Thread(target=live)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        value, fds = found[0]
        socket.send_fds(theirs, [b"answer"], fds)
        undo.pop_all()
    return value, ours


@contextlib.contextmanager
def _all_closed() -> Iterator[None]:
    """As the end of a process closes whatever it has opened."""
    before = _open_now()
    try:
        yield
    finally:
        for fd in _open_now() - before:
            os.close(fd)


def _open_now() -> set[int]:
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    # Without the one that listed them.
    return {fd for fd in listed if os.path.lexists(f"/proc/self/fd/{fd}")}


def _start(task: CopyTask) -> StartChannel:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, contextlib.suppress(Killed), _all_closed():
        opened = task.opened
        if opened.descriptor_socket is not None:  # the hook keeps its own, as after a fork
            opened = replace(opened, descriptor_socket=opened.descriptor_socket.dup())
        task = replace(task, opened=opened).with_descriptor()
        hook = StartChannel(theirs)
        try:
            with lock.held(task.node.cache.key_lock(task.key), 0):
                hook.send(stager.copy_and_report(task, threading.Event()))
        except lock.LockTimeout:
            hook.send(StartReport("busy"))
        else:
            stager._mount_for_waiting_jobs(task)
    return StartChannel(ours)


def _current() -> list[mounts.MountInfo]:
    # "self" is the main thread.
    return mounts.parse_mountinfo(os.fsdecode(Path("/proc/thread-self/mountinfo").read_bytes()))
