"""Unmounts every redirect of this node: before the package goes, or when bytes are in doubt.

Processes that have the local copy open keep it; what is opened next is the shared file system's
own file. Leases stay, so that nothing a job holds is evicted.
"""

import contextlib
import functools
from pathlib import Path

import click
import msgspec

from forestage.bind import unmount
from forestage.bind.unmount import RedirectBind
from forestage.cache import disk_probe
from forestage.cache.layout import Cache
from forestage.cache.node import Node
from forestage.commands import entry_sources
from forestage.commands.command_context import ExitStatus, as_json, print_result
from forestage.config import Config
from forestage.errors import ConfigError, ForestageError
from forestage.system import lock
from forestage.system.as_user import User
from forestage.system.terminal import OutputBlock, TextLine, format_count

ROOT_USER = User("root", 0, 0)


class UnredirectResult(msgspec.Struct, frozen=True):
    """The paths that show the shared file system again, and those that do not."""

    paths: tuple[str, ...]
    problems: tuple[str, ...] = ()


def unmount_redirects(node: Node) -> UnredirectResult:
    """Unmounts them all; as root. Raises PermissionError for other users.

    Redirects that a hook mounts later stay, so switch staging off first (switch.py): a hook that
    gets the space lock after us sees that. Where the configuration is broken, `node` may have the
    default one: the leases name the caches.
    """
    problems: list[str] = []
    going: list[unmount.ClaimedBind] = []
    with contextlib.ExitStack() as claims:
        for cache in _list_caches(node):
            try:
                with lock.held_if_writable(cache.space_lock, lock.SPACE_TIMEOUT):
                    going += _claim_remaining(cache, going, claims)
            except lock.LockTimeout as busy:  # unmounting is right without it as well
                problems.append(str(busy))
                going += _claim_remaining(cache, going, claims)
        try:
            unmount.unmount_binds(
                going, functools.partial(choose_bind_owner, node), unmount.SWEEP_TOTAL
            )
        except (ForestageError, OSError) as error:
            problems.append(str(error))
    left = {bind.mount.id: bind.path for bind in unmount.list_binds(node.cache)}
    undone = [one.bind.path for one in going if one.bind.mount.id not in left]
    elsewhere = left.keys() - {one.bind.mount.id for one in going}
    problems += [f"{left[one]}: another process unmounts it" for one in elsewhere]
    return UnredirectResult(tuple(undone), tuple(problems))


def _claim_remaining(
    cache: Cache, going: list[unmount.ClaimedBind], claims: contextlib.ExitStack
) -> list[unmount.ClaimedBind]:
    """Claim the redirects of all caches that are not claimed yet. Raises OSError."""
    known = {one.bind.mount.id for one in going}
    rest = [bind for bind in unmount.list_binds(cache) if bind.mount.id not in known]
    return unmount.claim_binds(cache, rest, claims)


def _list_caches(node: Node) -> list[Cache]:
    """The configured one, and each that a lease names: a hook may hold the lock of either."""
    found = {node.cache.real_root: node.cache}
    for root in node.leases.list_cache_roots():
        cache = Cache(Path(root), node.places.claims)
        found.setdefault(cache.real_root, cache)
    return list(found.values())


def choose_bind_owner(node: Node, bind: RedirectBind) -> User:
    """The user who can reach a redirect's path where root is squashed: its entry's owner.

    Root where that is not known: the entry is gone, or the disk of an earlier cache hangs.
    """
    cache = Cache(Path(bind.cache), node.places.claims)
    if not bind.key or disk_probe.probe_disk(node.places, cache):
        return ROOT_USER
    entry = cache.find_entry_by_key(bind.key)
    return entry_sources.read_owner_account(entry.access) if entry else ROOT_USER


def format_output(done: UnredirectResult) -> list[OutputBlock]:
    """Pure: what `unredirect` prints."""
    lines = [f"{path}: redirect unmounted" for path in done.paths]
    lines += [f"Problem: {problem}" for problem in done.problems]
    lines.append(f"{format_count(len(done.paths), 'redirect')} unmounted.")
    return [TextLine(text) for text in lines]


@click.command("unredirect")
@as_json
@click.pass_context
def unredirect_command(ctx: click.Context, as_json: bool) -> None:
    """Unmount every redirect of this node, now.

    What jobs have open they keep. New jobs get new redirects, unless staging is switched off.
    """
    try:
        node = ctx.obj.make_node()
    except ConfigError:  # the leases name the caches
        node = Node.from_config(Config(), ctx.obj.places, ctx.obj.clock)
    done = unmount_redirects(node)
    print_result(done, format_output(done), as_json)
    if done.problems:
        ctx.exit(ExitStatus.FAILED)


COMMANDS = (unredirect_command,)
