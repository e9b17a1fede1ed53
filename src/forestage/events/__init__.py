"""Events: what the hooks and stagers did, one line each, for people, `explain` and `report`.

`log` writes and reads events.jsonl and makes the line of the system log; `user_files` has what
users may read of it; `reasons` explains each reason of an outcome. The counters made of events are
those of `tally`. `reasons` is not imported here, since no hook needs it.
"""

from forestage.events.log import UNSERVED as UNSERVED
from forestage.events.log import WHOLE as WHOLE
from forestage.events.log import BadEntryOutcome as BadEntryOutcome
from forestage.events.log import Came as Came
from forestage.events.log import CopyOutcome as CopyOutcome
from forestage.events.log import EventRecord as EventRecord
from forestage.events.log import Hook as Hook
from forestage.events.log import Outcome as Outcome
from forestage.events.log import ReleaseOutcome as ReleaseOutcome
from forestage.events.log import RequestOutcome as RequestOutcome
from forestage.events.log import Result as Result
from forestage.events.log import append as append
from forestage.events.log import decoded_lines as decoded_lines
from forestage.events.log import field as field
from forestage.events.log import latest as latest
from forestage.events.log import of_job as of_job
from forestage.events.log import read as read
from forestage.events.log import read_own as read_own
from forestage.events.log import record as record
from forestage.events.log import record_events as record_events
from forestage.events.log import report_bad_entry as report_bad_entry
from forestage.events.log import report_copy as report_copy
from forestage.events.log import summary as summary
from forestage.events.log import unread as unread
from forestage.events.log import words as words
