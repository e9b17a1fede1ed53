"""What the shell completes: keys and paths of entries, jobs that are on record.

Whatever is wrong with the node, completion offers nothing and says nothing.
"""

import click
from click.shell_completion import CompletionItem

from forestage.cli.world import World
from forestage.errors import ForestageError

MOST = 50  # that a shell is offered; who has more has to type a digit


def _world(ctx: click.Context) -> World:
    return ctx.find_object(World) or World.real()


def entries(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Paths once a slash was typed, else keys with their paths as help."""
    from forestage.admin import inventory
    from forestage.system.terminal import harmless, short

    try:
        items = inventory.gather(_world(ctx).node(is_quiet=True)).items
    except (ForestageError, OSError):
        return []
    if "/" in typed:
        paths = dict.fromkeys(item.path for item in items if item.path.startswith(typed))
        # One that would do something in the shell, or in the terminal, is not offered.
        found = [CompletionItem(path) for path in paths if harmless(path) == path]
    else:
        fitting = (item for item in items if item.key.startswith(typed.lower()))
        found = [CompletionItem(short(item.key), help=harmless(item.path)) for item in fitting]
    return found[:MOST]


def jobs(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """The jobs with a lease, then those of the latest events."""
    from forestage import events
    from forestage.admin.recent import LOOK
    from forestage.cache.lease import Leases

    places = _world(ctx).places
    found: dict[int, str] = {}
    try:
        found |= dict.fromkeys(Leases(places.leases).jobs(), "has a lease")
        latest = {event.job: event.user for event in events.latest(places.events, LOOK)}
        found |= {job: latest[job] for job in reversed(latest) if job and job not in found}
    except (ForestageError, OSError):
        pass
    fitting = [(job, text) for job, text in found.items() if str(job).startswith(typed)]
    return [CompletionItem(str(job), help=text) for job, text in fitting[:MOST]]
