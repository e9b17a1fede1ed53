"""Events: what the hooks and stagers did, one line each, for people, `explain` and `report`.

`event_log` writes and reads events.jsonl and makes the line of the system log; `user_files` has
what users may read of it; `reasons` explains each reason of an outcome. The counters made of events
are in commands/event_counters.py. `reasons` is not imported here, since no hook needs it.
"""

from forestage.events.event_log import UNSERVED_RESULTS as UNSERVED_RESULTS
from forestage.events.event_log import WHOLE_RESULTS as WHOLE_RESULTS
from forestage.events.event_log import BadEntryOutcome as BadEntryOutcome
from forestage.events.event_log import CopyOutcome as CopyOutcome
from forestage.events.event_log import EventHook as EventHook
from forestage.events.event_log import EventRecord as EventRecord
from forestage.events.event_log import ImageArrival as ImageArrival
from forestage.events.event_log import Outcome as Outcome
from forestage.events.event_log import OutcomeResult as OutcomeResult
from forestage.events.event_log import ReleaseOutcome as ReleaseOutcome
from forestage.events.event_log import RequestOutcome as RequestOutcome
from forestage.events.event_log import append_events as append_events
from forestage.events.event_log import decode_lines as decode_lines
from forestage.events.event_log import format_outcome as format_outcome
from forestage.events.event_log import format_summary as format_summary
from forestage.events.event_log import make_job_event as make_job_event
from forestage.events.event_log import quote_field as quote_field
from forestage.events.event_log import read_events as read_events
from forestage.events.event_log import read_latest_events as read_latest_events
from forestage.events.event_log import read_new_events as read_new_events
from forestage.events.event_log import read_user_events as read_user_events
from forestage.events.event_log import record_bad_entry_for_users as record_bad_entry_for_users
from forestage.events.event_log import record_copy_for_users as record_copy_for_users
from forestage.events.event_log import record_events as record_events
from forestage.events.event_log import record_outcomes as record_outcomes
