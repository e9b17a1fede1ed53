"""What is wrong with a node, what it costs, and the line to change: the words of `check`."""

from collections.abc import Iterable
from enum import IntEnum
from typing import Literal

import msgspec

Level = Literal["critical", "warning", "unknown"]


class Code(IntEnum):
    """Exit statuses as Nagios, and what has taken after it, understand them."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


class Finding(msgspec.Struct, frozen=True):
    """One thing to change.

    critical: jobs or the node suffer, or no job gets what forestage is there for.
    warning: slower than it need be, or a risk.
    unknown: it could not be looked at.
    `id` is for scripts and never changes; `why` says it in seconds or in risk; `change` is the line
    to change, after its file, or the command to run.
    """

    id: str
    level: Level
    what: str
    why: str
    change: str


def worst(findings: Iterable[Finding]) -> Code:
    """Pure: the exit status. What is known to be wrong goes before what is not known."""
    levels = {finding.level for finding in findings}
    if "critical" in levels:
        return Code.CRITICAL
    if "warning" in levels:
        return Code.WARNING
    return Code.UNKNOWN if levels else Code.OK
