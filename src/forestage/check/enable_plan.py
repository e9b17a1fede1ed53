"""Plans of `forestage enable` and `disable`: how Slurm comes to call the hooks, and stops.

What else is wrong with these files `enable` says in the words of `check`, by the same findings.
slurm.conf and plugstack.conf are never edited: the plan holds the exact lines for the admin, who
keeps these files for a whole cluster. `apply_plan` makes or removes only our links in a directory
that `Prolog=` or `Epilog=` names with a glob. Refused is what would drain nodes: slurmd drains a
node whose Prolog is missing, cannot be executed, or is a glob without a match (run_script.c).
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from forestage.cache.node import Node
from forestage.check import plugstack_findings, slurm_conf_findings
from forestage.check import slurm_site as sites
from forestage.check.finding import CheckFinding
from forestage.check.slurm_site import TIMER_UNIT, HookSetting, HookSetup, SlurmSite
from forestage.config import Config
from forestage.errors import SlurmConfChangeRefused
from forestage.features import FEATURES
from forestage.features.doors import CHECKS_WANTS_UNIT, load_door
from forestage.slurm.slurm_conf import ConfLine
from forestage.system import mounts, run
from forestage.system.terminal import OutputBlock, TextLine
from forestage.system.tree import RootedTree

GRES_NAME = "nvme"
SYSTEMCTL_TIMEOUT = 60.0  # seconds
RECONFIGURE_COMMAND = "scontrol reconfigure"
RESTART_COMMAND = "systemctl restart slurmd"
PLUGSTACK_WORDS = ("include", "optional", "required")  # how a line of plugstack.conf begins
SHARED_DIRECTORY_NOTE = (
    "Other nodes that share such a directory are not seen from here: one that runs a Prolog or"
    " Epilog while the link is removed may drain."
)
DISABLE_NOTE = "This stops nothing at once: `forestage off` does, on each node."
ENABLE_NOTE = "Every node that reads these files must have forestage: one without it will drain."
LOGIN_NODES_NOTE = (
    "Login nodes read plugstack.conf as well: without forestage-spank for their Slurm they print"
    " errors with each srun and sbatch."
)


class LineChange(msgspec.Struct, frozen=True):
    """A line that the admin has to add to a file of Slurm's, or to remove; `place` says where."""

    file: str
    action: Literal["add", "remove"]
    text: str
    place: str


class HookLink(msgspec.Struct, frozen=True):
    """A symbolic link to make, or to remove."""

    path: str
    target: str


class SlurmChangePlan(msgspec.Struct):
    """`lines` are for the admin to change, `links` and `unlinks` for `apply_plan`, `notes` to know.

    `refusals` say what would drain nodes, or is in the way; with any, `apply_plan` does nothing.
    `disk` are lines by which jobs can ask for nodes with the cache's disk; forestage works without
    them.
    """

    lines: list[LineChange] = []
    links: list[HookLink] = []
    unlinks: list[HookLink] = []
    notes: list[str] = []
    refusals: list[str] = []
    disk: list[LineChange] = []

    @property
    def is_empty(self) -> bool:
        return not (self.lines or self.links or self.unlinks)


class CacheDisk(msgspec.Struct, frozen=True):
    """The cache's disk: where it is mounted, its MiB, and the GiB that stage-dir= may take."""

    mounted_at: str
    mib: int
    for_jobs: int


def find_cache_disk(node: Node) -> CacheDisk | None:
    """This node's disk; None without a cache on a disk of its own. Raises PermissionError."""
    try:
        facts = os.statvfs(node.cache.root)
    except (FileNotFoundError, NotADirectoryError):
        return None
    under = mounts.find_mount_of_path(mounts.list_mounts(), os.path.realpath(node.cache.root))
    if under is None or under.point == "/":
        return None
    size = facts.f_blocks * facts.f_frsize
    return CacheDisk(
        under.point, size >> 20, for_jobs=node.config.data.job_dir.resolve_bytes(size) >> 30
    )


def plan_enable(
    files: RootedTree, site: SlurmSite, disk: CacheDisk | None = None
) -> SlurmChangePlan:
    """What makes Slurm call both hooks, and load the companion where it is installed.

    `disk` is that of the cache, for which jobs may want to ask. Reads the plugins' files.
    """
    plan = SlurmChangePlan()
    for hook in site.hooks:
        _plan_hook(plan, site, hook)
    if site.companion_line and site.stack.companion is None:
        _plan_companion(plan, site)
    else:
        plan.notes += map(_format_finding, plugstack_findings.list_stack_findings(files, site))
    _add_configless_note(plan, site)
    plan.notes += map(_format_finding, slurm_conf_findings.list_flag_findings(site.conf))
    if disk is not None:
        plan.disk += list_disk_lines(site, disk)
    return plan


def list_disk_lines(site: SlurmSite, disk: CacheDisk) -> list[LineChange]:
    """Pure: what lets jobs ask for nodes with this disk, and for room on it.

    None where the site has a way of its own: Slurm knows one TmpFS, and the name is the site's.
    """
    settings = site.conf.settings
    types = site.conf.list_flags("grestypes")
    if "tmpfs" in settings or GRES_NAME in types:
        return []
    gres = str(Path(site.conf.path).with_name("gres.conf"))
    named = f"Feature=nvme TmpDisk={disk.mib}"
    lines = [LineChange(site.conf.path, "add", f"TmpFS={disk.mounted_at}", "at the end")]
    if disk.for_jobs:
        named += f" Gres={GRES_NAME}:{disk.for_jobs}"
        # Slurm counts what jobs of a node ask for together only of a GRES.
        all_types = ",".join([*types, GRES_NAME])
        count = f"NodeName=NODES Name={GRES_NAME} Count={disk.for_jobs} Flags=CountOnly"
        lines.append(LineChange(site.conf.path, "add", f"GresTypes={all_types}", "at the end"))
        lines.append(LineChange(gres, "add", count, "NODES: those with this disk"))
    return [*lines, LineChange(site.conf.path, "add", named, "to their NodeName= lines")]


def _plan_hook(plan: SlurmChangePlan, site: SlurmSite, hook: HookSetup) -> None:
    broken = [
        f"{one.what}, which drains nodes: {one.change}" for one in sites.list_broken_scripts(hook)
    ]
    way = sites.choose_installation(hook)
    if not hook.is_executable:
        plan.refusals.append(
            f"{hook.path} is missing or cannot be executed: install forestage again"
        )
    elif broken:
        plan.refusals += broken
    elif way.kind == "there":
        plan.notes.append(f"{hook.name}: forestage is there already ({way.text}).")
    elif way.kind == "line":
        plan.lines.append(LineChange(site.conf.path, "add", way.text, "at the end"))
    elif way.kind == "link":
        plan.links.append(HookLink(way.text, hook.path))
    else:
        plan.refusals.append(way.text)


def _plan_companion(plan: SlurmChangePlan, site: SlurmSite) -> None:
    pyxis, text = site.stack.pyxis, site.companion_line
    before = f", before pyxis ({pyxis.line.where})" if pyxis else ""
    plan.lines.append(LineChange(site.stack.file, "add", text, f"as the first line{before}"))
    plan.notes += [] if text.startswith("include") else [LOGIN_NODES_NOTE]


def _format_finding(found: CheckFinding) -> str:
    """Pure: a finding as a sentence, with the line to change."""
    return f"{found.what}. {found.why}. Change: {found.change}"


def plan_disable(site: SlurmSite) -> SlurmChangePlan:
    """Pure: what takes out all that leads Slurm to us."""
    plan = SlurmChangePlan()
    for hook in site.hooks:
        for pattern in hook.settings:
            _plan_script_removal(plan, hook, pattern)
    includes = site.stack.includes
    named = [
        one.line
        for one in site.stack.plugins
        if one.is_companion and one.line.included_by not in includes
    ]
    plan.lines += [_make_removal(one) for one in (*includes, *named)]
    _add_configless_note(plan, site)
    plan.notes += [SHARED_DIRECTORY_NOTE] if plan.unlinks else []
    return plan


def _plan_script_removal(plan: SlurmChangePlan, hook: HookSetup, pattern: HookSetting) -> None:
    for one in pattern.scripts:
        if one.relation == "names-us":
            plan.notes.append(f"{one.path} runs forestage: remove that manually.")
    if not pattern.is_glob:
        if any(one.relation == "hook" for one in pattern.scripts):
            plan.lines.append(_make_removal(pattern.setting.line))
        return
    linked = [one for one in pattern.scripts if one.relation == "hook" and one.path != hook.path]
    if linked and len(linked) == len(pattern.scripts):
        setting = pattern.setting
        plan.refusals.append(
            f"{setting.line.where}: {setting.value} would match nothing, which drains nodes: put"
            f" another script there first, or remove this line, then {RECONFIGURE_COMMAND}"
        )
    plan.unlinks += [HookLink(one.path, hook.path) for one in linked]


def _make_removal(line: ConfLine) -> LineChange:
    place = f"line {line.first}" if line.first == line.last else f"lines {line.first}-{line.last}"
    return LineChange(line.file, "remove", line.text, place)


def _add_configless_note(plan: SlurmChangePlan, site: SlurmSite) -> None:
    if site.conf.is_configless:
        plan.notes.append(
            f"{site.conf.path} comes from slurmctld (configless): change the file there."
        )


def apply_plan(plan: SlurmChangePlan, files: RootedTree) -> None:
    """Makes and removes the links, as root.

    Raises SlurmConfChangeRefused before anything is done; OSError.
    A link that was made before an error stays: slurmd may be about to run it.
    """
    if plan.refusals:
        raise SlurmConfChangeRefused("\n".join(plan.refusals))
    # slurmd lists the directory first, then looks for each script in turn: one that goes meanwhile
    # is a failed Prolog, and the node drains (run_script.c).
    if plan.unlinks and sites.is_hook_running(files):
        raise SlurmConfChangeRefused(
            "a Prolog or Epilog runs here and may have listed the directory",
            "try again, or drain the node first",
        )
    # The Epilog's first: it does no harm without a Prolog.
    for link in reversed(plan.links):
        files.host_path(link.path).symlink_to(files.host_path(link.target))
    for link in plan.unlinks:
        files.host_path(link.path).unlink(missing_ok=True)


def list_wanted_units(config: Config | None) -> list[str]:
    """Return the units of a node with this configuration; None is one that cannot be used."""
    if config is None:
        return [TIMER_UNIT]
    wanting = [
        one for one in FEATURES if one.unit and load_door(one.name, CHECKS_WANTS_UNIT)(config)
    ]
    return [TIMER_UNIT, *(one.unit for one in wanting)]


def start_units(files: RootedTree, units: Iterable[str]) -> list[str]:
    """Enable and start units where systemd runs; return a sentence for each."""
    if files.find_mode("/run/systemd/system") is None:
        return []
    return [_switch_unit(unit, "enable", "on") for unit in units]


def list_units_to_start(files: RootedTree, units: Iterable[str]) -> list[str]:
    """Return what `enable --yes` would start: nothing if all is on, or if no systemd runs."""
    off = [unit for unit in units if sites.lacks_enabled_unit(files, unit)]
    return [_format_unit_command("enable", off)] if off else []


def stop_units(files: RootedTree) -> list[str]:
    """Stop and disable the units of features that are enabled; return a sentence about each.

    The timer goes on until the package is removed: jobs that run still have leases and mounts.
    """
    return [_switch_unit(unit, "disable", "off") for unit in _list_units_to_stop(files)]


def list_units_to_stop(files: RootedTree) -> list[str]:
    """Return what `disable --yes` would stop."""
    on = _list_units_to_stop(files)
    return [_format_unit_command("disable", on)] if on else []


def _list_units_to_stop(files: RootedTree) -> list[str]:
    has_systemd = files.find_mode("/run/systemd/system") is not None
    units = [one.unit for one in FEATURES if one.unit]
    return [unit for unit in units if has_systemd and not sites.lacks_enabled_unit(files, unit)]


def _switch_unit(unit: str, verb: str, state: str) -> str:
    # A command for each unit: one that the admin has masked does not keep the others from it.
    ran = run.run_program(["systemctl", verb, "--now", unit], timeout=SYSTEMCTL_TIMEOUT)
    return (
        f"{unit} is {state}." if ran.code == 0 else f"{unit} is not {state}: {ran.format_ending()}"
    )


def _format_unit_command(verb: str, units: list[str]) -> str:
    return f"On each node: systemctl {verb} --now {' '.join(units)} (or add --yes there)."


def format_plan(plan: SlurmChangePlan, done: bool, enabling: bool) -> list[OutputBlock]:
    """Pure: the lines to change, which can be copied as they stand, the links, what comes next.

    slurmd looks into prolog.d at each job, into slurm.conf when it is asked to.
    """
    shown: list[OutputBlock] = []
    for file, action in dict.fromkeys((one.file, one.action) for one in plan.lines):
        lines = [one for one in plan.lines if (one.file, one.action) == (file, action)]
        places = ", ".join(dict.fromkeys(one.place for one in lines))
        verb = "Add to" if action == "add" else "Remove from"
        shown.append(TextLine(f"{verb} {file}, {places}:", heading=True))
        shown += [TextLine(one.text, 2, whole=True) for one in lines]
    shown += [TextLine(f"+ {one.path} -> {one.target}", whole=True) for one in plan.links]
    shown += [TextLine(f"- {one.path} -> {one.target}", whole=True) for one in plan.unlinks]
    if plan.disk:
        shown.append(
            TextLine("If jobs are to ask for nodes with this disk (docs/data.md):", heading=True)
        )
    for one in plan.disk:
        shown += [TextLine(f"{one.file}, {one.place}:", 2), TextLine(one.text, 4, whole=True)]
    if not enabling:
        shown.append(TextLine(DISABLE_NOTE))
    shown += [TextLine(note) for note in plan.notes]
    shown += [TextLine(f"Refused: {why}") for why in plan.refusals]
    if plan.refusals or plan.is_empty:
        end = "Nothing was done." if plan.refusals else "There is nothing to change."
        return [*shown, TextLine(end)]
    if enabling:
        shown.append(TextLine(ENABLE_NOTE))
    if plan.links or plan.unlinks:
        changed = "The links were changed." if done else "No link was changed yet: add --yes."
        shown.append(TextLine(changed))
    if plan.lines:
        # slurmd itself loads a new plugin only when it starts; steps load it at once.
        stack = any(one.text.split()[0] in PLUGSTACK_WORDS for one in plan.lines)
        restart = f", and on each node {RESTART_COMMAND} (running jobs go on)" if stack else ""
        step = (
            f"forestage does not edit Slurm's files. Once you have: {RECONFIGURE_COMMAND}{restart}"
        )
        shown.append(TextLine(step))
    return shown
