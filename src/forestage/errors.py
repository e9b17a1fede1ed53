"""The errors forestage raises on purpose.

Each keeps its parts, so that a hook can log them on one line, the command line
can print them for a human, and a test can compare them.
"""

import errno
from typing import ClassVar, NamedTuple


class ForestageError(Exception):
    """What went wrong, and in `hint` what to do about it.

    `exit_code` is the command line's exit status; hooks exit 0 whatever happens.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, hint: str = "") -> None:
        # No super().__init__(): BaseException.__new__ has kept the arguments as they
        # came, and a subclass with other parameters can then still be pickled.
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what} ({self.hint})" if self.hint else self.what

    @property
    def one_line(self) -> str:
        """The message for a log that has one line per event."""
        return str(self)


class ConfigProblem(NamedTuple):
    """One thing wrong in one configuration file."""

    where: str  # the file's path
    key: str  # "deadline", "partitions.gpu.deadline"; empty: the file as a whole
    what: str

    def __str__(self) -> str:
        return ": ".join(part for part in self if part)


class ConfigError(ForestageError):
    """The configuration cannot be used; `problems` holds every reason, not only the first."""

    exit_code: ClassVar[int] = 3

    def __init__(self, problems: tuple[ConfigProblem, ...]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems

    @property
    def one_line(self) -> str:
        return "; ".join(str(problem) for problem in self.problems)


class JobError(ForestageError):
    """The hook's environment does not describe a job."""

    exit_code: ClassVar[int] = 2


class PeerError(ForestageError):
    """The peer service cannot run here, or this node cannot prove to others who it is."""

    exit_code: ClassVar[int] = 6


class SlurmError(ForestageError):
    """Slurm did not answer, or in a way that may mean anything."""

    exit_code: ClassVar[int] = 8


class NotFoundError(ForestageError):
    """What was named on the command line is not here, or not one thing."""

    exit_code: ClassVar[int] = 1


class SlurmConfChangeRefused(ForestageError):
    """Slurm's configuration is not changed: it would drain nodes, or only its writer can do it."""

    exit_code: ClassVar[int] = 9


class Declined(ForestageError):
    """This image is not staged for this job, by a rule or by the user's own mistake.

    `reason` is one word for logs, events and metrics; the job goes on with its original path.
    """

    def __init__(self, reason: str, what: str, hint: str = "") -> None:
        super().__init__(what, hint)
        self.reason = reason


class CopyStopped(Declined):
    """A copy was asked to stop; what it has brought stays in the part."""

    def __init__(self) -> None:
        super().__init__("stopped", "the copy was stopped")


class Failed(Declined):
    """The node or forestage itself is at fault, not the request."""


DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk, or a user's quota on it, that has no room."""


UNMOUNTED_REASONS = ("cache-not-mounted", "cache-other-disk")
"""The reasons of a cache whose disk is not mounted, or not yet."""


def classify_disk_error(error: OSError) -> Declined:
    """Pure: what an error of the cache's disk means."""
    if error.errno in DISK_FULL_ERRNOS:
        return Declined("no-room", f"the cache's disk filled up: {error}")
    return classify_node_error(error)


def classify_node_error(error: Exception) -> Failed:
    """Return what an unexpected error of this node's own files and processes means. Pure."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        return Failed("disk-full", str(error))
    return Failed("io", str(error))
