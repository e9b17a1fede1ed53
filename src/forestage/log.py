"""One line at a time to the journal or syslog; by hand, or where neither listens, to stderr."""

import os

TAG = "forestage"


def say(line: str, by_slurm: bool) -> None:
    """`by_slurm`: whether slurmd runs us, whose stderr nobody reads."""
    if by_slurm and os.path.exists("/dev/log"):
        import syslog  # built in, but most runs by hand need none

        syslog.openlog(TAG, syslog.LOG_PID, syslog.LOG_DAEMON)
        syslog.syslog(syslog.LOG_INFO, line)
    else:
        os.write(2, f"{TAG}: {line}\n".encode(errors="backslashreplace"))
