"""What a request of a job came to: the outcome for log and user, and what there is to show."""

import contextlib
from pathlib import Path

import msgspec

from forestage.cache import baseline
from forestage.cache.image import Image
from forestage.cache.node import Node
from forestage.errors import Declined, Failed, of_node
from forestage.events import WHOLE, Handled, Result
from forestage.slurm.hints import Request
from forestage.units import printable


class Answer(msgspec.Struct, frozen=True):
    """What a request came to, and its image where one was found.

    `socket` is where the tasks of a step get the file through which they read; `decided` is by what
    it was decided that a redirect is in no container's way (Binds.decided).
    """

    outcome: Handled
    image: Image | None = None
    socket: Path | None = None
    decided: tuple[str, ...] = ()

    def saying(self, **facts: object) -> "Answer":
        """Returns the answer with these facts in its outcome."""
        return msgspec.structs.replace(self, outcome=msgspec.structs.replace(self.outcome, **facts))


def shown_as(request: Request, found: Image, result: Result, shown: str) -> Answer:
    outcome = Handled(result, request=printable(request.path), via=request.via, redirect=shown)
    return Answer(_about(outcome, found), found)


def of_error(request: Request, error: Exception, found: Image | None = None) -> Handled:
    """Pure: the outcome of a request that was not served."""
    if not isinstance(error, Declined):
        error = of_node(error)
    outcome = Handled(
        result="failed" if isinstance(error, Failed) else "declined",
        request=printable(request.path),
        via=request.via,
        reason=error.reason,
        detail=printable(str(error)),
    )
    return _about(outcome, found) if found else outcome


def _about(outcome: Handled, found: Image) -> Handled:
    return msgspec.structs.replace(outcome, image=found.path, key=found.key, size=found.size)


def measured(node: Node, answer: Answer) -> Answer:
    """The answer with what its start would have taken without the copy that is here."""
    if answer.image is None or answer.outcome.result not in WHOLE:
        return answer
    takes = 0.0
    with contextlib.suppress(OSError):  # only a figure
        takes = baseline.seconds(node.cache, node.config, answer.image.key)
    return answer.saying(baseline=takes)
