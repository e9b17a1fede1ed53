"""The clock as an argument, and deadlines measured by it."""

import time

import msgspec


class Clock:
    """The real clock, in seconds. Tests pass one of their own."""

    def wall(self) -> float:
        """Since the epoch; for records that people read. It may jump."""
        return time.time()

    def monotonic(self) -> float:
        """For every decision about waiting. It never jumps."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Deadline(msgspec.Struct, frozen=True):
    """The moment, on the monotonic clock, at which a hook stops waiting."""

    end: float
    clock: Clock

    @classmethod
    def after(cls, seconds: float, clock: Clock) -> "Deadline":
        return cls(clock.monotonic() + seconds, clock)

    def seconds_left(self) -> float:
        """Seconds, never negative."""
        return max(0.0, self.end - self.clock.monotonic())
