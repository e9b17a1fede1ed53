"""Is this node set up as it should be? Facts from each domain's `gather`, judged by its `findings`.

Facts are read from files; no command of Slurm is run, so that it can be asked every minute.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from forestage import (
    check_disk,
    check_hooks,
    check_node,
    check_plugins,
    check_pyxis,
    check_slurm,
    check_sources,
    check_striping,
    uses,
)
from forestage.cache.layout import Cache
from forestage.check_slurm import Conf
from forestage.clock import Clock
from forestage.config import DEFAULT, Config, Settings, load_settings
from forestage.errors import ConfigError
from forestage.finding import Code, Finding, worst
from forestage.paths import Places
from forestage.system.as_user import User
from forestage.system.terminal import Line, Piece, count, harmless
from forestage.system.tree import Files
from forestage.uses import Uses

PRIVATE = ("/tmp", "/dev/shm")  # noqa: S108 - named to be refused
_ORDER = ("critical", "warning", "unknown")

Status = Literal["ok", "warning", "critical", "unknown"]


class Checked(msgspec.Struct, frozen=True):
    """The document: `code` is the exit status, `findings` the worst first."""

    status: Status
    code: int
    findings: tuple[Finding, ...]


class Asked(msgspec.Struct, frozen=True):
    """Where to look: `conf` is $SLURM_CONF or "", `user` for whom sources must be readable."""

    places: Places
    clock: Clock
    conf: str = ""
    user: User | None = None
    is_root: bool = True


def check(asked: Asked) -> Checked:
    """Looks at the node and changes nothing. Takes seconds where a source does not answer."""
    return verdict(_findings(asked))


def verdict(findings: Iterator[Finding]) -> Checked:
    """Pure."""
    found = tuple(map(_harmless, sorted(findings, key=lambda one: _ORDER.index(one.level))))
    code = worst(found)
    statuses: dict[Code, Status] = {
        Code.OK: "ok",
        Code.WARNING: "warning",
        Code.CRITICAL: "critical",
        Code.UNKNOWN: "unknown",
    }
    return Checked(statuses[code], int(code), found)


def _harmless(one: Finding) -> Finding:
    """Names of files may be anything but text, which JSON has no way to say."""
    return msgspec.structs.replace(
        one, what=harmless(one.what), why=harmless(one.why), change=harmless(one.change)
    )


def _findings(asked: Asked) -> Iterator[Finding]:
    files = Files(asked.places.root)
    if not asked.is_root:
        yield Finding(
            "not-root",
            "unknown",
            "this user sees only a part of the node",
            "The cache, the event log and other users' rights are for root to see",
            "sudo forestage check",
        )
    conf = check_slurm.gather(files, asked.conf)
    used = uses.gather(asked.places)
    try:
        found = load_settings(asked.places.etc)
    except ConfigError as error:
        yield from _config(error)
        yield from _slurm(files, conf, used, Settings(Config(), {}, {}), asked)
        return
    yield from _slurm(files, conf, used, found, asked)
    yield from _node(files, conf, used, found, asked)


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
    files: Files, conf: Conf | None, used: Uses, found: Settings, asked: Asked
) -> Iterator[Finding]:
    yield from check_slurm.findings(conf, found)
    if conf is None:
        return
    plugins = check_plugins.gather(files, conf)
    yield from check_plugins.findings(plugins, found)
    now = asked.clock.wall()
    hooks = check_hooks.gather(files, conf, used, now, plugins.companion is not None)
    yield from check_hooks.findings(hooks)
    if plugins.pyxis is not None:
        pyxis = check_pyxis.gather(files, plugins.pyxis, found.config.cache)
        yield from check_pyxis.findings(pyxis)


def _node(
    files: Files, conf: Conf | None, used: Uses, found: Settings, asked: Asked
) -> Iterator[Finding]:
    config = found.config
    cache = Cache(files.at(files.real(config.cache)))
    hidden = (*PRIVATE, *check_slurm.hidden_below(files, conf))
    place = check_disk.gather(files, cache, config, hidden, used.images)
    yield from check_disk.findings(place, config, _origin(found, asked.places, "cache"))
    user = asked.user or uses.somebody(used)
    sources = check_sources.gather(files, config.sources, user, used.users_own)
    yield from check_sources.findings(sources, _origin(found, asked.places, "sources"))
    if all(one.state != "hangs" for one in sources):  # lfs would hang with them
        striped = check_striping.gather(files, used.images, files.filesystems())
        yield from check_striping.findings(striped)
    yield from check_node.findings(check_node.gather(files, asked.places, config))


def _origin(found: Settings, places: Places, key: str) -> str:
    """The file that sets a key, or that would."""
    origin = found.origins.get(key, DEFAULT)
    return str(places.etc / "forestage.yaml") if origin == DEFAULT else origin


def pieces(checked: Checked) -> list[Piece]:
    """Pure: what people read; the first line is all that Nagios shows in its lists."""
    word = checked.status.upper()
    if not checked.findings:
        return [Line(f"forestage {word} - nothing to change")]
    ids = ", ".join(dict.fromkeys(one.id for one in checked.findings))
    found: list[Piece] = [
        Line(f"forestage {word} - {count(len(checked.findings), 'finding')}: {ids}")
    ]
    for one in checked.findings:
        found += [
            Line(""),
            Line(f"{one.level.upper()} {one.id}: {one.what}", heading=True),
            Line(f"{one.why}.", indent=2),
            Line(f"change  {one.change}", indent=2),
        ]
    return found
