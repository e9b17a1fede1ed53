"""Findings about slurmd's hooks: whether they reach ours, and whether those can run.

A glob that matches nothing, a script that is missing or cannot be executed: Slurm takes each for a
failed Prolog and drains the node (read in slurmd's run_script.c).
"""

import re
from collections.abc import Iterator

from forestage.check import slurm_site as sites
from forestage.check.event_log_facts import EventLogFacts
from forestage.check.finding import CheckFinding
from forestage.check.slurm_site import (
    LINK_NAME,
    PATH_PATTERN,
    HookSetup,
    SlurmSite,
    list_lines_naming_forestage,
)
from forestage.errors import Failed
from forestage.system import run
from forestage.system.tree import RootedTree

RECENT_RUN_SECONDS = (
    7 * 86400.0
)  # seconds; a hook that ran since is called by some script of the site
INTERPRETER_TIMEOUT = 20.0  # seconds for the interpreter, on a node that is busy with jobs


def list_findings(
    files: RootedTree, site: SlurmSite, log_facts: EventLogFacts, now: float
) -> Iterator[CheckFinding]:
    """Looks at the scripts, and starts the interpreters of ours once each."""
    for hook in site.hooks:
        yield from _list_broken_findings(hook)
    for hook in site.hooks:
        # A script of the site may call ours in a way that is not seen here; but without any
        # line in slurm.conf nothing can, whatever has run before the line was taken out.
        ran = log_facts.hooks.get(hook.name.lower(), 0.0)
        called = bool(hook.settings) and now - ran < RECENT_RUN_SECONDS
        if not called and not any(script.is_ours for script in hook.scripts):
            yield _make_absent_finding(site, hook)
    if lacks_pdeathsig(files):  # so no program of ours can be started
        yield CheckFinding(
            "setpriv-old",
            "critical",
            "setpriv has no --pdeathsig, by which a program ends with the process that started it",
            "Nothing that takes a program works: directories of jobs, images of registries,"
            " `engine: rsync`, and the sweep, which asks Slurm which jobs are over",
            "util-linux 2.33 or newer: another release of the distribution",
        )
        return
    scripts = [script for hook in site.hooks for script in hook.scripts]
    ours = [one.path for one in scripts if one.is_ours and one.state == "fine"]
    for path in _list_interpreters(files, ours):
        if trouble := _find_interpreter_problem(files, path):
            yield CheckFinding(
                "hook-interpreter",
                "critical",
                f"the hooks' interpreter {path} cannot run them: {trouble}",
                "No job gets an image staged; each goes on with its original path",
                f"install forestage's package again, until `{path} -I -c 'import"
                " forestage.hooks'` ends well",
            )


def lacks_pdeathsig(files: RootedTree) -> bool:
    """Return whether this node's setpriv refuses the option with which each program is started."""
    program = files.find_program("setpriv")
    if not program:
        return False
    try:
        argv = [str(files.host_path(program)), "--pdeathsig", "KILL", "--", "true"]
        return run.run_program(argv, timeout=INTERPRETER_TIMEOUT).code != 0
    except (Failed, OSError):
        return False


def _list_interpreters(files: RootedTree, scripts: list[str]) -> list[str]:
    """Those that our scripts name, and the scripts which these call, where they name us."""
    words = [word for path in scripts for word in _list_paths(files, path)]
    called = [word for word in words if list_lines_naming_forestage(files, word)]
    words += [word for path in called for word in _list_paths(files, path)]
    return [word for word in dict.fromkeys(words) if re.fullmatch(r".*/python[\d.]*", word)]


def _list_paths(files: RootedTree, script: str) -> list[str]:
    """Only from lines that name us: a site's script may start other programs as well."""
    return [
        word
        for line in list_lines_naming_forestage(files, script)
        for word in PATH_PATTERN.findall(line)
    ]


def _find_interpreter_problem(files: RootedTree, path: str) -> str:
    if not files.is_executable(path):
        return "it is not there, or not executable"
    wanted = "import forestage.hooks.prolog, forestage.hooks.epilog"
    try:
        ran = run.run_program(
            [str(files.host_path(path)), "-I", "-c", wanted], timeout=INTERPRETER_TIMEOUT
        )
    except (Failed, OSError) as error:
        return str(error)
    return ran.format_ending() if ran.code else ""


def _list_broken_findings(hook: HookSetup) -> Iterator[CheckFinding]:
    risk = f"Slurm takes it for a failed {hook.name} and drains the node at its next job"
    for pattern in hook.settings:
        if not pattern.scripts:
            line, where = f"{hook.name}={pattern.setting.value}", pattern.setting.line.where
            link = f"{pattern.path.rpartition('/')[0]}/{LINK_NAME}"
            change = f"ln -s {hook.path} {link} (or {where}: without {line})"
            yield CheckFinding("hook-no-match", "critical", f"{line} matches no file", risk, change)
    for one in sites.list_broken_scripts(hook):
        if one.script.state == "not-executable":
            yield CheckFinding("hook-not-executable", "critical", one.what, risk, one.change)
        else:
            yield CheckFinding("hook-missing", "critical", one.what, risk, one.change)


def _make_absent_finding(site: SlurmSite, hook: HookSetup) -> CheckFinding:
    what = f"no {hook.name} in slurm.conf is forestage's, nor mentions it"
    way = sites.choose_installation(hook)
    change = f"{site.conf.path}: {way.text}" if way.kind == "line" else way.text
    if way.kind == "link":
        change = "forestage enable --yes"
    if hook.name == "Epilog":
        why = "Leases and redirects stay when jobs end, until the sweep finds them"
        return CheckFinding("epilog-absent", "critical", what, why, change)
    if site.stack.companion:
        why = "Copies start with a job's first step and not with the job: seconds later"
        return CheckFinding("prolog-absent", "warning", what, why, change)
    why = "No image is ever staged on this node"
    return CheckFinding("prolog-absent", "critical", what, why, change)
