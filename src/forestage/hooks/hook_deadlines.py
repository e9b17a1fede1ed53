"""How long a hook goes on, and waits for the copies that a job wants."""

import msgspec

from forestage.clock import Clock, Deadline
from forestage.config import Config
from forestage.stage.copy_wait import ProgressCallback, ignore_progress

SMALL_IMAGE_BYTES = 64 * 1024 * 1024  # most disks and links bring so many in within SHORT_WAIT
SHORT_WAIT = 1.0  # seconds that a small image is waited for: shorter than what reading twice costs


class HookDeadlines(msgspec.Struct, frozen=True):
    """How long a hook goes on: `end` limits everything, `copy` waiting for copies.

    `copy` is None where the job starts without them; of small ones the hook waits until `small`
    all the same, and until `room` for the word that a copy has room, where it may have none.
    `is_read_through`: what can be read through is not waited for until `copy`. `on_copy_wait` is
    called now and then during a wait. `fill` is how long a step waits for what its job has put into
    its own directory; `on_data_wait` is called now and then while it waits for data. `ready`:
    whether the hook waits until what is to be read through can be opened.
    """

    end: Deadline
    copy: Deadline | None
    small: Deadline
    room: Deadline
    on_copy_wait: ProgressCallback = ignore_progress
    fill: Deadline | None = None
    on_data_wait: ProgressCallback = ignore_progress
    ready: bool = True
    is_read_through: bool = False

    @classmethod
    def from_seconds(
        cls,
        clock: Clock,
        end: float,
        copy: float | None,
        small: bool = True,
        ready: bool = True,
        room: bool = True,
    ) -> "HookDeadlines":
        """From now on, in seconds; `small`, `room`: whether that is waited for at all."""
        return cls(
            Deadline.after(max(end, copy or 0.0), clock),
            None if copy is None else Deadline.after(copy, clock),
            Deadline.after(SHORT_WAIT if small else 0.0, clock),
            Deadline.after(SHORT_WAIT if room else 0.0, clock),
            ready=ready,
        )

    def copy_deadline(self, size: int) -> Deadline:
        """Returns how long to wait for the copy of an image of `size` bytes, at first."""
        none = Deadline(0.0, self.end.clock)
        asked = None if self.is_read_through else self.copy
        return asked or (self.small if size <= SMALL_IMAGE_BYTES else none)


def requested_wait(config: Config, hint: float | None, longest: float) -> float | None:
    """Pure: seconds that a job wants to wait for its copies; None: not at all.

    `hint` is its stage-wait=. It replaces the admin's `deadline:`, also where the job would start
    from the shared path. `longest` is what `deadline: auto` means.
    """
    if hint == 0:
        return None
    if hint is not None:
        return min(hint, config.max_stage_wait)
    if config.cold_start_mode != "wait":
        return None
    return longest if config.deadline is None else config.deadline
