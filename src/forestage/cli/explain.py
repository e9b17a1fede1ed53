"""`forestage explain`: what was done for a job, and why."""

import os
import re
from typing import TYPE_CHECKING

import click

from forestage.cli.world import as_json, complete_jobs, show

if TYPE_CHECKING:
    from forestage.cli.world import World


def _job_id(ctx: click.Context, parameter: click.Parameter, value: str) -> int:
    """Slurm's numeric id, also in front of a step's; `12_3` is a name that only Slurm can tell."""
    named = re.fullmatch(r"([0-9]{1,10})(\.[0-9a-z]+)?", value, re.ASCII)
    if named:
        return int(named[1])
    if re.fullmatch(r"[0-9]{1,10}[_+][0-9]{1,10}", value, re.ASCII):
        raise click.BadParameter(
            f"{value} is part of an array or a het job, and has an id of its own:"
            f" squeue -h -j {value} -o %A   (sacct -n -X -j {value} -o JobIDRaw, once it is over)"
        )
    raise click.BadParameter(f"{value!r} is no job id: expected a number such as 4242")


@click.command()
@as_json
@click.argument("job", callback=_job_id, metavar="JOBID", shell_complete=complete_jobs)
@click.pass_obj
def explain(world: "World", job: int, as_json: bool) -> None:
    """What a job asked for, what was done, why, and how long it took.

    Finished jobs too, as far back as the event log goes. Of an array, JOBID is the task's own id.
    Users see their own jobs, on a node of the job.
    """
    from forestage.admin import explain as view

    found = view.gather(world.places, job, os.geteuid())
    show(found, view.pieces(found, world.clock.wall()), as_json)


COMMANDS = (explain,)
