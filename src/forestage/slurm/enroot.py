"""What enroot's configuration says: its settings, and the directories that all containers bind.

As enroot 4.1 reads it (its `enroot`, runtime.sh, hooks.d/10-home.sh and enroot-mount.c). A mount
below a directory that a container binds without rbind makes that bind fail with EINVAL in the
container's user namespace, and the container does not start. Programs of enroot's are read as text
and never run.

    `enroot` on the PATH of slurmd     a script that says where its configuration lies (sysconf)
    SYSCONF/enroot.conf, .d            settings
    SYSCONF/mounts.d/*.fstab           binds of all containers
    CONFIG/mounts.d, CONFIG/hooks.d    the user's: ENROOT_CONFIG_PATH, else ~/.config/enroot
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from forestage.system.tree import PATH, RootedTree

ETC = "/etc/enroot"
SCRIPT_BYTES = 256 * 1024  # of `enroot`; 4.1.2's has 24 KiB
LONGEST = 4096  # bytes of a path that mount(2) takes, PATH_MAX
UNKNOWN = "\0"  # stands for a variable that nobody knows; no path has it

# config::fini(): what says no. All else that is not empty says yes, a 0 too.
_NO = r"no?|N[oO]?|[fF](alse)?|FALSE"
_SYSCONF = re.compile(r'^\s*config::export ENROOT_SYSCONF_PATH\s+"?(/[^"$`\s]*)"?\s*$', re.M)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_IN_FSTAB = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")  # common::envsubst
_OCTAL = re.compile(r"\\([0-7]{3})")


class FstabBind(NamedTuple):
    """A line of an fstab that binds a directory without what is mounted below it."""

    file: str
    line: int
    source: str


class EnrootSetup(msgspec.Struct, frozen=True):
    """What the node's enroot goes by.

    `program` is the first `enroot` on the PATH, "" for none; `sysconf` the directory of its
    configuration, `settings` what its enroot.conf says. `is_told` is whether it names that
    directory.
    """

    program: str
    sysconf: str
    settings: dict[str, str]
    is_told: bool

    @property
    def conf(self) -> str:
        return f"{self.sysconf}/enroot.conf"

    @property
    def mounts(self) -> str:
        """The directory of its fstabs: enroot.conf may say another."""
        return f"{self.settings.get('ENROOT_SYSCONF_PATH') or self.sysconf}/mounts.d"


class JobVariables:
    """A job's variables; `queried` are those that somebody wanted to know, None for one not set.

    Where not `all_known`, one that is not in `known` may have any value.
    """

    def __init__(self, known: Mapping[str, str], all_known: bool) -> None:
        self._known, self._all_known = known, all_known
        self.queried: dict[str, str | None] = {}

    def get(self, name: str) -> str | None:
        """A variable that is not set where nobody knows it."""
        return self.queried.setdefault(name, self._known.get(name))

    def expand(self, text: str, pattern: re.Pattern[str] = _IN_FSTAB) -> str:
        """The text with the values of its variables; UNKNOWN for one, and for a text without end.

        64 KiB of names of a variable of 128 KiB are a gigabyte.
        """
        values = (len(self._value(found)) for found in pattern.finditer(text))
        return pattern.sub(self._value, text) if sum(values) <= LONGEST else UNKNOWN

    def _value(self, match: re.Match[str]) -> str:
        name = next(filter(None, match.groups()))
        if not self._all_known and name not in self._known:
            return UNKNOWN
        return self.get(name) or ""


def read_enroot_setup(files: RootedTree, path: str = PATH) -> EnrootSetup:
    """Reads what the `enroot` on this PATH goes by."""
    found = [*files.list_programs("enroot", path)]
    # A wrapper calls the next one, mostly.
    texts = (files.read_text_or_none(program, SCRIPT_BYTES) or "" for program in found)
    match = next(filter(None, map(_SYSCONF.search, texts)), None)
    sysconf = match[1].rstrip("/") if match else ETC
    conf = f"{sysconf}/enroot.conf"
    parts = [f"{conf}.d/{name}" for name in files.list_names(f"{conf}.d") if name.endswith(".conf")]
    settings = _parse_settings(files.read_text_or_none(one) or "" for one in (conf, *parts))
    return EnrootSetup((*found, "")[0], sysconf, settings, match is not None)


def _parse_settings(texts: Iterator[str]) -> dict[str, str]:
    """Pure: a name, white space or =, a value that a shell expands; what was said first counts."""
    found: dict[str, str] = {}
    for text in texts:
        for line in text.splitlines():
            name, *value = re.split(r"[ \t=]+", line.partition("#")[0].strip(), maxsplit=1)
            if value and value[0] and not found.get(name):
                found[name] = value[0].strip("\"'")
    return found


def find_fixed_data_path(settings: Mapping[str, str]) -> str:
    """Pure: the part of ENROOT_DATA_PATH that is the same for all jobs; "" where there is none.

    ${UID} or $HOME in it: what is above them tells the disk.
    """
    fixed = settings.get("ENROOT_DATA_PATH", "").partition("$")[0].rstrip("/")
    return fixed if fixed.startswith("/") else ""


def is_true_setting(value: str) -> bool:
    """Pure: whether enroot takes a setting, or a variable of that name, for true."""
    return bool(value) and not re.fullmatch(_NO, value)


def find_user_folder(settings: Mapping[str, str], variables: JobVariables, home: str) -> str:
    """Pure: where the user's own configuration lies; UNKNOWN in it where that cannot be told."""
    own = variables.get("ENROOT_CONFIG_PATH")
    if own:
        return own
    if said := settings.get("ENROOT_CONFIG_PATH"):
        said = variables.expand(said, _VARIABLE)
        return UNKNOWN if set(said) & set("$`\\~") else said
    return f"{variables.get('XDG_CONFIG_HOME') or f'{home}/.config'}/enroot"


def list_plain_binds(text: str) -> Iterator[tuple[int, str]]:
    """Pure: number and source of each line of an fstab that binds without what is mounted below.

    Variables as they are written. By enroot-mount.c, which guesses what a short line leaves out.
    """
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if len(fields) < 2 or fields[0].startswith("#"):
            continue
        options = fields[1:4][-1].split(",")
        # A remount binds nothing; none of the two words in one line makes it recursive.
        if "bind" in options and not {"rbind", "remount"} & set(options):
            yield number, _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[0])


def list_site_binds(files: RootedTree, found: EnrootSetup) -> Iterator[FstabBind]:
    """What the site has all containers bind."""
    for name in files.list_names(found.mounts):
        if name.endswith(".fstab"):
            file = f"{found.mounts}/{name}"
            for number, source in list_plain_binds(files.read_text_or_none(file) or ""):
                yield FstabBind(file, number, source)


def is_bind_above(source: str, path: str) -> bool:
    """Pure: whether a bind of `source` may be one of what is above `path`.

    With UNKNOWN in it: where what comes before that allows it.
    """
    known, unknown, _ = source.partition(UNKNOWN)
    if unknown:
        return path.startswith(re.sub("/+", "/", known))
    plain = re.sub("/+", "/", source).rstrip("/")
    return source.startswith("/") and path.startswith(f"{plain}/")
