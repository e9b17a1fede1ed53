"""Events: what the hooks and stagers did, one line each, for people, `explain` and `report`.

`log` writes and reads events.jsonl and makes the line of the system log; `reasons` explains each
reason of an outcome. The counters made of events are those of `tally`. `reasons` is not imported
here, since no hook needs it.
"""

from forestage.events.log import (
    Came,
    Copied,
    Event,
    Handled,
    Hook,
    Outcome,
    Released,
    Result,
    append,
    decoded_lines,
    field,
    latest,
    of_job,
    read,
    record,
    summary,
    unread,
)

__all__ = [
    "Came",
    "Copied",
    "Event",
    "Handled",
    "Hook",
    "Outcome",
    "Released",
    "Result",
    "append",
    "decoded_lines",
    "field",
    "latest",
    "of_job",
    "read",
    "record",
    "summary",
    "unread",
]
