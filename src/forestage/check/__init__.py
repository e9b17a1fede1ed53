"""Check of a node's setup: each part looks, judges, and names the line to change.

The door of this folder is `run_checks`, with a `CheckTarget`; `format_report` renders its
`CheckReport`. A part is a module with `list_findings`, which reads and may take seconds. Facts are
read from files; of Slurm's programs only `slurmd -V` is run, which asks no daemon. What a feature
looks at, its checks.py says.

All of it happens in a child: whatever file a part reads may lie on a file system that hangs.
"""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from functools import partial

import msgspec

from forestage.check import (
    cache_findings,
    enroot_findings,
    event_log_facts,
    hook_findings,
    node_findings,
    plugstack_findings,
    pyxis_findings,
    slurm_conf_findings,
    source_findings,
)
from forestage.check import config_findings as of_settings
from forestage.check import slurm_site as sites
from forestage.check.event_log_facts import EventLogFacts
from forestage.check.finding import (
    CheckFinding,
    CheckReport,
    FindingLevel,
    escape_finding,
    format_report,
    make_report,
)
from forestage.check.slurm_site import SlurmSite
from forestage.clock import Clock
from forestage.config import Config, LoadedConfig, load_config
from forestage.errors import ConfigError, Failed
from forestage.features.contexts import CheckFacts
from forestage.features.doors import CHECKS_FINDINGS, load_doors
from forestage.paths import NodePaths
from forestage.slurm import enroot as enroots
from forestage.slurm.slurm_client import SlurmClient
from forestage.system import forked_child
from forestage.system.terminal import escape_control_characters
from forestage.system.tree import RootedTree

__all__ = [
    "CheckFinding",
    "CheckReport",
    "CheckTarget",
    "FindingLevel",
    "format_report",
    "make_report",
    "run_checks",
]

MESSAGE_TIMEOUT = 60.0  # seconds in which the child says something; each part has limits of its own
MAX_MESSAGE_BYTES = 128 * 1024  # bytes of what it says at once


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


def run_checks(target: CheckTarget) -> CheckReport:
    """Looks at the node and leaves all as it was. Takes seconds where a source does not answer.

    Raises Failed.
    """
    heard = [*_receive_findings(target)]
    said = next((one for one in heard if isinstance(one, str)), "")
    return make_report((one for one in heard if not isinstance(one, str)), said)


def _receive_findings(target: CheckTarget) -> Iterator[CheckFinding | str]:
    """The findings of the child, as far as it comes, and last what was read of enroot."""
    pid, line = forked_child.fork_with_socket(partial(_run_child, target), _send_failure)
    line.settimeout(MESSAGE_TIMEOUT)
    at = ""
    with line:
        while True:
            try:
                said = msgspec.json.decode(
                    line.recv(MAX_MESSAGE_BYTES) or b"{}", type=_CheckMessage
                )
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)  # it may stay in the kernel, and is left there
                yield _make_hang_finding(at)
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


def _run_child(target: CheckTarget, line: socket.socket) -> None:
    """The child's whole life."""
    forked_child.close_descriptors_except({line.fileno()})
    line.send(msgspec.json.encode(_CheckMessage(at="enroot's configuration")))
    files = RootedTree(target.places.root)
    of_enroot = enroot_findings.read_node_enroot_setup(files)
    for one in _list_findings(target, files, of_enroot):
        said = (
            _CheckMessage(at=one)
            if isinstance(one, str)
            else _CheckMessage(found=escape_finding(one))
        )
        line.send(msgspec.json.encode(said))
    words = escape_control_characters(enroot_findings.format_enroot_summary(files, of_enroot))
    line.send(msgspec.json.encode(_CheckMessage(over=True, enroot=words)))


def _send_failure(line: socket.socket, error: BaseException | None) -> None:
    with contextlib.suppress(OSError):
        line.send(msgspec.json.encode(_CheckMessage(error=ascii(error)[: MAX_MESSAGE_BYTES // 2])))


def _make_hang_finding(at: str) -> CheckFinding:
    return CheckFinding(
        "check-hangs",
        "unknown",
        f"{at} could not be looked at: no answer after {MESSAGE_TIMEOUT:.0f} s",
        "A file system that holds some of it hangs; what comes after it was not looked at either",
        "`dmesg`, and `cat /proc/PID/stack` of the process forestage that is in state D",
    )


def _list_findings(
    target: CheckTarget, files: RootedTree, of_enroot: enroots.EnrootSetup
) -> Iterator[CheckFinding | str]:
    """What is found, and before each part what it looks at."""
    yield "slurm.conf"
    if target.login:
        found = _find_site(files, target)
        yield from (
            (found,)
            if isinstance(found, CheckFinding)
            else plugstack_findings.list_login_findings(files, found)
        )
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
    used = event_log_facts.read_event_log_facts(target.places)
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
        yield from _list_slurm_findings(
            files, found, used, LoadedConfig(Config(), {}, {}), target.clock
        )
        return
    yield from of_settings.list_removed_key_findings(settings)
    # First, as what hangs is a source most likely.
    yield "a source"
    origin = of_settings.locate_config_file(settings, target.places, "sources")
    yield from source_findings.list_findings(
        files, settings.config, used, origin, target.clock.wall()
    )
    yield "slurm.conf and what it names"
    found = _find_site(files, target)
    site = None if isinstance(found, CheckFinding) else found
    settings = plugstack_findings.resolve_auto_redirects(
        files, site, settings, target.places.loaded.exists()
    )
    yield from _list_slurm_findings(files, found, used, settings, target.clock)
    config, conf = settings.config, None if site is None else site.conf
    covered = slurm_conf_findings.read_covered_paths(files, conf)
    yield from covered.list_findings()
    yield "the cache"
    origin = of_settings.locate_config_file(settings, target.places, "cache")
    yield from cache_findings.list_findings(
        files, config, covered.paths, used, origin, target.clock.wall()
    )
    yield from of_settings.list_findings(files, conf, settings, used.images, target.places)
    yield "enroot's configuration"
    yield from enroot_findings.list_findings(files, config.sources, of_enroot)
    yield "the node"
    yield from node_findings.list_findings(
        files, target.places, settings.node_config, target.clock.wall()
    )
    yield from node_findings.list_untended_findings(files, conf)
    facts = CheckFacts(target, files, settings, site)
    for findings in load_doors(CHECKS_FINDINGS):
        yield from findings(facts)


def _find_site(files: RootedTree, target: CheckTarget) -> SlurmSite | CheckFinding:
    """Return what Slurm reads here, or what is said where its slurm.conf cannot be read."""
    try:
        return sites.read_named_site(files, target.conf)
    except Failed as error:
        return slurm_conf_findings.make_unread_finding(error.what)


def _list_slurm_findings(
    files: RootedTree,
    site: SlurmSite | CheckFinding,
    log_facts: EventLogFacts,
    settings: LoadedConfig,
    clock: Clock,
) -> Iterator[CheckFinding]:
    if isinstance(site, CheckFinding):
        yield site
        return
    yield from slurm_conf_findings.list_findings(site.conf, settings)
    yield from plugstack_findings.list_findings(files, site, settings)
    yield from hook_findings.list_findings(files, site, log_facts, clock.wall())
    if site.stack.pyxis is not None:
        yield from pyxis_findings.list_findings(files, site.stack.pyxis)
