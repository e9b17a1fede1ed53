"""What enroot's configuration says: its settings, and the directories that all containers bind.

As enroot 4.1 reads them (its `enroot`, hooks.d/10-home.sh and enroot-mount.c). A mount below a
directory that a container binds without rbind makes that bind fail with EINVAL in the container's
user namespace, and the container does not start.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from forestage.system.tree import Files

ETC = "/etc/enroot"
CONF = f"{ETC}/enroot.conf"
MOUNTS = f"{ETC}/mounts.d"

# config::fini(): what says no. All else that is not empty says yes, a 0 too.
_NO = r"no?|N[oO]?|[fF](alse)?|FALSE"


class Bind(NamedTuple):
    """A line of an fstab that binds a directory without what is mounted below it."""

    file: str
    line: int
    source: str


def settings(files: Files) -> dict[str, str]:
    """enroot.conf and what lies beside it: a name, white space, a value that a shell expands."""
    found = {}
    parts = [f"{CONF}.d/{name}" for name in files.names(f"{CONF}.d") if name.endswith(".conf")]
    for path in (CONF, *parts):
        for line in (files.text(path) or "").splitlines():
            name, *value = line.partition("#")[0].split(None, 1)[:2] or [""]
            if value:
                found[name] = value[0].strip().strip("\"'")
    return found


def data_above(settings: Mapping[str, str]) -> str:
    """Pure: the part of ENROOT_DATA_PATH that is the same for all jobs; "" where there is none.

    ${UID} or $HOME in it: what is above them tells the disk.
    """
    fixed = settings.get("ENROOT_DATA_PATH", "").partition("$")[0].rstrip("/")
    return fixed if fixed.startswith("/") else ""


def says_yes(value: str) -> bool:
    """Pure: whether enroot takes a setting, or a variable of that name, for true."""
    return bool(value) and not re.fullmatch(_NO, value)


def plain_binds(files: Files, variables: Mapping[str, str]) -> Iterator[Bind]:
    """The site's binds of directories; those with a variable that is unknown are left out."""
    for name in files.names(MOUNTS):
        file = f"{MOUNTS}/{name}"
        for number, line in enumerate((files.text(file) or "").splitlines(), 1):
            fields = line.partition("#")[0].split()
            if not name.endswith(".fstab") or len(fields) < 4 or "bind" not in fields[3].split(","):
                continue
            source = fields[0]
            for variable, value in variables.items():
                source = source.replace(f"${{{variable}}}", value)
            if source.startswith("/") and "$" not in source:
                yield Bind(file, number, source)
