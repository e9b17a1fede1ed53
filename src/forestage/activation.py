"""What does Slurm run today? Our hooks in slurm.conf and prolog.d, and the companion."""

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from forestage import edits
from forestage.edits import File
from forestage.errors import Failed
from forestage.paths import Places
from forestage.slurm import plugstack, slurm_conf
from forestage.slurm.plugstack import Plugin
from forestage.slurm.slurm_conf import Setting

CALLED = 1 << 20  # bytes of a site's script that are searched for our hook's path

COMMENT = re.compile(rb"(^|\s)#.*")
CONTEXTS = frozenset(  # slurmd sets it for each of its scripts (prolog and epilog guide)
    (b"SLURM_SCRIPT_CONTEXT=prolog_slurmd", b"SLURM_SCRIPT_CONTEXT=epilog_slurmd")
)

HookName = Literal["Prolog", "Epilog"]


class Glob(msgspec.Struct, frozen=True):
    """A setting that is a pattern. `ours`: those of its matches that lead to our hook."""

    setting: Setting
    matches: tuple[str, ...]
    ours: tuple[str, ...]
    directory: bool  # whether the directory is there


class Hook(msgspec.Struct, frozen=True):
    """One of our hooks, and what slurm.conf has in its place.

    `usable`: it is there and can be run. `callers`: scripts of the site that name it.
    """

    name: HookName
    path: str
    usable: bool
    settings: tuple[Setting, ...]
    globs: tuple[Glob, ...]
    callers: tuple[str, ...]


class Site(msgspec.Struct, frozen=True):
    """What there is. `files` are slurm.conf, plugstack.conf and what they include, by the names
    that lead there. `companion` is the plugin's path, and `built` whether it is there."""

    conf: str
    stack: str
    files: Mapping[str, File]
    settings: tuple[Setting, ...]
    plugins: tuple[Plugin, ...]
    hooks: tuple[Hook, ...]
    companion: str
    built: bool

    def named(self, name: str) -> tuple[Setting, ...]:
        """Every setting of slurm.conf of that name, which is in lower case."""
        return _named(self.settings, name)


def gather(places: Places, conf: Path) -> Site:
    """Reads what there is; `conf` is slurm.conf. Raises Failed, OSError."""
    if not conf.exists():
        raise Failed("slurm-conf", f"{conf} is not there", "say --slurm-conf FILE")
    files: dict[str, File] = {}

    def text(path: str) -> str:
        files[path] = File(os.path.realpath(path), edits.read(path))
        return files[path].text

    conf, companion = conf.absolute(), places.companion
    try:
        settings = tuple(slurm_conf.settings(str(conf), text))
        named = _named(settings, "plugstackconfig")
        stack = named[-1].value if named else str(conf.parent / "plugstack.conf")
        plugins = tuple(plugstack.read(stack, text))
    except FileNotFoundError as error:
        raise Failed("slurm-conf", f"{error.filename} is included, but is not there") from None
    except ValueError as error:
        raise Failed("slurm-conf", str(error)) from None
    prolog, epilog = places.prolog, places.epilog
    hooks = (_hook(settings, "Prolog", prolog), _hook(settings, "Epilog", epilog))
    return Site(
        conf=os.path.realpath(conf),
        stack=os.path.realpath(stack),
        files=files,
        settings=settings,
        plugins=plugins,
        hooks=hooks,
        companion=str(companion),
        built=companion.exists(),
    )


def is_glob(value: str) -> bool:
    """Pure: whether slurmd takes the value of Prolog= for a pattern (glob(7))."""
    return glob.has_magic(value)


def _named(settings: tuple[Setting, ...], name: str) -> tuple[Setting, ...]:
    return tuple(one for one in settings if one.name == name)


def _hook(every: tuple[Setting, ...], name: HookName, path: Path) -> Hook:
    settings = _named(every, name.lower())
    patterns = [one for one in settings if is_glob(one.value)]
    globs = tuple(_glob(one, path) for one in patterns)
    single = [one.value for one in settings if one.value != str(path) and one not in patterns]
    scripts = [*single, *(m for g in globs for m in g.matches if m not in g.ours)]
    callers = tuple(script for script in scripts if _calls(script, path))
    return Hook(name, str(path), _usable(path), settings, globs, callers)


def _glob(setting: Setting, hook: Path) -> Glob:
    # As slurmd's, it finds dangling links as well.
    matches = tuple(sorted(glob.glob(setting.value)))  # noqa: PTH207 - an absolute path
    real = os.path.realpath(hook)
    ours = tuple(match for match in matches if os.path.realpath(match) == real)
    return Glob(setting, matches, ours, Path(setting.value).parent.is_dir())


def hook_runs(places: Places) -> bool:
    """Whether slurmd runs a Prolog or an Epilog on this node now, ours or another; as root."""
    return any(_is_hook(process) for process in (places.root / "proc").glob("[0-9]*"))


def _is_hook(process: Path) -> bool:
    try:
        variables = (process / "environ").read_bytes().split(b"\0")
        if CONTEXTS.isdisjoint(variables):
            return False
        # Only slurmd's own child: users may set any variable, and what a Prolog has left behind,
        # such as a stager, still has its own.
        parent = (process / "stat").read_bytes().rpartition(b") ")[2].split()[1]
        return (process.parent / os.fsdecode(parent) / "comm").read_bytes().startswith(b"slurm")
    except OSError:  # it has ended
        return False


def _usable(hook: Path) -> bool:
    return hook.is_file() and os.access(hook, os.X_OK)


def _calls(script: str, hook: Path) -> bool:
    """Whether a script of the site's runs our hook, as far as its text says, without comments."""
    try:
        with Path(script).open("rb") as file:
            lines = file.read(CALLED).splitlines()
    except OSError:
        return False
    return any(os.fsencode(hook) in COMMENT.sub(b"", line) for line in lines)
