"""Check of a node's setup: each part gathers facts, judges them, and names the line to change.

The door of this folder is `check`, with a `Target`; `pieces` renders its `Report`. A part is a
module with `gather`, which reads and may take seconds, and `findings`, which is pure. Facts are
read from files; of Slurm's programs only `slurmd -V` is run, which asks no daemon.
"""

from collections.abc import Iterator

import msgspec

from forestage.admin import site as sites
from forestage.admin.site import Conf
from forestage.cache.layout import Cache
from forestage.check import disk, hooks, node, plugins, pyxis, slurm_conf, sources, uses
from forestage.check.finding import Code, Finding, Level, Report, pieces, report
from forestage.check.uses import Uses
from forestage.clock import Clock
from forestage.config import DEFAULT, Config, Settings, load_settings
from forestage.errors import ConfigError
from forestage.paths import Places
from forestage.system.as_user import User
from forestage.system.tree import Files

__all__ = ["Code", "Finding", "Level", "Report", "Target", "check", "pieces", "report"]

PRIVATE = ("/tmp", "/dev/shm")  # noqa: S108 - named to be refused


class Target(msgspec.Struct, frozen=True):
    """The node to look at: `conf` is $SLURM_CONF or "", `user` must be able to read the sources."""

    places: Places
    clock: Clock
    conf: str = ""
    user: User | None = None
    is_root: bool = True


def check(target: Target) -> Report:
    """Looks at the node and changes nothing. Takes seconds where a source does not answer."""
    return report(_findings(target))


def _findings(target: Target) -> Iterator[Finding]:
    files = Files(target.places.root)
    if not target.is_root:
        yield Finding(
            "not-root",
            "unknown",
            "this user sees only a part of the node",
            "The cache, the event log and other users' rights are for root to see",
            "sudo forestage check",
        )
    conf = sites.find_conf(files, target.conf)
    used = uses.gather(target.places)
    try:
        found = load_settings(target.places.etc)
    except ConfigError as error:
        yield from _config(error)
        yield from _slurm(files, conf, used, Settings(Config(), {}, {}), target)
        return
    yield from _slurm(files, conf, used, found, target)
    yield from _node(files, conf, used, found, target)


def _config(error: ConfigError) -> Iterator[Finding]:
    for problem in error.problems:
        yield Finding(
            "config",
            "critical",
            str(problem),
            "No job gets an image staged while the configuration cannot be read",
            f"{problem.where}: {problem.key or 'the file as a whole'}",
        )


def _slurm(
    files: Files, conf: Conf | None, used: Uses, found: Settings, target: Target
) -> Iterator[Finding]:
    yield from slurm_conf.findings(conf, found)
    if conf is None:
        return
    site = sites.with_conf(files, conf)
    yield from plugins.findings(plugins.gather(files, site), found)
    yield from hooks.findings(hooks.gather(files, site, used, target.clock.wall()))
    if site.stack.pyxis is not None:
        facts = pyxis.gather(files, site.stack.pyxis, found.config.cache)
        yield from pyxis.findings(facts)


def _node(
    files: Files, conf: Conf | None, used: Uses, found: Settings, target: Target
) -> Iterator[Finding]:
    config = found.config
    cache = Cache(files.at(files.real(config.cache)))
    hidden = (*PRIVATE, *slurm_conf.hidden_below(files, conf))
    place = disk.gather(files, cache, config, hidden, used.images)
    yield from disk.findings(place, config, _origin(found, target.places, "cache"))
    user = target.user or uses.somebody(used)
    looked = sources.gather(files, config.sources, user, used.users_own)
    yield from sources.findings(looked, _origin(found, target.places, "sources"))
    if all(one.state != "hangs" for one in looked):  # lfs would hang with them
        striped = sources.gather_striping(files, used.images, files.filesystems())
        yield from sources.striping_findings(striped)
    yield from node.findings(node.gather(files, target.places, config))


def _origin(found: Settings, places: Places, key: str) -> str:
    """The file that sets a key, or that would."""
    origin = found.origins.get(key, DEFAULT)
    return str(places.etc / "forestage.yaml") if origin == DEFAULT else origin
