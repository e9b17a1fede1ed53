"""What a step's environment says of its image and its data: FORESTAGE_RESULT and its like."""

import os
from collections.abc import Sequence

from forestage.events import UNSERVED, WHOLE, Handled
from forestage.hooks.answers import Answer
from forestage.slurm.job import Job
from forestage.slurm.lines import (
    DATA_RESULT,
    IMAGE_PATH,
    LOCAL,
    MAX_LINE,
    RESULT,
    has_control,
)

BY_WORTH = (*WHOLE, "through", "started", *UNSERVED)
MAX_LOCAL = MAX_LINE // 2  # bytes


def word(outcome: Handled) -> str:
    """Pure: a request's outcome for the step's environment; `none` where no copy is shown."""
    if outcome.result in UNSERVED:
        return outcome.reason
    is_shown = outcome.redirect != "none" or outcome.result == "started"
    return outcome.result if is_shown else "none"


def of_image(job: Job, answers: Sequence[Answer]) -> list[tuple[str, str]]:
    """Pure: what the step's environment says of its image, or of the first that the comment names.

    One word, a result or why not (events/reasons.py), and the path at which the image shows.
    """
    pairs = [*zip(job.requests, answers, strict=True)]
    own = [pair for pair in pairs if pair[0].via == "option"] or pairs
    if not own:
        return []
    request, answer = own[0]
    outcome = answer.outcome
    path = outcome.image or os.path.join(job.work_dir, request.path)
    found = [(RESULT, word(outcome)), (IMAGE_PATH, path)]
    return [pair for pair in found if not any(map(has_control, pair))]


def local_images(job: Job, answers: Sequence[Answer]) -> tuple[str, ...]:
    """Pure: the images of the comment that the step reads from this node's disk."""
    return tuple(
        answer.outcome.image
        for request, answer in zip(job.requests, answers, strict=True)
        if request.via == "hint" and word(answer.outcome) in WHOLE
    )


def of_data(outcomes: Sequence[Handled], local: Sequence[str]) -> list[tuple[str, str]]:
    """Pure: what the step's environment says of all its data, and where it is local.

    The word is the worst one: of a failure, of what was declined, then the last of BY_WORTH. Paths
    beyond MAX_LOCAL bytes are left out.
    """
    found = []
    if outcomes:
        worst = max(outcomes, key=lambda outcome: BY_WORTH.index(outcome.result))
        found.append((DATA_RESULT, word(worst)))
    listed = ""
    for path in dict.fromkeys(local):
        named = f":{path.replace('%', '%25').replace(':', '%3A')}"
        if not has_control(path) and len(os.fsencode(listed + named)) <= MAX_LOCAL:
            listed += named
    return found + ([(LOCAL, listed[1:])] if listed else [])
