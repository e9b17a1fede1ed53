"""The command `forestage`: which commands there are, and the module of each.

A command's module is imported when the command runs, or when its own help or completion is asked.
It gathers facts, makes a view of them and shows it. What that needs is imported when it runs.
"""

import importlib
from functools import partial
from typing import TYPE_CHECKING

import click

from forestage.commands.command_context import CommandContext as CommandContext
from forestage.commands.command_context import ExitStatus, LazyCommandGroup
from forestage.features import FEATURES, doors

if TYPE_CHECKING:
    from forestage.features.doors import CommandsDoor

CORE_COMMANDS = {
    "What is going on": {
        "status": "Show the cache, its space, copies under way, leases.",
        "explain": "What a job asked for, what was done, why, and how long it took.",
        "ls": "List the entries, last used first: all, or those named.",
        "show": "All about an entry, and whether its source is unchanged.",
        "path": "Print the path of IMAGE's local copy.",
    },
    "Is it set up well": {
        "check": "Check the setup of this node, Slurm and pyxis, and print the lines to change.",
        "config": "Print every setting, and the file that it comes from.",
        "enable": "Have Slurm call forestage: Prolog=, Epilog=, the companion.",
        "disable": "Stop Slurm from calling forestage.",
    },
    "When something is wrong": {
        "off": 'Switch staging off on this node, now: `forestage off "INC-42"`.',
        "on": "Switch staging on again, after `forestage off`.",
    },
    "The cache": {
        "evict": "Evict entries: exactly those named, or down to the low watermark.",
        "pin": "Keep entries from being evicted; of a PATH, its newest.",
        "unpin": "Let entries be evicted again; of a PATH, all of them.",
        "verify": "Compare entries with their sources, or with the checksums of their copying.",
        "sweep": "Clean up what crashes left: leases of jobs that are over, redirects, parts.",
        "tend": "Do the minute's work: room, metrics, prefetch, the sweep, proofs of entries.",
        "unredirect": "Unmount every redirect of this node, now.",
    },
    "Images before a job": {},
    "The whole cluster": {},
}
"""The headings of `forestage --help`, and below them the core's commands: each is in the module of
its name, but for those in SHARED_MODULES. The second value is the first sentence of its own help.
"""

SHARED_MODULES = {"disable": "enable", "on": "off", "unpin": "pin"}
"""Commands that have a module with another one."""

EXIT_STATUS_HELP = "\n".join(f"  {member.value:>3}  {member.meaning}" for member in ExitStatus)


@click.group(
    cls=LazyCommandGroup,
    epilog=f"\b\nExit status:\n{EXIT_STATUS_HELP}",  # \b keeps click from filling the lines
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="forestage")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Look after the container images that forestage keeps on this node.

    KEY is an entry's key or its beginning, PATH the image's path as `forestage ls` prints it or a
    link to it.
    """
    if ctx.obj is None:
        ctx.obj = CommandContext.from_environ()


def _load_core_command(module: str) -> "CommandsDoor":
    found: CommandsDoor = importlib.import_module(f"forestage.commands.{module}")
    return found


def _load_feature_command(name: str) -> "CommandsDoor":
    return doors.load_door(name, doors.COMMANDS)


for heading, commands in CORE_COMMANDS.items():
    for name, summary in commands.items():
        main.add_lazy_command(
            heading, name, summary, partial(_load_core_command, SHARED_MODULES.get(name, name))
        )
    of_features = (
        (place, name, summary, feature.name)
        for feature in FEATURES
        if feature.heading == heading
        for place, name, summary in feature.commands
    )
    for _, name, summary, feature_name in sorted(of_features):
        main.add_lazy_command(heading, name, summary, partial(_load_feature_command, feature_name))
