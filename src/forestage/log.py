"""Writes one line at a time to the journal or syslog; by hand, or where neither listens, to stderr.

Never waits and never raises: a line that cannot be delivered at once is dropped. Not by syslog(3),
which blocks for ever once nobody reads /dev/log and net.unix.max_dgram_qlen lines are queued there.
Every job's hooks come here, so this module imports nothing before there is a line.
"""

import os
import time

TAG = "forestage"

_PRIORITY = 3 << 3 | 6  # LOG_DAEMON, LOG_INFO: syslog(3)


def write_log_line(line: str, by_slurm: bool) -> None:
    """`by_slurm`: whether slurmd runs us, whose stderr nobody reads."""
    try:
        if by_slurm and os.path.exists("/dev/log"):
            _send_to_syslog(line)
        else:
            os.write(2, f"{TAG}: {line}\n".encode(errors="backslashreplace"))
    except OSError:
        pass


def _send_to_syslog(line: str) -> None:
    """Sends one datagram in the format of syslog(3). Raises OSError, at once."""
    # The C modules beneath: `socket` itself imports selectors and enum, 5 ms of a job's start.
    import _socket

    now = time.strftime("%b %e %H:%M:%S")
    text = f"<{_PRIORITY}>{now} {TAG}[{os.getpid()}]: {line}"
    sender = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    try:
        # DONTWAIT: a full queue is EAGAIN.
        sender.sendto(text.encode(errors="backslashreplace"), _socket.MSG_DONTWAIT, "/dev/log")
    finally:
        sender.close()
