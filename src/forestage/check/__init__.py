"""Check of a node's setup: each part looks, judges, and names the line to change.

The door of this folder is `check`, with a `Target`; `pieces` renders its `Report`. A part is a
module with `findings`, which reads and may take seconds. Facts are read from files; of Slurm's
programs only `slurmd -V` is run, which asks no daemon. In the store of images a directory is made
and removed, and a registry that was silent is connected to: both as nobody.
"""

from collections.abc import Iterator

import msgspec

from forestage.admin import site as sites
from forestage.admin.site import Conf
from forestage.check import (
    disk,
    enroot,
    hooks,
    node,
    plugins,
    pyxis,
    registry,
    slurm_conf,
    sources,
    uses,
)
from forestage.check import settings as of_settings
from forestage.check.finding import Finding, Level, Report, pieces, report
from forestage.check.uses import Uses
from forestage.clock import Clock
from forestage.config import Config, Settings, load_settings
from forestage.errors import ConfigError
from forestage.paths import Places
from forestage.slurm.enroot import Site
from forestage.system.tree import Files

__all__ = ["Finding", "Level", "Report", "Target", "check", "pieces", "report"]


class Target(msgspec.Struct, frozen=True):
    """The node to look at: `conf` is $SLURM_CONF or ""."""

    places: Places
    clock: Clock
    conf: str = ""
    is_root: bool = True


def check(target: Target) -> Report:
    """Looks at the node and leaves all as it was. Takes seconds where a source does not answer."""
    files = Files(target.places.root)
    of_enroot = enroot.read(files)
    found = tuple(_findings(target, files, of_enroot))
    return report(found, enroot.looked(files, of_enroot))


def _findings(target: Target, files: Files, of_enroot: Site) -> Iterator[Finding]:
    if not target.is_root:
        yield Finding(
            "not-root",
            "unknown",
            "this user sees only a part of the node",
            "The cache, the event log and other users' rights are for root to see",
            "sudo forestage check",
        )
    conf = sites.find_conf(files, target.conf)
    if conf is not None:
        conf = sites.with_release(files, conf)
    used = uses.gather(target.places)
    try:
        settings = load_settings(target.places.etc)
    except ConfigError as error:
        for problem in error.problems:
            yield Finding(
                "config",
                "critical",
                str(problem),
                "No job gets an image staged while the configuration cannot be read",
                ": ".join(filter(None, (problem.where, problem.key))),
            )
        yield from _slurm(files, conf, used, Settings(Config(), {}, {}), target.clock)
        return
    settings = plugins.decided(files, conf, settings)
    yield from _slurm(files, conf, used, settings, target.clock)
    config = settings.config
    hidden = slurm_conf.hidden_below(files, conf)
    origin = of_settings.origin(settings, target.places, "cache")
    yield from disk.findings(files, config, hidden, used.images, origin)
    yield from of_settings.findings(files, conf, settings, used.images, target.places)
    yield from enroot.findings(files, config.sources, of_enroot)
    origin = of_settings.origin(settings, target.places, "sources")
    yield from sources.findings(files, config.sources, used.images, origin)
    yield from node.findings(files, target.places, settings.of_node, target.clock.wall())
    stack = sites.with_conf(files, conf).stack if conf else None
    if stack is not None and stack.pyxis is not None:
        origin = of_settings.origin(settings, target.places, "registry.store")
        yield from registry.findings(files, stack.pyxis, config, origin)
        if config.registry.enabled:
            yield from registry.silence(used.silent, target.clock.wall())


def _slurm(
    files: Files, conf: Conf | None, used: Uses, settings: Settings, clock: Clock
) -> Iterator[Finding]:
    yield from slurm_conf.findings(conf, settings)
    if conf is None:
        return
    site = sites.with_conf(files, conf)
    yield from plugins.findings(files, site, settings)
    yield from hooks.findings(files, site, used, clock.wall())
    if site.stack.pyxis is not None:
        yield from pyxis.findings(files, site.stack.pyxis)
