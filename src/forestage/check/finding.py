"""Findings of `forestage check`, the report that they make, and its exit status for Nagios."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from forestage.system.terminal import OutputBlock, TextLine, escape_control_characters, format_count

FindingLevel = Literal["critical", "warning", "unknown", "note"]
CheckStatus = Literal["ok", "warning", "critical", "unknown"]

_LEVEL_ORDER = ("critical", "warning", "unknown", "note")  # known to be wrong, before what is not
_EXIT_STATUSES = {"ok": 0, "warning": 1, "critical": 2, "unknown": 3}  # as Nagios understands them


class CheckFinding(msgspec.Struct, frozen=True):
    """One thing to change.

    critical: jobs or the node suffer, or no job gets what forestage is there for.
    warning: slower than it need be, or a risk.
    unknown: it could not be looked at.
    note: to know, and no reason to change anything; the status stays ok.
    `id` is for scripts and never changes; `why` says it in seconds or in risk; `change` is the line
    to change, after its file, or the command to run.
    """

    id: str
    level: FindingLevel
    what: str
    why: str
    change: str


class CheckReport(msgspec.Struct, frozen=True):
    """The document: `code` is the exit status, `findings` the worst first.

    `enroot` says which configuration of enroot's was read, "" for none.
    """

    status: CheckStatus
    code: int
    findings: tuple[CheckFinding, ...]
    enroot: str = ""


def make_report(findings: Iterable[CheckFinding], enroot: str = "") -> CheckReport:
    """Pure: the findings in order, with harmless text; the first one's level is the status."""
    found = tuple(
        map(escape_finding, sorted(findings, key=lambda one: _LEVEL_ORDER.index(one.level)))
    )
    level = found[0].level if found else "note"
    status: CheckStatus = "ok" if level == "note" else level
    return CheckReport(status, _EXIT_STATUSES[status], found, escape_control_characters(enroot))


def escape_finding(one: CheckFinding) -> CheckFinding:
    """Pure: with its text made harmless: names of files may be anything but what JSON can say."""
    what, why, change = (
        escape_control_characters(one.what),
        escape_control_characters(one.why),
        escape_control_characters(one.change),
    )
    return msgspec.structs.replace(one, what=what, why=why, change=change)


def format_report(report: CheckReport) -> list[OutputBlock]:
    """Pure: what people read; the first line is all that Nagios shows in its lists."""
    word = report.status.upper()
    read: list[OutputBlock] = [TextLine(f"read    {report.enroot}")] if report.enroot else []
    if not report.findings:
        return [TextLine(f"forestage {word} - nothing to change"), *read]
    ids = ", ".join(dict.fromkeys(one.id for one in report.findings))
    found: list[OutputBlock] = [
        TextLine(f"forestage {word} - {format_count(len(report.findings), 'finding')}: {ids}")
    ]
    for one in report.findings:
        found += [
            TextLine(""),
            TextLine(f"{one.level.upper()} {one.id}: {one.what}", heading=True),
            TextLine(f"{one.why}.", indent=2),
            TextLine(f"change  {one.change}", indent=2),
        ]
    return found + ([TextLine(""), *read] if read else [])
