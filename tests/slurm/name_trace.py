"""What a process and its children do with names, of strace(1): which directories they look into."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

STRACE = [
    *("strace", "-f", "-y", "-s", "4096", "--seccomp-bpf"),
    *("-e", "trace=%file,%process", "-e", "signal=none"),
]

_CALL = re.compile(r"^(\d+) +(\w+)\((.*)")
_RESUMED = re.compile(r"^(\d+) +<\.\.\. (?:clone3?|v?fork) resumed>.* = (\d+)$")
_NAME = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')
_FORKS = ("clone", "clone3", "fork", "vfork")
_MAKES = ("creat", "mkdir", "mknod", "rename", "unlink", "rmdir", "link", "symlink")
_ONE_NAME = ("execve", "readlink", "chdir", "open", "mount", "newfstatat", "statx")


@dataclass
class NameTrace:
    """`made`: directories in which any process made or deleted a name.

    `waited`: those in which the traced process resolved one, or a child of it of the first `depth`
    generations, each with an example.
    """

    made: dict[str, str] = field(default_factory=dict)
    waited: dict[str, str] = field(default_factory=dict)


def read_trace(text: str, depth: int) -> NameTrace:
    """Parse what strace has written. Pure.

    Processes do not change their directory: a name without a descriptor is below `/`.
    """
    parents: dict[str, str] = {}
    calls: list[tuple[str, str, str, str]] = []
    for line in text.splitlines():
        if resumed := _RESUMED.match(line):
            parents[resumed[2]] = resumed[1]
        elif called := _CALL.match(line):
            calls.append((line, called[1], called[2], called[3]))
            if called[2] in _FORKS and (forked := re.search(r" = (\d+)$", line)):
                parents[forked[1]] = called[1]
    found = NameTrace()
    for line, pid, call, rest in calls:
        if call in _FORKS:
            continue
        is_waited_for = _find_generation(pid, parents) <= depth
        for path, makes in _list_names(call, rest):
            above = os.path.dirname(path)
            if makes:
                found.made.setdefault(above, line)
            while is_waited_for and above not in found.waited:
                found.waited[above] = line
                above = os.path.dirname(above)
    return found


def _find_generation(pid: str, parents: dict[str, str]) -> int:
    generation = 0
    while pid in parents:
        pid, generation = parents[pid], generation + 1
    return generation


def _list_names(call: str, rest: str) -> list[tuple[str, bool]]:
    """The paths of one system call, and whether it makes or deletes a name."""
    arguments = rest.rpartition(") = ")[0] or rest
    names = _NAME.findall(arguments)
    if call.startswith(_ONE_NAME):
        names = names[:1]
    elif call.startswith("symlink"):
        names = names[1:]
    makes = call.startswith(_MAKES) or "O_CREAT" in arguments
    joined = [os.path.normpath(os.path.join(base or "/", name)) for base, name in names if name]
    return [(path, makes) for path in joined]
