"""What `forestage explain` prints of the events of job 7."""

from __future__ import annotations

import io
from typing import Any

from forestage.cache.lease import Lease
from forestage.commands.explain import format_output, make_job_history
from forestage.events import EventRecord, Outcome, RequestOutcome
from forestage.system.terminal import write_plain

NOW = 1_800_000_000.0
KEY = "0123456789abcdef" * 2


def event(outcome: Outcome, **changes: Any) -> EventRecord:
    facts: dict[str, Any] = {"time": NOW, "hook": "prolog", "job": 7, "user": "alice", "node": "n1"}
    return EventRecord(outcome=outcome, **{**facts, **changes})


def hit(**changes: Any) -> Outcome:
    facts: dict[str, Any] = {"request": "/a.sqsh", "via": "option", "image": "/a.sqsh", "key": KEY}
    return RequestOutcome(
        **{"result": "hit", **facts, "redirect": "mounted", "wait": 0.01, **changes}
    )


def printed(*events: EventRecord, lease: Lease | None = None) -> str:
    out = io.StringIO()
    write_plain(format_output(make_job_history(7, events, lease), NOW), out)
    return out.getvalue()
