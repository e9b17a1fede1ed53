"""Acts as the job's user, in a child process that may hang, be killed and be left behind.

`run_in_child`, `run_in_child_with_socket` and `run_each_in_child` run work in such a child, as root
until the work calls `set_effective_user`; so runs what is root's own and may hang.
`set_effective_user` changes effective ids only. The real and saved ids stay root's, so the user can
neither signal nor ptrace the child (kill(2), ptrace(2)): whatever it reads for the cache stays
untouched.
"""

import array
import contextlib
import functools
import os
import pwd
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import msgspec

from forestage.errors import Declined, Failed
from forestage.system import forked_child
from forestage.system.files import open_descriptor
from forestage.units import is_utf8

T = TypeVar("T")

ChildResult = tuple[T, list[int]]
"""What the child found: a value, and open file descriptors that go with it."""

_LONGEST = 256 * 1024  # bytes of an answer: an ACL has up to 64 KiB, more as text
_MAX_FDS = 4
_IDLE = 1.0  # seconds between two calls of who waits
_LEAST = 0.2  # seconds for a child, however little is left: a healthy file system answers by then
_TRIES = 2  # of a child that a signal ends
_ENDS = 1.0  # seconds for the end of a child that has closed its socket
_MOST_GROUPS = 20  # that a message lists


class User(msgspec.Struct, frozen=True, omit_defaults=True):
    """The job's owner. `gid` is the primary group.

    `groups` are all groups, the primary one first, and `home` is the home directory that the node
    has for the user; both are None as long as the name service was not asked
    (`query_name_service`). `of_step`: Slurm gave these groups to the step, and the node may know
    others.
    """

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] | None = None
    home: str | None = None
    of_step: bool = False

    def __str__(self) -> str:
        """The user with their groups, for a message that says what they may not do. Pure."""
        name = self.name or f"uid {self.uid}"
        if self.groups is None:
            return name
        listed = ", ".join(map(str, self.groups[:_MOST_GROUPS]))
        more = len(self.groups) - _MOST_GROUPS
        listed += f" and {more} more" if more > 0 else ""
        whose = "of this step" if self.of_step else "that this node knows"
        return f"{name} with the groups {whose} ({listed})"

    def without_groups(self) -> "User":
        """Return the user as records keep them: groups may change while a record is kept. Pure."""
        return User(self.name, self.uid, self.gid)


class ChildTimeout(Declined):
    """The child did not answer in time: the file system under it hangs, most likely.

    No fault of the node: the request is declined.
    """

    exit_code: ClassVar[int] = 6

    def __init__(self, what: str) -> None:
        super().__init__("source-hangs", f"the source does not answer: {what}")


class ChildKilled(Declined):
    """A signal ended the child each time it was tried.

    No fault of the node: an epilog that kills a user's processes takes a child with their ids as
    well, and a child in a job's cgroup may be the kernel's choice when memory ends there.
    """

    exit_code: ClassVar[int] = 6

    def __init__(self, number: int) -> None:
        what = f"a process of forestage was killed by signal {number}"
        super().__init__("killed", what, "does an epilog kill all processes of a user?")


class DeadlinePassed(Declined):
    """The caller has no time left: nobody was asked, so nothing is known of any file system."""

    exit_code: ClassVar[int] = 6

    def __init__(self) -> None:
        super().__init__("deadline", "the time for this was used up before it was its turn")


class _ChildReply(msgspec.Struct):
    """What crosses the socket: a value, the errno and file name of an OSError, or why not."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    errno: int = 0
    filename: bytes = b""  # it need not be text
    reason: str = ""
    detail: str = ""
    node_failed: bool = False


def user_from_uid(uid: int, gid: int) -> User:
    """The user of this number, with their own group; with `gid` where the node knows none such."""
    try:
        known = pwd.getpwuid(uid)
    except KeyError:
        return User("", uid, gid)
    return User(known.pw_name, uid, known.pw_gid)


def find_user_name(uid: int) -> str:
    """The user's name; "" where the node knows none of this number."""
    return user_from_uid(uid, 0).name


def find_home_directory(user: User) -> str:
    """The home directory that the node has for a user; "" where it knows none of this number."""
    if user.home is not None:
        return user.home
    try:
        return pwd.getpwuid(user.uid).pw_dir
    except KeyError:
        return ""


def list_group_ids(user: User) -> list[int]:
    """All groups of a user, the primary one among them."""
    if user.groups is not None:
        return [*user.groups]
    return os.getgrouplist(user.name, user.gid) if user.name else [user.gid]


def query_name_service(user: User, timeout: float) -> User:
    """Return the user with name, groups and home as the node's name service has them.

    Each question may take seconds where a directory service is slow, and no process that acts as
    this user has to ask again. Groups that Slurm gave a step stay. Raises Declined (slow-names)
    after `timeout` seconds, DeadlinePassed, ChildKilled, Failed.
    """

    def work() -> ChildResult[User]:
        name, home = user.name, ""
        with contextlib.suppress(KeyError):
            known = pwd.getpwuid(user.uid)
            name, home = name or known.pw_name, known.pw_dir
        named = msgspec.structs.replace(user, name=name)
        listed = tuple(dict.fromkeys((user.gid, *list_group_ids(named))))
        if not is_utf8(name + home):  # no user's real one
            return msgspec.structs.replace(user, groups=listed, home=""), []
        return msgspec.structs.replace(named, groups=listed, home=home), []

    try:
        found, line = run_in_child_with_socket(work, User, timeout)
    except ChildTimeout:
        whose = user.name or f"uid {user.uid}"
        what = f"the node's name service took more than {timeout:.1f} s to say who {whose} is"
        raise Declined("slow-names", what, f"time getent initgroups {whose}") from None
    line.close()
    return found


def set_effective_user(user: User) -> None:
    """Takes on the user's effective ids and groups, for file access, until the process ends."""
    # Groups first: they can only be set while the effective uid is still root's.
    if os.geteuid() == 0:
        os.setgroups(list_group_ids(user))
    os.setegid(user.gid)
    os.seteuid(user.uid)


@contextlib.contextmanager
def with_effective_user(user: User) -> Iterator[None]:
    """Takes the user's effective ids on for some file access, in a child of `run_in_child`."""
    uid, gid = os.geteuid(), os.getegid()
    set_effective_user(user)
    try:
        yield
    finally:
        os.seteuid(uid)
        os.setegid(gid)


def open_path_as_root_or_user(path: str, user: User) -> int:
    """An O_PATH descriptor of what lies at `path`, as root or, where root is squashed, as the user.

    Call it in a child of `run_in_child`. Raises OSError.
    """
    flags = os.O_PATH | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except PermissionError:
        with with_effective_user(user):
            return os.open(path, flags)


def resolve_links(path: str) -> str:
    """Returns where a path leads, without links; the path itself where that is unknown.

    Not realpath(3): opening the root of a file system in this way asks its server nothing, so one
    that hangs does not matter.
    """
    try:
        with open_descriptor(path, os.O_PATH) as handle:
            return os.readlink(f"/proc/self/fd/{handle}")
    except OSError:
        return path


class ChildProcess:
    """A child that does `work` beside us; to be asked for its answer once, or ended.

    `work` decides by `set_effective_user` when it stops being root; of the descriptors open here it
    has only `keep`.
    """

    def __init__(
        self, work: Callable[[], ChildResult[Any]], keep: tuple[int, ...] = (), tries: int = _TRIES
    ) -> None:
        self._begin = functools.partial(_fork_child, work, keep)
        self._tries = tries
        self._pid, self._line = self._begin()

    def wait_for_reply(
        self, reply_type: type[T], timeout: float, idle: Callable[[], None] | None = None
    ) -> tuple[T, socket.socket]:
        """As `run_in_child_with_socket`, once it has begun: within `timeout` seconds from now."""
        end = time.monotonic() + max(timeout, _LEAST)
        while True:
            self._tries -= 1
            try:
                return self._wait_for_one_reply(reply_type, timeout, end, idle)
            except ChildKilled:
                if not self._tries or time.monotonic() >= end:
                    raise
            self._pid, self._line = self._begin()

    def _wait_for_one_reply(
        self, reply_type: type[T], timeout: float, end: float, idle: Callable[[], None] | None
    ) -> tuple[T, socket.socket]:
        ours = self._line
        with contextlib.ExitStack() as undo:
            undo.callback(_kill_and_reap, self._pid)
            on_error = undo.enter_context(contextlib.ExitStack())
            on_error.callback(ours.close)
            data = _peek_reply(ours, timeout, end, idle)
            if not data:
                raise _explain_death(self._pid)
            got = msgspec.json.decode(data, type=_ChildReply)
            if got.errno:
                raise OSError(got.errno, os.strerror(got.errno), os.fsdecode(got.filename) or None)
            if got.reason:
                raise (Failed if got.node_failed else Declined)(got.reason, got.detail)
            value = msgspec.json.decode(got.value, type=reply_type)
            on_error.pop_all()
            return value, ours

    def kill(self) -> None:
        """Of one that was not asked."""
        self._line.close()
        _kill_and_reap(self._pid)


def run_in_child_with_socket(
    work: Callable[[], ChildResult[T]],
    reply_type: type[T],
    timeout: float,
    keep: tuple[int, ...] = (),
    on_idle: Callable[[], None] | None = None,
    tries: int = _TRIES,
) -> tuple[T, socket.socket]:
    """Runs `work` in a child; returns its value, decoded as `reply_type`, and a socket.

    The descriptors that `work` opened stay queued in the socket until `receive_descriptors`. Never
    take one just to close it: close(2) blocks on a hung file server, discarding the socket does
    not. OSError, Declined and Failed of `work` are raised again here. `on_idle` is called each
    second of the wait. A child that a signal ends is tried again, `tries` times in all: 1 is for
    work that must not be done twice. Raises ChildTimeout after `timeout` seconds, DeadlinePassed
    where there are none, ChildKilled where a signal ended each child, Failed where one died without
    an answer otherwise.
    """
    if timeout <= 0:
        raise DeadlinePassed
    return ChildProcess(work, keep, tries).wait_for_reply(reply_type, timeout, on_idle)


def run_each_in_child(
    works: Sequence[Callable[[], T]],
    reply_type: type[T],
    timeout: float,
    total: float,
    at_once: int,
    on_done: Callable[[int, T | None], None] = lambda number, value: None,
) -> list[T | None]:
    """Runs each of `works` in a child of its own, `at_once` of them together; returns their values.

    None for one that died, failed, or did not answer within `timeout` seconds, or by the end of the
    `total` for all. One that a signal ends is tried once more. A child that hangs is killed and
    left behind; it keeps no other waiting. `on_done` is called with the number and value of each as
    soon as it has ended.
    """
    found: list[T | None] = [None] * len(works)
    left = list(enumerate(works))[::-1]
    tries = [_TRIES] * len(works)
    running: dict[socket.socket, tuple[int, int, float]] = {}  # number, pid, until
    end = time.monotonic() + total
    while True:
        while left and len(running) < at_once and time.monotonic() < end:
            number, work = left.pop()
            tries[number] -= 1
            pid, ours = _fork_child(_without_descriptors(work), ())
            running[ours] = number, pid, min(end, time.monotonic() + timeout)
        if not running:
            for number, _ in left:
                on_done(number, None)
            return found
        first = min(until for _, _, until in running.values())
        answered = _wait_readable([*running], first - time.monotonic())
        for ours, (number, pid, until) in list(running.items()):
            again = False
            if ours in answered:
                data = ours.recv(_LONGEST)
                again = (
                    not data and tries[number] > 0 and isinstance(_explain_death(pid), ChildKilled)
                )
                got = msgspec.json.decode(data, type=_ChildReply) if data else _ChildReply(errno=1)
                if not (got.errno or got.reason):
                    found[number] = msgspec.json.decode(got.value, type=reply_type)
            elif time.monotonic() < until:
                continue
            del running[ours]
            ours.close()
            _kill_and_reap(pid)
            if again:
                left.append((number, works[number]))
            else:
                on_done(number, found[number])


def _without_descriptors(work: Callable[[], T]) -> Callable[[], ChildResult[T]]:
    return lambda: (work(), [])


def _fork_child(
    work: Callable[[], ChildResult[T]], keep: tuple[int, ...]
) -> tuple[int, socket.socket]:
    """The child that does `work`, and the socket on which its answer comes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        _run_child(work, theirs, keep)
    theirs.close()
    return pid, ours


def receive_descriptors(line: socket.socket) -> list[int]:
    """The descriptors that wait in a line of `run_in_child_with_socket`.

    This process' end of it is closed.

    They stay in it for other holders of the line: a second stager, when the first was killed.
    """
    fds = array.array("i")
    with line:
        # By hand: socket.recv_fds of Python 3.11 takes flags and forgets them.
        space = socket.CMSG_LEN(_MAX_FDS * fds.itemsize)
        _, control, _, _ = line.recvmsg(_LONGEST, space, socket.MSG_PEEK | socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def run_in_child(
    work: Callable[[], ChildResult[T]],
    reply_type: type[T],
    timeout: float,
    keep: tuple[int, ...] = (),
    tries: int = _TRIES,
) -> ChildResult[T]:
    """`run_in_child_with_socket` and `receive_descriptors` in one.

    It is for descriptors that are safe to close.
    """
    value, line = run_in_child_with_socket(work, reply_type, timeout, keep, tries=tries)
    return value, receive_descriptors(line)


def _run_child(
    work: Callable[[], ChildResult[T]], theirs: socket.socket, keep: tuple[int, ...]
) -> NoReturn:
    """The child's whole life. It must never return into the hook's code above it."""
    try:
        forked_child.close_descriptors_except({theirs.fileno(), *keep})
        fds: list[int] = []
        try:
            value, fds = work()
            answer = _ChildReply(value=msgspec.Raw(msgspec.json.encode(value)))
        except OSError as error:
            answer = _ChildReply(errno=error.errno or 0, filename=_error_file_name(error))
        except Declined as declined:
            failed = isinstance(declined, Failed)
            answer = _ChildReply(reason=declined.reason, detail=str(declined), node_failed=failed)
        # One packet holds it all, however long; by default a socket takes 208 KiB at once.
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LONGEST)
        socket.send_fds(theirs, [msgspec.json.encode(answer)], fds)
    finally:
        # Whatever went wrong, the parent learns it from the missing answer.
        os._exit(0)


def _error_file_name(error: OSError) -> bytes:
    """The file that an error is about: open(2) by descriptor has a number, others none."""
    return os.fsencode(error.filename if isinstance(error.filename, (str, bytes)) else "")


def _wait_readable(sockets: list[socket.socket], timeout: float) -> list[socket.socket]:
    """Those that can be read within so many seconds. select(2) takes no descriptor above 1023."""
    poll = select.poll()
    by_number = {one.fileno(): one for one in sockets}
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(max(0.0, timeout) * 1000)]


def _peek_reply(
    ours: socket.socket, timeout: float, end: float, idle: Callable[[], None] | None
) -> bytes:
    """The child's answer, left in the socket together with its descriptors."""
    while True:
        left = end - time.monotonic()
        if _wait_readable([ours], min(_IDLE, left) if idle else left):
            break
        if time.monotonic() >= end:
            raise ChildTimeout(f"no answer after {max(timeout, _LEAST):.1f} s")
        if idle:
            idle()
    return ours.recv(_LONGEST, socket.MSG_PEEK)


def _explain_death(pid: int) -> Declined:
    """Why a child has closed its socket without an answer; the child stays to be reaped.

    Its other files may be closed later, and one of them may hang with its file system.
    """
    end = time.monotonic() + _ENDS
    options = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while (over := os.waitid(os.P_PID, pid, options)) is None and time.monotonic() < end:
        time.sleep(0.0005)
    if over is not None and over.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
        return ChildKilled(over.si_status)
    return Failed("helper", "the process that looks at the image died without an answer")


def _kill_and_reap(pid: int) -> None:
    """Kills without waiting: a child in an uninterruptible read dies when its file system wakes."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for _ in range(20):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.0005)
