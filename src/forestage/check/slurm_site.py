"""The site's Slurm files as one model: slurm.conf, the scripts that it names, and plugstack.conf.

`enable`, `disable` and `check` all decide by this model: what is broken (`list_broken_scripts`),
and how a hook of ours comes to be called (`choose_installation`). It is read below the root of a
`RootedTree`, as slurmd reads it; of Slurm's commands only `slurmd -V` is run, and nothing is
changed.
"""

import contextlib
import fnmatch
import glob
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from forestage.errors import Failed
from forestage.paths import NodePaths
from forestage.slurm import companion, plugstack, slurm_conf
from forestage.slurm import slurm_release as releases
from forestage.slurm.companion import CompanionState
from forestage.slurm.slurm_conf import ConfLine, ConfSetting, ReadText
from forestage.system import processes
from forestage.system.tree import RootedTree

# Paths as slurm.conf and plugstack.conf name them, whatever root they are read below.
HOOK_PATHS = {"Prolog": str(NodePaths().prolog), "Epilog": str(NodePaths().epilog)}
COMPANION_PATH = str(NodePaths().companion)
# What plugstack.conf includes: where no package has brought the file of this release, nothing.
COMPANION_CONF = str(NodePaths().companion.parent / "plugstack-{}.conf")
RELEASE_SUFFIX = ".release"  # behind the companion's path: the file that says for which Slurm it is
# Where packages put Slurm's plugins, if slurm.conf has no PluginDir.
USUAL_PLUGIN_DIRECTORIES = (
    "/usr/lib64/slurm",
    "/usr/lib/x86_64-linux-gnu/slurm-wlm",
    "/usr/lib/aarch64-linux-gnu/slurm-wlm",
    "/usr/lib/slurm",
    "/usr/local/lib/slurm",
    "/opt/slurm/lib/slurm",
    "/opt/slurm/lib64/slurm",
)
# What is to run on each node, and the directories in which systemd finds that it is.
TIMER_UNIT = "forestage.timer"
# The directories in which `systemctl enable` makes a unit's link, by [Install] of our unit files.
_WANTED_BY = {TIMER_UNIT: "timers.target.wants"}
_OTHERS_WANTED_BY = "multi-user.target.wants"
_UNIT_DIRECTORIES = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
LINK_NAME = "50-forestage"  # in a directory of hooks
MAX_SCRIPT_BYTES = 1 << 20  # bytes of a site's script that are searched for our name

# PrologFlags that set Alloc as well: slurm.conf(5); `scontrol show config` of 22.05 says so of two.
_FLAGS_IMPLYING_ALLOC = {"contain", "x11", "nohold", "runinjob"}
_UNWANTED_FLAGS = ("serial", "runinjob")
PATH_PATTERN = re.compile(r"/[\w./+-]+")  # in a script
_COMMENT_PATTERN = re.compile(r"(?:^|(?<=\s))#.*", re.MULTILINE)

HookName = Literal["Prolog", "Epilog"]
ScriptState = Literal["fine", "missing", "dangling", "not-executable"]
ScriptRelation = Literal["hook", "names-us", "other"]


class ParsedSlurmConf(msgspec.Struct, frozen=True):
    """slurm.conf with its includes: where it lies, and its settings, names in lower case.

    `release` is that of the Slurm which reads it, as 22.05; "" where that is not known. `nodes` are
    lists of those that are always there.
    """

    path: str
    lines: tuple[ConfSetting, ...]
    partitions: frozenset[str] = frozenset()
    release: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, str]:
        """The value that counts for each name: the last one."""
        return {one.name: one.value for one in self.lines}

    @property
    def is_configless(self) -> bool:
        """Whether slurmd writes this file itself, from what slurmctld sends."""
        return "/run/slurm/conf/" in self.path or "/conf-cache/" in self.path

    def list_flags(self, name: str) -> list[str]:
        return [flag.strip() for flag in self.settings.get(name, "").split(",") if flag.strip()]

    @property
    def prolog_flags(self) -> set[str]:
        """PrologFlags in lower case, with those that others imply."""
        return _with_implied_flags(self.list_flags("prologflags"))

    @property
    def wanted_prolog_flags(self) -> str:
        """The line with the flags that forestage wants, the site's others kept."""
        flags = [
            one for one in self.list_flags("prologflags") if one.lower() not in _UNWANTED_FLAGS
        ]
        flags += [one for one in self._wanted if one.lower() not in _with_implied_flags(flags)]
        return f"PrologFlags={','.join(flags)}"

    @property
    def missing_flags(self) -> set[str]:
        """Of the flags that forestage wants those that are not set, in lower case."""
        return {one.lower() for one in self._wanted} - self.prolog_flags

    @property
    def is_old(self) -> bool:
        """Whether this Slurm tells a Prolog no comment, and refuses to start with DeferBatch."""
        return bool(self.release) and self.release < releases.COMMENT_IN_PROLOG

    @property
    def _wanted(self) -> tuple[str, ...]:
        return ("Alloc",) if self.is_old else ("Alloc", "DeferBatch")

    def resolve_hook_path(self, value: str) -> str:
        """Return what slurmd runs for a value of Prolog= or Epilog=. Pure.

        An older Slurm looks for a relative one in slurmd's own directory, finds none, and drains.
        """
        if value.startswith("/") or (self.release and self.release < releases.RELATIVE_HOOKS):
            return value
        return str(Path(self.path).parent / value)

    def has_flag(self, name: str, flag: str) -> bool:
        return flag.lower() in (one.lower() for one in self.list_flags(name))


class HookScript(msgspec.Struct, frozen=True):
    """A program that slurmd runs as Prolog or Epilog.

    hook: it is our hook, or a link to it. names-us: its path or its text, comments apart, says
    "forestage", as a wrapper's does, or names a directory of hooks that holds one of such a name.
    other: the site's own.
    """

    path: str
    state: ScriptState
    relation: ScriptRelation

    @property
    def is_ours(self) -> bool:
        return self.relation != "other"


class HookSetting(msgspec.Struct, frozen=True):
    """One `Prolog=` or `Epilog=` of slurm.conf, and the scripts that it stands for.

    `path` is what it means, in full; `has_directory`: whether the directory of a glob is there.
    """

    setting: ConfSetting
    path: str
    is_glob: bool
    has_directory: bool
    scripts: tuple[HookScript, ...]


class HookSetup(msgspec.Struct, frozen=True):
    """Our hook of a name, whether it can be executed, and what slurm.conf has for that name."""

    name: HookName
    path: str
    is_executable: bool
    settings: tuple[HookSetting, ...]

    @property
    def glob_settings(self) -> tuple[HookSetting, ...]:
        return tuple(one for one in self.settings if one.is_glob)

    @property
    def scripts(self) -> tuple[HookScript, ...]:
        return tuple(script for pattern in self.settings for script in pattern.scripts)


class BrokenHookScript(msgspec.Struct, frozen=True):
    """A script that slurmd takes for a failed hook; the node drains. `change` is the remedy."""

    script: HookScript
    what: str
    change: str


class HookInstallation(msgspec.Struct, frozen=True):
    """How slurmd comes to run a hook of ours.

    there: it does, by the script `text`. line: slurm.conf needs `text`. link: there has to be a
    link of the path `text`. by-hand: `text` says what to do.
    """

    kind: Literal["there", "line", "link", "by-hand"]
    text: str


class StackPlugin(msgspec.Struct, frozen=True):
    """A plugin of the stack: its line, and its file."""

    line: plugstack.PluginLine
    path: str
    exists: bool

    @property
    def is_companion(self) -> bool:
        return Path(self.path).name == "forestage.so"

    @property
    def is_pyxis(self) -> bool:
        return "pyxis" in Path(self.path).name


class PluginStack(msgspec.Struct, frozen=True):
    """plugstack.conf with its includes, and the plugins in the order in which Slurm loads them.

    `includes` are the lines for the companion's own file, whether or not it is there.
    `read_error` says why no more could be read.
    """

    file: str
    plugins: tuple[StackPlugin, ...]
    includes: tuple[plugstack.IncludeLine, ...] = ()
    read_error: str = ""

    @property
    def companion(self) -> StackPlugin | None:
        return next((one for one in self.plugins if one.is_companion), None)

    @property
    def pyxis(self) -> StackPlugin | None:
        return next((one for one in self.plugins if one.is_pyxis), None)

    @property
    def misplaced_line(self) -> ConfLine | None:
        """The line that loads the companion, where that comes after pyxis: it is to come before.

        A step's image must be redirected before pyxis opens it. Of a companion that is included by
        its own file that is the line of the include: the file is a package's.
        """
        ours, pyxis = self.companion, self.pyxis
        if not (ours and pyxis) or self.plugins.index(ours) < self.plugins.index(pyxis):
            return None
        by = ours.line.included_by
        return by if by and by in self.includes else ours.line


class SlurmSite(msgspec.Struct, frozen=True):
    """What Slurm reads on this node.

    `companion_line` is the line by which plugstack.conf loads the companion that is installed; ""
    where none is.
    """

    conf: ParsedSlurmConf
    hooks: tuple[HookSetup, ...]
    stack: PluginStack
    companion_line: str


def read_site(files: RootedTree, path: str) -> SlurmSite:
    """The site whose slurm.conf is `path`. Raises Failed where any of it cannot be read."""
    found = _make_site(files, parse_slurm_conf(files, path))
    if found.stack.read_error:
        raise Failed("slurm-conf", found.stack.read_error)
    return found


def parse_slurm_conf(files: RootedTree, path: str) -> ParsedSlurmConf:
    """Read slurm.conf alone. Raises Failed, also where Slurm would refuse the file."""
    try:
        text = _make_text_reader(files)
        lines = tuple(slurm_conf.read_settings(path, text))
        partitions = frozenset(slurm_conf.list_partitions(path, text))
        return ParsedSlurmConf(
            path, lines, partitions, nodes=tuple(slurm_conf.list_node_names(path, text))
        )
    except (OSError, ValueError) as error:
        raise Failed("slurm-conf", slurm_conf.explain_read_error(error)) from None


def read_named_conf(files: RootedTree, named: str) -> ParsedSlurmConf:
    """Read the file that is `named` ($SLURM_CONF), else the usual one. Raises Failed."""
    path = named or slurm_conf.find_usual_conf(files.root)
    if not path:
        raise Failed("slurm-conf", "slurm.conf cannot be read: it is in none of its usual places")
    return parse_slurm_conf(files, path)


def read_named_site(files: RootedTree, named: str) -> SlurmSite:
    """Return the site of `read_named_conf`'s file. Raises Failed where that cannot be read."""
    return _make_site(files, read_named_conf(files, named))


def _make_text_reader(files: RootedTree) -> ReadText:
    return lambda path: slurm_conf.read_conf_text(str(files.host_path(path)))


def _make_site(files: RootedTree, conf: ParsedSlurmConf) -> SlurmSite:
    """The hooks and plugins that a slurm.conf leads to; slurmd is run for its release."""
    conf = msgspec.structs.replace(
        conf, release=releases.find_slurm_release(files, list_plugin_directories(conf))
    )
    hooks = (_read_hook_setup(files, conf, "Prolog"), _read_hook_setup(files, conf, "Epilog"))
    return SlurmSite(conf, hooks, _read_plugin_stack(files, conf), _format_companion_line(files))


def read_companion_release(files: RootedTree, companion: str = COMPANION_PATH) -> str:
    """The release of Slurm for which that companion was built, as 22.05; "" if nothing says so."""
    return releases.parse_release(files.read_text_or_none(f"{companion}{RELEASE_SUFFIX}") or "")


def format_companion_include(release: str) -> str:
    """Pure: the line that loads the companion on hosts that have it for this release, and is read
    without a word on all others."""
    return f"include {COMPANION_CONF.format(f'{release}*')}"


def _format_companion_line(files: RootedTree) -> str:
    if files.find_mode(COMPANION_PATH) is None:
        return ""
    release = read_companion_release(files)
    if release and files.find_mode(COMPANION_CONF.format(release)) is not None:
        return format_companion_include(release)
    return f"optional {COMPANION_PATH}"


def _read_hook_setup(files: RootedTree, conf: ParsedSlurmConf, name: HookName) -> HookSetup:
    path = HOOK_PATHS[name]
    named = (one for one in conf.lines if one.name == name.lower() and one.value)
    patterns = tuple(
        _read_hook_setting(files, one, conf.resolve_hook_path(one.value), path) for one in named
    )
    return HookSetup(name, path, _read_script_state(files, path) == "fine", patterns)


def _read_hook_setting(
    files: RootedTree, setting: ConfSetting, value: str, hook: str
) -> HookSetting:
    if not glob.has_magic(value):
        script = HookScript(
            value, _read_script_state(files, value), _read_script_relation(files, value, hook)
        )
        return HookSetting(setting, value, False, True, (script,))
    # Dangling links are matches as well: glob(3), as slurmd calls it, finds them.
    found = sorted(glob.iglob(str(files.host_path(value))))  # noqa: PTH207 - absolute, as slurmd's
    paths = (f"/{one.removeprefix(str(files.root)).lstrip('/')}" for one in found)
    directory = stat.S_ISDIR(files.find_mode(str(Path(value).parent)) or 0)
    scripts = (
        HookScript(one, _read_script_state(files, one), _read_script_relation(files, one, hook))
        for one in paths
    )
    return HookSetting(setting, value, True, directory, tuple(scripts))


def _read_script_state(files: RootedTree, path: str) -> ScriptState:
    mode = files.find_mode(path)
    if mode is None:
        return "dangling" if files.host_path(path).is_symlink() else "missing"
    return "fine" if stat.S_ISREG(mode) and mode & 0o111 else "not-executable"


def _read_script_relation(files: RootedTree, path: str, hook: str) -> ScriptRelation:
    real = files.resolve_path(path)
    if real == files.resolve_path(hook):
        return "hook"
    named = (
        "forestage" in path or "forestage" in real or bool(list_lines_naming_forestage(files, path))
    )
    return "names-us" if named or _runs_hook_directory(files, path, Path(hook).name) else "other"


def _runs_hook_directory(files: RootedTree, script: str, kind: str) -> bool:
    """As the prolog.sh of DeepOps runs all of prolog.d."""
    folders = (
        word
        for word in PATH_PATTERN.findall(_read_without_comments(files, script))
        if kind in Path(word).name
    )
    return any("forestage" in name for one in folders for name in files.list_names(one))


def list_broken_scripts(hook: HookSetup) -> Iterator[BrokenHookScript]:
    """Pure: what slurm.conf names for this hook and slurmd cannot run (run_script.c)."""
    words = {
        "dangling": "a link that leads nowhere",
        "missing": "not there",
        "not-executable": "no program that can be executed",
    }
    for pattern in hook.settings:
        line = f"{hook.name}={pattern.setting.value}"
        for script in pattern.scripts:
            if script.state != "fine":
                what = f"{script.path} of {line} is {words[script.state]}"
                yield BrokenHookScript(script, what, _format_repair(hook, pattern, script))


def _format_repair(hook: HookSetup, pattern: HookSetting, script: HookScript) -> str:
    where, line = pattern.setting.line.where, f"{hook.name}={pattern.setting.value}"
    if script.state == "not-executable":
        return f"chmod 0755 {script.path} (or take it out of that directory)"
    if script.relation == "hook" and not hook.is_executable:
        return f"install forestage's package again (or {where}: without {line})"
    if pattern.is_glob:
        return f"ln -sfn {hook.path} {script.path}" if script.is_ours else f"rm {script.path}"
    if script.is_ours:
        return f"{where}: {hook.name}={hook.path}"
    return f"{where}: without {line}"


def choose_installation(hook: HookSetup) -> HookInstallation:
    """Pure: a link where slurm.conf names a directory's files; the site's own scripts stay."""
    ours = next((one.path for one in hook.scripts if one.is_ours), "")
    if ours:
        return HookInstallation("there", ours)
    if hook.glob_settings:
        return _choose_link(hook.glob_settings[0])
    others = [one for one in hook.settings if one.scripts[0].state == "fine"]
    if not others:
        return HookInstallation("line", f"{hook.name}={hook.path}")
    other = others[0].setting
    folder = f"{Path(others[0].path).parent}/{hook.name.lower()}.d"
    return HookInstallation(
        "by-hand",
        f"{other.line.where}: {hook.name}={other.value} is there already: run {hook.path} at its"
        f" end, or make it one of a directory ({hook.name}={folder}/*)",
    )


def _choose_link(pattern: HookSetting) -> HookInstallation:
    """A link by a name that the glob matches and nobody has."""
    where, value = pattern.setting.line.where, pattern.path
    directory, names = os.path.split(value)
    if not pattern.has_directory:
        return HookInstallation(
            "by-hand", f"{where}: the directory of {value} is not there: make it first"
        )
    taken = {script.path for script in pattern.scripts}
    for name in (LINK_NAME, names.replace("*", LINK_NAME, 1)):
        path = os.path.join(directory, name)
        fits = fnmatch.fnmatchcase(name, names) and not glob.has_magic(path)
        if fits and path not in taken:
            return HookInstallation("link", path)
    text = f"{where}: no name fits {value}: link forestage's hook there manually"
    return HookInstallation("by-hand", text)


def list_lines_naming_forestage(files: RootedTree, script: str) -> list[str]:
    """The lines of a script that say "forestage", comments apart."""
    return [
        line for line in _read_without_comments(files, script).split("\n") if "forestage" in line
    ]


def _read_without_comments(files: RootedTree, script: str) -> str:
    """Its text without comments."""
    return _COMMENT_PATTERN.sub("", files.read_text_or_none(script, MAX_SCRIPT_BYTES) or "")


def _with_implied_flags(flags: list[str]) -> set[str]:
    found = {flag.lower() for flag in flags}
    return found | {"alloc"} if found & _FLAGS_IMPLYING_ALLOC else found


def _read_plugin_stack(files: RootedTree, conf: ParsedSlurmConf) -> PluginStack:
    beside = str(Path(conf.path).with_name("plugstack.conf"))
    file = conf.settings.get("plugstackconfig", beside)
    folders = list_plugin_directories(conf)
    plugins: list[StackPlugin] = []
    includes: list[plugstack.IncludeLine] = []
    broken = ""
    ours = COMPANION_CONF.partition("{")[0]
    try:
        for line in plugstack.read_lines(file, _make_text_reader(files), files.root):
            if isinstance(line, plugstack.PluginLine):
                plugins.append(_make_stack_plugin(files, line, folders))
            elif line.pattern.startswith(ours):
                includes.append(line)
    except (OSError, ValueError) as error:  # what comes before it is kept
        broken = slurm_conf.explain_read_error(error)
    return PluginStack(file, tuple(plugins), tuple(includes), broken)


def list_plugin_directories(conf: ParsedSlurmConf) -> list[str]:
    """Where Slurm looks for a plugin that is named without a directory."""
    folders = [*conf.settings.get("plugindir", "").split(":"), *USUAL_PLUGIN_DIRECTORIES]
    return [folder for folder in folders if folder]


def _make_stack_plugin(
    files: RootedTree, line: plugstack.PluginLine, folders: list[str]
) -> StackPlugin:
    path = line.path
    if not path.startswith("/"):
        tried = [f"{folder}/{path}" for folder in folders]
        path = next((one for one in tried if files.find_mode(one) is not None), path)
    return StackPlugin(line, path, files.find_mode(path) is not None)


def lacks_enabled_unit(files: RootedTree, *units: str) -> bool:
    """Whether systemd runs here, and one of these units is not enabled.

    A node without systemd has a way of its own.
    """
    if files.find_mode("/run/systemd/system") is None:
        return False
    wanted_by = {unit: _WANTED_BY.get(unit, _OTHERS_WANTED_BY) for unit in units}
    return not all(
        any(unit in files.list_names(f"{folder}/{wants}") for folder in _UNIT_DIRECTORIES)
        for unit, wants in wanted_by.items()
    )


# slurmd sets SLURM_SCRIPT_CONTEXT for each of its scripts (prolog and epilog guide).
_CONTEXTS = frozenset(
    (b"SLURM_SCRIPT_CONTEXT=prolog_slurmd", b"SLURM_SCRIPT_CONTEXT=epilog_slurmd")
)


def is_hook_running(files: RootedTree) -> bool:
    """Whether slurmd runs a Prolog or an Epilog on this node now, ours or another. As root."""
    numbers = (name for name in files.list_names("/proc") if name.isdigit())
    return any(_is_hook_process(files.host_path(f"/proc/{number}")) for number in numbers)


def _is_hook_process(process: Path) -> bool:
    # First whose it is: what users' processes have in their environment may be any text, and may
    # lie in memory that hangs whoever reads it.
    if not processes.is_trusted(process):
        return False
    with contextlib.suppress(OSError):  # it has ended
        if _CONTEXTS.isdisjoint((process / "environ").read_bytes().split(b"\0")):
            return False
        # Only slurmd's own child counts: what a Prolog has left behind, such as a stager, still has
        # the Prolog's variables.
        parent = process.parent / str(processes.read_stat(process).parent)
        return processes.is_trusted(parent) and processes.read_name(parent).startswith("slurm")
    return False


def read_node_companion_state(places: NodePaths, conf: str) -> CompanionState:
    """Return whether steps get the companion, as hooks find it out; `conf` is $SLURM_CONF or ""."""
    files = RootedTree(places.root)
    path = conf or slurm_conf.find_usual_conf(files.root)
    conf_file = slurm_conf.SlurmConf(path and str(files.host_path(path)))
    return companion.read_companion_state(places.loaded, conf_file)
