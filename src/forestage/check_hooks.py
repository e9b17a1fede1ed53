"""Do slurmd's hooks reach ours, and can they run? For `check`.

A glob that matches nothing, a script that is missing or cannot be executed: Slurm takes each for a
failed Prolog and drains the node (read in slurmd's run_script.c).
"""

import glob
import re
import stat
from collections.abc import Iterator
from typing import Literal

import msgspec

from forestage.check_slurm import Conf
from forestage.errors import Failed
from forestage.finding import Finding
from forestage.paths import Places
from forestage.system import run
from forestage.system.tree import Files
from forestage.uses import Uses

NAMES = ("Prolog", "Epilog")
RECENT = 7 * 86400.0  # seconds; a hook that ran since is called by some script of the site
OURS = {"Prolog": Places().prolog, "Epilog": Places().epilog}
TIMEOUT = 20.0  # seconds for the interpreter, on a node that is busy with jobs

SCRIPT = 64 * 1024  # bytes of a script that are looked at

_MAGIC = re.compile(r"[*?[]")
_PATHS = re.compile(r"/[\w./+-]+")

_COMMENT = re.compile(r"(?:^|(?<=\s))#.*", re.MULTILINE)

State = Literal["fine", "missing", "dangling", "not-executable"]


class Script(msgspec.Struct, frozen=True):
    """A program that slurmd runs; `ours`: it is our hook, or mentions it."""

    path: str
    state: State
    ours: bool = False


class Hook(msgspec.Struct, frozen=True):
    """A setting of slurm.conf, `name`=`pattern`, and the scripts it stands for."""

    name: str
    pattern: str
    scripts: tuple[Script, ...]


class Interpreter(msgspec.Struct, frozen=True):
    """What our hooks are run by; `trouble` is "" where it can load them."""

    path: str
    trouble: str = ""


class Hooks(msgspec.Struct, frozen=True):
    """`recent` are those of our hooks that have run within RECENT."""

    conf: str
    hooks: tuple[Hook, ...]
    interpreters: tuple[Interpreter, ...] = ()
    recent: frozenset[str] = frozenset()
    companion: bool = False


def gather(files: Files, conf: Conf, uses: Uses, now: float, companion: bool) -> Hooks:
    """Looks at the scripts, and starts the interpreters of ours once each."""
    hooks = tuple(
        Hook(name, pattern, tuple(_scripts(files, pattern)))
        for name in NAMES
        for pattern in conf.every(name.lower())
    )
    ours = [s.path for hook in hooks for s in hook.scripts if s.ours and s.state == "fine"]
    recent = frozenset(name for name, when in uses.hooks.items() if now - when < RECENT)
    return Hooks(conf.path, hooks, tuple(_interpreters(files, ours)), recent, companion)


def _scripts(files: Files, pattern: str) -> Iterator[Script]:
    if not _MAGIC.search(pattern):
        yield _script(files, pattern)
        return
    # glob(3) as slurmd calls it finds dangling links as well.
    for path in sorted(glob.iglob(str(files.at(pattern)))):  # noqa: PTH207 - absolute, as slurmd's
        yield _script(files, f"/{path.removeprefix(str(files.root)).lstrip('/')}")


def _script(files: Files, path: str) -> Script:
    mode = files.mode(path)
    ours = "forestage" in path or bool(_lines(files, path)) or "forestage" in files.real(path)
    if mode is None:
        state: State = "dangling" if files.at(path).is_symlink() else "missing"
    else:
        state = "fine" if stat.S_ISREG(mode) and mode & 0o111 else "not-executable"
    return Script(path, state, ours)


def _interpreters(files: Files, scripts: list[str]) -> Iterator[Interpreter]:
    """Those that our scripts name, and the scripts which these call, where they name us."""
    words = [word for path in scripts for word in _paths_in(files, path)]
    called = [word for word in words if _lines(files, word)]
    words += [word for path in called for word in _paths_in(files, path)]
    named = (word for word in words if re.fullmatch(r".*/python[\d.]*", word))
    for path in dict.fromkeys(named):
        yield Interpreter(path, _trouble(files, path))


def _paths_in(files: Files, script: str) -> list[str]:
    return [word for line in _lines(files, script) for word in _PATHS.findall(line)]


def _lines(files: Files, script: str) -> list[str]:
    """Those that name us, without comments: a site's script may start other programs as well."""
    text = _COMMENT.sub("", files.text(script, SCRIPT) or "")
    return [line for line in text.split("\n") if "forestage" in line]


def _trouble(files: Files, path: str) -> str:
    mode = files.mode(path)
    if mode is None or not mode & 0o111:
        return "it is not there, or not executable"
    wanted = "import forestage.hooks, forestage.prolog, forestage.epilog"
    try:
        ran = run.run([str(files.at(path)), "-I", "-c", wanted], timeout=TIMEOUT)
    except (Failed, OSError) as error:
        return str(error)
    return ran.explained() if ran.code else ""


def findings(facts: Hooks) -> Iterator[Finding]:
    """Pure."""
    for hook in facts.hooks:
        yield from _broken(facts.conf, hook)
    for name in NAMES:
        hooks = [hook for hook in facts.hooks if hook.name == name]
        ours = any(script.ours for hook in hooks for script in hook.scripts)
        # A script of the site may call ours by a way that is not seen here; but without any
        # line in slurm.conf nothing can, whatever has run before the line was taken out.
        called = bool(hooks) and name.lower() in facts.recent
        if not ours and not called:
            yield _absent(facts, name)
    for one in facts.interpreters:
        if one.trouble:
            yield Finding(
                "hook-interpreter",
                "critical",
                f"the hooks' interpreter {one.path} cannot run them: {one.trouble}",
                "No job gets an image staged; each goes on with its original path",
                f"install forestage's package again, until `{one.path} -I -c 'import"
                " forestage.hooks'` ends well",
            )


def _broken(conf: str, hook: Hook) -> Iterator[Finding]:
    line = f"{hook.name}={hook.pattern}"
    risk = f"Slurm takes it for a failed {hook.name} and drains the node at its next job"
    if not hook.scripts:
        yield Finding(
            "hook-no-match",
            "critical",
            f"{line} matches no file",
            risk,
            f"ln -s {OURS[hook.name]} {hook.pattern.rpartition('/')[0]}/50-forestage (or"
            f" {conf}: without {line})",
        )
    for script in hook.scripts:
        if script.state in ("missing", "dangling"):
            word = "a link that leads nowhere" if script.state == "dangling" else "not there"
            yield Finding(
                "hook-missing",
                "critical",
                f"{script.path} of {line} is {word}",
                risk,
                f"rm {script.path}" if script.state == "dangling" else f"{conf}: without {line}",
            )
        elif script.state == "not-executable":
            yield Finding(
                "hook-not-executable",
                "critical",
                f"{script.path} of {line} is no program that can be executed",
                risk,
                f"chmod 0755 {script.path} (or take it out of that directory)",
            )


def _absent(facts: Hooks, name: str) -> Finding:
    line = f"forestage enable --yes (or {facts.conf}: {name}={OURS[name]})"
    what = f"no {name} in slurm.conf is forestage's, nor mentions it"
    if name == "Epilog":
        why = "Leases and redirects stay when jobs end, until the sweep finds them"
        return Finding("epilog-absent", "critical", what, why, line)
    if facts.companion:
        why = "Copies start with a job's first step and not with the job: seconds later"
        return Finding("prolog-absent", "warning", what, why, line)
    return Finding("prolog-absent", "critical", what, "No image is ever staged on this node", line)
