"""Plans of `forestage enable` and `disable`: how Slurm comes to call the hooks, and stops.

slurm.conf and plugstack.conf are never edited: the plan holds the exact lines for the admin, who
keeps these files for a whole cluster. `apply` makes or removes only our links in a directory that
`Prolog=` or `Epilog=` names with a glob. Refused is what would drain nodes: slurmd drains a node
whose Prolog is missing, cannot be executed, or is a glob without a match (run_script.c).
"""

import fnmatch
import glob
import os
from pathlib import Path
from typing import Literal

import msgspec

from forestage.admin import site as sites
from forestage.admin.site import COMPANION, Hook, Pattern, Site
from forestage.errors import Failed, RefusedError
from forestage.slurm.slurm_conf import Line as ConfLine
from forestage.system import run
from forestage.system.terminal import Line, Piece
from forestage.system.tree import Files

LINK = "50-forestage"
TIMER = "forestage-sweep.timer"
FLAGS = frozenset(("alloc", "deferbatch"))
SYSTEMCTL = 60.0  # seconds
RECONFIGURE = "scontrol reconfigure"
RESTART = "systemctl restart slurmd"
SHARED = (
    "Other nodes that share such a directory are not seen from here: one that runs a Prolog or"
    " Epilog while the link is removed may drain."
)
EVERYWHERE = "Every node that reads these files must have forestage: one without it will drain."
LOGIN = (
    "Login nodes read plugstack.conf as well: install forestage-spank there too, and upgrade it"
    " together with Slurm, else srun and sbatch print errors."
)


class LineChange(msgspec.Struct, frozen=True):
    """A line that the admin has to add to a file of Slurm's, or to remove; `place` says where."""

    file: str
    action: Literal["add", "remove"]
    text: str
    place: str


class Link(msgspec.Struct, frozen=True):
    """A symbolic link to make, or to remove."""

    path: str
    target: str


class Plan(msgspec.Struct, frozen=True):
    """`lines` are for the admin to change, `links` and `unlinks` for `apply`, `notes` to know.

    `refusals` say what would drain nodes, or is in the way; with any, `apply` does nothing.
    """

    lines: tuple[LineChange, ...] = ()
    links: tuple[Link, ...] = ()
    unlinks: tuple[Link, ...] = ()
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.lines or self.links or self.unlinks)


class Document(msgspec.Struct, frozen=True):
    """A plan as JSON; `done`: whether its links were made or removed."""

    done: bool
    lines: tuple[LineChange, ...]
    linked: tuple[str, ...]
    unlinked: tuple[str, ...]
    notes: tuple[str, ...]
    refusals: tuple[str, ...]


def read_site(files: Files, conf: str) -> Site:
    """The site's Slurm files, for a plan. Raises Failed where they cannot be read."""
    try:
        found = sites.read(files, conf)
    except FileNotFoundError as error:
        raise Failed("slurm-conf", f"{error.filename} is included, but is not there") from None
    except ValueError as error:
        raise Failed("slurm-conf", f"{conf} cannot be read: {error}") from None
    if found.stack.broken:
        raise Failed("slurm-conf", found.stack.broken)
    return found


def to_enable(site: Site) -> Plan:
    """Pure: what makes Slurm call both hooks, and load the companion where it is installed."""
    plans = [_enable_hook(site, hook) for hook in site.hooks]
    plans.append(_enable_companion(site))
    notes = _configless(site)
    if FLAGS - site.conf.prolog_flags:
        notes.append(
            f"{site.conf.wanted_prolog_flags} lets jobs wait for their images for longer than 15 s."
        )
    return _sum([*plans, Plan(notes=tuple(notes))])


def _enable_hook(site: Site, hook: Hook) -> Plan:
    if not hook.usable:
        missing = f"{hook.path} is missing or cannot be executed: install forestage again"
        return Plan(refusals=(missing,))
    broken = [
        f"{pattern.setting.line.where}: {script.path} is {script.state}, which drains nodes:"
        " `forestage check` says what to change"
        for pattern in hook.patterns
        for script in pattern.scripts
        if script.state != "fine"
    ]
    if broken:
        return Plan(refusals=tuple(broken))
    there = next((one.path for one in hook.scripts if one.ours), "")
    if there:
        return Plan(notes=(f"{hook.name}: forestage is there already ({there}).",))
    if not hook.patterns:
        line = LineChange(site.conf.path, "add", f"{hook.name}={hook.path}", "at the end")
        return Plan(lines=(line,))
    if not hook.globs:
        return Plan(refusals=(_taken(hook),))
    path = _free_name(hook.globs[0])
    if not path:
        return Plan(refusals=(_no_place(hook.globs[0]),))
    return Plan(links=(Link(path, hook.path),))


def _free_name(pattern: Pattern) -> str:
    """A path for our link that the glob matches and nobody has; "" where there is none."""
    directory, names = os.path.split(pattern.setting.value)
    taken = {script.path for script in pattern.scripts}
    if not pattern.directory or glob.has_magic(directory):
        return ""
    for name in (LINK, names.replace("*", LINK, 1)):
        path = os.path.join(directory, name)
        fits = fnmatch.fnmatchcase(name, names) and not glob.has_magic(name)
        if fits and path not in taken:
            return path
    return ""


def _no_place(pattern: Pattern) -> str:
    setting = pattern.setting
    if not pattern.directory:
        return f"{setting.line.where}: the directory of {setting.value} is not there: make it first"
    return (
        f"{setting.line.where}: no name fits {setting.value}: link forestage's hook there by hand"
    )


def _taken(hook: Hook) -> str:
    other = hook.patterns[0].setting
    return (
        f"{other.line.where}: {hook.name}={other.value} is there already: run {hook.path} at the"
        f" end of that script, or make it one of a directory ({hook.name}="
        f"{Path(other.value).parent}/{hook.name.lower()}.d/*)"
    )


def _enable_companion(site: Site) -> Plan:
    stack, ours, pyxis = site.stack, site.stack.companion, site.stack.pyxis
    if not site.companion_built:
        return Plan()
    if ours is None:
        # A step's image must be redirected before pyxis opens it, and Slurm calls in this order.
        before = f", before pyxis ({pyxis.line.where})" if pyxis else ""
        line = LineChange(stack.file, "add", f"optional {COMPANION}", f"as the first line{before}")
        return Plan(lines=(line,), notes=(LOGIN,))
    if pyxis is not None and stack.plugins.index(pyxis) < stack.plugins.index(ours):
        move = f"{ours.line.where}: move this line before pyxis ({pyxis.line.where})."
        return Plan(notes=(move,))
    return Plan()


def to_disable(site: Site) -> Plan:
    """Pure: what takes out all that leads Slurm to us."""
    plans = [_disable_script(hook, pattern) for hook in site.hooks for pattern in hook.patterns]
    lines = [_removed(one.line) for one in site.stack.plugins if one.ours]
    plan = _sum([*plans, Plan(lines=tuple(lines), notes=tuple(_configless(site)))])
    shared = (SHARED,) if plan.unlinks else ()
    return msgspec.structs.replace(plan, notes=(*plan.notes, *shared))


def _disable_script(hook: Hook, pattern: Pattern) -> Plan:
    linked = [one for one in pattern.scripts if one.relation == "hook" and one.path != hook.path]
    others = [one for one in pattern.scripts if one.relation == "names-us"]
    notes = tuple(f"{one.path} runs forestage: take that out by hand." for one in others)
    if not pattern.is_glob:
        ours = any(one.relation == "hook" for one in pattern.scripts)
        return Plan(lines=(_removed(pattern.setting.line),) if ours else (), notes=notes)
    refusals = []
    if linked and len(linked) == len(pattern.scripts):
        setting = pattern.setting
        refusals.append(
            f"{setting.line.where}: {setting.value} would match nothing, which drains nodes: put"
            f" another script there first, or remove this line, then {RECONFIGURE}"
        )
    unlinks = tuple(Link(one.path, hook.path) for one in linked)
    return Plan(unlinks=unlinks, notes=notes, refusals=tuple(refusals))


def _removed(line: ConfLine) -> LineChange:
    place = f"line {line.first}" if line.first == line.last else f"lines {line.first}-{line.last}"
    return LineChange(line.file, "remove", line.text, place)


def _configless(site: Site) -> list[str]:
    if not site.conf.configless:
        return []
    return [f"{site.conf.path} comes from slurmctld (configless): change the file there."]


def _sum(plans: list[Plan]) -> Plan:
    return Plan(
        lines=tuple(one for plan in plans for one in plan.lines),
        links=tuple(one for plan in plans for one in plan.links),
        unlinks=tuple(one for plan in plans for one in plan.unlinks),
        notes=tuple(one for plan in plans for one in plan.notes),
        refusals=tuple(one for plan in plans for one in plan.refusals),
    )


def apply(plan: Plan, files: Files) -> None:
    """Makes and removes the links, as root. Raises RefusedError before anything is done; OSError.

    A link that was made before an error stays: slurmd may be about to run it.
    """
    if plan.refusals:
        raise RefusedError("\n".join(plan.refusals))
    # slurmd lists the directory first, then looks for each script in turn: one that goes meanwhile
    # is a failed Prolog, and the node drains (run_script.c).
    if plan.unlinks and sites.hook_runs(files):
        raise RefusedError(
            "a Prolog or Epilog runs here and may have listed the directory",
            "try again, or drain the node first",
        )
    # The Epilog's first: it does no harm without a Prolog.
    for link in reversed(plan.links):
        files.at(link.path).symlink_to(files.at(link.target))
    for link in plan.unlinks:
        files.at(link.path).unlink(missing_ok=True)


def start_timer(files: Files) -> str:
    """Has systemd run the sweep, where there is one; returns what came of it, for people."""
    if files.mode("/run/systemd/system") is None:
        return ""
    ran = run.run(["systemctl", "enable", "--now", TIMER], timeout=SYSTEMCTL)
    return f"{TIMER} is on." if ran.code == 0 else f"{TIMER} is not on: {ran.explained()}"


# What people and tools are shown.


def document(plan: Plan, done: bool) -> Document:
    """Pure."""
    return Document(
        done=done,
        lines=plan.lines,
        linked=tuple(one.path for one in plan.links),
        unlinked=tuple(one.path for one in plan.unlinks),
        notes=plan.notes,
        refusals=plan.refusals,
    )


def pieces(plan: Plan, done: bool, enabling: bool) -> list[Piece]:
    """Pure: the lines to change, the links, what there is to know, what comes next."""
    shown: list[Piece] = []
    for where in dict.fromkeys((one.file, one.action) for one in plan.lines):
        shown += _changes(plan, *where)
    shown += [Line(f"+ {one.path} -> {one.target}", whole=True) for one in plan.links]
    shown += [Line(f"- {one.path} -> {one.target}", whole=True) for one in plan.unlinks]
    shown += [Line(note) for note in plan.notes]
    if plan.refusals:
        shown += [Line(f"Refused: {why}") for why in plan.refusals]
        return [*shown, Line("Nothing was done.")]
    if plan.empty:
        return [*shown, Line("There is nothing to change.")]
    if enabling:
        shown.append(Line(EVERYWHERE))
    return [*shown, *(Line(text) for text in _next(plan, done))]


def _changes(plan: Plan, file: str, action: str) -> list[Piece]:
    """One file's lines, which can be copied as they stand."""
    lines = [one for one in plan.lines if (one.file, one.action) == (file, action)]
    places = ", ".join(dict.fromkeys(one.place for one in lines))
    verb = "Add to" if action == "add" else "Remove from"
    shown: list[Piece] = [Line(f"{verb} {file}, {places}:", heading=True)]
    return [*shown, *(Line(one.text, 2, whole=True) for one in lines)]


def _next(plan: Plan, done: bool) -> list[str]:
    """What is left to do. slurmd looks into prolog.d at each job, into slurm.conf when told to."""
    steps = []
    if plan.links or plan.unlinks:
        steps.append("The links were changed." if done else "No link was changed yet: add --yes.")
    if plan.lines:
        # slurmd itself loads a new plugin only when it starts; steps load it at once.
        stack = any("forestage.so" in one.text for one in plan.lines)
        restart = f", and on each node {RESTART} (running jobs go on)" if stack else ""
        steps.append(
            f"forestage does not edit Slurm's files. Once you have: {RECONFIGURE}{restart}"
        )
    return steps
