"""Exit statuses of the command line in one table, and which error gets which."""

from enum import IntEnum

from forestage.errors import ForestageError


class Exit(IntEnum):
    """Exit statuses of `forestage`; `meaning` is what the help and the manual page say."""

    meaning: str

    def __new__(cls, value: int, meaning: str = "") -> "Exit":
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    OK = 0, "It was done."
    NOT_FOUND = 1, "What was named is not here, or is in use and stays."
    USAGE = 2, "The command line is wrong."
    CONFIG = 3, "The configuration cannot be used."
    PERMISSION = 4, "This user may not see or do it: run as root."
    CACHE = 5, "The cache is not mounted, or must not be used."
    FAILED = 6, "The node is at fault: a damaged lease, a lock that stays held, a port in use, I/O."
    BAD = 7, "A bad entry was found: its bytes or rights are not those of its source."
    SLURM = 8, "Slurm did not answer, or not clearly: no lease was released."
    REFUSED = 9, "Slurm's configuration was not changed: it was said what to do by hand."
    INTERRUPTED = 130, "It was interrupted from the keyboard."
    PIPE = 141, "The reader of the output went away."


def table() -> str:
    """Pure: every exit status and its meaning, a line each."""
    return "\n".join(f"  {member.value:>3}  {member.meaning}" for member in Exit)


def of(error: Exception) -> Exit:
    """Pure: the exit status for an expected error."""
    from forestage.errors import Failed

    if isinstance(error, PermissionError):
        return Exit.PERMISSION
    if isinstance(error, Failed):
        return Exit.CACHE if error.reason.startswith("cache-") else Exit.FAILED
    if isinstance(error, ForestageError):
        return Exit(error.exit_code)
    return Exit.FAILED


def lines(error: Exception, is_root: bool) -> list[str]:
    """Pure: what to print about an expected error."""
    from forestage.errors import ConfigError

    if isinstance(error, ConfigError):
        return [str(problem) for problem in error.problems]
    if isinstance(error, OSError) and error.strerror:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        hint = " (run as root)" if of(error) is Exit.PERMISSION and not is_root else ""
        return [what + hint]
    return [str(error)]
