"""What happened: the event log and the reasons it names."""

from forestage.events.log import LONGEST as LONGEST
from forestage.events.log import REMEMBERED as REMEMBERED
from forestage.events.log import ROTATE_AT as ROTATE_AT
from forestage.events.log import Event as Event
from forestage.events.log import Hook as Hook
from forestage.events.log import Outcome as Outcome
from forestage.events.log import Result as Result
from forestage.events.log import append as append
from forestage.events.log import each as each
from forestage.events.log import field as field
from forestage.events.log import read as read
from forestage.events.log import record as record
from forestage.events.log import summary as summary
from forestage.events.log import unread as unread
