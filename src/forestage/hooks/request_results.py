"""What a request of a job came to: the outcome for log and user, and what there is to show.

And what a step's environment says of it: FORESTAGE_RESULT and its like.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from forestage.cache import baseline
from forestage.cache.node import Node
from forestage.cache.source_image import SourceImage
from forestage.errors import Declined, Failed, classify_node_error
from forestage.events import UNSERVED_RESULTS, WHOLE_RESULTS, OutcomeResult, RequestOutcome
from forestage.slurm.hints import Request
from forestage.slurm.job import Job
from forestage.slurm.step_protocol import (
    DATA_RESULT_VARIABLE,
    IMAGE_PATH_VARIABLE,
    LOCAL_PATHS_VARIABLE,
    MAX_LINE_BYTES,
    RESULT_VARIABLE,
    has_control_characters,
)
from forestage.units import make_printable

RESULTS_BEST_FIRST = (*WHOLE_RESULTS, "through", "started", *UNSERVED_RESULTS)
MAX_LOCAL_BYTES = MAX_LINE_BYTES // 2  # bytes


class RequestResult(msgspec.Struct, frozen=True):
    """What a request came to, and its image where one was found.

    `socket` is where the tasks of a step get the file through which they read; `decision_lines` is
    by what it was decided that a redirect is in no container's way (ContainerBinds.decision_lines).
    """

    outcome: RequestOutcome
    image: SourceImage | None = None
    socket: Path | None = None
    decision_lines: tuple[str, ...] = ()

    def with_facts(self, **facts: object) -> "RequestResult":
        """Returns the answer with these facts in its outcome."""
        return msgspec.structs.replace(self, outcome=msgspec.structs.replace(self.outcome, **facts))


def make_served_result(
    request: Request, image: SourceImage, result: OutcomeResult, redirect: str
) -> RequestResult:
    outcome = RequestOutcome(
        result, request=make_printable(request.path), via=request.via, redirect=redirect
    )
    return RequestResult(_with_image(outcome, image), image)


def make_error_outcome(
    request: Request, error: Exception, image: SourceImage | None = None
) -> RequestOutcome:
    """Pure: the outcome of a request that was not served."""
    if not isinstance(error, Declined):
        error = classify_node_error(error)
    outcome = RequestOutcome(
        result="failed" if isinstance(error, Failed) else "declined",
        request=make_printable(request.path),
        via=request.via,
        reason=error.reason,
        detail=make_printable(str(error)),
    )
    return _with_image(outcome, image) if image else outcome


def _with_image(outcome: RequestOutcome, image: SourceImage) -> RequestOutcome:
    return msgspec.structs.replace(outcome, image=image.path, key=image.key, size=image.size)


def with_baseline(node: Node, answer: RequestResult) -> RequestResult:
    """The answer with what its start would have taken without the copy that is here."""
    if answer.image is None or answer.outcome.result not in WHOLE_RESULTS:
        return answer
    takes = 0.0
    with contextlib.suppress(OSError):  # only a figure
        takes = baseline.estimate_read_seconds(node.cache, node.config, answer.image.key)
    return answer.with_facts(baseline=takes)


def choose_result_variable(outcome: RequestOutcome) -> str:
    """Pure: a request's outcome for the step's environment; `none` where no copy is shown."""
    if outcome.result in UNSERVED_RESULTS:
        return outcome.reason
    is_shown = outcome.redirect != "none" or outcome.result == "started"
    return outcome.result if is_shown else "none"


def list_image_variables(job: Job, answers: Sequence[RequestResult]) -> list[tuple[str, str]]:
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
    found = [(RESULT_VARIABLE, choose_result_variable(outcome)), (IMAGE_PATH_VARIABLE, path)]
    return [pair for pair in found if not any(map(has_control_characters, pair))]


def list_local_images(job: Job, answers: Sequence[RequestResult]) -> tuple[str, ...]:
    """Pure: the images of the comment that the step reads from this node's disk."""
    return tuple(
        answer.outcome.image
        for request, answer in zip(job.requests, answers, strict=True)
        if request.via == "hint" and choose_result_variable(answer.outcome) in WHOLE_RESULTS
    )


def list_data_variables(
    outcomes: Sequence[RequestOutcome], local: Sequence[str]
) -> list[tuple[str, str]]:
    """Pure: what the step's environment says of all its data, and where it is local.

    The word is the worst one: of a failure, of what was declined, then the last of
    RESULTS_BEST_FIRST. Paths beyond MAX_LOCAL_BYTES are left out.
    """
    found = []
    if outcomes:
        worst = max(outcomes, key=lambda outcome: RESULTS_BEST_FIRST.index(outcome.result))
        found.append((DATA_RESULT_VARIABLE, choose_result_variable(worst)))
    listed = ""
    for path in dict.fromkeys(local):
        named = f":{path.replace('%', '%25').replace(':', '%3A')}"
        if not has_control_characters(path) and len(os.fsencode(listed + named)) <= MAX_LOCAL_BYTES:
            listed += named
    return found + ([(LOCAL_PATHS_VARIABLE, listed[1:])] if listed else [])
