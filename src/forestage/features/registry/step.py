"""What a step does with an image of a registry: a process of its own obtains it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forestage.errors import ForestageError
from forestage.features.registry import prolog

if TYPE_CHECKING:
    from forestage.features.contexts import BeforeLeaseFacts
    from forestage.slurm.job import Job
    from forestage.slurm.step_protocol import LineFields


def before_lease(facts: BeforeLeaseFacts) -> tuple[Job, LineFields]:
    """Have a process obtain the image, which may take long.

    Returns the job without it, and the step's answer: where the tasks get the real one.
    """
    node, job = facts.node, facts.job
    if not prolog.has_import(facts):
        return job, ()
    from forestage.features.registry import step_image

    later: LineFields = ()
    try:
        if job.reference and (
            asked := step_image.RegistryRequest.from_environ(job.reference, facts.environ)
        ):
            later = step_image.start_import_process(node, job, asked, facts.record_outcomes)
    except (ForestageError, OSError) as error:
        facts.write_log_line(f"result=failed reason=registry detail={str(error)!r}")
    return prolog.drop_reference(job), later
