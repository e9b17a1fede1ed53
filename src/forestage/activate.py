"""`forestage enable` and `disable`: have Slurm call us, or have it stop.

The facts of activation.py in, a plan out; `apply` takes back what it cannot do to its end. What is
refused is what would drain nodes: Slurm drains one whose Prolog is missing, cannot be run, or is a
pattern without a match.
"""

import contextlib
import fnmatch
import os
from pathlib import Path

import msgspec

from forestage import edits
from forestage.activation import Glob, Hook, Site, hook_runs, is_glob
from forestage.edits import Edit, Lines
from forestage.errors import RefusedError
from forestage.paths import Places
from forestage.slurm.slurm_conf import Line, Setting
from forestage.system import run

LINK = "50-forestage"
TIMER = "forestage-sweep.timer"
FLAGS = frozenset(("alloc", "deferbatch"))
SYSTEMCTL = 60.0  # seconds
SHARED = (
    "Nodes that share such a directory are not seen from here: one that runs a Prolog or Epilog"
    " while the link goes may drain."
)


class Link(msgspec.Struct, frozen=True):
    """A symbolic link to make, or to remove."""

    path: str
    target: str


class Plan(msgspec.Struct, frozen=True):
    """What would be done; `refusals` say why it cannot be. `notes` are for people to act on."""

    edits: tuple[Edit, ...] = ()
    links: tuple[Link, ...] = ()
    unlinks: tuple[Link, ...] = ()
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.edits or self.links or self.unlinks)


def to_enable(site: Site) -> Plan:
    """Pure: what makes Slurm call both hooks, and load the companion where it is built."""
    text = Lines(site.files.values())
    links, notes, refusals = [], [], _not_ours_to_change(site)
    for hook in site.hooks:
        if not hook.usable:
            refusals.append(f"{hook.path} is missing or cannot be run: install forestage again")
        elif _there(hook):
            notes.append(f"{hook.name}: forestage is there already ({_there(hook)}).")
        elif not hook.settings:
            text.append(site.conf, f"{hook.name}={hook.path}")
        elif hook.globs:
            link = _link(hook)
            links += [Link(link, hook.path)] if link else []
            refusals += [] if link else [_no_place(hook.globs[0])]
        else:
            refusals.append(_taken(hook))
    notes += _stack_on(site, text)
    flags = {flag for one in site.named("prologflags") for flag in _flags(one)}
    if FLAGS - flags:
        notes.append(
            "PrologFlags=Alloc,DeferBatch lets jobs wait for their images for longer than 15 s."
        )
    return Plan(text.edits(), tuple(links), (), tuple(notes), tuple(refusals))


def to_disable(site: Site) -> Plan:
    """Pure: what takes all that out again that leads Slurm to us."""
    text = Lines(site.files.values())
    unlinks, notes, refusals = [], [], _not_ours_to_change(site)
    for hook in site.hooks:
        for setting in hook.settings:
            if setting.value == hook.path:
                _drop(text, site, setting.line)
        for found in hook.globs:
            unlinks += [Link(one, hook.path) for one in found.ours]
            if found.ours and found.ours == found.matches:
                refusals.append(_would_be_empty(hook, found))
        for caller in hook.callers:
            notes.append(f"{caller} runs {hook.path}: take that out by hand.")
    for plugin in site.plugins:
        if plugin.path == site.companion:
            _drop(text, site, plugin)
    notes += [SHARED] if unlinks else []
    return Plan(text.edits(), (), tuple(unlinks), tuple(notes), tuple(refusals))


def _drop(text: Lines, site: Site, line: Line) -> None:
    text.drop(site.files[line.file].path, line.first, line.last)


def _flags(setting: Setting) -> set[str]:
    return {flag.strip().lower() for flag in setting.value.split(",")}


def _not_ours_to_change(site: Site) -> list[str]:
    """slurmd writes these files by itself, from what slurmctld sends (configless)."""
    path = site.conf
    if not ("/run/slurm/conf/" in path or "/conf-cache/" in path):
        return []
    return [f"{path} comes from slurmctld (configless): change it there"]


def _there(hook: Hook) -> str:
    """Where Slurm finds our hook already; "" where it does not."""
    lines = [one.line.where for one in hook.settings if one.value == hook.path]
    links = [one for found in hook.globs for one in found.ours]
    return next(iter([*lines, *links, *hook.callers]), "")


def _link(hook: Hook) -> str:
    """A link's path that the first pattern matches and that is free; "" where there is none."""
    found = hook.globs[0]
    directory, pattern = os.path.split(found.setting.value)
    if not found.directory or is_glob(directory):
        return ""
    names = (LINK, pattern.replace("*", LINK, 1))
    for name in names:
        path = os.path.join(directory, name)
        if _matches(name, pattern) and path not in found.matches:
            return path
    return ""


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) and not is_glob(name)


def _no_place(found: Glob) -> str:
    setting = found.setting
    return (
        f"{setting.line.where}: no name fits {setting.value}: link forestage's hook there by hand"
    )


def _taken(hook: Hook) -> str:
    other = hook.settings[0]
    return (
        f"{other.line.where}: {hook.name}={other.value} is there already: run {hook.path} at the"
        f" end of that script, or make it one of a directory ({hook.name}="
        f"{Path(other.value).parent}/{hook.name.lower()}.d/*)"
    )


def _would_be_empty(hook: Hook, found: Glob) -> str:
    setting = found.setting
    return (
        f"{setting.line.where}: {setting.value} would match nothing, which drains nodes: put"
        f" another script there first, or take {hook.name}= out"
    )


def _stack_on(site: Site, text: Lines) -> list[str]:
    """The companion's line, before all other plugins; what there is to say about it."""
    paths = [plugin.path for plugin in site.plugins]
    if not site.built:
        return []
    if site.companion not in paths:
        text.begin(site.stack, f"optional {site.companion}")
        return []
    before = [os.path.basename(path) for path in paths[: paths.index(site.companion)]]
    if any("pyxis" in name for name in before):
        return [f"{site.stack}: pyxis comes before {site.companion}: move it behind."]
    return []


def apply(plan: Plan, places: Places) -> None:
    """Does it, as root. Raises RefusedError and Failed before anything is done; OSError, with the
    files as they were. A link that was made then stays: slurmd may be about to run it."""
    if plan.refusals:
        raise RefusedError("\n".join(plan.refusals))
    edits.check(plan.edits)
    # slurmd lists the directory first, then looks for each script in turn: one that goes meanwhile
    # is a failed Prolog, and the node drains (run_script.c).
    if plan.unlinks and hook_runs(places):
        raise RefusedError(
            "a Prolog or Epilog runs here and may have listed the directory",
            "try again, or drain the node first",
        )
    with contextlib.ExitStack() as undo:
        for edit in plan.edits:
            was_there = Path(edit.path).exists()
            edits.write(edit)
            undo.callback(edits.take_back, edit, was_there)
        # The Epilog's first: it does no harm without a Prolog.
        for link in reversed(plan.links):
            Path(link.path).symlink_to(link.target)
        undo.pop_all()
    for link in plan.unlinks:
        Path(link.path).unlink(missing_ok=True)


def start_timer(places: Places) -> str:
    """Has systemd run the sweep, where there is one; what came of it, for people."""
    if not (places.root / "run/systemd/system").is_dir():
        return ""
    ran = run.run(["systemctl", "enable", "--now", TIMER], timeout=SYSTEMCTL)
    return f"{TIMER} is on." if ran.code == 0 else f"{TIMER} is not on: {ran.explained()}"
