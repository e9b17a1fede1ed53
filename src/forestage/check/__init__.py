"""Check of a node's setup: each part looks, judges, and names the line to change.

The door of this folder is `check`, with a `CheckTarget`; `pieces` renders its `CheckReport`. A part
is a module with `findings`, which reads and may take seconds. Facts are read from files; of Slurm's
programs only `slurmd -V` is run, which asks no daemon. What a feature looks at, its checks.py says.

All of it happens in a child: whatever file a part reads may lie on a file system that hangs.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from functools import partial

import msgspec

from forestage.check import disk, enroot, hooks, node, plugins, pyxis, slurm_conf, sources, uses
from forestage.check import settings as of_settings
from forestage.check import site as sites
from forestage.check.finding import CheckFinding, CheckReport, Level, pieces, plain, report
from forestage.check.site import SlurmSite
from forestage.check.uses import EventLogFacts
from forestage.clock import Clock
from forestage.config import Config, LoadedConfig, load_config
from forestage.errors import ConfigError, Failed
from forestage.features.contexts import CheckFacts
from forestage.features.doors import CHECKS_FINDINGS, load_all
from forestage.paths import NodePaths
from forestage.slurm import enroot as enroots
from forestage.slurm.queue import SlurmClient
from forestage.system import child
from forestage.system.terminal import escape_control_characters
from forestage.system.tree import RootedTree

__all__ = ["CheckFinding", "CheckReport", "CheckTarget", "Level", "check", "pieces", "report"]

PATIENCE = 60.0  # seconds in which the child says something; each part has limits of its own
LONGEST = 128 * 1024  # bytes of what it says at once


class CheckTarget(msgspec.Struct, frozen=True):
    """The node to look at: `conf` is $SLURM_CONF or "". `login`: jobs are submitted there.

    `slurm` is how Slurm is asked, and what this host is called.
    """

    places: NodePaths
    clock: Clock
    conf: str = ""
    is_root: bool = True
    login: bool = False
    slurm: SlurmClient = SlurmClient("")


class _CheckMessage(msgspec.Struct, frozen=True):
    """What the child says: what it looks at next, what it has found, or that it is over."""

    at: str = ""
    found: CheckFinding | None = None
    over: bool = False
    enroot: str = ""
    error: str = ""


def check(target: CheckTarget) -> CheckReport:
    """Looks at the node and leaves all as it was. Takes seconds where a source does not answer.

    Raises Failed.
    """
    heard = [*_heard(target)]
    said = next((one for one in heard if isinstance(one, str)), "")
    return report((one for one in heard if not isinstance(one, str)), said)


def _heard(target: CheckTarget) -> Iterator[CheckFinding | str]:
    """The findings of the child, as far as it comes, and last what was read of enroot."""
    pid, line = child.fork_with_socket(partial(_look, target), _failed)
    line.settimeout(PATIENCE)
    at = ""
    with line:
        while True:
            try:
                said = msgspec.json.decode(line.recv(LONGEST) or b"{}", type=_CheckMessage)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)  # it may stay in the kernel, and is left there
                yield _hangs(at)
                return
            at = said.at or at
            if said.found is not None:
                yield said.found
            if said.over:
                yield said.enroot
                break
            if said == _CheckMessage():
                said = _CheckMessage(error="its process died")
            if said.error:
                raise Failed("helper", f"{at} could not be looked at: {said.error}")
    os.waitpid(pid, 0)


def _look(target: CheckTarget, line: socket.socket) -> None:
    """The child's whole life."""
    child.close_descriptors_except({line.fileno()})
    line.send(msgspec.json.encode(_CheckMessage(at="enroot's configuration")))
    files = RootedTree(target.places.root)
    of_enroot = enroot.read(files)
    for one in _findings(target, files, of_enroot):
        said = _CheckMessage(at=one) if isinstance(one, str) else _CheckMessage(found=plain(one))
        line.send(msgspec.json.encode(said))
    words = escape_control_characters(enroot.looked(files, of_enroot))
    line.send(msgspec.json.encode(_CheckMessage(over=True, enroot=words)))


def _failed(line: socket.socket, error: BaseException | None) -> None:
    with contextlib.suppress(OSError):
        line.send(msgspec.json.encode(_CheckMessage(error=ascii(error)[: LONGEST // 2])))


def _hangs(at: str) -> CheckFinding:
    return CheckFinding(
        "check-hangs",
        "unknown",
        f"{at} could not be looked at: no answer after {PATIENCE:.0f} s",
        "A file system that holds some of it hangs; what comes after it was not looked at either",
        "`dmesg`, and `cat /proc/PID/stack` of the process forestage that is in state D",
    )


def _findings(
    target: CheckTarget, files: RootedTree, of_enroot: enroots.EnrootSetup
) -> Iterator[CheckFinding | str]:
    """What is found, and before each part what it looks at."""
    yield "slurm.conf"
    if target.login:
        found = _find_site(files, target)
        yield from (found,) if isinstance(found, CheckFinding) else plugins.on_login(files, found)
        return
    if not target.is_root:
        yield CheckFinding(
            "not-root",
            "unknown",
            "this user sees only a part of the node",
            "The cache, the event log and other users' rights are for root to see",
            "sudo forestage check",
        )
    yield "the event log"
    used = uses.gather(target.places)
    yield "the configuration"
    try:
        settings = load_config(target.places.etc)
    except ConfigError as error:
        for problem in error.problems:
            yield CheckFinding(
                "config",
                "critical",
                str(problem),
                "No job gets an image staged while the configuration cannot be read",
                ": ".join(filter(None, (problem.where, problem.key))),
            )
        yield "slurm.conf and what it names"
        found = _find_site(files, target)
        yield from _slurm(files, found, used, LoadedConfig(Config(), {}, {}), target.clock)
        return
    yield from of_settings.find_removed(settings)
    # First, as what hangs is a source most likely.
    yield "a source"
    origin = of_settings.origin(settings, target.places, "sources")
    yield from sources.findings(files, settings.config, used, origin, target.clock.wall())
    yield "slurm.conf and what it names"
    found = _find_site(files, target)
    site = None if isinstance(found, CheckFinding) else found
    settings = plugins.decided(files, site, settings, target.places.loaded.exists())
    yield from _slurm(files, found, used, settings, target.clock)
    config, conf = settings.config, None if site is None else site.conf
    covered = slurm_conf.covered_paths(files, conf)
    yield from covered.findings()
    yield "the cache"
    origin = of_settings.origin(settings, target.places, "cache")
    yield from disk.findings(files, config, covered.paths, used, origin, target.clock.wall())
    yield from of_settings.findings(files, conf, settings, used.images, target.places)
    yield "enroot's configuration"
    yield from enroot.findings(files, config.sources, of_enroot)
    yield "the node"
    yield from node.findings(files, target.places, settings.of_node, target.clock.wall())
    yield from node.untended(files, conf)
    facts = CheckFacts(target, files, settings, site)
    for findings in load_all(CHECKS_FINDINGS):
        yield from findings(facts)


def _find_site(files: RootedTree, target: CheckTarget) -> SlurmSite | CheckFinding:
    """Return what Slurm reads here, or what is said where its slurm.conf cannot be read."""
    try:
        return sites.find(files, target.conf)
    except Failed as error:
        return slurm_conf.unread(error.what)


def _slurm(
    files: RootedTree,
    site: SlurmSite | CheckFinding,
    used: EventLogFacts,
    settings: LoadedConfig,
    clock: Clock,
) -> Iterator[CheckFinding]:
    if isinstance(site, CheckFinding):
        yield site
        return
    yield from slurm_conf.findings(site.conf, settings)
    yield from plugins.findings(files, site, settings)
    yield from hooks.findings(files, site, used, clock.wall())
    if site.stack.pyxis is not None:
        yield from pyxis.findings(files, site.stack.pyxis)
