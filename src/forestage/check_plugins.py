"""Is the companion where it can do its work, and does no other plugin take it away? For `check`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forestage import elf
from forestage.check_slurm import Conf
from forestage.config import Settings
from forestage.finding import Finding
from forestage.paths import Places
from forestage.slurm import plugstack
from forestage.system.tree import Files

LIBRARY = Places().companion
HELPER = "/usr/lib/forestage/bin/forestage"
# Where packages put Slurm's plugins, if slurm.conf has no PluginDir.
USUAL = (
    "/usr/lib64/slurm",
    "/usr/lib/x86_64-linux-gnu/slurm-wlm",
    "/usr/lib/aarch64-linux-gnu/slurm-wlm",
    "/usr/lib/slurm",
    "/usr/local/lib/slurm",
    "/opt/slurm/lib/slurm",
    "/opt/slurm/lib64/slurm",
)
# A plugin of any of these kinds is in every installation; its version is Slurm's own.
_OWN = ("auth_munge.so", "cred_munge.so", "select_cons_tres.so", "topology_tree.so")
_SPANK_MASK = 0xFFFF00  # plugin.c: plugins of this kind need to match major and minor only


class Plugin(msgspec.Struct, frozen=True):
    """A plugin of the stack: its line, its file, and what that holds.

    `version` is of the Slurm it was compiled for, as a number; None where it cannot be read.
    """

    line: plugstack.Plugin
    path: str
    exists: bool
    ours: bool = False
    pyxis: bool = False
    job_prolog: bool = False
    version: int | None = None
    strings: tuple[str, ...] = ()


class Plugins(msgspec.Struct, frozen=True):
    """The stack in its order; `slurm` is this node's release, as a number."""

    file: str
    stack: tuple[Plugin, ...]
    slurm: int | None = None
    helper: bool = True

    @property
    def companion(self) -> Plugin | None:
        return next((one for one in self.stack if one.ours), None)

    @property
    def pyxis(self) -> Plugin | None:
        return next((one for one in self.stack if one.pyxis), None)


def gather(files: Files, conf: Conf) -> Plugins:
    """Reads plugstack.conf and the files that it names; nothing is loaded or started."""
    beside = str(Path(conf.path).with_name("plugstack.conf"))
    file = conf.settings.get("plugstackconfig", beside)
    folders = [*conf.settings.get("plugindir", "").split(":"), *USUAL]
    folders = [folder for folder in folders if folder]
    stack: list[Plugin] = []
    lines = plugstack.read(file, lambda path: files.text(path) or "", files.root)
    with contextlib.suppress(ValueError):  # what comes before includes that never end is kept
        stack.extend(_plugin(files, line, folders) for line in lines)
    ours = next((one for one in stack if one.ours), None)
    program = (ours.line.argument("helper") or HELPER) if ours else HELPER
    helper = bool((files.mode(program) or 0) & 0o111)
    return Plugins(file, tuple(stack), _slurm(files, folders), helper)


def _plugin(files: Files, line: plugstack.Plugin, folders: list[str]) -> Plugin:
    path = line.path
    if not path.startswith("/"):
        tried = [f"{folder}/{path}" for folder in folders]
        path = next((one for one in tried if files.mode(one) is not None), path)
    data = files.data(path) or b""
    parsed = elf.parse(data)
    name = Path(path).name
    return Plugin(
        line=line,
        path=path,
        exists=files.mode(path) is not None,
        ours=name == "forestage.so",
        pyxis="pyxis" in name,
        job_prolog=bool(parsed and "slurm_spank_job_prolog" in parsed.symbols),
        version=parsed.word("plugin_version") if parsed else None,
        strings=tuple(w for w in ("enroot", "use_squashfuse=") if w.encode() in data),
    )


def _slurm(files: Files, folders: list[str]) -> int | None:
    for folder in folders:
        for name in _OWN:
            data = files.data(f"{folder}/{name}")
            parsed = elf.parse(data) if data else None
            if parsed and (version := parsed.word("plugin_version")) is not None:
                return version
    return None


def release(number: int) -> str:
    """Pure: SLURM_VERSION_NUM as people write it."""
    return f"{number >> 16 & 0xFF}.{number >> 8 & 0xFF:02}"


def findings(facts: Plugins, settings: Settings) -> Iterator[Finding]:
    """Pure."""
    ours, pyxis = facts.companion, facts.pyxis
    if ours is None:
        yield from _without(facts, settings)
    else:
        yield from _companion(facts, ours)
        order = [one for one in facts.stack if one.ours or one.pyxis]
        if pyxis is not None and order[0].pyxis:
            yield Finding(
                "plugstack-order",
                "warning",
                f"{pyxis.line.path} comes before {ours.line.path}",
                "A step's image may be read from the shared file system before it is redirected",
                f"{ours.line.file}: `{_words(ours.line)}` before the line of"
                f" {pyxis.line.path} ({pyxis.line.where})",
            )
    for one in facts.stack:
        if one.job_prolog:
            yield Finding(
                "spank-job-prolog",
                "warning" if ours else "critical",
                f"{one.path} defines slurm_spank_job_prolog",
                "With such a plugin in the stack, Slurm hides --container-image from the Prolog:"
                + (" copies start with the first step" if ours else " no such image is staged"),
                f"{one.line.file}: without line {one.line.first}"
                + ("" if ours else f", or `optional {LIBRARY}` before pyxis"),
            )


def _without(facts: Plugins, settings: Settings) -> Iterator[Finding]:
    everywhere = (None, *settings.partitions)
    if any(settings.for_partition(name).redirect == "spank" for name in everywhere):
        yield Finding(
            "companion-absent",
            "critical",
            f"redirect: spank, but {facts.file} does not name the companion",
            "Images are copied, and no job ever sees a copy",
            f"forestage enable --yes (or {facts.file}: optional {LIBRARY})",
        )


def _companion(facts: Plugins, ours: Plugin) -> Iterator[Finding]:
    where = ours.line.where
    wanted = msgspec.structs.replace(ours.line, required=False)
    required = ours.line.required
    loads = "slurmd does not start" if required else "No step gets an image staged"
    if not ours.exists:
        yield Finding(
            "companion-missing",
            "critical" if required else "warning",
            f"{ours.path} ({where}) is not there",
            loads,
            f"install the companion's package, or {ours.line.file}: without line {ours.line.first}",
        )
    elif _differs(ours.version, facts.slurm):
        yield Finding(
            "companion-release",
            "critical" if required else "warning",
            f"{ours.path} was built for Slurm {release(ours.version or 0)}, this is"
            f" {release(facts.slurm or 0)}",
            loads,
            "install the companion that is built for this Slurm (make -C src/spank install)",
        )
    if required:
        yield Finding(
            "companion-required",
            "warning",
            f"{where} says `required`",
            "If the plugin cannot be loaded, as after an upgrade of Slurm, slurmd does not start",
            f"{ours.line.file}: {_words(wanted)}",
        )
    if not facts.helper:
        program = ours.line.argument("helper") or HELPER
        yield Finding(
            "companion-helper",
            "warning",
            f"the companion's helper {program} is not there, or not executable",
            "No step gets an image staged",
            f"{ours.line.file}: helper=/path/to/forestage, or install forestage's package",
        )


def _differs(one: int | None, other: int | None) -> bool:
    if one is None or other is None:
        return False
    return one & _SPANK_MASK != other & _SPANK_MASK


def _words(line: plugstack.Plugin) -> str:
    kind = "required" if line.required else "optional"
    return " ".join((kind, line.path, *line.arguments))
